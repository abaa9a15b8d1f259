"""Do the ranks' dp_ranks shard the data, so that every share is read and none is read twice? `RankMapError`.

Two conditions must hold. Every dp_rank from 0 up to, but not including, dp_degree belongs to a rank. And each belongs
to exactly ``world_size / dp_degree`` ranks, those that differ only along dims that share their data. A formula with a
wrong factor breaks these conditions without an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from countoff.core.checks.check import Check
from countoff.core.counts.batches import check_count
from countoff.core.protocol.records import Records
from countoff.core.verdict import Cause, Verdict, VerdictKind
from countoff.core.words import count_of, names_of

__all__ = ["RANK_MAP_ERROR", "DpRankFaults", "RankMapCheck", "check_dp_ranks", "dp_rank_faults", "judge_dp_ranks"]

RANK_MAP_ERROR = VerdictKind(
    "RankMapError",
    "the ranks' dp_ranks leave some data unread, or let several ranks read the same share",
    default="raises, before the first batch",
    level="raise",
    restart="useless",
    causes={
        "": Cause(
            "The position along the data dims was computed with a wrong factor, or over dims that share their data.",
            "compute dp_rank with the sizes of the dims inside it: replicate * dp_shard_size + shard, never times the "
            "number of replicas; countoff.core.ranks.RankMap does it by name.",
        )
    },
)
_LOADER_WHY = "The sampler counts the ranks of the world, or of a node, instead of those along the data dims."
_LOADER_REMEDY = (
    "give the sampler the mesh's numbers: dp_rank, dp_degree = countoff.mesh.dp_position(mesh), then "
    "DistributedSampler(dataset, num_replicas=dp_degree, rank=dp_rank)."
)
_LISTED = 8


class RankMapCheck(Check):
    """Judges the dp_ranks of all ranks at the roll call."""

    def compare_reports(self, reports: Records, *, complete: bool, refused: bool) -> Iterator[Verdict | None]:  # noqa: D102
        if complete and not refused:
            yield judge_dp_ranks({rank: report["plan"] for rank, report in reports.items()})


@dataclass(frozen=True)
class DpRankFaults:
    """What is wrong with the dp_ranks of a job; all faults are empty if nothing is.

    Attributes:
        world_size: Ranks of the job.
        dp_degree: Shares into which the data is cut.
        out_of_range: The dp_rank of each rank whose dp_rank is below 0 or not below dp_degree.
        missing: The dp_ranks that no rank has, ascending: their data is never read.
        repeated: The ranks, ascending, of each dp_rank that ranks with different shares have: its data is read more
            than once.
        split: Pairs of ranks that must read the same data and have different dp_ranks.
    """

    world_size: int
    dp_degree: int
    out_of_range: Mapping[int, int]
    missing: tuple[int, ...]
    repeated: Mapping[int, tuple[int, ...]]
    split: tuple[tuple[int, int], ...]

    @property
    def never_read(self) -> float:
        """The fraction of the data that no rank reads, from 0 to 1."""
        return len(self.missing) / self.dp_degree

    @property
    def read_twice(self) -> float:
        """The fraction of the data that is read more than once, from 0 to 1."""
        return len(self.repeated) / self.dp_degree

    @property
    def sound(self) -> bool:
        """Whether every share is read, and none is read twice."""
        return not (self.out_of_range or self.missing or self.repeated or self.split)


def dp_rank_faults(
    values: Sequence[int] | Mapping[int, int], *, dp_degree: int, groups: Sequence[int] | None = None
) -> DpRankFaults:
    """Returns what is wrong with the dp_ranks of a job.

    Args:
        values: The dp_rank of each rank, in the order of ranks, or by rank; one for every rank.
        dp_degree: Shares into which the data is cut, at least 1.
        groups: One number per rank, equal for ranks that must read the same data. If it is not known, a dp_rank counts
            as repeated if more than ``world_size / dp_degree`` ranks have it.

    Raises:
        ValueError: If dp_degree is not an integer of at least 1 or does not divide the number of ranks, or there is not
            exactly one value for each rank.

    Example:
        >>> dp_rank_faults([0, 1, 1, 2], dp_degree=4).missing
        (3,)
    """
    check_count("dp_degree", dp_degree, minimum=1)
    by_rank = dict(values) if isinstance(values, Mapping) else dict(enumerate(values))
    world_size = len(by_rank) if groups is None else len(groups)
    if set(by_rank) != set(range(world_size)):
        raise ValueError(f"there must be one dp_rank for each of the ranks 0 to {world_size - 1}, got {len(by_rank)}")
    return _faults(by_rank, dp_degree, None if groups is None else dict(enumerate(groups)))


def _faults(by_rank: Mapping[int, int], dp_degree: int, groups: Mapping[int, int] | None) -> DpRankFaults:
    """Returns what is wrong with the dp_ranks of all ranks that take part, which may be some ranks of a job.

    Raises:
        ValueError: If dp_degree does not divide the number of these ranks.
    """
    world_size = len(by_rank)
    if not world_size or world_size % dp_degree:
        raise ValueError(f"dp_degree {dp_degree} must divide the number of ranks {world_size}")
    owners: dict[int, list[int]] = {}
    out_of_range: dict[int, int] = {}
    split: list[tuple[int, int]] = []
    first_of_group: dict[int, int] = {}
    for rank, value in sorted(by_rank.items()):
        if type(value) is not int or not 0 <= value < dp_degree:
            out_of_range[rank] = value
        else:
            owners.setdefault(value, []).append(rank)
        if groups is not None:
            first = first_of_group.setdefault(groups[rank], rank)
            if by_rank[first] != value:
                split.append((first, rank))
    repeated = {
        value: tuple(ranks)
        for value, ranks in sorted(owners.items())
        if (len(ranks) > world_size // dp_degree if groups is None else len({groups[rank] for rank in ranks}) > 1)
    }
    missing = tuple(value for value in range(dp_degree) if value not in owners)
    return DpRankFaults(world_size, dp_degree, out_of_range, missing, repeated, tuple(split))


def check_dp_ranks(
    values: Sequence[int] | Mapping[int, int], *, dp_degree: int, groups: Sequence[int] | None = None
) -> Verdict | None:
    """Returns a `RankMapError` that names the ranks that collide, the shares never read, and how much data that is.

    Args:
        values: As for ``dp_rank_faults``.
        dp_degree: As for ``dp_rank_faults``.
        groups: As for ``dp_rank_faults``.

    Returns:
        The verdict; None if every share is read and none is read twice.

    Raises:
        ValueError: As for ``dp_rank_faults``.

    Example:
        >>> for clause in check_dp_ranks([0, 1, 1, 2], dp_degree=4).sentence.split("; "):
        ...     print(clause)
        1 of 4 dp_ranks belongs to no rank (3): 25 % of the data is never read
        25 % of the data is read more than once: ranks 1, 2 read the same dp_rank 1.
    """
    found = _verdict_on(dp_rank_faults(values, dp_degree=dp_degree, groups=groups))
    return found and replace(found, remedy=RANK_MAP_ERROR.cause_of("").remedy)


def _verdict_on(faults: DpRankFaults) -> Verdict | None:
    if faults.sound:
        return None
    named = [rank for ranks in faults.repeated.values() for rank in ranks]
    named += [*faults.out_of_range, *(rank for pair in faults.split for rank in pair)]
    return RANK_MAP_ERROR.found("; ".join(_clauses(faults)) + ".", dict.fromkeys(named))


def judge_dp_ranks(plans: Mapping[int, Mapping[str, object]]) -> Verdict | None:
    """Returns a `RankMapError` if the dp_ranks that the ranks sent to the roll call do not shard the data.

    Args:
        plans: What each rank sent to the roll call. It is judged only if every rank has ``dp_rank`` and ``dp_degree``,
            and all have the same dp_degree. If every rank also has ``loader_position``, the dp_rank and dp_degree with
            which its loader really reads, that position must agree with them.
    """
    values = {rank: plan.get("dp_rank") for rank, plan in plans.items()}
    degrees = {plan.get("dp_degree") for plan in plans.values()}
    degree = next(iter(degrees)) if len(degrees) == 1 else None
    if type(degree) is not int or any(value is None for value in values.values()):
        return None
    dp_ranks = cast("dict[int, int]", values)
    try:
        found = _verdict_on(_faults(dp_ranks, degree, None))
    except ValueError as error:
        return RANK_MAP_ERROR.found(f"{error}.", why="")
    return found or _judge_loaders(plans, dp_ranks, degree)


def _judge_loaders(
    plans: Mapping[int, Mapping[str, object]], dp_ranks: Mapping[int, int], dp_degree: int
) -> Verdict | None:
    """Returns a `RankMapError` if a loader does not read the share of its rank."""
    known: dict[int, tuple[int, int]] = {}
    for rank, plan in plans.items():
        match plan.get("loader_position"):
            case [int(share), int(degree)]:
                known[rank] = share, degree
            case _:
                return None
    degrees = sorted({degree for _, degree in known.values()})
    if degrees == [dp_degree]:
        found = _verdict_on(_faults({rank: share for rank, (share, _) in known.items()}, dp_degree, dp_ranks))
        return None if found is None else replace(found, remedy=_LOADER_REMEDY)
    among = " or ".join(count_of(degree, "rank") for degree in degrees)
    if max(degrees) > dp_degree:
        effect = "ranks that must read the same batch read different ones"
    else:
        effect = "every sample is read by more than one data rank"
    sentence = f"the loaders share the data out among {among}, and the mesh has {dp_degree} data ranks: {effect}."
    odd = tuple(rank for rank, (_, degree) in known.items() if degree != dp_degree)
    return RANK_MAP_ERROR.found(sentence, odd, why=_LOADER_WHY, remedy=_LOADER_REMEDY)


def _clauses(faults: DpRankFaults) -> list[str]:
    clauses: list[str] = []
    degree = faults.dp_degree
    if faults.out_of_range:
        rank, value = next(iter(faults.out_of_range.items()))
        count, largest = len(faults.out_of_range), max(faults.out_of_range.values(), key=_size)
        verb = "has" if count == 1 else "have"
        clauses.append(
            f"{count} of {faults.world_size} ranks {verb} a dp_rank outside 0 to {degree - 1} (rank {rank}: {value}"
            f"{f', the largest {largest}' if count > 1 else ''})"
        )
    if faults.missing:
        verb = "belongs" if len(faults.missing) == 1 else "belong"
        clauses.append(
            f"{len(faults.missing)} of {degree} dp_ranks {verb} to no rank ({_listed(faults.missing)}): "
            f"{_percent(faults.never_read)} of the data is never read"
        )
    if faults.repeated:
        value, ranks = next(iter(faults.repeated.items()))
        more = f" (1 of {len(faults.repeated)} such dp_ranks)" if len(faults.repeated) > 1 else ""
        clauses.append(
            f"{_percent(faults.read_twice)} of the data is read more than once: {names_of(ranks)} read the same "
            f"dp_rank {value}{more}"
        )
    if faults.split:
        first, other = faults.split[0]
        more = f" ({len(faults.split)} such ranks)" if len(faults.split) > 1 else ""
        clauses.append(f"ranks {first} and {other} must read the same data and have different dp_ranks{more}")
    return clauses


def _size(value: object) -> float:
    return value if isinstance(value, (int, float)) else float("-inf")


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:_LISTED])) + (", …" if len(numbers) > _LISTED else "")


def _percent(part: float) -> str:
    return f"{100 * part:.3g} %"

"""Do the ranks' dp_ranks shard the data, so that every share is read and none is read twice? `RankMapError`.

Two conditions must hold. Every dp_rank from 0 up to, but not including, dp_degree belongs to a rank. And each belongs
to exactly ``world_size / dp_degree`` ranks, those that differ only along dims that share their data. A formula with a
wrong factor breaks these conditions without an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import cast

from countoff.core.arithmetic.ranks import DpRankFaults, faults_among
from countoff.core.checks.check import Check
from countoff.core.messages import count_of
from countoff.core.protocol.records import Records
from countoff.core.verdict import Cause, Verdict, VerdictKind

__all__ = ["RANK_MAP_ERROR", "RankMapCheck", "judge_dp_ranks"]

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
            "number of replicas; countoff.core.RankMap does it by name.",
        )
    },
)
"""**Cause.** A sampler counts every rank of the world although some share their data, or a formula has a wrong factor.

**Fix.** Compute the position from the mesh, or by `RankMap` where there is none: see [which rank reads which
data](ranks.md).
"""
_LOADER_WHY = "The sampler counts the ranks of the world, or of a node, instead of those along the data dims."
_LOADER_REMEDY = (
    "give the sampler the mesh's numbers: dp_rank, dp_degree = countoff.mesh.dp_position(mesh), then "
    "DistributedSampler(dataset, num_replicas=dp_degree, rank=dp_rank)."
)


class RankMapCheck(Check):
    """Judges the dp_ranks of all ranks at the roll call."""

    def compare_reports(self, reports: Records, *, complete: bool, refused: bool) -> Iterator[Verdict | None]:  # noqa: D102
        if complete and not refused:
            yield judge_dp_ranks({rank: report["plan"] for rank, report in reports.items()})


def _verdict_on(faults: DpRankFaults) -> Verdict | None:
    if faults.sound:
        return None
    named = [rank for ranks in faults.repeated.values() for rank in ranks]
    named += [*faults.out_of_range, *(rank for pair in faults.split for rank in pair)]
    return RANK_MAP_ERROR.found(str(faults), dict.fromkeys(named))


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
        found = _verdict_on(faults_among(dp_ranks, degree, None))
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
        found = _verdict_on(faults_among({rank: share for rank, (share, _) in known.items()}, dp_degree, dp_ranks))
        return None if found is None else replace(found, remedy=_LOADER_REMEDY)
    among = " or ".join(count_of(degree, "rank") for degree in degrees)
    if max(degrees) > dp_degree:
        effect = "ranks that must read the same batch read different ones"
    else:
        effect = "every sample is read by more than one data rank"
    sentence = f"the loaders share the data out among {among}, and the mesh has {dp_degree} data ranks: {effect}."
    outliers = tuple(rank for rank, (_, degree) in known.items() if degree != dp_degree)
    return RANK_MAP_ERROR.found(sentence, outliers, why=_LOADER_WHY, remedy=_LOADER_REMEDY)

"""Which rank reads which share of the data: named mesh dims, and the position of a rank along the data dims.

The usual mistake here is the factor. With dp_replicate R and dp_shard S the position is ``r * S + s``. The formula
``r * R + s`` is right by chance if R = S, is out of range if R > S, and if R < S ranks read each other's data without
an error (facebookresearch/lingua #58). So no caller multiplies: sizes are given once, by name.

Names do not imply semantics: frameworks drop dims of size 1 and have different names for data dims, so the data dims
are always given. Needs neither torch nor a running job; an adapter translates a real mesh to a ``RankMap``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from countoff.core.arithmetic.batches import check_count
from countoff.core.arithmetic.dim_orders import ORDERS, Order, order_of_text
from countoff.core.messages import names_of

__all__ = ["ORDERS", "DpRankFaults", "Order", "RankMap", "dp_rank_faults", "faults_among"]

INFERRED = -1
_LISTED = 8


@dataclass(frozen=True)
class RankMap:
    """Ranks in row-major order over named dims, the last dim varying fastest, as in torch's DeviceMesh.

    Attributes:
        names: The dims, outermost first; none twice.
        sizes: Ranks along each dim, in the same order, each at least 1; their product is the world size.
        data_dims: The dims along which different data is read, in any order. Ranks that differ only in other dims
            share a dp_rank and must read the same data.

    Raises:
        ValueError: If there are no dims, a name is empty or repeated, names and sizes differ in number, a size is not
            an integer of at least 1, or a data dim is repeated or is not among the names.

    Example:
        >>> ranks = RankMap(("dp_replicate", "dp_shard", "tp"), (2, 4, 2), data_dims=("dp_replicate", "dp_shard"))
        >>> ranks.world_size, ranks.dp_degree, ranks.dp_rank(11)
        (16, 8, 5)
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    data_dims: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.names or len(self.names) != len(self.sizes):
            raise ValueError(
                f"names and sizes must have the same length of at least 1, got {self.names} and {self.sizes}"
            )
        if "" in self.names or len(set(self.names)) != len(self.names):
            raise ValueError(f"the names of dims must be different and not empty, got {self.names}")
        for name, size in zip(self.names, self.sizes, strict=True):
            if type(size) is not int or size < 1:
                raise ValueError(f"the size of dim {name!r} must be an integer of at least 1, got {size!r}")
        if len(set(self.data_dims)) != len(self.data_dims) or not set(self.data_dims) <= set(self.names):
            raise ValueError(f"data_dims must be different names out of {self.names}, got {self.data_dims}")

    @classmethod
    def fit(cls, names: Sequence[str], sizes: Sequence[int], data_dims: Sequence[str], *, world_size: int) -> RankMap:
        """Returns the map of a job of known size; one size may be -1 and is then inferred.

        Args:
            names: The dims, outermost first.
            sizes: Ranks along each dim, at least 1; at most one is -1, which takes the ranks that the others leave
                over.
            data_dims: The dims along which different data is read.
            world_size: Ranks of the job, at least 1.

        Raises:
            ValueError: If the sizes do not multiply to world_size, if more than one is -1, if the others do not divide
                world_size where one is, or if anything is outside its domain.

        Example:
            >>> RankMap.fit(("dp_replicate", "dp_shard", "tp"), (2, -1, 2), ("dp_replicate", "dp_shard"), world_size=16)
            ...     # doctest: +ELLIPSIS
            RankMap(names=('dp_replicate', 'dp_shard', 'tp'), sizes=(2, 4, 2), ...)
        """
        if type(world_size) is not int or world_size < 1:
            raise ValueError(f"world_size must be an integer of at least 1, got {world_size!r}")
        given = {name: size for name, size in zip(names, sizes, strict=True) if size != INFERRED}
        # Checks the known sizes before one of them is a divisor.
        if given:
            cls(tuple(given), tuple(given.values()), ())
        open_names = [name for name in names if name not in given]
        known = math.prod(given.values())
        spelled = " × ".join(f"{name} {given.get(name, INFERRED)}" for name in names)
        if len(open_names) > 1:
            raise ValueError(f"only one size may be {INFERRED}, got {' and '.join(open_names)} in {spelled}")
        if open_names and world_size % known:
            raise ValueError(
                f"{spelled}: the other sizes multiply to {known}, which does not divide world_size {world_size}"
            )
        if not open_names and known != world_size:
            raise ValueError(f"{spelled} = {known}, but world_size is {world_size}")
        full = tuple(given.get(name, world_size // known) for name in names)
        return cls(tuple(names), full, tuple(data_dims))

    @classmethod
    def of(cls, order: str, *, world_size: int, **sizes: int) -> RankMap:
        """Returns the map with a framework's own order of dims.

        Args:
            order: A name in ``ORDERS`` (``torchtitan``, ``lingua``, ``accelerate``, ``composer``, ``lightning``,
                ``megatron``, ``deepspeed``), or Megatron's notation, fastest dim first: ``tp-cp-ep-dp-pp``.
            world_size: Ranks of the job, at least 1.
            **sizes: Ranks along each dim, by name. A dim that is not given has size 1, except the one that the order
                infers; a -1 here infers that dim instead.

        Raises:
            ValueError: If the order is unknown, it has no such dim, or the sizes do not fit world_size.

        Example:
            >>> ranks = RankMap.of("torchtitan", world_size=16, dp_replicate=2, tp=2)
            >>> ranks.sizes, ranks.dp_rank(11)
            ((1, 2, 4, 1, 2), 5)
        """
        known = order_of_text(order)
        for name in sizes:
            if name not in known.names:
                raise ValueError(f"the order {order!r} has no dim {name!r}; it has {', '.join(known.names)}")
        open_dim = None if INFERRED in sizes.values() else known.inferred
        full = [sizes.get(name, INFERRED if name == open_dim else 1) for name in known.names]
        return cls.fit(known.names, full, known.data_dims, world_size=world_size)

    @property
    def world_size(self) -> int:
        """Ranks of the job: the product of all sizes."""
        return math.prod(self.sizes)

    @property
    def dp_degree(self) -> int:
        """Shares into which the data is cut: the product of the sizes of the data dims; 1 if there are none."""
        return math.prod(size for name, size in zip(self.names, self.sizes, strict=True) if name in self.data_dims)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the position of a rank along every dim, outermost first.

        Args:
            rank: A rank of the job, from 0 up to, but not including, world_size.

        Raises:
            ValueError: If the rank is not an integer in this range.

        Example:
            >>> RankMap(("dp", "tp"), (2, 4), data_dims=("dp",)).coordinates(6)
            {'dp': 1, 'tp': 2}
        """
        if type(rank) is not int or not 0 <= rank < self.world_size:
            raise ValueError(f"rank must be an integer from 0 to {self.world_size - 1}, got {rank!r}")
        innermost_first: list[tuple[str, int]] = []
        for name, size in zip(reversed(self.names), reversed(self.sizes), strict=True):
            rank, position = divmod(rank, size)
            innermost_first.append((name, position))
        return dict(reversed(innermost_first))

    def dp_rank(self, rank: int) -> int:
        """Returns the share of the data that a rank reads, from 0 up to, but not including, dp_degree.

        A mixed-radix number over the data dims, in the order of the mesh. For the order (pp, dp_replicate, dp_shard,
        cp, tp) this is torchtitan's ``(rank // (cp * tp)) % (dp_replicate * dp_shard)``.

        Args:
            rank: A rank of the job, from 0 up to, but not including, world_size.

        Raises:
            ValueError: If the rank is not an integer in this range.

        Example:
            >>> RankMap(("dp", "tp"), (2, 4), data_dims=("dp",)).dp_rank(6)
            1
        """
        share = 0
        position = self.coordinates(rank)
        for name, size in zip(self.names, self.sizes, strict=True):
            if name in self.data_dims:
                share = share * size + position[name]
        return share

    def dp_ranks(self) -> list[int]:
        """Returns the dp_rank of every rank, in the order of ranks; much faster than a call of ``dp_rank`` for each.

        Example:
            >>> RankMap(("pp", "dp", "tp"), (2, 2, 2), data_dims=("dp",)).dp_ranks()
            [0, 0, 1, 1, 0, 0, 1, 1]
        """
        shares = [0]
        for name, size in zip(self.names, self.sizes, strict=True):
            if name in self.data_dims:
                shares = [share * size + position for share in shares for position in range(size)]
            else:
                shares = [share for share in shares for _ in range(size)]
        return shares

    def faults(self, values: Sequence[int] | Mapping[int, int]) -> DpRankFaults:
        """Returns what is wrong with dp_ranks that the user's own code computed.

        Shares can be numbered in any way, as long as ranks that share their data have the same number, other ranks have
        different numbers, and the numbers are 0 up to, but not including, dp_degree.

        Args:
            values: The dp_rank of each rank, in the order of ranks, or by rank; one for every rank of the job.

        Raises:
            ValueError: If there is not exactly one value for each rank.

        Example:
            >>> ranks = RankMap.of("lingua", world_size=16, dp_replicate=2, dp_shard=8)
            >>> faults = ranks.faults([(rank // 8) * 2 + rank % 8 for rank in range(16)])
            >>> faults.sound
            False
            >>> print(faults)  # doctest: +ELLIPSIS
            6 of 16 dp_ranks belong to no rank (10, 11, 12, 13, 14, 15): 37.5 % of the data is never read; ...
        """
        return dp_rank_faults(values, dp_degree=self.dp_degree, groups=self.dp_ranks())


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

    def __str__(self) -> str:
        """All faults as one sentence: the ranks that collide, the shares never read, and how much data that is."""
        return "every share is read, and none is read twice." if self.sound else "; ".join(_clauses(self)) + "."


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
        >>> faults = dp_rank_faults([0, 1, 1, 2], dp_degree=4)
        >>> faults.missing
        (3,)
        >>> for clause in str(faults).split("; "):
        ...     print(clause)
        1 of 4 dp_ranks belongs to no rank (3): 25 % of the data is never read
        25 % of the data is read more than once: ranks 1, 2 read the same dp_rank 1.
    """
    check_count("dp_degree", dp_degree, minimum=1)
    by_rank = dict(values) if isinstance(values, Mapping) else dict(enumerate(values))
    world_size = len(by_rank) if groups is None else len(groups)
    if set(by_rank) != set(range(world_size)):
        raise ValueError(f"there must be one dp_rank for each of the ranks 0 to {world_size - 1}, got {len(by_rank)}")
    return faults_among(by_rank, dp_degree, None if groups is None else dict(enumerate(groups)))


def faults_among(by_rank: Mapping[int, int], dp_degree: int, groups: Mapping[int, int] | None) -> DpRankFaults:
    """Returns what is wrong with the dp_ranks of all ranks that take part, which may be some ranks of a job.

    Args:
        by_rank: The dp_rank of each rank that takes part.
        dp_degree: Shares into which the data is cut, at least 1.
        groups: As for ``dp_rank_faults``, by rank.

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

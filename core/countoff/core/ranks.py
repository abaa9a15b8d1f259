"""Which rank reads which share of the data: named mesh dims, and the position of a rank along the data dims.

The usual mistake here is the factor. With dp_replicate R and dp_shard S the position is ``r * S + s``. The formula
``r * R + s`` is right by chance if R = S, is out of range if R > S, and if R < S ranks read each other's data without
an error (facebookresearch/lingua #58). So no caller multiplies: sizes are given once, by name.

Names do not imply semantics: frameworks drop dims of size 1 and have different names for data dims, so the data dims
are always given. Needs neither torch nor a running job; an adapter translates a real mesh to a ``RankMap``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from countoff.core.checks.rank_map import DpRankFaults, check_dp_ranks, dp_rank_faults
from countoff.core.counts.dim_orders import ORDERS, Order, order_of_text
from countoff.core.verdict import Verdict

__all__ = ["ORDERS", "DpRankFaults", "Order", "RankMap", "check_dp_ranks", "dp_rank_faults"]

INFERRED = -1


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
        >>> ranks.world_size, ranks.dp_degree, ranks.dp_rank(11), ranks.peers(11)
        (16, 8, 5, (10, 11))
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
    def data_parallel(cls, world_size: int) -> RankMap:
        """Returns the map of plain data parallel: one dim, and every rank reads a share of its own.

        Args:
            world_size: Ranks of the job, at least 1.

        Raises:
            ValueError: If world_size is not an integer of at least 1.

        Example:
            >>> RankMap.data_parallel(4).dp_rank(3)
            3
        """
        return cls(("dp",), (world_size,), data_dims=("dp",))

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

    def peers(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks with the dp_rank of this rank, including itself, ascending.

        Args:
            rank: A rank of the job, from 0 up to, but not including, world_size.

        Returns:
            ``world_size // dp_degree`` ranks.

        Raises:
            ValueError: If the rank is not an integer in this range.

        Example:
            >>> RankMap(("pp", "dp"), (2, 3), data_dims=("dp",)).peers(1)
            (1, 4)
        """
        position = self.coordinates(rank)
        steps: list[range] = []
        first, stride = 0, self.world_size
        for name, size in zip(self.names, self.sizes, strict=True):
            stride //= size
            if name in self.data_dims:
                first += position[name] * stride
            else:
                steps.append(range(0, size * stride, stride))
        return tuple(first + sum(offsets) for offsets in itertools.product(*steps))

    def check_dp_ranks(self, values: Sequence[int] | Mapping[int, int]) -> Verdict | None:
        """Returns what is wrong with dp_ranks that the user's own code computed.

        Shares can be numbered in any way, as long as ranks that share their data have the same number, other ranks have
        different numbers, and the numbers are 0 up to, but not including, dp_degree.

        Args:
            values: The dp_rank of each rank, in the order of ranks, or by rank; one for every rank of the job.

        Returns:
            A `RankMapError`; None if every share is read and none is read twice.

        Raises:
            ValueError: If there is not exactly one value for each rank.

        Example:
            >>> ranks = RankMap.of("lingua", world_size=16, dp_replicate=2, dp_shard=8)
            >>> wrong = [(rank // 8) * 2 + rank % 8 for rank in range(16)]
            >>> print(ranks.check_dp_ranks(wrong).sentence)  # doctest: +ELLIPSIS
            6 of 16 dp_ranks belong to no rank (10, 11, 12, 13, 14, 15): 37.5 % of the data is never read; ...
        """
        return check_dp_ranks(values, dp_degree=self.dp_degree, groups=self.dp_ranks())

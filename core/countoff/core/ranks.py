"""Which rank reads which share of the data: named mesh dimensions, and the position along the data dims alone.

The one thing that goes wrong here is the factor. With dp_replicate R and dp_shard S the position is ``r * S + s``;
``r * R + s`` is right by luck when R = S, runs out of range when R > S, and when R < S lets ranks read each other's
data without an error (facebookresearch/lingua #58). So no caller multiplies: the sizes are given once, by name.

Names do not imply semantics: frameworks drop dims of size 1 and call the data dims differently, so the data dims are
always said. Needs neither torch nor a running job; a real mesh is translated to a ``RankMap`` by an adapter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["RankMap"]


@dataclass(frozen=True)
class RankMap:
    """Ranks laid out row-major over named dims, the last one varying fastest, as torch's DeviceMesh lays them out.

    Attributes:
        names: The dims, outermost first; none twice.
        sizes: The ranks along each dim, in the same order, each at least 1; their product is the world size.
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
            raise ValueError(f"names and sizes must be equally many and at least 1, got {self.names} and {self.sizes}")
        if "" in self.names or len(set(self.names)) != len(self.names):
            raise ValueError(f"names of dims must be different and not empty, got {self.names}")
        for name, size in zip(self.names, self.sizes, strict=True):
            if type(size) is not int or size < 1:
                raise ValueError(f"the size of dim {name!r} must be an integer of at least 1, got {size!r}")
        if len(set(self.data_dims)) != len(self.data_dims) or not set(self.data_dims) <= set(self.names):
            raise ValueError(f"data_dims must be different names out of {self.names}, got {self.data_dims}")

    @classmethod
    def data_parallel(cls, world_size: int) -> RankMap:
        """Returns the map of plain data parallel: one dim, and every rank reads its own share.

        Args:
            world_size: The ranks of the job, at least 1.

        Raises:
            ValueError: If world_size is not an integer of at least 1.

        Example:
            >>> RankMap.data_parallel(4).dp_rank(3)
            3
        """
        return cls(("dp",), (world_size,), data_dims=("dp",))

    @property
    def world_size(self) -> int:
        """The ranks of the job: the product of all sizes."""
        return math.prod(self.sizes)

    @property
    def dp_degree(self) -> int:
        """The shares into which the data is cut: the product of the sizes of the data dims, 1 if there are none."""
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

        Mixed radix over the data dims in the order of the mesh. For the order (pp, dp_replicate, dp_shard, cp, tp) this
        is torchtitan's ``(rank // (cp * tp)) % (dp_replicate * dp_shard)``.

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

    def peers(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks that share the dp_rank of this one, itself among them, ascending.

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
        mine = self.dp_rank(rank)
        return tuple(other for other in range(self.world_size) if self.dp_rank(other) == mine)

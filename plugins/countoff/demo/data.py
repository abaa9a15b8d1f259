"""Real data for the demo: scikit-learn's handwritten digits, in shards of equal size and a held-out part."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HELD_OUT = 360
GLOBAL_BATCH = 64
_SHARDS_PER_RANK, _SHARDS_OF_SHORT_RANK = 4, 3


@dataclass(frozen=True)
class Data:
    """What the shards hold, and what each rank gets when whole shards are distributed.

    Attributes:
        directory: Where the shards are.
        ranks: Number of ranks they are meant for.
        shards: Number of shards; one too few for every rank to get the same number.
        shard_size: Digits in each shard.
    """

    directory: Path
    ranks: int
    shards: int
    shard_size: int

    @property
    def batch_size(self) -> int:
        """Samples per rank and batch; the total over all ranks stays about the same for any number of ranks."""
        return max(1, GLOBAL_BATCH // self.ranks)

    @property
    def short_rank(self) -> int:
        """The rank that gets one shard less than the others."""
        return self.ranks - 1

    def batches(self, rank: int) -> int:
        """Returns the number of batches in this rank's shards; the last one may be incomplete."""
        samples = self.shard_size * (_SHARDS_OF_SHORT_RANK if rank == self.short_rank else _SHARDS_PER_RANK)
        return -(-samples // self.batch_size)


def write(directory: Path, ranks: int) -> Data:
    """Writes the digits as ``shard-*.npz``, four for each rank but three for the last, and ``held-out.npz``."""
    import numpy as np
    from sklearn.datasets import load_digits  # pyright: ignore[reportMissingTypeStubs]

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = (images[order] / 16).astype("float32"), labels[order].astype("int64")
    np.savez(directory / "held-out.npz", images=images[:HELD_OUT], labels=labels[:HELD_OUT])
    shards = _SHARDS_PER_RANK * (ranks - 1) + _SHARDS_OF_SHORT_RANK
    size = (len(labels) - HELD_OUT) // shards
    for number in range(shards):
        part = slice(HELD_OUT + number * size, HELD_OUT + (number + 1) * size)
        np.savez(directory / f"shard-{number:03}.npz", images=images[part], labels=labels[part])
    return Data(directory, ranks, shards, size)

"""How many batches a loop takes for each optimizer step, by which it is known to train on what its loader gives."""

from __future__ import annotations

__all__ = ["Rhythm"]

_STEADY = 3
"""Steps after different batches that show a rhythm: the batches before the second and the third one are compared."""


class Rhythm:
    """The batches between the optimizer steps of one pass.

    A loop that trains on its loader's batches takes equally many for each step. One that fetches ahead, or skips some
    at its start, takes more for the first step. One that takes less for it deals batches out among the ranks, as
    ``islice(loader, rank, None, world_size)`` does. One that packs samples takes now more, now less. In both, ranks may
    take different numbers of batches, and be right.

    Args:
        gap: Batches per step, where an earlier pass has shown it: the first step of this pass may then come sooner, in
            the middle of an accumulation that the earlier pass has begun. None where no pass has.

    Attributes:
        gap: Batches per step; None while that is not known.
        broken: Whether the loop has another rhythm than a loop that trains on its loader's batches.
    """

    def __init__(self, gap: int | None = None) -> None:
        self.gap = gap
        self.broken = False
        self._known = gap is not None
        self._first = 0
        self._steps = 0
        self._taken = 0

    @property
    def is_steady(self) -> bool:
        """Whether the loop is known to train on its loader's batches."""
        return not self.broken and (self._known or self._steps >= _STEADY)

    def stepped(self, taken: int) -> None:
        """Takes note of an optimizer step. Those after the same batch are one.

        Args:
            taken: Batches of the pass that the loop had taken then.
        """
        gap, self._taken = taken - self._taken, taken
        if not gap:
            return
        self._steps += 1
        if self._steps == 1:
            self._first = gap
        elif self.gap is None:
            self.gap = gap
            self.broken = gap > self._first
        elif gap != self.gap:
            self.broken = True

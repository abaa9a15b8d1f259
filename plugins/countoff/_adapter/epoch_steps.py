"""Counts the optimizer steps of a train epoch, where a run accumulates the gradients of several batches.

The framework or the person has said how many. A loop that goes on without that, or that cuts up its batches, steps more
often than the totals and the learning-rate schedule were made for.
"""

from __future__ import annotations

from collections.abc import Callable

from countoff.core import Verdict
from countoff.core.checks.framework import judge_steps

__all__ = ["EpochSteps"]


class EpochSteps:
    """The optimizer steps of the open train epoch, of each optimizer.

    Where several optimizers step, as in turns or one of them after each batch, the one with the fewest steps counts.

    Args:
        accumulation: Returns the batches per optimizer step that the run has now, at least 1.
        by_passes: Whether these are backward passes, which are counted; else batches, and what is counted are forward
            passes of the models that are known.

    Example:
        >>> steps = EpochSteps(lambda: 4)
        >>> for batch in range(1, 13):
        ...     steps.step(optimizer=1, batch=batch)
        >>> print(steps.judge("train epoch 0", batches=12, passes=0).sentence)
        train epoch 0 had 12 optimizer steps in 12 batches: gradient_accumulation_steps=4 makes at most 3.
    """

    def __init__(self, accumulation: Callable[[], int], *, by_passes: bool = False) -> None:
        self._accumulation = accumulation
        self._by_passes = by_passes
        self.begin()

    def begin(self) -> None:
        """Begins an epoch."""
        self._least = self._accumulation()  # a program may change it
        self._steps = dict[int, int]()
        self._batches = dict[int, int]()
        self._last = dict[int, int]()

    def step(self, optimizer: int, batch: int) -> None:
        """Counts a step.

        Args:
            optimizer: Which optimizer it was.
            batch: Number of the batch in the epoch.
        """
        if self._least > 1:
            self._least = min(self._least, self._accumulation())
            self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
            if self._last.get(optimizer) != batch:
                self._last[optimizer] = batch
                self._batches[optimizer] = self._batches.get(optimizer, 0) + 1

    def judge(self, epoch: str, *, batches: int, passes: int) -> Verdict | None:
        """Returns a warning if the epoch, which is about to end, has had more steps than its batches can have.

        Where not all passes are known to be backward passes, several steps in one batch are one.

        Args:
            epoch: Its name.
            batches: Its batches, at least 0.
            passes: Its passes that are counted, at least 0.
        """
        unknown = self._by_passes and passes < batches
        if not self._steps or unknown:
            return None
        steps = stepped = min(self._batches.values())
        if self._by_passes:
            steps, stepped = min((steps, self._batches[optimizer]) for optimizer, steps in self._steps.items())
        known = {"batches": batches, "passes": max(batches, passes)}
        return judge_steps(epoch, steps, self._least, **known, cut=steps > stepped)

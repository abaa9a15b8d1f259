"""Counts the optimizer steps of a train epoch, where Accelerate accumulates the gradients of several batches.

A loop that never calls `accumulate()`, or that cuts up its batches inside of it, steps more often than the totals and
the learning-rate schedule were made for. The number of steps alone proves neither: `accumulate()` also steps at the end
of each loader, of which an epoch may read several.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from countoff.core import Verdict
from countoff.core.checks.framework import judge_steps

__all__ = ["EpochSteps"]


@dataclass
class _Stepped:
    """What one optimizer has done in the epoch."""

    steps: int = 0
    batches: int = 0  # that had a step
    batch: int = 0  # of the last step

    def step(self, batch: int) -> None:
        self.batches += batch != self.batch
        self.steps += 1
        self.batch = batch


class EpochSteps:
    """The optimizer steps of the open train epoch.

    Args:
        accumulation: Returns the batches per optimizer step that the run has now, at least 1.
        optimizers: Returns how many optimizers the run has. All of them must show the same, as one may train a part of
            the model without an accumulation.

    Example:
        >>> steps = EpochSteps(lambda: 4, optimizers=lambda: 1)
        >>> for batch in range(1, 13):
        ...     steps.step(optimizer=1, batch=batch)
        >>> print(steps.judge("train epoch 0", batches=12, passes=12).sentence)
        train epoch 0 had 12 optimizer steps in 12 batches: gradient_accumulation_steps=4 makes at most 3.
    """

    def __init__(self, accumulation: Callable[[], int], optimizers: Callable[[], int]) -> None:
        self._accumulation = accumulation
        self._optimizers = optimizers
        self.begin()

    def begin(self) -> None:
        """Begins an epoch."""
        self._said = self._accumulation()
        self._stepped = dict[int, _Stepped]()

    def step(self, optimizer: int, batch: int) -> None:
        """Counts a step.

        Args:
            optimizer: Which optimizer it was.
            batch: Number of the batch in the epoch, from 1.
        """
        if self._said > 1 and self._accumulation() == self._said:  # a program may change it
            self._stepped.setdefault(optimizer, _Stepped()).step(batch)

    def judge(self, epoch: str, *, batches: int, passes: int) -> Verdict | None:
        """Returns a warning if all batches of an epoch, which is about to end, have had a step.

        Args:
            epoch: Its name.
            batches: Its batches, at least 0.
            passes: Its backward passes that are counted, at least 0. With fewer than batches, not all are known.
        """
        stepped = self._stepped.values()
        if not stepped or passes < batches or len(stepped) < self._optimizers():
            return None
        if any(each.batches < batches for each in stepped):
            return None
        steps = min(each.steps for each in stepped)
        return judge_steps(epoch, steps, self._said, batches=batches, passes=passes)

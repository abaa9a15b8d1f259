"""Has a run that has ended by itself trained as long as planned? `ShortRun`. Adapters look for it.

A trainer goes from epoch to epoch, and takes the end of its loader for the end of an epoch. So a loader that gives
fewer batches than it has, or none, shortens the run: it ends without an error, and too early. Two facts are needed: the
run has ended by itself before its plan, and the loader has ended by itself before its length.
"""

from __future__ import annotations

from dataclasses import dataclass

from countoff.core.arithmetic.steps import steps_in_epoch
from countoff.core.messages import count_of
from countoff.core.verdict import Cause, Verdict, VerdictKind

__all__ = ["RESUMED", "SHORT_RUN", "EpochEnd", "ShortEpochs", "judge_run"]

RESUMED = "resume"
"""Subject of a `ShortRun` whose first short epoch is the one after a resume of its loader."""
SHORT_RUN = VerdictKind(
    "ShortRun",
    "the run has ended by itself before its planned end, because the loader has given fewer batches than it has",
    ends=False,
    causes={
        "": Cause(
            "The loader's passes have ended too early, and the loop takes the end of a pass for the end of an epoch. "
            "So it has ended without an error.",
            "look for what can be read only once or raises StopIteration: a dataset that reads from an iterator, a "
            "file or a connection must begin again in each epoch. Then train again, from a checkpoint that was written "
            "before that epoch.",
        ),
        RESUMED: Cause(
            "The loader was restored at the end of a pass, and the run has gone on with the next epoch: nothing was "
            "left to give. So it has ended without an error.",
            "resume from a checkpoint from the middle of an epoch.\n"
            "resume from this one without the loader's state: the epoch then begins with its first batch. Give the "
            "sampler its epoch in that case, for another order.",
        ),
    },
)
"""**Cause.** A trainer takes the end of its loader for the end of an epoch. A `StatefulDataLoader` that was saved in
the last batch of an epoch has nothing left for the next one
([torchdata#1437](https://github.com/meta-pytorch/data/issues/1437)). A dataset that keeps one iterator is empty after
the first epoch. The exit code is 0, and the model is trained too little.

**Fix.** Resume from another checkpoint. A dataset must begin again in each epoch.

It is reported only where nothing else has ended the run, and torch's own samplers prove the length.
"""


@dataclass(frozen=True)
class EpochEnd:
    """A train epoch whose loader has ended by itself.

    Attributes:
        epoch: Its number, from 0.
        given: Batches that the loader has given to this rank in it, at least 0.
        whole: Batches of this rank that the epoch is proven to have.
        position: Batches of it that were trained on before the checkpoint from which the run has resumed.
        resumed: Whether it is the first epoch after a resume.
        restored: Whether its loader may have been restored by that, in the middle or at the end of a pass.
    """

    epoch: int
    given: int
    whole: int
    position: int = 0
    resumed: bool = False
    restored: bool = False

    @property
    def due(self) -> int:
        """Batches that the loader had to give."""
        return max(0, self.whole - self.position)

    def missing_steps(self, gradient_accumulation_steps: int, *, partial_applied: bool) -> int:
        """Returns the optimizer steps that the epoch has not had.

        Args:
            gradient_accumulation_steps: Batches per optimizer step, at least 1.
            partial_applied: Whether a whole epoch applies a last accumulation that is not complete. One that ends too
                early does not: nothing has told the loop that it would.
        """
        whole, done = (
            steps_in_epoch(batches, gradient_accumulation_steps=gradient_accumulation_steps, partial_applied=applied)
            for batches, applied in ((self.whole, partial_applied), (self.position + self.given, False))
        )
        return max(0, whole - done)


class ShortEpochs:
    """The train epochs of one fit that have ended too early.

    Args:
        gradient_accumulation_steps: Batches per optimizer step, at least 1.
        partial_applied: As for `EpochEnd.missing_steps`.

    Attributes:
        first: The first one; None if there is none.
        last: The last one, likewise.
        number: How many there are.
        missing_steps: The optimizer steps that they have not had.
        gave_some: Whether the loader has given some batches in one of them.

    Example:
        >>> short = ShortEpochs()
        >>> short.add(EpochEnd(0, given=40, whole=40))
        >>> short.add(EpochEnd(1, given=0, whole=40, resumed=True))
        >>> judge_run(short, steps=40, planned=80).sentence
        'the run ended after 40 of 80 steps: train epoch 1 gave 0 of 40 batches after the resume.'
    """

    def __init__(self, gradient_accumulation_steps: int = 1, *, partial_applied: bool = True) -> None:
        self.first: EpochEnd | None = None
        self.last: EpochEnd | None = None
        self.number = self.missing_steps = 0
        self.gave_some = False
        self._accumulation, self._partial_applied = gradient_accumulation_steps, partial_applied

    def add(self, end: EpochEnd) -> None:
        """Takes note of the end of a train epoch, if it has come too early."""
        if end.given >= end.due:
            return
        self.first, self.last = self.first or end, end
        self.number += 1
        self.gave_some |= end.given > 0
        self.missing_steps += end.missing_steps(self._accumulation, partial_applied=self._partial_applied)


def judge_run(short: ShortEpochs, *, steps: int, planned: int) -> Verdict | None:
    """Returns a `ShortRun` if a run that has ended by itself is shorter than planned, because of short epochs.

    Args:
        short: The short epochs.
        steps: Optimizer steps of the whole run.
        planned: Optimizer steps that were planned for it.
    """
    first = short.first
    if first is None or steps >= planned:
        return None
    after = " after the resume" if first.resumed else ""
    sentence = (
        f"the run ended after {steps} of {count_of(planned, 'step')}: train epoch {first.epoch} gave {first.given} of "
        f"{count_of(first.due, 'batch')}{after}"
    )
    if short.number > 1:
        sentence += f", and {count_of(short.number - 1, 'later epoch')} gave too few as well"
    return SHORT_RUN.found(f"{sentence}.", subject=RESUMED if first.restored else "")

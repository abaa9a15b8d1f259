"""Learning-rate schedules as the examples of the frameworks make them: of these countoff says nothing.

A schedule has the form of transformers' linear one: a warm-up, and a decay to 0 at the number that it is made for.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from countoff.core.arithmetic.schedules import decay
from countoff.core.checks.horizon import Horizon, RunLength, run_out, wrong_horizon
from countoff.core.verdict import Verdict


@dataclass(frozen=True)
class Loop:
    """A loop over a loader, as one rank runs it.

    Attributes:
        batches: Batches per epoch of the loader before a framework divides it.
        epochs: Epochs.
        processes: Processes among which Accelerate divides the loader.
        accumulation: Batches per optimizer step.
        per_batch: Whether a plain loop steps its scheduler after every batch.
        drop_last: Whether Accelerate drops the batches that do not go round, as with ``drop_last=True``.
    """

    batches: int
    epochs: int
    processes: int = 1
    accumulation: int = 1
    per_batch: bool = False
    drop_last: bool = False

    @property
    def own_batches(self) -> int:
        return self.batches // self.processes if self.drop_last else math.ceil(self.batches / self.processes)

    @property
    def steps_per_epoch(self) -> int:
        if self.per_batch:  # a plain loop leaves out the incomplete step
            return self.own_batches // self.accumulation
        return math.ceil(self.own_batches / self.accumulation)

    @property
    def pace(self) -> Fraction:
        return Fraction(self.accumulation if self.per_batch else self.processes)

    @property
    def run(self) -> RunLength:
        return RunLength(
            self.epochs * self.steps_per_epoch,
            steps_per_epoch=self.steps_per_epoch,
            epochs=self.epochs,
            gradient_accumulation_steps=self.accumulation,
            processes=self.processes,
            epoch_batches=(self.batches, self.own_batches * self.processes),
        )

    def lengths(self) -> dict[str, int]:
        """The numbers for which the examples make a schedule, by where they do so."""
        batches, epochs, accumulation = self.batches, self.epochs, self.accumulation
        if self.per_batch:
            return {"len(loader) * epochs": batches * epochs, "max_steps * accumulation": 7 * accumulation}
        found = {
            "Accelerate: len(loader) * epochs // accumulation": batches * epochs // accumulation,
            "transformers: epochs * ceil(len(loader) / accumulation)": epochs * math.ceil(batches / accumulation),
            "diffusers: epochs * processes * ceil(len(loader after sharding) / accumulation)": (
                epochs * self.processes * self.steps_per_epoch
            ),
            "after prepare(), times the processes": epochs * self.own_batches * self.processes // accumulation,
        }
        return {name: length for name, length in found.items() if length}

    def said(self, horizon: Horizon, *, told: bool) -> Iterator[Verdict]:
        """What countoff says of a schedule in this loop, whether or not it was told the epochs."""
        if told:
            found = [wrong_horizon(horizon, self.run)]
        else:
            run = replace(self.run, steps=None, epochs=None)
            begins = [int(epoch * self.steps_per_epoch * self.pace) for epoch in range(1, self.epochs)]
            found = [run_out(horizon, run, calls=at, span="it") for at in begins]
        yield from filter(None, found)


def named(loop: Loop, length: int, warmup: int = 0) -> Horizon:
    return Horizon("LambdaLR", decay(length, warmup=warmup), loop.pace, "once per process")


PLAIN = [
    Loop(batches, epochs, 1, accumulation, per_batch=True)
    for batches, epochs, accumulation in itertools.product(range(1, 30), range(1, 10), (2, 3, 4, 8))
    if batches >= accumulation
]


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 6, 8, 16, 24, 64])
def test_nothing_is_said_of_the_examples_of_accelerate(processes: int) -> None:
    for batches, epochs, accumulation in itertools.product((*range(1, 20), 65, 230), (1, 2, 3, 5, 9), (1, 2, 4, 8)):
        loop = Loop(batches, epochs, processes, accumulation)
        loops = [loop] if batches < processes else [loop, replace(loop, drop_last=True)]
        for each, told in itertools.product(loops, (False, True)):
            for name, length in each.lengths().items():
                assert not list(each.said(named(each, length), told=told)), (each, name, told)


@pytest.mark.parametrize("processes", [2, 3, 4, 8, 64])
def test_nothing_is_said_of_a_limit_of_steps_times_the_processes(processes: int) -> None:
    """As in the examples of transformers and diffusers, where the user gives ``max_train_steps``."""
    for batches, steps, accumulation in itertools.product(range(1, 30), range(1, 40), (1, 4)):
        loop = Loop(batches, 1, processes, accumulation)
        loop = replace(loop, epochs=math.ceil(steps / loop.steps_per_epoch))
        horizon = named(loop, steps * processes)
        assert not list(loop.said(horizon, told=False)), (loop, steps)
        assert wrong_horizon(horizon, replace(loop.run, steps=steps, limited=True)) is None


def test_nothing_is_said_of_plain_loops_that_step_with_every_batch() -> None:
    for loop in PLAIN:
        assert not list(loop.said(named(loop, loop.lengths()["len(loader) * epochs"]), told=False)), loop
        assert not list(loop.said(named(loop, loop.lengths()["len(loader) * epochs"]), told=True)), loop


@given(
    st.integers(1, 5000),
    st.integers(1, 30),
    st.integers(2, 64),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.sampled_from([0, 10, 100, 500]),
)
def test_nothing_is_said_of_any_example(batches, epochs, processes, accumulation, warmup):
    """The schedule has a warm-up as in the examples; one that is longer is said, as it ends with a rate of 0."""
    loop = Loop(batches, epochs, processes, accumulation)
    for length in loop.lengths().values():
        if length > warmup:
            assert not list(loop.said(named(loop, length, warmup), told=False))
            assert not list(loop.said(named(loop, length, warmup), told=True))


def test_a_schedule_in_optimizer_steps_is_still_found() -> None:
    """The same loops with the mistake that the rule is for: a schedule for steps that is stepped once per process."""
    found = 0
    for batches, epochs, processes in itertools.product((18, 190, 1001), (1, 3, 5), (2, 4, 8)):
        loop = Loop(batches, epochs, processes)
        horizon = named(loop, epochs * loop.steps_per_epoch)
        steps = epochs * loop.steps_per_epoch
        assert (wrong_horizon(horizon, loop.run) is not None) == (horizon.end_step < steps - loop.run.slack)
        found += horizon.end_step < steps - loop.run.slack
    assert found

"""Ticks: the steps and learning rates that ranks compare in the middle of a span."""

import json
from typing import Any, cast

import numpy
import pytest

from countoff.core.checks.steps import Tick
from countoff.core.protocol.counters import SpanCounters, tick_keys

EPOCH = "train epoch 0"


TICK = {"rank": 0, "steps": 8, "step_hash": 5, "rates": [0.1, 0.2]}


@pytest.mark.parametrize(
    ("difference", "kind"),
    [
        ({}, None),
        ({"steps": 7}, "StepMismatch"),
        ({"step_hash": 6}, "StepMismatch"),
        ({"rates": [0.1, 0.3]}, "LearningRateMismatch"),
        ({"rates": [0.1]}, None),
        ({"rates": []}, None),
        ({"rates": [0.1, 0.3], "steps": 7}, "StepMismatch"),
    ],
)
def test_ticks_are_compared_steps_first(difference: dict[str, Any], kind: str | None) -> None:
    found = Tick("tick/1/64", "batch 64 of train epoch 0", {**TICK, "rank": 1, **difference}).compare(TICK)
    assert (found and found.kind) == kind
    assert found is None or found.ranks == (0, 1)


def test_a_tick_verdict_names_the_place_and_both_counts() -> None:
    found = Tick("tick/1/64", "batch 64 of train epoch 0", {**TICK, "rank": 1, "step_hash": 6}).compare(TICK)
    steps = "rank 0 had applied 8 optimizer steps and rank 1 8, but after other batches"
    assert found is not None
    assert found.sentence == f"at batch 64 of train epoch 0, {steps}."


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ([0.1], [0.2], "with learning rate 0.1 and rank 1 with 0.2"),
        ([0.00031711500169576796] * 2, [0.0003] * 2, "with learning rate 3.17e-4 and rank 1 with 3e-4"),
        ([0.000300001], [0.0003], "with learning rate 3.00001e-4 and rank 1 with 3e-4"),
        ([0.1, 0.2], [0.1, 0.3], "with learning rate 0.1, 0.2 and rank 1 with 0.1, 0.3"),
        ([0.1, 0.2], [0.2, 0.1], "with learning rate 0.1, 0.2 and rank 1 with 0.2, 0.1"),
        ([0.1, 0.1, 0.2], [0.1, 0.2, 0.2], "with the learning rates 0.1, 0.1, 0.2 and rank 1 with 0.1, 0.2, 0.2"),
        ([0.1], [float("nan")], "with learning rate 0.1 and rank 1 with nan"),
    ],
)
def test_learning_rates_are_written_as_people_write_them(first: list[float], second: list[float], words: str) -> None:
    """A message has as few digits as tell the rates apart, and equal rates of one rank once."""
    found = Tick("tick/1/64", "batch 64 of train epoch 0", {**TICK, "rank": 1, "rates": second}).compare(
        {**TICK, "rates": first}
    )
    assert found is not None
    assert found.sentence == f"at batch 64 of train epoch 0, rank 0 trains {words}."


def test_numpy_rates_equal_rates_of_python() -> None:
    """A learning rate that is a number of numpy equals the same number of Python on another rank."""
    ticks = [
        Tick.of(rank, SpanCounters(EPOCH), 64, steps=0, step_hash=0, rates=cast(Any, rates))
        for rank, rates in enumerate(([0.5], [numpy.float32(0.5)]))
    ]
    assert ticks[0].key == ticks[1].key
    assert ticks[1].compare(json.loads(json.dumps(ticks[0].record))) is None


def test_a_span_has_a_key_for_each_tick() -> None:
    """A closed span has one key for each multiple of `tick_batches` that it started."""
    assert tick_keys(SpanCounters(EPOCH, opened=3, started=7), 3) == ["tick/3/3", "tick/3/6"]
    assert tick_keys(SpanCounters(EPOCH, opened=3, started=2), 3) == []

"""Ticks: the steps and learning rates that ranks compare in the middle of a span."""

import json
import threading
from typing import Any, cast

import numpy
import pytest

from countoff.core import constants
from countoff.core.checks import Checks
from countoff.core.checks.check import FitStart, TickPart
from countoff.core.checks.steps import StepCheck
from countoff.core.protocol.counters import SpanCounters, TickPlace
from countoff.core.protocol.rates import compared_rates
from countoff.core.protocol.records import FitPlan
from countoff.core.protocol.resume_record import ScheduleState
from countoff.core.session.state import State
from countoff.core.settings import Settings
from countoff.core.verdict import Verdict

EPOCH = "train epoch 0"
WHERE = f"batch 64 of {EPOCH}"
TICK = {"rank": 0, "steps": 8, "step_hash": 5, "rates": [0.1, 0.2]}


def parts_at(place: TickPlace, checks: Checks) -> list[TickPart]:
    """What the checks compare at a tick."""
    span = SpanCounters(place.span, opened=place.opened, started=place.batch)
    made = [make for check in checks if (make := check.tick(span)) is not None]
    return [part for make in made if (part := make(place)) is not None]


def compared(logged: dict[str, Any], own: dict[str, Any]) -> Verdict | None:
    """What rank 1, which has `own`, finds in the record of rank 0 at a tick."""
    state = State(1, 2, Settings(), {})
    state.steps, state.step_hash = own["steps"], own["step_hash"]
    checks = Checks.of(state, learning_rates_in_force=lambda: own["rates"], schedule=ScheduleState, hash_weights=None)
    state.evidence.steps(threading.get_ident())
    checks.learning_rates.fit_started(FitStart(FitPlan(), {}, holders=(0, 1)), None)
    parts = parts_at(TickPlace(1, 64, EPOCH), checks)
    return next((found for part in parts if (found := part.compare(logged, (0, 1))) is not None), None)


@pytest.mark.parametrize(
    ("difference", "kind"),
    [
        ({}, None),
        ({"steps": 7}, "StepMismatch"),
        ({"step_hash": 6}, "StepMismatch"),
        ({"rates": [0.1, 0.3]}, "LearningRateMismatch"),
        ({"rates": [0.2, 0.1]}, None),
        ({"rates": [0.1]}, None),
        ({"rates": []}, None),
        ({"rates": [0.1, 0.3], "steps": 7}, "StepMismatch"),
    ],
)
def test_ticks_are_compared_steps_first(difference: dict[str, Any], kind: str | None) -> None:
    found = compared(TICK, {**TICK, **difference})
    assert (found and found.kind) == kind
    assert found is None or found.ranks == (0, 1)


def test_a_tick_verdict_names_the_place_and_both_counts() -> None:
    found = compared(TICK, {**TICK, "step_hash": 6})
    steps = "rank 0 had applied 8 optimizer steps and rank 1 8, but after other batches"
    assert found is not None
    assert found.sentence == f"at {WHERE}, {steps}."


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ([0.1], [0.2], "with learning rate 0.1 and rank 1 with 0.2"),
        ([0.00031711500169576796] * 2, [0.0003] * 2, "with learning rate 3.17e-4 and rank 1 with 3e-4"),
        ([0.000300001], [0.0003], "with learning rate 3.00001e-4 and rank 1 with 3e-4"),
        ([0.1, 0.2], [0.1, 0.3], "with learning rate 0.1, 0.2 and rank 1 with 0.1, 0.3"),
        ([0.1, 0.1, 0.2], [0.1, 0.2, 0.2], "with the learning rates 0.1, 0.1, 0.2 and rank 1 with 0.1, 0.2, 0.2"),
        ([0.1], [float("nan")], "with learning rate 0.1 and rank 1 with nan"),
    ],
)
def test_learning_rates_are_written_as_people_write_them(first: list[float], second: list[float], words: str) -> None:
    """A message has as few digits as tell the rates apart, and equal rates of one rank once."""
    found = compared({**TICK, "rates": first}, {**TICK, "rates": second})
    assert found is not None
    assert found.sentence == f"at {WHERE}, rank 0 trains {words}."


def test_numpy_rates_equal_rates_of_python() -> None:
    """A learning rate that is a number of numpy equals the same number of Python on another rank."""
    logged = json.loads(json.dumps({**TICK, "rates": compared_rates([0.5])}))
    assert compared(logged, {**TICK, "rates": cast(Any, [numpy.float32(0.5)])}) is None
    json.dumps(compared_rates(cast(Any, [numpy.float32(0.5)])))


def test_a_span_has_a_key_for_each_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed span has one key for each multiple of a tick's batches that it started."""
    monkeypatch.setattr(constants, "TICK_BATCHES", 3)
    every_three = StepCheck(State(0, 2, Settings(), {}))
    assert list(every_three.left_keys(SpanCounters(EPOCH, opened=3, started=7))) == ["tick/3/3", "tick/3/6"]
    assert list(every_three.left_keys(SpanCounters(EPOCH, opened=3, started=2))) == []

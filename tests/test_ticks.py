"""Ticks: the steps and learning rates that ranks compare in the middle of a span."""

import json
from typing import Any, cast

import numpy
import pytest

from countoff.core.checks import Checks
from countoff.core.checks.steps import StepCheck, compare_steps
from countoff.core.protocol.counters import SpanCounters, tick_key
from countoff.core.protocol.rates import compared_rates
from countoff.core.settings import Settings
from countoff.core.state import State
from countoff.core.verdict import Verdict

EPOCH = "train epoch 0"
WHERE = f"batch 64 of {EPOCH}"
TICK = {"rank": 0, "steps": 8, "step_hash": 5, "rates": [0.1, 0.2]}


def compared(standing: dict[str, Any], own: dict[str, Any]) -> Verdict | None:
    """What rank 1, which has `own`, finds in the record of rank 0 at a tick."""
    state = State(1, 2, Settings(), {})
    state.steps, state.step_hash = own["steps"], own["step_hash"]
    checks = Checks.of(
        state, learning_rates_in_force=lambda: own["rates"], schedule=lambda: ((), ()), hash_weights=None
    )
    state.evidence.has_stepped = lambda thread: True
    span = SpanCounters(EPOCH, opened=1, started=64)
    parts = [part for check in checks if (part := check.tick(span)) is not None]
    return next((found for part in parts if (found := part.compare(standing, (0, 1))) is not None), None)

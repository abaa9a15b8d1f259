"""Where schedules end and where their warm-ups do, by the numbers that they declare, against the curves themselves."""

import math
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from countoff.core.arithmetic.schedules import (
    Ending,
    chained,
    decay,
    milestones,
    one_after_another,
    one_cycle,
    vanishing,
    warmup,
)


@given(st.integers(1, 3000), st.integers(0, 3000), st.sampled_from([0.0, 0.125, 0.5]))
def test_a_warmup_and_a_decay_end_where_their_curve_does(length: int, first: int, lowest: float) -> None:
    """By transformers' linear schedule, with a lowest rate."""
    assume(length > first + 1)

    def rate(call: int) -> float:
        if call < first:
            return call / first
        return max(lowest, lowest + (1 - lowest) * (length - call) / (length - first))

    ending = decay(length, warmup=first, lowest=lowest)
    assert rate(ending.warmup) == 1.0
    assert ending.warmup == 0 or rate(ending.warmup - 1) < 1.0
    assert rate(ending.at) == pytest.approx(ending.rate) == pytest.approx(rate(ending.at + 1))
    assert rate(ending.at - 1) > ending.rate
    assert rate(ending.falls_after) == 1.0 > rate(ending.falls_after + 1)


def test_a_flat_part_belongs_to_the_schedule() -> None:
    ending = decay(100, warmup=10, flat=60)
    assert (ending.at, ending.warmup, ending.falls_after) == (100, 10, 70)


def test_a_warmup_that_is_longer_than_its_schedule_is_finished() -> None:
    ending = decay(50, warmup=100)
    assert (ending.kind, ending.at, ending.reached) == ("zero", 50, 100)
    assert decay(100, warmup=50).reached == 100


@given(st.floats(0.001, 0.999), st.integers(1, 50))
def test_a_rate_vanishes_at_the_first_tick_below_a_millionth(factor: float, every: int) -> None:
    call = vanishing(factor, every).at
    assert factor ** (call // every) <= 1e-6 < factor ** ((call - 1) // every)


def test_milestones_end_with_the_last() -> None:
    ending = milestones([30, 60, 60], 0.1)
    assert (ending.kind, ending.at, ending.stepwise) == ("minimum", 60, True)
    assert ending.rate == pytest.approx(1e-3)


def test_parts_follow_each_other() -> None:
    """The last part tells the end; the parts before it are a warm-up only if each of them is one."""
    cosine = decay(80, rises=True)
    ending = one_after_another([warmup(20), cosine], [20])
    assert ending == Ending("zero", 100, warmup=20, falls_after=20, rises=True)
    after_a_decay = one_after_another([decay(20), cosine], [20])
    assert after_a_decay is not None
    assert (after_a_decay.at, after_a_decay.warmup) == (100, 0)
    assert one_after_another([None, cosine], [20]) == after_a_decay
    assert one_after_another([warmup(20), None], [20]) is None
    assert one_after_another([cosine, warmup(20)], [80]) is None
    assert one_after_another([warmup(20), cosine], []) is None


def test_factors_are_multiplied() -> None:
    """One of them falls. If several do, the product does not follow from where each ends."""
    ending = chained([warmup(20), decay(100), warmup(5)])
    assert ending is not None
    assert (ending.kind, ending.at, ending.warmup) == ("zero", 100, 20)
    assert chained([decay(100), decay(50)]) is None
    assert chained([decay(100), None]) is None
    assert chained([warmup(5)]) is None


def test_one_cycle_has_no_rate_after_its_end() -> None:
    ending = one_cycle(60, warmup=17)
    assert (ending.kind, ending.at, ending.warmup) == ("error", 60, 17)


def test_rates_are_those_of_the_optimizer() -> None:
    ending = decay(10, lowest=0.01).times(0.3)
    assert (ending.peak, ending.rate) == (0.3, pytest.approx(0.003))


@pytest.mark.parametrize("length", [0, -1, math.nan, math.inf, True, "ten", None])
def test_what_is_no_length_is_refused(length: Any) -> None:
    for make in (warmup, decay, lambda each: one_cycle(each, warmup=0), lambda each: milestones([each], 0.1)):
        with pytest.raises((TypeError, ValueError)):
            make(length)


@pytest.mark.parametrize("factor", [0, 1, 1.5, -0.1, math.nan])
def test_what_does_not_fall_is_refused(factor: float) -> None:
    for make in (vanishing, lambda each: milestones([5], each)):
        with pytest.raises(ValueError, match="does not fall"):
            make(factor)
    with pytest.raises(ValueError, match="does not fall"):
        decay(5, lowest=1.0)

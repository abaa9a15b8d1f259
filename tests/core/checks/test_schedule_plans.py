"""Learning-rate schedules at the roll call: they differ if the ranks will train with different rates."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from countoff.core.checks.learning_rates import SchedulePlan, judge_schedules, places


def linear(length: int, warmup: int = 0, peak: float = 0.1) -> Callable[[int], float]:
    def rate(tick: int) -> float:
        if tick < warmup:
            return peak * tick / warmup
        return peak * max(0.0, (length - tick) / (length - warmup))

    return rate


def plan(length: int = 40, *, ticks: int = 30, name: str = "LambdaLR", **curve: Any) -> list[Mapping[str, Any]]:
    return [SchedulePlan.of(name, linear(length, **curve), begin=0, ticks=ticks, made_for=length).to_json()]


def test_equal_schedules_agree_also_where_a_rank_has_a_shorter_run() -> None:
    assert judge_schedules({0: plan(), 1: plan(ticks=12), 2: plan(ticks=9000)}) is None


def test_the_minority_is_named_with_both_lengths() -> None:
    found = judge_schedules({0: plan(), 1: plan(), 2: plan(48), 3: plan()})
    assert found is not None
    assert (
        found.sentence == "before the first batch, LambdaLR is made for 48 steps on rank 2, 40 steps on ranks 0, 1, 3."
    )
    assert (found.kind, found.subject, found.ranks, found.standing) == (
        "LearningRateMismatch",
        "schedule",
        (2,),
        "out of step",
    )


def test_of_two_ranks_both_differ() -> None:
    found = judge_schedules({0: plan(peak=0.2), 1: plan()})
    assert found is not None
    assert (
        found.sentence
        == "before the first batch, the highest learning rate of LambdaLR is 0.2 on rank 0, 0.1 on rank 1."
    )
    assert (found.ranks, found.standing) == ((0, 1), "differ")


def test_other_schedulers_and_other_curves_are_named() -> None:
    other = judge_schedules({0: plan(), 1: plan(41, name="LinearLR")})
    assert other is not None
    assert "the learning-rate scheduler is LambdaLR on rank 0, LinearLR on rank 1." in other.sentence
    bent = [SchedulePlan.of("LambdaLR", lambda tick: 0.1 - tick**2 / 1e6, begin=0, ticks=30, made_for=40).to_json()]
    curve = judge_schedules({0: plan(), 1: bent})
    assert curve is not None
    assert curve.sentence == "before the first batch, the curve of LambdaLR differs between rank 0 and rank 1."


def test_what_differs_beyond_the_run_of_every_rank_is_no_difference() -> None:
    """The same warm-up, and a decay that the shortest rank does not get to."""
    longer, shorter = plan(400, warmup=20, ticks=100), plan(80, warmup=20, ticks=20)
    assert judge_schedules({0: longer, 1: shorter}) is None
    assert judge_schedules({0: longer, 1: plan(80, warmup=20, ticks=40)}) is not None


@pytest.mark.parametrize("other", [(), plan(48) * 2])
def test_unknown_schedules_prove_nothing(other: Any) -> None:
    assert judge_schedules({0: plan(), 1: other}) is None
    assert judge_schedules({}) is None


def test_a_schedule_that_raises_an_error_differs_from_one_that_does_not() -> None:
    def one_cycle(tick: int) -> float:
        if tick > 10:
            raise ValueError("too many steps")
        return 0.1

    ended = [SchedulePlan.of("OneCycleLR", one_cycle, begin=0, ticks=30, made_for=10).to_json()]
    whole = [SchedulePlan.of("OneCycleLR", lambda _: 0.1, begin=0, ticks=30, made_for=30).to_json()]
    assert judge_schedules({0: ended, 1: ended}) is None
    assert judge_schedules({0: ended, 1: whole}) is not None


def test_a_resumed_schedule_is_compared_from_where_it_stands() -> None:
    resumed = [SchedulePlan.of("LambdaLR", linear(40), begin=20, ticks=10, made_for=40).to_json()]
    assert judge_schedules({0: resumed, 1: resumed}) is None
    assert judge_schedules({0: resumed, 1: plan(ticks=10)}) is not None


@pytest.mark.parametrize("record", [{}, {"name": "x", "made_for": -1, "peak": 0.1, "rates": ""}, {"name": "x"}])
def test_a_record_that_is_no_schedule_is_refused(record: Mapping[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        judge_schedules({0: [record], 1: plan()})


def test_places_are_few_and_begin_alike() -> None:
    """So the checksums of ranks with runs of different lengths have a common beginning."""
    for ticks in (1, 2, 3, 50, 10**9):
        found = list(places(ticks))
        assert found == [each for each in places(10**12) if each < ticks]
        assert len(found) <= 48
        assert found == sorted(set(found))

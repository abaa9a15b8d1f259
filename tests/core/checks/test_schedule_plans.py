"""Learning-rate schedules at the roll call: they differ if the ranks will train with different rates."""

from collections.abc import Mapping
from typing import Any

import pytest

from countoff.core.arithmetic.schedules import Ending, decay, milestones, warmup
from countoff.core.checks.learning_rates import judge_schedules
from countoff.core.protocol.fit_records import SchedulePlan


def plan(
    length: int = 40, *, calls: int = 30, begin: int = 0, name: str = "LambdaLR", peak: float = 0.1, warmup: int = 0
) -> list[Mapping[str, Any]]:
    return made(decay(length, warmup=warmup).times(peak), calls=calls, begin=begin, name=name)


def made(ending: Ending, *, calls: int, begin: int = 0, name: str = "LambdaLR") -> list[Mapping[str, Any]]:
    return [SchedulePlan.of(name, ending, begin=begin, calls=calls).to_json()]


def test_equal_schedules_agree_also_where_a_rank_has_a_shorter_run() -> None:
    assert judge_schedules({0: plan(), 1: plan(calls=12), 2: plan(calls=9000)}) is None


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
    assert (found.ranks, found.standing) == ((0, 1), "differ")


@pytest.mark.parametrize(
    ("peaks", "told"),
    [
        ((1e-3, 2e-3), "rank 1 trains with 2 times the learning rate of rank 0 (the highest is 0.002, not 0.001)"),
        (
            (2e-3, 1e-3, 1e-3),
            "rank 0 trains with 2 times the learning rate of ranks 1, 2 (the highest is 0.002, not 0.001)",
        ),
        (
            (1e-3 / 1.05, 1e-3 / 1.05, 3e-3 / 1.05, 3e-3 / 1.05),
            "ranks 2, 3 train with 3 times the learning rate of ranks 0, 1 (the highest is 0.00286, not 9.52e-4)",
        ),
        ((1e-3, 1e-3 + 1e-9), "the highest learning rate of LambdaLR is 0.001 on rank 0, 0.001000001 on rank 1"),
        ((0.1, 0.2, 0.3), "the highest learning rate of LambdaLR is 0.1 on rank 0, 0.2 on rank 1, 0.3 on rank 2"),
    ],
)
def test_where_only_the_base_rates_differ_it_is_not_about_steps(peaks: tuple[float, ...], told: str) -> None:
    found = judge_schedules({rank: plan(peak=peak) for rank, peak in enumerate(peaks)})
    assert found is not None
    assert found.sentence == f"before the first batch, {told}."
    assert found.remedy.startswith("give every rank the same lr")


def test_where_lengths_differ_too_it_is_about_them() -> None:
    found = judge_schedules({0: plan(peak=0.2), 1: plan(48)})
    assert found is not None
    assert ("is made for" in found.sentence, found.remedy) == (True, "")


def test_another_warmup_is_named() -> None:
    found = judge_schedules({0: plan(warmup=5), 1: plan(warmup=8)})
    assert found is not None
    assert (
        found.sentence == "before the first batch, the warm-up of LambdaLR takes 5 steps on rank 0, 8 steps on rank 1."
    )


def test_schedulers_of_other_classes_prove_nothing() -> None:
    """They may have one curve; the rates of the first steps tell."""
    assert judge_schedules({0: plan(), 1: plan(41, name="LinearLR")}) is None


def test_what_differs_beyond_the_run_of_every_rank_is_no_difference() -> None:
    """The same warm-up, and a decay that the shortest rank does not get to."""
    longer, shorter = plan(400, warmup=20, calls=100), plan(80, warmup=20, calls=20)
    assert judge_schedules({0: longer, 1: shorter}) is None
    assert judge_schedules({0: longer, 1: plan(80, warmup=20, calls=40)}) is not None


@pytest.mark.parametrize("other", [(), plan(48) * 2])
def test_unknown_schedules_prove_nothing(other: Any) -> None:
    assert judge_schedules({0: plan(), 1: other}) is None
    assert judge_schedules({}) is None


def test_milestones_are_alike_until_the_last_of_them() -> None:
    first, second = milestones([6, 9], 0.1), milestones([6, 12], 0.1)
    for calls, said in ((9, False), (12, True)):
        assert (judge_schedules({0: made(first, calls=calls), 1: made(second, calls=calls)}) is not None) is said


def test_schedules_that_have_ended_are_alike() -> None:
    """A run that goes on after the warm-ups of both ranks trains with one rate."""
    ranks = {rank: made(warmup(length), calls=50, begin=20) for rank, length in enumerate((10, 12))}
    assert judge_schedules(ranks) is None
    ranks = {rank: made(warmup(length), calls=50, begin=5) for rank, length in enumerate((10, 12))}
    assert judge_schedules(ranks) is not None


def test_a_resumed_schedule_is_compared_from_where_it_stands() -> None:
    resumed = plan(begin=20, calls=10)
    assert judge_schedules({0: resumed, 1: resumed}) is None
    found = judge_schedules({0: resumed, 1: plan(calls=10)})
    assert found is not None
    assert found.sentence == "before the first batch, LambdaLR has made 20 steps on rank 0, 0 steps on rank 1."


@pytest.mark.parametrize("record", [{}, {**plan()[0], "made_for": -1}, {"name": "x"}])
def test_a_record_that_is_no_schedule_is_refused(record: Mapping[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        judge_schedules({0: [record], 1: plan()})

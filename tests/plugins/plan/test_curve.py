"""The curve of a schedule: which steps have a point, where its parts end, and how much data has been seen there."""

import itertools
import math
from dataclasses import replace

import pytest

from countoff.plan.curve import Curve, Ending, samples_after
from countoff.plan.job import Job, RunPlan
from countoff.plan.ramp import ramped_steps
from countoff.plan.schedules import LinguaSchedule, Schedule, TorchTitanSchedule, WarmupDecay


def curve_of(schedule: Schedule, steps: int | None) -> Curve:
    curve = Curve.of(RunPlan.of(Job(steps=steps, schedule=schedule), world_size=4))
    assert curve is not None
    return curve


TITAN = TorchTitanSchedule(warmup_steps=200, horizon_steps=1000)


@pytest.mark.parametrize(
    ("schedule", "steps", "endings"),
    [
        (TITAN, 1000, {"warm-up": 200, "decay": 1000, "run": 1000}),
        (replace(TITAN, horizon_steps=800, own_horizon=True), 1000, {"warm-up": 200, "decay": 800, "run": 1000}),
        (replace(TITAN, horizon_steps=2000, own_horizon=True), 1000, {"warm-up": 200, "decay": 2000, "run": 1000}),
        # TorchTitan cuts a warm-up that is longer than the run.
        (replace(TITAN, warmup_steps=3000), 1000, {"warm-up": 1000, "run": 1000}),
        (replace(TITAN, warmup_steps=0), 1000, {"decay": 1000, "run": 1000}),
        (replace(TITAN, decay_ratio=0.0), 1000, {"warm-up": 200, "run": 1000}),
        # Lingua and Composer reach the full rate with the first step after the warm-up.
        (LinguaSchedule("cosine", 200, 1), 1000, {"warm-up": 201, "decay": 1000, "run": 1000}),
        (LinguaSchedule("cosine", 2000, 1), 1000, {"warm-up": 2000, "run": 1000}),
        (LinguaSchedule("constant", 200, 1), 1000, {"run": 1000}),
        (WarmupDecay("linear", 100, 500), 1000, {"warm-up": 101, "decay": 500, "run": 1000}),
        (WarmupDecay("constant", 100, 500), 1000, {"warm-up": 101, "run": 1000}),
        (WarmupDecay("cosine", 100, 500), None, {"warm-up": 101, "decay": 500}),
    ],
)
def test_each_part_has_the_step_with_which_it_ends(
    schedule: Schedule, steps: int | None, endings: dict[Ending, int]
) -> None:
    """The curve goes to the last of these steps, whether that is the end of the run or of the schedule."""
    curve = curve_of(schedule, steps)
    assert curve.endings == endings
    assert curve.points[0][0] == 1
    assert curve.points[-1][0] == max(endings.values())


def test_a_short_run_has_a_point_for_each_step() -> None:
    schedule = WarmupDecay("cosine", 100, 500)
    assert curve_of(schedule, 900).points == tuple((step, schedule.factor(step - 1)) for step in range(1, 901))


def test_a_long_run_has_points_at_even_distances_and_at_each_turn() -> None:
    """Ten million steps are not computed one by one, and the peak of a short warm-up is not missed."""
    schedule = WarmupDecay("linear", 7_777, 9_000_000, min_factor=0.1)
    points = dict(curve_of(schedule, 10_000_000).points)
    assert len(points) < 1100
    assert points[7_778] == max(points.values()) == 1.0
    assert (points[9_000_001], points[10_000_000]) == (0.1, 0.1)
    steps = list(points)
    assert steps == sorted(steps)
    assert max(later - step for step, later in itertools.pairwise(steps)) <= 10_011


def test_a_step_without_a_rate_is_not_a_number() -> None:
    points = curve_of(replace(TITAN, horizon_steps=50, decay_ratio=0.0, own_horizon=True), 100).points
    assert math.isnan(points[-1][1])


def test_without_a_schedule_or_a_step_there_is_no_curve() -> None:
    assert Curve.of(RunPlan.of(Job(steps=10), world_size=4)) is None
    empty = Job(batch_size=8, dataset_size=2, drop_last=True, epochs=1, schedule=TITAN)
    assert Curve.of(RunPlan.of(empty, world_size=4)) is None


@pytest.mark.parametrize("drop_last", [False, True])
def test_samples_are_those_of_the_batches_until_a_step(drop_last: bool) -> None:
    """A last batch that is not full, and a last accumulation that is short, count with what they hold."""
    job = Job(batch_size=4, gradient_accumulation_steps=3, dataset_size=51, epochs=4, drop_last=drop_last)
    plan = RunPlan.of(job, world_size=2)
    share = [4] * 6 + ([] if drop_last else [2])
    steps = [sum(share[begin : begin + 3]) for _ in range(4) for begin in range(0, len(share), 3)]
    seen = [2 * sum(steps[:step]) for step in range(len(steps) + 1)]
    assert [samples_after(plan, step) for step in range(len(steps) + 1)] == seen
    assert seen[-1] == plan.batches.total_samples


def test_samples_of_an_endless_stream_and_of_a_ramp_are_counted() -> None:
    plan = RunPlan.of(Job(batch_size=2, global_batch_size=32, steps=20), world_size=4)
    assert [samples_after(plan, step) for step in (0, 1, 20, 30)] == [0, 32, 640, 960]
    ramp = ramped_steps(plan.batches, start=8, increment=8, samples=100)
    assert ramp == [(8, 5), (16, 2), (24, 2), (32, 11)]
    assert [samples_after(plan, step, ramp=ramp) for step in (0, 3, 6, 9, 20, 21)] == [0, 24, 56, 120, 472, 504]
    assert samples_after(RunPlan.of(Job(steps=20), world_size=4), 3) is None

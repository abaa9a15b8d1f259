"""The curve of a learning-rate schedule over a run: points to draw, and the steps at which something ends.

Steps count from 1 here, as in messages and in logs: step 1 is the first one taken. A schedule may have ten million
steps, so its curve has points at even distances and where it turns, not one for each step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from countoff.core.counts.steps import batches_until_step
from countoff.plan.job import RunPlan
from countoff.plan.schedules import Schedule

__all__ = ["Curve", "Ending", "samples_after"]

Ending = Literal["warm-up", "decay", "run"]
_POINTS = 1000
"""Points at even distances. A run of fewer steps has a point for each."""


@dataclass(frozen=True)
class Curve:
    """The factor by which a schedule multiplies the learning rate, from step 1 to where run and schedule have ended.

    Attributes:
        points: Step and factor, in order; the factor is NaN where the framework computes none.
        endings: The step with which each part ends that the curve has, by the name of the part: the first one at the
            full rate after the ``warm-up``, the last one of the ``decay``, and the last one of the ``run``.
    """

    points: tuple[tuple[int, float], ...]
    endings: dict[Ending, int]

    @classmethod
    def of(cls, plan: RunPlan) -> Curve | None:
        """Returns the curve of a plan; None if it has no schedule, or one of no known number of steps.

        Example:
            >>> from countoff.plan.job import Job
            >>> from countoff.plan.schedules import WarmupDecay
            >>> schedule = WarmupDecay("linear", warmup_steps=1, horizon_steps=5)
            >>> curve = Curve.of(RunPlan.of(Job(steps=4, schedule=schedule), world_size=2))
            >>> curve.points, curve.endings
            (((1, 0.0), (2, 1.0), (3, 0.75), (4, 0.5), (5, 0.25)), {'warm-up': 2, 'decay': 5, 'run': 4})
        """
        steps = plan.batches.total_steps
        if plan.job.schedule is None or steps == 0:
            return None
        schedule = plan.job.schedule if steps is None else plan.job.schedule.planned_for(steps)
        if steps is None and schedule.horizon_steps < 1:  # it is as long as the run
            return None
        endings: dict[Ending, int] = {}
        warmed = _end_of_warmup(schedule)
        if warmed is not None:
            endings["warm-up"] = warmed
        first, end = warmed or 1, schedule.horizon_steps
        if first < end and schedule.factor(end - 1) < schedule.factor(first - 1):
            endings["decay"] = end
        if steps is not None:
            endings["run"] = steps
        last = max(endings.values(), default=end)
        return cls(tuple((step, schedule.factor(step - 1)) for step in _steps(last, endings)), endings)

    def factor_at(self, step: int) -> float:
        """Returns the factor of a step that is the end of a part, or has a point for another reason."""
        return dict(self.points)[step]


def samples_after(plan: RunPlan, step: int, *, ramp: list[tuple[int, int]] | None = None) -> int | None:
    """Returns the samples that all dp_ranks together have seen after a step; None if it cannot be known.

    Args:
        plan: The run on its ranks.
        step: Optimizer steps since the start of training, at least 0; beyond the run's end: as if it went on.
        ramp: The global batches of a growing batch, each with its number of optimizer steps; None if it is constant.
    """
    batches = plan.batches
    if ramp is not None:
        seen, left = 0, step
        for size, steps in ramp:
            seen += size * min(steps, left)
            left -= min(steps, left)
        return None if batches.global_batch_size is None else seen + left * batches.global_batch_size
    if not batches.batches_per_epoch or not batches.steps_per_epoch:
        return batches.samples_after(step * plan.gradient_accumulation_steps)
    done = batches_until_step(
        step,
        batches_per_epoch=batches.batches_per_epoch,
        steps_per_epoch=batches.steps_per_epoch,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
    )
    return batches.samples_after(done)


def _end_of_warmup(schedule: Schedule) -> int | None:
    """Returns the first step at the full rate; None if there is no warm-up.

    Frameworks reach the full rate with the last step of the warm-up or with the first one after it, and cut a warm-up
    that is longer than the schedule, or do not.
    """
    warmup = schedule.warmup_steps
    if not warmup:
        return None
    ends = [step for step in (min(warmup, schedule.horizon_steps), warmup, warmup + 1) if step >= 1]
    factors = {step: factor for step in ends if not math.isnan(factor := schedule.factor(step - 1))}
    end = max(factors, key=factors.__getitem__, default=None)
    return None if end is None or factors[end] <= schedule.factor(0) else end


def _steps(last: int, endings: dict[Ending, int]) -> Iterator[int]:
    """Yields the steps that get a point, in order: at even distances, and beside every turn."""
    count = min(last, _POINTS)
    even = {1 + (last - 1) * index // max(count - 1, 1) for index in range(count)}
    turns = {step for end in endings.values() for step in (end - 1, end, end + 1, end + 2) if 1 <= step <= last}
    yield from sorted(even | turns)

"""What is wrong with the learning-rate schedule of a configuration: its warm-up, its horizon, its first step."""

from __future__ import annotations

import math
from collections.abc import Iterator

from countoff.plan.checks.held_minimum import check_held_minimum
from countoff.plan.issues import ConfigIssue, Level
from countoff.plan.job import Job, RunPlan
from countoff.plan.schedules import (
    LinguaSchedule,
    MegatronSchedule,
    NemoCosine,
    Schedule,
    TorchTitanSchedule,
    TrainerSchedule,
    WarmupDecay,
    peak_factor,
)

__all__ = ["check_schedule"]


def check_schedule(job: Job, steps: int | None, plan: RunPlan | None = None) -> Iterator[ConfigIssue]:
    """Yields what is wrong with the learning rate, as far as the configuration shows it.

    Args:
        job: The run.
        steps: Optimizer steps of the run, at least 0; None if unknown: then only the schedule itself is checked.
        plan: The run on its ranks; None if the configuration does not fit them.
    """
    if job.schedule is None or steps == 0:
        return
    if steps is None:
        horizon = job.schedule.horizon_steps
        if horizon and job.schedule.warmup_steps >= horizon:
            yield ConfigIssue("silent", "warm-up", _warmup_longer_than_schedule(job, job.schedule))
        return
    schedule = job.schedule.planned_for(steps)
    if isinstance(schedule, (MegatronSchedule, NemoCosine)):
        yield from check_held_minimum(job, schedule, steps, plan)
        return
    yield from _check_warmup(job, schedule, steps)
    yield from _check_horizon(job, schedule, steps, plan)
    if isinstance(schedule, LinguaSchedule):
        yield from _check_first_step(schedule)
    if isinstance(schedule, TrainerSchedule) and schedule.warmup_steps < steps:
        yield from _check_phases(job, schedule, steps)


def _check_warmup(job: Job, schedule: Schedule, steps: int) -> Iterator[ConfigIssue]:
    warmup, horizon = schedule.warmup_steps, schedule.horizon_steps
    if isinstance(schedule, LinguaSchedule) and warmup == steps and schedule.scheduler in ("linear", "cosine"):
        text = (
            f"{job.stated('warmup_steps', warmup)} and {_stated_length(job, steps)}: lingua divides by zero after "
            f"the last step, before it writes the last checkpoint"
        )
        yield ConfigIssue("stops", "warm-up", text)
    elif warmup >= min(steps, horizon) and steps > 1:
        ends_in_run = horizon <= warmup < steps and not isinstance(schedule, TorchTitanSchedule)
        if ends_in_run:
            text = _warmup_longer_than_schedule(job, schedule)
        else:
            text = _warmup_as_long_as_run(job, schedule, steps)
        yield ConfigIssue("silent", "warm-up", text)


def _warmup_longer_than_schedule(job: Job, schedule: Schedule) -> str:
    key, horizon = job.key("warmup_steps"), schedule.horizon_steps
    return (
        f"{job.stated('warmup_steps', schedule.warmup_steps)} and {job.stated('horizon_steps', horizon)}: the learning "
        f"rate rises until the schedule ends, and no step is left for the decay; set {key} below {horizon:,}"
    )


def _warmup_as_long_as_run(job: Job, schedule: Schedule, steps: int) -> str:
    key, warmup = job.key("warmup_steps"), schedule.warmup_steps
    part = _warmup_part(schedule)
    smaller = f"below {steps:,}" if part is None else f"below {part:g}"
    lengths = f"{_stated_warmup(job, schedule)} and {_stated_length(job, steps)}"
    if isinstance(schedule, TorchTitanSchedule):
        cut = min(warmup, schedule.horizon_steps)
        return (
            f"{lengths}: TorchTitan cuts the warm-up to {cut:,} and the learning rate never decays; set {key} well "
            f"below {job.key(_length(job))}"
        )
    peak = peak_factor(schedule, steps=steps)
    return (
        f"{lengths}: the learning rate only rises, to {peak:.4g} of the configured one, and never decays; set {key} "
        f"{smaller}"
    )


def _check_horizon(job: Job, schedule: Schedule, steps: int, plan: RunPlan | None) -> Iterator[ConfigIssue]:
    horizon = schedule.horizon_steps
    if horizon == steps:
        return
    if horizon < steps:
        yield _horizon_before_end(job, schedule, steps)
        return
    other_unit = None if plan is None else _counted_in_another_unit(job, schedule, steps, plan)
    if other_unit is not None:
        # TorchTitan's own total_steps exists so that a run can end before its schedule.
        yield ConfigIssue("note" if isinstance(schedule, TorchTitanSchedule) else "silent", "horizon", other_unit)
    elif schedule.warmup_steps < steps:
        text = (
            f"{job.stated('horizon_steps', horizon)} and the run ends after {steps:,} steps, at a learning rate of "
            f"{schedule.factor(steps - 1):.4g} of the configured one: right if the run is meant to end early"
        )
        yield ConfigIssue("note", "horizon", text)


def _horizon_before_end(job: Job, schedule: Schedule, steps: int) -> ConfigIssue:
    horizon, last = schedule.horizon_steps, schedule.factor(steps - 1)
    key = job.key("horizon_steps")
    level: Level = "silent"
    if math.isnan(last):
        text = f"after {horizon:,} steps no learning rate can be computed, and the run stops"
        level = "stops"
    elif last < 0:
        text = (
            f"from step {_first_step_below_zero(schedule, horizon, steps):,} on the learning rate is negative, at the "
            f"last step {last:.4g} of the configured one: the model is trained away from its data"
        )
    elif last == 0:
        text = f"the last {steps - horizon:,} steps have a learning rate of 0 and train nothing"
    else:
        text = f"the schedule ends {steps - horizon:,} steps early; the last step has {last:.4g} of the configured rate"
    lengths = f"{job.stated('horizon_steps', horizon)} and {_stated_length(job, steps)}"
    remedy = f"set {key} to {steps:,} or leave it out"
    if isinstance(schedule, TrainerSchedule):
        remedy = f"set num_stable_steps to {schedule.phases[0] + steps - horizon:,}"
    return ConfigIssue(level, "horizon", f"{lengths}: {text}; {remedy}")


def _check_phases(job: Job, schedule: TrainerSchedule, steps: int) -> Iterator[ConfigIssue]:
    """Yields the issue of a decay that begins before the warm-up has ended."""
    stable, decay = schedule.phases
    if schedule.curve == "warmup_stable_decay" and stable < 0:
        text = (
            f"num_decay_steps is {decay:,} and the warm-up has {schedule.warmup_steps:,} of the {steps:,} steps of the "
            f"run: the decay is {-stable:,} steps too long, and begins below the full learning rate; set "
            f"num_decay_steps to at most {steps - schedule.warmup_steps:,}"
        )
        yield ConfigIssue("silent", "horizon", text)


def _first_step_below_zero(schedule: Schedule, horizon: int, steps: int) -> int:
    """Returns the first step, counted from 1, whose factor is negative; a bisection, because a decay only falls."""
    low, high = min(horizon, steps) - 1, steps - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if schedule.factor(middle) < 0 else (middle + 1, high)
    return low + 1


def _counted_in_another_unit(job: Job, schedule: Schedule, steps: int, plan: RunPlan) -> str | None:
    """Returns the text of an issue if the horizon is a multiple of the run, as when it was counted in batches."""
    accumulation, degree = plan.gradient_accumulation_steps, plan.ranks.dp_degree
    key, horizon = job.key("horizon_steps"), schedule.horizon_steps
    units = (
        (accumulation, "the batches of a rank"),
        (accumulation * degree, "the batches of all data ranks together"),
        (degree, "the steps of all data ranks together"),
    )
    for factor, unit in units:
        # The configured number may have been rounded to whole batches, so less than one factor away is a match.
        if factor > 1 and 0 <= steps * factor - horizon < factor:
            return (
                f"{key} is {horizon:,}, {factor:,} times the {steps:,} steps of the run: that counts {unit}, and the "
                f"schedule ticks once per step, so the run ends at {steps / horizon:.3g} of the schedule; set {key} to "
                f"{steps:,}"
            )
    return None


def _check_first_step(schedule: LinguaSchedule) -> Iterator[ConfigIssue]:
    if not schedule.warmup_steps or schedule.scheduler == "constant":
        return
    after = "; after its last step the cosine is back at 1.0, which a run that is extended starts with"
    text = f"the first step of lingua has a learning rate of 0{after if schedule.scheduler == 'cosine' else ''}"
    yield ConfigIssue("note", "first-step", text)


def _warmup_part(schedule: Schedule) -> float | None:
    """The fraction of the run as which the warm-up is configured; None if it is configured in steps."""
    return schedule.warmup_part if isinstance(schedule, (TrainerSchedule, WarmupDecay)) else None


def _stated_warmup(job: Job, schedule: Schedule) -> str:
    """The warm-up with its name; the steps that it gives, where it is a fraction of the run."""
    part = _warmup_part(schedule)
    if part is None:
        return job.stated("warmup_steps", schedule.warmup_steps)
    return f"{job.key('warmup_steps')} {part:g} gives {schedule.warmup_steps:,} steps"


def _stated_length(job: Job, steps: int) -> str:
    """The number that ends the run, with its name; the steps that it gives, where it counts epochs."""
    if job.steps == steps or job.epochs is None:
        return job.stated("steps", steps)
    return f"{job.key('epochs')} {job.epochs:g} gives {steps:,} steps"


def _length(job: Job) -> str:
    """The name of the number that ends the run."""
    return "steps" if job.steps is not None else "epochs"

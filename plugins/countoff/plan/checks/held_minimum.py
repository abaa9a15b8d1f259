"""Schedules whose minimum holds after their end: Megatron-LM's and NeMo's, in the unit in which they are written.

Such a run may well be meant to end at its minimum. It is a fault where the minimum is 0, where most of the run is spent
there, or where the framework stops.
"""

from __future__ import annotations

from collections.abc import Iterator

from countoff.plan.issues import ConfigIssue
from countoff.plan.job import Job, RunPlan
from countoff.plan.schedules import MegatronSchedule, NemoCosine

__all__ = ["check_held_minimum"]

# A schedule that ends by less than this part of the run early or late is meant to end with it.
_CLOSE = 0.02


def check_held_minimum(
    job: Job, schedule: MegatronSchedule | NemoCosine, steps: int, plan: RunPlan | None
) -> Iterator[ConfigIssue]:
    """Yields what is wrong with a warm-up, and with a schedule that ends before or after the run.

    Args:
        job: The run.
        schedule: Its schedule, planned for this number of steps.
        steps: Optimizer steps of the run, at least 1.
        plan: The run on its ranks; None if the configuration does not fit them.
    """
    warmup, horizon = schedule.warmup_steps, schedule.horizon_steps
    stated_warmup, stated_run = job.stated("warmup_steps", warmup), job.stated("steps", steps)
    if isinstance(schedule, NemoCosine) and schedule.constant_steps and _has_no_decay(schedule):
        constant = job.stated("constant_steps", schedule.constant_steps)
        longer = job.stated("horizon_steps", horizon) if schedule.own_horizon else stated_run
        text = (
            f"{stated_warmup}, {constant}, and {longer}: no step is left for the decay, and after its warm-up the "
            f"learning rate is at its minimum; make {job.key('constant_steps')} smaller"
        )
        yield ConfigIssue("silent", "warm-up", text)
        return
    if _has_no_decay(schedule):
        stops = isinstance(schedule, MegatronSchedule)
        what = "Megatron-LM stops on an assertion" if stops else "no step is left for the decay"
        longer = job.stated("horizon_steps", horizon) if _own_horizon(schedule) else stated_run
        text = f"{stated_warmup} and {longer}: {what}; make the warm-up shorter than the schedule"
        yield ConfigIssue("stops" if stops else "silent", "warm-up", text)
        return
    if warmup >= steps > 1:
        highest = schedule.factor(steps - 1)
        text = (
            f"{stated_warmup} and {stated_run}: the learning rate only rises, to {highest:.4g} of the configured one, "
            f"and never decays; make the warm-up shorter than the run"
        )
        yield ConfigIssue("silent", "warm-up", text)
    elif isinstance(schedule, MegatronSchedule) and job.batch_stages and job.origins["steps"].key == "--train-iters":
        yield from _check_stages(job, schedule, plan)
    elif _own_horizon(schedule) and not (isinstance(schedule, MegatronSchedule) and schedule.style == "constant"):
        yield from _check_end(job, schedule, steps, stated_run)


def _has_no_decay(schedule: MegatronSchedule | NemoCosine) -> bool:
    if isinstance(schedule, MegatronSchedule):
        return schedule.warmup >= schedule.decay
    return schedule.warmup_steps + schedule.constant_steps >= schedule.horizon_steps


def _own_horizon(schedule: MegatronSchedule | NemoCosine) -> bool:
    return schedule.own_decay if isinstance(schedule, MegatronSchedule) else schedule.own_horizon


def _check_end(job: Job, schedule: MegatronSchedule | NemoCosine, steps: int, stated_run: str) -> Iterator[ConfigIssue]:
    """Yields the issue of a decay that ends before or after the run."""
    horizon, lowest = schedule.horizon_steps, schedule.min_factor
    lengths = f"{job.stated('horizon_steps', horizon)} and {stated_run}"
    remedy = f"set {job.key('horizon_steps')} to {job.written('steps', steps)} or leave it out"
    at_minimum = steps - horizon
    if at_minimum > _CLOSE * steps:
        is_zero = lowest == 0
        rate = "0 and train nothing" if is_zero else f"{lowest:.4g} of the configured one"
        text = f"{lengths}: the last {at_minimum:,} of {steps:,} steps have a learning rate of {rate}"
        if is_zero or at_minimum > steps / 2:
            yield ConfigIssue("silent", "horizon", f"{text}; {remedy}")
        else:
            yield ConfigIssue("note", "horizon", f"{text}: right if the run is meant to end there")
    elif horizon - steps > _CLOSE * steps and schedule.warmup_steps < steps:
        last = schedule.factor(steps - 1)
        text = f"{lengths}: the run ends at a learning rate of {last:.4g} of the configured one"
        yield ConfigIssue("note", "horizon", f"{text}: right if the run is meant to end early")


def _check_stages(job: Job, schedule: MegatronSchedule, plan: RunPlan | None) -> Iterator[ConfigIssue]:
    """Yields the issue of a decay that is counted in smaller batches than those that the run has.

    Where only ``--step-batch-size-schedule`` is given, Megatron-LM sets its global batch to the micro-batch size times
    the data ranks, and multiplies the iterations of the decay by that (``validate_args``,
    ``get_optimizer_param_scheduler``).
    """
    if plan is None or plan.batch_size is None or schedule.style == "constant":
        return
    counted = plan.batch_size * plan.ranks.dp_degree
    largest = job.batch_stages[-1][1]
    if largest > counted and job.key("global_batch_size") == "--step-batch-size-schedule":
        text = (
            f"--step-batch-size-schedule grows to {largest:,} samples, and Megatron-LM counts the decay in batches of "
            f"{counted:,} (--micro-batch-size × data ranks): the learning rate is at its minimum up to "
            f"{largest / counted:.3g} times too early; give --train-samples and --lr-decay-samples"
        )
        yield ConfigIssue("silent", "horizon", text)

"""What is wrong with the learning-rate schedule of a configuration: its warm-up, and its horizon."""

from __future__ import annotations

from collections.abc import Iterator

from countoff.core.arithmetic.schedules import Ending
from countoff.core.checks.horizon import RunLength, numbers_of
from countoff.plan.issues import ConfigIssue
from countoff.plan.job import Job, RunPlan
from countoff.plan.schedules import ConfiguredSchedule

__all__ = ["check_schedule"]

_CLOSE = 0.02
"""Part of the run by which a schedule that may be held at its lowest rate ends with it."""


def check_schedule(job: Job, steps: int | None, plan: RunPlan | None = None) -> Iterator[ConfigIssue]:
    """Yields what is wrong with the learning rate, as far as the configuration shows it.

    Args:
        job: The run.
        steps: Optimizer steps of the run, at least 0; None if unknown: then only the schedule itself is checked.
        plan: The run on its ranks; None if the configuration does not fit them.
    """
    schedule = job.schedule
    if schedule is None or steps == 0:
        return
    if steps is None:
        ending, fixed = schedule.in_run(1), schedule.horizon is not None and schedule.warmup_part is None
        if fixed and not schedule.may_be_held and ending.warmup >= ending.at:
            yield _longer_than_schedule(job, ending)
        return
    ending = schedule.in_run(steps)
    yield from _check_warmup(job, schedule, ending, steps)
    if schedule.may_be_held:
        yield from _check_held(job, schedule, ending, steps, plan)
    else:
        yield from _check_horizon(job, schedule, ending, steps, plan)
    if schedule.phases is not None and ending.warmup < steps:
        yield from _check_phases(schedule, ending, steps)


def _check_warmup(job: Job, schedule: ConfiguredSchedule, ending: Ending, steps: int) -> Iterator[ConfigIssue]:
    warmup, horizon = ending.warmup, ending.at
    if warmup < min(steps, horizon) or steps == 1:
        return
    if schedule.may_be_held and warmup >= horizon:
        return  # Megatron-LM refuses it
    if schedule.divides_by_zero and warmup == steps:
        text = (
            f"{job.stated('warmup_steps', warmup)} and {_stated_length(job, steps)}: lingua divides by zero after "
            f"the last step, before it writes the last checkpoint"
        )
        yield ConfigIssue("stops", "warm-up", text)
        return
    if horizon <= warmup < steps and not schedule.cuts_warmup:
        yield _longer_than_schedule(job, ending)
    else:
        yield _as_long_as_run(job, schedule, ending, steps)


def _longer_than_schedule(job: Job, ending: Ending) -> ConfigIssue:
    key, horizon = job.key("warmup_steps"), ending.at
    text = (
        f"{job.stated('warmup_steps', ending.warmup)} and {job.stated('horizon_steps', horizon)}: the learning "
        f"rate rises until the schedule ends, and no step is left for the decay"
    )
    return ConfigIssue("silent", "warm-up", text, f"set {key} below {job.written('horizon_steps', horizon)}")


def _as_long_as_run(job: Job, schedule: ConfiguredSchedule, ending: Ending, steps: int) -> ConfigIssue:
    key, warmup, part = job.key("warmup_steps"), ending.warmup, schedule.warmup_part
    stated = job.stated("warmup_steps", warmup) if part is None else f"{key} {part:g} gives {warmup:,} steps"
    lengths = f"{stated} and {_stated_length(job, steps)}"
    if schedule.cuts_warmup:
        text = f"TorchTitan cuts the warm-up to {min(warmup, ending.at):,} and the learning rate never decays"
        remedy = f"set {key} well below {job.key('steps' if job.steps is not None else 'epochs')}"
        return ConfigIssue("silent", "warm-up", f"{lengths}: {text}", remedy)
    highest = f", to {(steps - 1) / warmup:.4g} of the configured one," if schedule.linear_warmup else ""
    smaller = job.written("steps", steps) if part is None else f"{part:g}"
    text = f"{lengths}: the learning rate only rises{highest} and never decays"
    return ConfigIssue("silent", "warm-up", text, f"set {key} below {smaller}")


def _check_held(
    job: Job, schedule: ConfiguredSchedule, ending: Ending, steps: int, plan: RunPlan | None
) -> Iterator[ConfigIssue]:
    """Yields the issue of a decay that ends before or after the run, where its lowest rate holds after it.

    It is a fault where that rate is 0, or where most of the run is spent there.
    """
    if ending.warmup >= min(steps, ending.at):
        return
    if job.batch_stages and schedule.lowest < 1 and job.origins["steps"].key == "--train-iters":
        yield from _check_stages(job, plan)
        return
    if not schedule.own_horizon:
        return
    horizon, early = ending.at, steps - ending.at
    lengths = f"{job.stated('horizon_steps', horizon)} and {job.stated('steps', steps)}"
    if early > _CLOSE * steps:
        rate = "0 and train nothing" if ending.kind == "zero" else f"{ending.rate:.4g} of the configured one"
        text = f"{lengths}: the last {early:,} of {steps:,} steps have a learning rate of {rate}"
        if ending.kind == "zero" or early > steps / 2:
            remedy = f"set {job.key('horizon_steps')} to {job.written('steps', steps)} or leave it out"
            yield ConfigIssue("silent", "horizon", text, remedy)
        else:
            yield ConfigIssue("note", "horizon", f"{text}: right if the run is meant to end there")
    elif -early > _CLOSE * steps:
        text = f"{lengths}: the run ends before its schedule: right if the run is meant to end early"
        yield ConfigIssue("note", "horizon", text)


def _check_stages(job: Job, plan: RunPlan | None) -> Iterator[ConfigIssue]:
    """Yields the issue of a decay that is counted in smaller batches than those that the run has.

    Where only ``--step-batch-size-schedule`` is given, Megatron-LM sets its global batch to the micro-batch size times
    the data ranks, and multiplies the iterations of the decay by that (``validate_args``,
    ``get_optimizer_param_scheduler``).
    """
    if plan is None or plan.batch_size is None:
        return
    counted = plan.batch_size * plan.ranks.dp_degree
    largest = job.batch_stages[-1][1]
    if largest > counted and job.key("global_batch_size") == "--step-batch-size-schedule":
        text = (
            f"--step-batch-size-schedule grows to {largest:,} samples, and Megatron-LM counts the decay in batches of "
            f"{counted:,} (--micro-batch-size × data ranks): the learning rate is at its minimum up to "
            f"{largest / counted:.3g} times too early"
        )
        yield ConfigIssue("silent", "horizon", text, "give --train-samples and --lr-decay-samples")


def _check_horizon(
    job: Job, schedule: ConfiguredSchedule, ending: Ending, steps: int, plan: RunPlan | None
) -> Iterator[ConfigIssue]:
    horizon = ending.at
    if horizon == steps:
        return
    if horizon < steps:
        yield _horizon_before_end(job, schedule, ending, steps)
        return
    other_unit = None if plan is None else _counted_in_another_unit(job, ending, steps, plan)
    if other_unit is not None:
        # TorchTitan's own total_steps exists so that a run can end before its schedule.
        remedy = f"set {job.key('horizon_steps')} to {steps:,}"
        yield ConfigIssue("note" if schedule.cuts_warmup else "silent", "horizon", other_unit, remedy)
    elif ending.warmup < steps:
        text = (
            f"{job.stated('horizon_steps', horizon)} and the run ends after {steps:,} steps: right if the run is meant "
            "to end early"
        )
        yield ConfigIssue("note", "horizon", text)


def _horizon_before_end(job: Job, schedule: ConfiguredSchedule, ending: Ending, steps: int) -> ConfigIssue:
    horizon, early = ending.at, steps - ending.at
    lengths = f"{job.stated('horizon_steps', horizon)} and {_stated_length(job, steps)}"
    remedy = f"set {job.key('horizon_steps')} to {steps:,} or leave it out"
    if schedule.phases is not None:
        remedy = f"set num_stable_steps to {schedule.phases_in(steps)[0] + early:,}"
    if schedule.beyond == "none":
        text = f"after {horizon:,} steps no learning rate can be computed, and the run stops"
        return ConfigIssue("stops", "horizon", f"{lengths}: {text}", remedy)
    if schedule.beyond == "falls" and early >= schedule.falls_below_zero:
        first = horizon + schedule.falls_below_zero
        text = f"from step {first:,} on the learning rate is negative: the model is trained away from its data"
    elif schedule.beyond == "held" and ending.kind == "zero":
        text = f"the last {early:,} steps have a learning rate of 0 and train nothing"
    elif schedule.beyond == "held":
        text = f"the schedule ends {early:,} steps early; the last step has {ending.rate:.4g} of the configured rate"
    else:
        goes_on = "rises again" if schedule.beyond == "rises" else "falls below its lowest value"
        text = f"the schedule ends {early:,} steps early, and the learning rate {goes_on}"
    return ConfigIssue("silent", "horizon", f"{lengths}: {text}", remedy)


def _check_phases(schedule: ConfiguredSchedule, ending: Ending, steps: int) -> Iterator[ConfigIssue]:
    """Yields the issue of a decay that begins before the warm-up has ended."""
    stable, falling = schedule.phases_in(steps)
    if stable < 0:
        text = (
            f"num_decay_steps is {falling:,} and the warm-up has {ending.warmup:,} of the {steps:,} steps of the "
            f"run: the decay is {-stable:,} steps too long, and begins below the full learning rate"
        )
        yield ConfigIssue("silent", "horizon", text, f"set num_decay_steps to at most {steps - ending.warmup:,}")


def _counted_in_another_unit(job: Job, ending: Ending, steps: int, plan: RunPlan) -> str | None:
    """Returns what is wrong if the horizon is a multiple of the run, as when it was counted in batches."""
    key, horizon, accumulation = job.key("horizon_steps"), ending.at, plan.gradient_accumulation_steps
    run = RunLength(gradient_accumulation_steps=accumulation, processes=plan.ranks.dp_degree)
    for number, what, _ in numbers_of(run, steps):
        # The configured number may have been rounded to whole batches, so less than one step away is a match.
        if number > steps and 0 <= number - horizon < number // steps:
            return (
                f"{key} is {horizon:,}, and {number:,} is the number of {what}; the schedule is stepped once per step, "
                f"so the run ends at {steps / horizon:.3g} of the schedule"
            )
    return None


def _stated_length(job: Job, steps: int) -> str:
    """The number that ends the run, with its name; the steps that it gives, where it counts epochs."""
    if job.steps == steps or job.epochs is None:
        return job.stated("steps", steps)
    return f"{job.key('epochs')} {job.epochs:g} gives {steps:,} steps"

"""What is wrong with a configuration on so many ranks: the mistakes that a file shows before a GPU is paid for."""

from __future__ import annotations

import math
from collections.abc import Iterator

from countoff.core.arithmetic.horizon import Horizon
from countoff.core.configs.issues import ConfigIssue, Level, worst_first
from countoff.core.configs.job import Job, JobError, RunPlan
from countoff.core.configs.schedules import LinguaSchedule, Schedule, TorchTitanSchedule, peak_factor
from countoff.core.ranks import RankMap

__all__ = ["about_length", "check_job"]


def check_job(job: Job, *, world_size: int) -> list[ConfigIssue]:
    """Returns all that was noticed about a run on so many ranks, the worst first.

    Args:
        job: The run.
        world_size: The ranks, at least 1.

    Example:
        >>> job = Job("", ("dp", "tp"), (2, 8), ("dp",), batch_size=2)
        >>> print(*[issue.line for issue in check_job(job, world_size=4)])
        stops   dims: the dims do not fit 4 ranks: dp 2 × tp 8 = 16, but world_size is 4
    """
    found = [*job.issues, *_world(job, world_size)]
    try:
        ranks = job.rank_map(world_size)
    except JobError as error:
        return worst_first([*found, *_schedule(job, job.steps), ConfigIssue("stops", "dims", str(error))])
    plan, refused = None, ""
    try:
        plan = RunPlan.of(job, world_size=world_size)
    except JobError as error:
        refused = str(error)
    found += _schedule(job, job.steps if plan is None else plan.batches.total_steps, plan)
    found += [*_refilled(job, ranks), *_lingua_ranks(job, ranks), *_chunks(job, ranks), *_lengths(job, ranks)]
    uneven = job.uneven_experts(ranks)
    if uneven is not None:
        found.append(ConfigIssue("stops", "experts", f"{job.key('expert_parallel')}: {uneven}"))
    if plan is None:
        found.append(ConfigIssue("stops", "batch", refused))
    else:
        found += [*_plan(plan), *(issue for issue in about_length(plan) if issue.is_fault)]
    return worst_first(found)


def about_length(plan: RunPlan) -> Iterator[ConfigIssue]:
    """Yields what there is to say about the length of a run: that it is none, unknown, or not what ends it.

    Args:
        plan: The run on so many ranks.
    """
    job, batches = plan.job, plan.batches
    if batches.total_steps == 0:
        yield ConfigIssue("silent", "length", _no_steps(plan))
    elif job.epochs is not None and batches.batches_per_epoch is None:
        missing = "--dataset-size N" if job.dataset_size is None else "--batch-size N"
        text = f"{job.key('epochs')} is {_count(job.epochs, 'epoch')}, and nothing says how long one is: give {missing}"
        yield ConfigIssue("note", "length", text)
    elif job.epochs is not None and job.steps is not None and batches.steps_per_epoch is not None:
        every = job.epochs * batches.steps_per_epoch
        if every == job.steps:
            return
        keys = (job.key("steps"), job.key("epochs"))
        first, later = keys if job.steps < every else reversed(keys)
        text = f"{_count(every, 'step')} make up {_count(job.epochs, 'epoch')}, and {keys[0]} is {job.steps:,}"
        yield ConfigIssue("note", "length", f"{text}: {first} ends the run, and {later} has no effect")


def _no_steps(plan: RunPlan) -> str:
    job, ranks = plan.job, plan.ranks
    size, degree = job.dataset_size or 0, ranks.dp_degree
    fewest = size // degree if job.strided else -(-size // degree)
    why = f"{job.key('dataset_size')} {size:,} gives one of {degree:,} data ranks {_count(fewest, 'sample')}"
    if not fewest:
        return f"the run has 0 steps: {why}; use fewer data ranks, or more data"
    full = (
        f"a batch of fewer than {plan.batch_size:,} is thrown away ({job.key('drop_last')})"
        if plan.batch_size
        else "no batch"
    )
    return (
        f"the run has 0 steps: {why}, and {full}; make the batch smaller, use fewer data ranks, or keep short batches"
    )


def _world(job: Job, world_size: int) -> Iterator[ConfigIssue]:
    if job.world_size is not None and job.world_size != world_size:
        yield ConfigIssue(
            "stops",
            "world-size",
            f"{job.key('world_size')} is {job.world_size}, and the job was to have {world_size} ranks: all that is "
            f"said here holds for {world_size}",
        )


def _schedule(job: Job, steps: int | None, plan: RunPlan | None = None) -> Iterator[ConfigIssue]:
    """What is wrong with the learning rate in a run of so many steps, as far as the configuration shows it."""
    if job.schedule is None or steps == 0:
        return
    if steps is None:
        planned = _planned(job, job.schedule)
        if planned.warmup_end_step >= planned.end_step:
            yield ConfigIssue("silent", "warm-up", _warmup_beyond(job, planned))
        return
    schedule = job.schedule.planned_for(steps)
    planned = _planned(job, schedule)
    warmup, horizon = planned.warmup_end_step, planned.end_step
    key, steps_key = job.key("warmup_steps"), _length_key(job)
    peak = peak_factor(schedule, steps=steps)
    if isinstance(schedule, LinguaSchedule) and warmup == steps and schedule.scheduler in ("linear", "cosine"):
        yield ConfigIssue(
            "stops",
            "warm-up",
            f"{key} and {steps_key} are both {steps:,}: lingua divides by zero after the last step, before the last "
            f"checkpoint is written",
        )
    elif warmup >= min(steps, horizon) and steps > 1:
        beyond = horizon <= warmup < steps and not isinstance(schedule, TorchTitanSchedule)
        text = _warmup_beyond(job, planned) if beyond else _long_warmup(schedule, key, steps_key, steps, peak)
        yield ConfigIssue("silent", "warm-up", text)
    unit = None if plan is None else _unit(planned, steps, plan)
    if horizon < steps:
        yield _short_horizon(job, schedule, steps)
    elif unit is not None:
        # TorchTitan has a total_steps of its own in order that a run can be cut short of it.
        yield ConfigIssue("note" if job.framework == "torchtitan" else "silent", "horizon", unit)
    elif horizon > steps and warmup < steps:
        yield ConfigIssue(
            "note",
            "horizon",
            f"{job.key('horizon_steps')} is {horizon:,} and the run ends after {steps:,} steps, at a learning rate of "
            f"{schedule.factor(steps - 1):.4g} of the configured one: right if the run is to be cut short",
        )
    if isinstance(schedule, LinguaSchedule) and warmup and schedule.scheduler != "constant":
        again = "; after its last step the cosine is back at 1.0, which a run that is extended starts with"
        yield ConfigIssue(
            "note",
            "first-step",
            f"the first step of lingua has a learning rate of 0{again if schedule.scheduler == 'cosine' else ''}",
        )


def _length_key(job: Job) -> str:
    return job.key("steps" if job.steps is not None else "epochs")


def _warmup_beyond(job: Job, planned: Horizon) -> str:
    key = job.key("warmup_steps")
    return (
        f"{key} is {planned.warmup_ticks:,} and {planned.name} is {planned.ticks:,}: the learning rate rises until the "
        f"schedule is over, and there is nothing left in which to decay; set {key} below {planned.ticks:,}"
    )


def _planned(job: Job, schedule: Schedule) -> Horizon:
    """The schedule as a horizon: every framework whose files are read ticks once per step."""
    return Horizon(job.key("horizon_steps"), ticks=schedule.horizon_steps, warmup_ticks=schedule.warmup_steps)


def _unit(planned: Horizon, steps: int, plan: RunPlan) -> str | None:
    """Says that a horizon was counted in another unit than steps, where it is that many times the run exactly."""
    accumulation, degree = plan.gradient_accumulation_steps, plan.ranks.dp_degree
    units = (
        (accumulation, "the batches of a rank"),
        (accumulation * degree, "the batches of all data ranks together"),
        (degree, "the steps of all data ranks together"),
    )
    for factor, what in units:
        # Whoever divides may have rounded.
        if factor > 1 and 0 <= steps * factor - planned.end_step < factor:
            return (
                f"{planned.name} is {planned.ticks:,}, {factor:,} times the {steps:,} steps of the run: that counts "
                f"{what}, and the schedule ticks once per step, so that the run ends at {planned.rho(steps):.3g} of "
                f"it; set {planned.name} to {steps:,}"
            )
    return None


def _long_warmup(schedule: Schedule, key: str, steps_key: str, steps: int, peak: float) -> str:
    warmup = schedule.warmup_steps
    if isinstance(schedule, TorchTitanSchedule):
        cut = min(warmup, schedule.horizon_steps)
        return (
            f"{key} is {warmup:,} of {steps:,} steps: TorchTitan cuts it to {cut:,} and the learning rate never "
            f"decays; set {key} well below {steps_key}"
        )
    return (
        f"{key} is {warmup:,} and {steps_key} is {steps:,}: the learning rate only rises, to {peak:.4g} of the "
        f"configured one, and never decays; set {key} below {steps:,}"
    )


def _short_horizon(job: Job, schedule: Schedule, steps: int) -> ConfigIssue:
    horizon, last = schedule.horizon_steps, schedule.factor(steps - 1)
    key, steps_key = job.key("horizon_steps"), _length_key(job)
    head = f"{key} is {horizon:,} and {steps_key} is {steps:,}: "
    level: Level = "silent"
    if math.isnan(last):
        text = f"after {horizon:,} steps there is no learning rate left to compute, and the run stops"
        level = "stops"
    elif last < 0:
        text = (
            f"from step {_first_below_zero(schedule, horizon, steps):,} on the learning rate is negative, at the last "
            f"step {last:.4g} of the configured one: the model is trained away from its data"
        )
    elif last == 0:
        text = f"the last {steps - horizon:,} steps have a learning rate of 0 and train nothing"
    else:
        text = f"the schedule ends {steps - horizon:,} steps early; the last step has {last:.4g} of the configured rate"
    return ConfigIssue(level, "horizon", f"{head}{text}; set {key} to {steps:,} or leave it out")


def _first_below_zero(schedule: Schedule, horizon: int, steps: int) -> int:
    """The first step, counted from 1, whose factor is negative: the decay only falls, so the middle tells the half."""
    low, high = min(horizon, steps) - 1, steps - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if schedule.factor(middle) < 0 else (middle + 1, high)
    return low + 1


def _refilled(job: Job, ranks: RankMap) -> Iterator[ConfigIssue]:
    dim = job.refilled_dim
    if dim is None or job.fits(ranks.world_size):
        return
    written = dict(zip(job.names, job.sizes, strict=True))[dim]
    size = dict(zip(ranks.names, ranks.sizes, strict=True))[dim]
    origin = job.origins.get(dim)
    given = origin is not None and origin.given
    where = f"{job.key(dim)} {written}" if given else f"{job.key(dim)}, which is not written,"
    yield ConfigIssue(
        "silent" if given else "note",
        "override",
        f"{where} does not fit {ranks.world_size} ranks: {job.framework} sets it to {size}, and only its log says so",
    )


def _lingua_ranks(job: Job, ranks: RankMap) -> Iterator[ConfigIssue]:
    """Lingua computes ``replicate * dp_replicate + shard``, where the factor must be dp_shard."""
    if job.framework != "lingua":
        return
    sizes = dict(zip(ranks.names, ranks.sizes, strict=True))
    replicas, shards = sizes["dp_replicate"], sizes["dp_shard"]
    computed: list[int] = []
    for rank in range(ranks.world_size):
        at = ranks.coordinates(rank)
        computed.append(at["dp_replicate"] * (replicas if shards > 1 else 1) + at["dp_shard"])
    verdict = ranks.check_dp_ranks(computed)
    if verdict is not None:
        yield ConfigIssue(
            "stops" if any(value >= ranks.dp_degree for value in computed) else "silent",
            "dp-rank",
            f"lingua's train.py multiplies by dp_replicate where dp_shard is right: {verdict.sentence[:-1]}; make it "
            f'dp_rank * world_mesh["dp_shard"].size() + world_mesh["dp_shard"].get_local_rank(), or, where it is that '
            f"already, --ignore dp-rank",
        )


def _chunks(job: Job, ranks: RankMap) -> Iterator[ConfigIssue]:
    for source, chunks in job.chunks.items():
        degree = ranks.dp_degree
        if not chunks:
            yield ConfigIssue("stops", "chunks", f"{source} has no *.chunk.*.jsonl: lingua divides by zero")
        elif chunks > degree:
            left = chunks - degree
            yield ConfigIssue(
                "silent",
                "chunks",
                f"{source} has {chunks} chunks for {degree} data ranks: lingua reads the first {degree}, and {left} "
                f"({100 * left / chunks:.3g} % of the files) are never read; make it {degree} chunks",
            )
        elif degree % chunks:
            yield ConfigIssue(
                "stops",
                "chunks",
                f"{source} has {chunks} chunks, which must divide {degree} data ranks: lingua stops on an assertion",
            )


def _lengths(job: Job, ranks: RankMap) -> Iterator[ConfigIssue]:
    if job.framework != "torchtitan" or job.sequence_length is None:
        return
    sizes = dict(zip(ranks.names, ranks.sizes, strict=True))
    divisor = sizes["tp"] * (2 * sizes["cp"] if sizes["cp"] > 1 else 1)
    if job.sequence_length % divisor:
        yield ConfigIssue(
            "stops",
            "sequence-length",
            f"{job.key('sequence_length')} {job.sequence_length:,} must divide by tp {sizes['tp']}"
            f"{' × 2 × cp ' + str(sizes['cp']) if sizes['cp'] > 1 else ''} = {divisor}",
        )


def _plan(plan: RunPlan) -> Iterator[ConfigIssue]:
    job, ranks, batches = plan.job, plan.ranks, plan.batches
    shared = ranks.world_size // ranks.dp_degree
    if shared > 1:
        yield ConfigIssue(
            "note",
            "data-ranks",
            f"{ranks.world_size} ranks read {ranks.dp_degree} shares: count samples and tokens over the data ranks "
            f"alone, or they come out {shared} times too high",
        )
    if job.data_ends and ranks.dp_degree > 1:
        yield ConfigIssue(
            "stops",
            "uneven",
            f"the data is read once, and {ranks.dp_degree} data ranks seldom have equally many batches: the first to "
            f"end leaves with exit code 0, and the others fail in a collective; read it for ever (infinite=True), and "
            f"end by {job.key('steps')}",
        )
    if job.pipeline_microbatches > 1:
        how = "cut out of the batch" if job.microbatches_inside else "each a whole batch"
        yield ConfigIssue(
            "note",
            "micro-batches",
            f"{job.pipeline_microbatches} pipeline micro-batches, {how} (TorchTitan until 0.3.0 cuts the batch into "
            f"them, since then it multiplies by them)",
        )
    if job.micro_batch_size is not None and plan.batch_size is not None and job.micro_batch_size > plan.batch_size:
        yield ConfigIssue(
            "note",
            "micro-batches",
            f"{job.key('micro_batch_size')} {job.micro_batch_size} is more than the {plan.batch_size} samples that a "
            f"rank has: it is cut to that",
        )
    if batches.uneven_batches is not None:
        fewest, most = batches.uneven_batches
        yield ConfigIssue(
            "stops",
            "uneven",
            f"{job.key('dataset_size')} {job.dataset_size:,} in turns gives data ranks {fewest:,} to {most:,} batches: "
            f"where the first has ended, the others wait in a collective; end every rank after {fewest:,} batches, or "
            f"fill the shares up",
        )
    if batches.samples_repeated:
        text = f"{_are(batches.samples_repeated)} read twice per epoch, to even the ranks"
        yield ConfigIssue("note", "repeats", text)
    if batches.samples_dropped:
        text = f"{_are(batches.samples_dropped)} left out of every epoch, with the last batches"
        yield ConfigIssue("note", "dropped", text)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _are(samples: int) -> str:
    return f"{_count(samples, 'sample')} {'is' if samples == 1 else 'are'}"

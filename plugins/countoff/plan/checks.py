"""What is wrong with a configuration on a number of ranks: mistakes that the file shows before the job starts."""

from __future__ import annotations

import math
from collections.abc import Iterator

from countoff.core.plan import BatchPlan
from countoff.core.ranks import RankMap
from countoff.plan.issues import ConfigIssue, worst_first
from countoff.plan.job import Job, JobError, RunPlan
from countoff.plan.schedule_checks import check_schedule

__all__ = ["check_job", "check_length"]


def check_job(job: Job, *, world_size: int) -> list[ConfigIssue]:
    """Returns all issues of a run on this number of ranks, the worst first.

    Args:
        job: The run.
        world_size: Ranks of the job, at least 1.

    Example:
        >>> job = Job("", ("dp", "tp"), (2, 8), ("dp",), batch_size=2)
        >>> print(*[issue.line for issue in check_job(job, world_size=4)])
        stops   dims: the dims do not fit 4 ranks: dp 2 × tp 8 = 16, but world_size is 4
    """
    issues = [*job.issues, *_check_world_size(job, world_size)]
    try:
        ranks = job.rank_map(world_size)
    except JobError as error:
        return worst_first([*issues, *check_schedule(job, job.steps), ConfigIssue("stops", "dims", str(error))])
    plan, refused = None, ""
    try:
        plan = RunPlan.of(job, world_size=world_size)
    except JobError as error:
        refused = str(error)
    issues += check_schedule(job, job.steps if plan is None else plan.batches.total_steps, plan)
    issues += _check_mesh(job, ranks)
    if plan is None:
        issues.append(ConfigIssue("stops", "batch", refused))
    else:
        issues += _check_plan(plan)
    return worst_first(issues)


def check_length(plan: RunPlan) -> Iterator[ConfigIssue]:
    """Yields the issue of a run's length: it has no steps, cannot be known, or is set twice.

    Args:
        plan: The run on its ranks.
    """
    job, batches = plan.job, plan.batches
    if batches.total_steps == 0:
        yield ConfigIssue("silent", "length", _no_steps(plan))
    elif job.epochs is not None and batches.batches_per_epoch is None:
        text = f"{job.key('epochs')} is {_count(job.epochs, 'epoch')}, and nothing says how long one is"
        if batches.total_steps is not None:
            text += f", so the plan goes to the end of {job.stated('steps', batches.total_steps, '')}"
        yield ConfigIssue("note", "length", f"{text}: give {plan.length_flags[-1]}")
    elif job.run_tokens is not None and batches.total_steps is None:
        text = f"{job.stated('steps', 0)}, and nothing says how many tokens a sample has: give {plan.length_flags[-1]}"
        yield ConfigIssue("note", "length", text)
    elif job.epochs is not None and job.steps is not None and batches.steps_per_epoch is not None:
        steps_of_epochs = math.ceil(job.epochs * batches.steps_per_epoch)
        if steps_of_epochs == job.steps:
            return
        keys = (job.key("steps"), job.key("epochs"))
        first, later = keys if job.steps < steps_of_epochs else reversed(keys)
        epochs = f"{_count(job.epochs, 'epoch')} {'is' if job.epochs == 1 else 'are'}"
        lengths = f"{epochs} {_count(steps_of_epochs, 'step')}, and {keys[0]} is {job.steps:,}"
        yield ConfigIssue("note", "length", f"{lengths}: {first} ends the run, and {later} has no effect")


def _no_steps(plan: RunPlan) -> str:
    job, degree = plan.job, plan.ranks.dp_degree
    size = job.dataset_size or 0
    fewest = size // degree if job.strided else -(-size // degree)
    why = f"{job.key('dataset_size')} {size:,} gives one of {degree:,} data ranks {_count(fewest, 'sample')}"
    if not fewest:
        return f"the run has 0 steps: {why}; use fewer data ranks, or more data"
    no_batch = (
        f"a batch of fewer than {plan.batch_size:,} is dropped ({job.key('drop_last')})"
        if plan.batch_size
        else "no batch"
    )
    remedy = "make the batch smaller, use fewer data ranks, or keep short batches"
    return f"the run has 0 steps: {why}, and {no_batch}; {remedy}"


def _check_world_size(job: Job, world_size: int) -> Iterator[ConfigIssue]:
    if job.world_size is not None and job.world_size != world_size:
        text = (
            f"{job.key('world_size')} is {job.world_size}, but the check is for {world_size} ranks: every other line "
            f"holds for {world_size}"
        )
        yield ConfigIssue("stops", "world-size", text)


def _check_mesh(job: Job, ranks: RankMap) -> Iterator[ConfigIssue]:
    """Yields what is wrong with the dims, and with what each rank reads along them."""
    yield from _check_refilled_dim(job, ranks)
    if job.framework == "lingua":
        yield from _check_lingua_dp_ranks(ranks)
    yield from _check_chunks(job, ranks)
    if job.framework == "torchtitan":
        yield from _check_sequence_length(job, ranks)
    uneven = job.uneven_experts(ranks)
    if uneven is not None:
        yield ConfigIssue("stops", "experts", f"{job.key('expert_parallel')}: {uneven}")


def _check_refilled_dim(job: Job, ranks: RankMap) -> Iterator[ConfigIssue]:
    dim = job.refilled_dim
    if dim is None or job.fits(ranks.world_size):
        return
    configured = dict(zip(job.names, job.sizes, strict=True))[dim]
    size = _sizes(ranks)[dim]
    origin = job.origins.get(dim)
    given = origin is not None and origin.given
    where = f"{job.key(dim)} {configured}" if given else f"{job.key(dim)}, which is not written,"
    text = f"{where} does not fit {ranks.world_size} ranks: {job.framework} sets it to {size}, and only its log says so"
    yield ConfigIssue("silent" if given else "note", "override", text)


def _check_lingua_dp_ranks(ranks: RankMap) -> Iterator[ConfigIssue]:
    """Yields the issue of lingua's ``replicate * dp_replicate + shard``, where the factor must be dp_shard."""
    sizes = _sizes(ranks)
    # A mesh without shards has no dim for them, and lingua then multiplies by nothing.
    factor = sizes["dp_replicate"] if sizes["dp_shard"] > 1 else 1
    computed: list[int] = []
    for rank in range(ranks.world_size):
        position = ranks.coordinates(rank)
        computed.append(position["dp_replicate"] * factor + position["dp_shard"])
    verdict = ranks.check_dp_ranks(computed)
    if verdict is None:
        return
    text = (
        f"lingua's train.py multiplies by dp_replicate where dp_shard is right: {verdict.sentence[:-1]}; make it "
        f'dp_rank * world_mesh["dp_shard"].size() + world_mesh["dp_shard"].get_local_rank(), or use --ignore dp-rank '
        f"if your train.py has that already"
    )
    crashes = any(value >= ranks.dp_degree for value in computed)
    yield ConfigIssue("stops" if crashes else "silent", "dp-rank", text)


def _check_chunks(job: Job, ranks: RankMap) -> Iterator[ConfigIssue]:
    degree = ranks.dp_degree
    for source, chunks in job.chunks.items():
        if not chunks:
            yield ConfigIssue("stops", "chunks", f"{source} has no *.chunk.*.jsonl: lingua divides by zero")
        elif chunks > degree:
            unread = chunks - degree
            text = (
                f"{source} has {chunks} chunks for {degree} data ranks: lingua reads the first {degree}, and {unread} "
                f"({100 * unread / chunks:.3g} % of the files) are never read; make it {degree} chunks"
            )
            yield ConfigIssue("silent", "chunks", text)
        elif degree % chunks:
            text = f"{source} has {chunks} chunks, which must divide {degree} data ranks: lingua stops on an assertion"
            yield ConfigIssue("stops", "chunks", text)


def _check_sequence_length(job: Job, ranks: RankMap) -> Iterator[ConfigIssue]:
    """Yields the issue of a sequence that TorchTitan cannot cut among tensor and context parallel ranks."""
    tp, cp = _sizes(ranks)["tp"], _sizes(ranks)["cp"]
    divisor = tp * (2 * cp if cp > 1 else 1)
    if job.sequence_length is not None and job.sequence_length % divisor:
        product = f"tp {tp}{f' × 2 × cp {cp}' if cp > 1 else ''} = {divisor}"
        text = f"{job.stated('sequence_length', job.sequence_length, '')} must divide by {product}"
        yield ConfigIssue("stops", "sequence-length", text)


def _check_plan(plan: RunPlan) -> Iterator[ConfigIssue]:
    """Yields what is wrong with, or worth knowing about, the batches and the data of a run."""
    yield from _check_rounded_batch(plan)
    yield from _check_growing_batch(plan)
    yield from _check_updates(plan)
    yield from _check_data_ranks(plan.ranks)
    yield from _check_end_of_data(plan.job, plan.ranks)
    yield from _check_micro_batches(plan)
    yield from _check_uneven_shares(plan)
    yield from _check_repeats(plan.batches)
    yield from (issue for issue in check_length(plan) if issue.is_fault)


def _check_rounded_batch(plan: RunPlan) -> Iterator[ConfigIssue]:
    job, done = plan.job, plan.batches.global_batch_size
    if job.accumulation_rounded and job.global_batch_size is not None and done not in (None, job.global_batch_size):
        text = (
            f"{job.stated('global_batch_size', job.global_batch_size)}, no multiple of "
            f"{job.stated('batch_size', plan.batch_size or 1, '')} × {_count(plan.ranks.dp_degree, 'data rank')}: "
            f"{job.framework} rounds down, and a step has {_count(done or 0, 'sample')}"
        )
        yield ConfigIssue("silent", "batch", text)


def _check_growing_batch(plan: RunPlan) -> Iterator[ConfigIssue]:
    """Yields the issue of a global batch on the way to the full one that does not divide."""
    job = plan.job
    sizes = [batch for _, batch in job.batch_stages]
    if job.ramp is not None:
        # Every batch of the ramp divides if the first one and the increment do.
        sizes = [job.ramp[0], job.ramp[0] + job.ramp[1]]
    divisor = (plan.batch_size or 1) * plan.ranks.dp_degree
    if plan.batch_size is None or job.batch_size is None:
        return
    for size in sizes:
        if size % divisor:
            text = (
                f"the global batch grows, and its size {size:,} is no multiple of {job.key('batch_size')} "
                f"{plan.batch_size} × {_count(plan.ranks.dp_degree, 'data rank')} = {divisor:,} samples: "
                f"{job.framework} stops there"
            )
            yield ConfigIssue("stops", "batch", text)
            return


def _check_updates(plan: RunPlan) -> Iterator[ConfigIssue]:
    """Yields what is wrong with the optimizer updates of a framework that makes several in each of its steps."""
    job, degree = plan.job, plan.ranks.dp_degree
    whole, mini = job.global_batch_size, job.mini_batch_size
    if whole is None or mini is None:
        return
    name = job.key("mini_batch_size")
    per_rank = mini // degree
    if not per_rank:
        text = f"{name} {mini:,} leaves no sample for each of {degree:,} data ranks: {job.framework} stops"
        yield ConfigIssue("stops", "batch", text)
        return
    if mini > whole and not job.micro_batches_vary:
        text = f"{name} {mini:,} is more than {job.key('global_batch_size')} {whole:,}: {job.framework} stops"
        yield ConfigIssue("stops", "batch", text)
    elif mini % degree:
        text = (
            f"{name} {mini:,} does not divide by {degree:,} data ranks: {job.framework} rounds it down to {per_rank:,} "
            f"samples on each, {per_rank * degree:,} in all"
        )
        yield ConfigIssue("silent", "batch", text)
    elif whole % mini and whole > mini:
        text = (
            f"{job.key('global_batch_size')} {whole:,} is no multiple of {name} {mini:,}: the last update of a step "
            f"has {whole % mini:,} samples, and counts as much as the others"
        )
        yield ConfigIssue("note", "batch", text)
    if job.micro_batch_size is not None and per_rank % job.micro_batch_size:
        text = (
            f"{name} {mini:,} gives each of {degree:,} data ranks {per_rank:,} samples, which is no multiple of "
            f"{job.key('micro_batch_size')} {job.micro_batch_size:,}: {job.framework} stops"
        )
        yield ConfigIssue("stops", "micro-batches", text)


def _check_data_ranks(ranks: RankMap) -> Iterator[ConfigIssue]:
    shared = ranks.world_size // ranks.dp_degree
    if shared > 1:
        text = (
            f"{ranks.world_size:,} ranks read {_count(ranks.dp_degree, 'share')}: count samples and tokens over the "
            f"data ranks alone, or they come out {shared} times too high"
        )
        yield ConfigIssue("note", "data-ranks", text)


def _check_end_of_data(job: Job, ranks: RankMap) -> Iterator[ConfigIssue]:
    if job.data_ends and ranks.dp_degree > 1:
        text = (
            f"the data is read once, and {ranks.dp_degree} data ranks seldom have the same number of batches: the "
            f"first rank without data exits with code 0, and the others fail in a collective; repeat the data "
            f"(infinite=True), and end the run with {job.key('steps')}"
        )
        yield ConfigIssue("stops", "uneven", text)


def _check_micro_batches(plan: RunPlan) -> Iterator[ConfigIssue]:
    job = plan.job
    if job.pipeline_microbatches > 1:
        how = "cut out of the batch" if job.microbatches_inside else "each a whole batch"
        text = (
            f"{job.pipeline_microbatches} pipeline micro-batches, {how} (TorchTitan up to 0.3.0 cuts the batch into "
            f"them, later versions multiply the batch by them)"
        )
        yield ConfigIssue("note", "micro-batches", text)
    if job.micro_batch_size is not None and plan.batch_size is not None and job.micro_batch_size > plan.batch_size:
        text = (
            f"{job.key('micro_batch_size')} {job.micro_batch_size} is more than the {plan.batch_size} samples that a "
            f"rank has: it is cut to that"
        )
        yield ConfigIssue("note", "micro-batches", text)


def _check_uneven_shares(plan: RunPlan) -> Iterator[ConfigIssue]:
    if plan.batches.uneven_batches is not None:
        job, (fewest, most) = plan.job, plan.batches.uneven_batches
        text = (
            f"{job.key('dataset_size')} {job.dataset_size:,} in turns gives data ranks {fewest:,} to {most:,} batches: "
            f"when the first has no more, the others wait in a collective; end every rank after {fewest:,} batches, or "
            f"fill the shares up"
        )
        yield ConfigIssue("stops", "uneven", text)


def _check_repeats(batches: BatchPlan) -> Iterator[ConfigIssue]:
    if batches.samples_repeated:
        text = f"{_samples_are(batches.samples_repeated)} read twice per epoch, to even the ranks"
        yield ConfigIssue("note", "repeats", text)
    if batches.samples_dropped:
        text = f"{_samples_are(batches.samples_dropped)} left out of every epoch, with the last batches"
        yield ConfigIssue("note", "dropped", text)


def _sizes(ranks: RankMap) -> dict[str, int]:
    return dict(zip(ranks.names, ranks.sizes, strict=True))


def _count(number: float, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _samples_are(samples: int) -> str:
    return f"{_count(samples, 'sample')} {'is' if samples == 1 else 'are'}"

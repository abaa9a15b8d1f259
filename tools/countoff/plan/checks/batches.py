"""The batches of a run and its data: sizes that do not divide, and shares that differ."""

from __future__ import annotations

from collections.abc import Iterator

from countoff.core.arithmetic.ranks import RankMap
from countoff.plan.issues import ConfigIssue, counted
from countoff.plan.job import Job, RunPlan

__all__ = ["check_batches"]


def check_batches(plan: RunPlan) -> Iterator[ConfigIssue]:
    """Yields what is wrong with the batches and the data of a run.

    Args:
        plan: The run on its ranks.
    """
    yield from _check_growing_batch(plan)
    yield from _check_end_of_data(plan.job, plan.ranks)
    yield from _check_uneven_shares(plan)


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
                f"{plan.batch_size} × {counted(plan.ranks.dp_degree, 'data rank')} = {divisor:,} samples: "
                f"{job.framework} stops there"
            )
            yield ConfigIssue("stops", "batch", text)
            return


def _check_end_of_data(job: Job, ranks: RankMap) -> Iterator[ConfigIssue]:
    if job.data_ends and ranks.dp_degree > 1:
        text = (
            f"the data is read once, and {ranks.dp_degree} data ranks seldom have the same number of batches: the "
            f"first rank without data exits with code 0, and the others fail in a collective"
        )
        remedy = f"repeat the data (infinite=True), and end the run with {job.key('steps')}"
        yield ConfigIssue("stops", "uneven", text, remedy)


def _check_uneven_shares(plan: RunPlan) -> Iterator[ConfigIssue]:
    if plan.batches.uneven_batches is not None:
        job, (fewest, most) = plan.job, plan.batches.uneven_batches
        text = (
            f"{job.key('dataset_size')} {job.dataset_size:,} in turns gives data ranks {fewest:,} to {most:,} batches: "
            f"when the first has no more, the others wait in a collective"
        )
        remedy = f"end every rank after {fewest:,} batches, or fill the shares up"
        yield ConfigIssue("stops", "uneven", text, remedy)

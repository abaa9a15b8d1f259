"""The ranks of a run and its mesh: another number of ranks, dims that the framework changes."""

from __future__ import annotations

from collections.abc import Iterator

from countoff.core.arithmetic.ranks import RankMap
from countoff.plan.issues import ConfigIssue
from countoff.plan.job import Job

__all__ = ["check_mesh", "check_world_size"]


def check_world_size(job: Job, world_size: int) -> Iterator[ConfigIssue]:
    """Yields the issue of a number of ranks that is not the configured one.

    Args:
        job: The run.
        world_size: Ranks of the job, at least 1.
    """
    if job.world_size is not None and job.world_size != world_size:
        text = (
            f"{job.key('world_size')} is {job.world_size}, but the check is for {world_size} ranks: every other line "
            f"holds for {world_size}"
        )
        yield ConfigIssue("stops", "world-size", text)


def check_mesh(job: Job, ranks: RankMap) -> Iterator[ConfigIssue]:
    """Yields what is wrong with the dims, and with what each rank reads along them.

    Args:
        job: The run.
        ranks: Which rank reads which share of the data.
    """
    yield from _check_refilled_dim(job, ranks)
    for check in job.own_checks:
        yield from check(job, ranks)


def _check_refilled_dim(job: Job, ranks: RankMap) -> Iterator[ConfigIssue]:
    dim = job.refilled_dim
    if dim is None or job.fits(ranks.world_size):
        return
    configured = dict(zip(job.names, job.sizes, strict=True))[dim]
    size = dict(zip(ranks.names, ranks.sizes, strict=True))[dim]
    origin = job.origins.get(dim)
    given = origin is not None and origin.given
    where = f"{job.key(dim)} {configured}" if given else f"{job.key(dim)}, which is not written,"
    text = f"{where} does not fit {ranks.world_size} ranks: {job.framework} sets it to {size}, and only its log says so"
    yield ConfigIssue("silent" if given else "note", "override", text)

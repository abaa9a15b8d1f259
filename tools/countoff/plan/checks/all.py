"""All checks of a run, in the order in which equally bad issues are listed."""

from __future__ import annotations

from countoff.plan.checks.batches import check_batches
from countoff.plan.checks.length import check_length
from countoff.plan.checks.mesh import check_mesh, check_world_size
from countoff.plan.checks.schedule import check_schedule
from countoff.plan.issues import ConfigIssue, worst_first
from countoff.plan.job import Job, JobError, RunPlan

__all__ = ["check_job"]


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
    issues = [*job.issues, *check_world_size(job, world_size)]
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
    issues += check_mesh(job, ranks)
    if plan is None:
        issues.append(ConfigIssue("stops", "batch", refused))
    else:
        issues += check_batches(plan)
        issues += (issue for issue in check_length(plan) if issue.is_fault)
    return worst_first(issues)

"""The length of a run: of no steps, of none that can be known, or set twice."""

from __future__ import annotations

import math
from collections.abc import Iterator

from countoff.plan.issues import ConfigIssue, counted
from countoff.plan.job import RunPlan

__all__ = ["check_length"]


def check_length(plan: RunPlan) -> Iterator[ConfigIssue]:
    """Yields the issue of a run's length: it has no steps, cannot be known, or is set twice.

    Args:
        plan: The run on its ranks.
    """
    job, batches = plan.job, plan.batches
    if batches.total_steps == 0:
        yield _no_steps(plan)
    elif job.epochs is not None and batches.batches_per_epoch is None:
        text = f"{job.key('epochs')} is {counted(job.epochs, 'epoch')}, and nothing says how long one is"
        if batches.total_steps is not None:
            text += f", so the plan goes to the end of {job.stated('steps', batches.total_steps, '')}"
        yield ConfigIssue("note", "length", f"{text}: give {plan.length_flags[-1]}")
    elif job.epochs is not None and job.steps is not None and batches.steps_per_epoch is not None:
        steps_of_epochs = math.ceil(job.epochs * batches.steps_per_epoch)
        if steps_of_epochs == job.steps:
            return
        keys = (job.key("steps"), job.key("epochs"))
        first, later = keys if job.steps < steps_of_epochs else reversed(keys)
        epochs = f"{counted(job.epochs, 'epoch')} {'is' if job.epochs == 1 else 'are'}"
        lengths = f"{epochs} {counted(steps_of_epochs, 'step')}, and {keys[0]} is {job.steps:,}"
        yield ConfigIssue("note", "length", f"{lengths}: {first} ends the run, and {later} has no effect")


def _no_steps(plan: RunPlan) -> ConfigIssue:
    job, degree = plan.job, plan.ranks.dp_degree
    size = job.dataset_size or 0
    fewest = size // degree if job.strided else -(-size // degree)
    why = f"{job.key('dataset_size')} {size:,} gives one of {degree:,} data ranks {counted(fewest, 'sample')}"
    text = f"the run has 0 steps: {why}"
    if not fewest:
        return ConfigIssue("silent", "length", text, "use fewer data ranks, or more data")
    no_batch = (
        f"a batch of fewer than {plan.batch_size:,} is dropped ({job.key('drop_last')})"
        if plan.batch_size
        else "no batch"
    )
    remedy = "make the batch smaller, use fewer data ranks, or keep short batches"
    return ConfigIssue("silent", "length", f"{text}, and {no_batch}", remedy)

"""What a check has left out, because the configuration does not show a number that it needs."""

from __future__ import annotations

from typing import NamedTuple

from countoff.plan.job import Job, JobError, RunPlan

__all__ = ["Unchecked", "unchecked", "unchecked_line"]

_SCHEDULE = "a schedule that countoff knows"


class Unchecked(NamedTuple):
    """One thing that was not checked.

    Attributes:
        what: Its name: ``batch``, ``length`` or ``schedule``.
        without: What would make it known: a flag, or words.
    """

    what: str
    without: str


def unchecked(job: Job, *, world_size: int) -> list[Unchecked]:
    """Returns what cannot be checked of a run on this number of ranks.

    Args:
        job: The run.
        world_size: Ranks of the job, at least 1.

    Example:
        >>> unchecked(Job(batch_size=2, epochs=3), world_size=4)[0]
        Unchecked(what='length', without='--dataset-size')
    """
    try:
        plan = RunPlan.of(job, world_size=world_size)
    except JobError:
        return [Unchecked(what, "sizes that fit the ranks") for what in ("batch", "length", "schedule")]
    found: list[Unchecked] = []
    if plan.batch_size is None and job.tokens_per_micro_batch is None:
        found.append(Unchecked("batch", "--batch-size"))
    length_flag = plan.length_flags[-1].removesuffix(" N")
    if plan.batches.total_steps is None:
        found.append(Unchecked("length", length_flag))
    if job.schedule is None:
        found.append(Unchecked("schedule", _SCHEDULE))
    elif plan.batches.total_steps is None:
        found.append(Unchecked("schedule", length_flag))
    return found


def unchecked_line(left_out: list[Unchecked]) -> str:
    """Returns what was not checked, for the end of a line; empty if that is nothing.

    Example:
        >>> unchecked_line([Unchecked("length", "--steps"), Unchecked("schedule", "--steps")])
        '; not checked without --steps: length, schedule'
    """
    if not left_out:
        return ""
    kinds: dict[str, list[str]] = {}
    for each in left_out:
        kinds.setdefault(each.without, []).append(each.what)
    parts = [f"without {needed}: {', '.join(names)}" for needed, names in kinds.items()]
    return f"; not checked {'; '.join(parts)}"

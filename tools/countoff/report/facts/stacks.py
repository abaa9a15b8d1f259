"""Where the main threads of the ranks were last."""

from __future__ import annotations

from countoff.report.model import Run
from countoff.report.ranks import ranks_by


def stacks_of(run: Run) -> list[tuple[tuple[int, ...], str, tuple[str, ...]]]:
    """The last stacks of all ranks, equal ones together: the ranks, their state, the frames; fewest ranks first."""
    last = {rank: fit.stacks[-1] for rank, fit in run.fits.items() if fit.stacks}
    groups = ranks_by({rank: (stack.state, stack.frames) for rank, stack in last.items()})
    found = [(ranks, state, frames) for (state, frames), ranks in groups.items()]
    return sorted(found, key=lambda group: (len(group[0]), group[0]))

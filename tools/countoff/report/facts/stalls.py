"""The stall in which a run stands, and the ranks for which the others wait in it."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator

from countoff.core.checks.stalled import DOING, STALLED
from countoff.core.verdict import Verdict
from countoff.report.model import Fit, Run, Trace


def stall_of(trace: Trace) -> Verdict | None:
    """The stall in which the last run stands, or stood when it was ended from outside."""
    return _stall_in(trace.runs[-1]) if trace.runs else None


def waited_for(run: Run) -> tuple[int, ...]:
    """The ranks for which the others wait in a stall; empty if there is none, or if all wait for one another."""
    verdict = run.verdict
    stall = verdict if verdict is not None and verdict.kind == STALLED.name else _stall_in(run)
    return stall.ranks if stall is not None and len(stall.ranks) < run.world_size else ()


def one_line(verdict: Verdict) -> str:
    """What a verdict or a warning says in one line: its headline, and at a stall the line of code too."""
    return f"{verdict.kind}: {'; '.join(told(verdict))}" if verdict.kind == STALLED.name else verdict.headline


def told(stall: Verdict) -> Iterator[str]:
    """What a stall says in one line: for how long, and who is at which line of code, doing what."""
    clauses = stall.sentence.rstrip(".").split("; ")
    first = re.split(r"; |\. |\.$", stall.why)[0]
    who, _, place = first.partition(" at ")
    doing = f"{who} "
    if place and any(clause.startswith(doing) for clause in clauses):
        at, said = next((at, clause) for at, clause in enumerate(clauses) if clause.startswith(doing))
        what = said.removeprefix(doing).replace(DOING["code"], "in its own code")
        clauses[at] = f"{first}, {what if who.endswith(' is') else what.replace(' its ', ' their ')}"
    elif first:
        clauses.append(first)
    yield from clauses


def _stall_in(run: Run) -> Verdict | None:
    """The stall in which a run stands, or stood when it was ended from outside: no rank has moved after it."""
    stalls = [warning for warning in run.warnings if warning.kind == STALLED.name]
    endings = {fit.ending.how for fit in run.fits.values() if fit.ending is not None}
    if not stalls or run.verdict is not None or endings - {"signal"}:
        return None
    return None if any(_moved_after(fit, stalls[-1].time) for fit in run.fits.values()) else stalls[-1]


def _moved_after(fit: Fit, time: float) -> bool:
    """Whether a rank has opened or closed a span, or counted a batch or a step, after a moment."""
    if any(span.begin > time or (span.end or 0.0) > time for span in fit.spans):
        return True
    ticks = fit.spans[-1].ticks if fit.spans else []
    at = bisect_right([tick.time for tick in ticks], time)  # a rank that stands still writes ticks too
    return len({(tick.batches, tick.steps) for tick in ticks[max(0, at - 1) :]}) > 1

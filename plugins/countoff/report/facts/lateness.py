"""How late each rank is: at this moment in batches, and at the end of its last span in seconds."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from statistics import median

from countoff.core.trace.format import SILENT_SECONDS
from countoff.report.model import Fit, Run, Span

_FEW = 4
"""Of each rank, so many of its last spans are compared: a look must not take longer the longer the job runs."""


def behind_batches(run: Run) -> dict[int, float]:
    """How many batches each rank lacks in the span in which it is, compared with half of the ranks in this span.

    Ranks write every five seconds, and never at the same moment. So they are compared at the last moment of which all
    know how far they were; what is between two lines of a rank is interpolated. A rank that is silent does not hold
    this moment back. Ranks that have written nothing yet in their span are left out.
    """
    places: defaultdict[tuple[int, str], dict[int, tuple[Fit, Span]]] = defaultdict(dict)
    for rank, fit in run.fits.items():
        if fit.open and (fit.open[-1].ticks or fit.open[-1].at_verdict):
            places[fit.dropped_spans + len(fit.spans), fit.open[-1].name][rank] = fit, fit.open[-1]
    found: dict[int, float] = {}
    for ranks in places.values():
        lasts = [span.last for _, span in ranks.values()]
        moment = min(last for last in lasts if last >= max(lasts) - SILENT_SECONDS)
        counts = {rank: _batches_at(span, moment) for rank, (_, span) in ranks.items()}
        usual = median(counts.values())
        found |= {rank: max(0.0, usual - batches) for rank, batches in counts.items()}
    return found


def _batches_at(span: Span, moment: float) -> float:
    """How many batches a rank had of a span; all that are known of it where a verdict has counted them."""
    if span.at_verdict:
        return span.batches
    points = span.points
    place = bisect_right(points, moment, key=lambda point: point.time)
    if place == len(points):
        return points[-1].batches
    before, after = points[max(0, place - 1)], points[place]
    passed = after.time - before.time
    share = (moment - before.time) / passed if passed > 0 else 0.0
    return before.batches + max(0.0, share) * (after.batches - before.batches)


def late_seconds(run: Run) -> dict[int, float]:
    """How many seconds after the first rank each rank came to the end of its last span that other ranks have closed.

    Ranks that are more than a few spans behind the others are left out.
    """
    ends: defaultdict[tuple[int, str], dict[int, float]] = defaultdict(dict)
    for rank, fit in run.fits.items():
        for place, span in _last_closed(fit):
            ends[place, span.name][rank] = span.last
    found: dict[int, float] = {}
    for ranks in sorted(ends.values(), key=lambda ranks: min(ranks.values())):
        if len(ranks) > 1:
            first = min(ranks.values())
            found |= {rank: end - first for rank, end in ranks.items()}
    return found


def _last_closed(fit: Fit) -> Iterator[tuple[int, Span]]:
    """The last spans that a rank has closed, each with its place among all its spans."""
    closed = ((place, span) for place, span in reversed(list(enumerate(fit.spans))) if span.end is not None)
    for place, span in islice(closed, _FEW):
        yield fit.dropped_spans + place, span

"""What ranks are doing at this moment, those that do the same together: the facts of `countoff top`.

Ticks of ranks come up to five seconds apart, and never at the same moment. So ranks count as different only where they
differ by more than that explains, or once nobody moves any more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

from countoff.core.trace.format import SILENT_SECONDS
from countoff.report.model import Fit, Run, Span, Tick
from countoff.report.ranks import ranks_by

_WINDOW_SECONDS, _LONGEST_WINDOW_SECONDS, _WINDOW_BATCHES = 30.0, 300.0, 3
"""Rates are those of the last 30 s, or of the last three batches where these take longer."""
_APART_SECONDS, _APART_BATCHES = 12.0, 2
"""A rank is behind if it lacks more batches than the others read in this time, and more than so many."""
_SLOW_TIMES, _SLOW_SHARE, _LOADER_TIMES = 0.8, 0.1, 1.5
"""A rank is slow below so many times the usual rate. Its loader is slow if it waits for it by this share of the time
more than is usual, and so many times as long."""
_STILL_SECONDS, _STILL_BATCHES = 10.0, 3
"""Nobody moves if no rank has begun a batch for so long, nor for the time of so many usual ones."""
STANDS = "stands still"
ENDINGS = {
    "finished": "finished",
    "verdict": "ended by the verdict",
    "failed": "failed",
    "closed": "left before the end",
    "signal": "ended by a signal",
}
"""How ranks have ended, by how a trace says it."""
_ORDER = ("no trace", "lost", "silent", "failed", "ended by the verdict", "behind", STANDS, "slow", "slow loader", "")
"""Which ranks come first; those that have ended as they should come last."""


@dataclass(frozen=True)
class Row:
    """Ranks that are doing the same.

    Attributes:
        ranks: The ranks, ascending.
        hosts: The names of their hosts.
        span: The span they are in, or how they have ended.
        fewest_batches: The fewest batches of one of them in this span; None outside of spans and before its first tick.
        most_batches: The most batches.
        batches_per_second: Half of them are at least so fast; None if that is not known.
        loader_share: The share of the time that half of them wait at least for their loader; None if not known.
        learning_rates: One for each parameter group, as the last of their lines has it.
        age_seconds: Seconds since the last line of the rank that has been silent longest; None without a line.
        still_seconds: Seconds since the last of those began a batch that stand still; None if none does.
        note: Why they are not with the others: ``lost`` (the verdict names them), ``silent``, ``stands still`` (no rank
            moves), ``behind``, ``slow``, ``slow loader``; or what ended them.
    """

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    span: str
    fewest_batches: int | None = None
    most_batches: int | None = None
    batches_per_second: float | None = None
    loader_share: float | None = None
    learning_rates: tuple[float, ...] = ()
    age_seconds: float | None = None
    still_seconds: float | None = None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON types."""
        return asdict(self)


class _State(NamedTuple):
    """What one rank is doing: where it is, how far it came within the window, and when it began its last batch."""

    fit: Fit
    place: str
    what: str
    age: float
    batches: int | None = None
    read: int = 0
    seconds: float = 0.0
    loader_share: float | None = None
    still_seconds: float | None = None

    @property
    def rate(self) -> float | None:
        return self.read / self.seconds if self.loader_share is not None else None


def rows_of(run: Run, time: float) -> list[Row]:
    """What the ranks of a run are doing; those that need a look come first, then the slowest.

    Args:
        run: The run.
        time: The time of this host, in seconds since the epoch.
    """
    now = max(time, run.end)  # this host's clock may be behind that of rank 0
    lost = run.verdict.ranks if run.verdict and run.verdict.kind == "LostRank" else ()
    states = {rank: _state(fit, now, lost=rank in lost) for rank, fit in run.fits.items()}
    rows = [Row(tuple(run.missing), (), "no trace")] if run.missing else []
    places = ranks_by({rank: (_opened(state.fit), state.place, state.what) for rank, state in states.items()})
    for _, ranks in sorted(places.items()):  # those in an earlier span first
        alike = _alike({rank: states[rank] for rank in ranks})
        rows += [_row(note, [states[rank] for rank in group]) for (note, _), group in sorted(alike.items(), key=_least)]
    return sorted(rows, key=_urgency)


def _opened(fit: Fit) -> int:
    """How many spans a rank has opened."""
    return fit.dropped_spans + len(fit.spans)


def _least(group: tuple[tuple[str, int], tuple[int, ...]]) -> tuple[int, tuple[int, ...]]:
    """Groups at one place by their batches."""
    (_, batches), ranks = group
    return batches, ranks


def _state(fit: Fit, now: float, *, lost: bool) -> _State:
    age = max(0.0, now - fit.last)
    if fit.ending is not None:
        return _State(fit, ENDINGS[fit.ending.how], fit.ending.what, age)
    what = "lost" if lost else ""
    if not fit.open:
        return _State(fit, "between spans" if fit.spans else "before the first span", what, age)
    span = fit.open[-1]
    last = span.points[-1]
    first = _window_begin(span, last)
    seconds = max(last.time, now - SILENT_SECONDS) - first.time
    share = (last.loader_seconds - first.loader_seconds) / seconds if span.ticks and seconds > 0 else None
    batches = span.batches if span.ticks or span.batches else span.before or None
    read, still = max(0, last.batches - first.batches), _still_seconds(fit, span, last, now)
    return _State(fit, span.name, what, age, batches, read, seconds, share, still)


def _still_seconds(fit: Fit, span: Span, last: Tick, now: float) -> float | None:
    """Seconds since a rank was first seen at its last batch; None if its ticks do not show that it stands still."""
    points = span.points
    at = points[bisect_left(points, last.batches, key=lambda point: point.batches)]
    usual = (at.time - span.begin) / (at.batches - span.before) if at.batches > span.before else _STILL_SECONDS
    moved = max(at.time, fit.spans[-1].end or 0.0)  # in an evaluation within the span it has moved too
    return now - moved if last.time - moved >= max(_STILL_SECONDS, _STILL_BATCHES * usual) else None


def _window_begin(span: Span, last: Tick) -> Tick:
    """How far a rank was when the window began."""
    usual = (last.time - span.begin) / max(1, last.batches - span.before)
    window = min(_LONGEST_WINDOW_SECONDS, max(_WINDOW_SECONDS, _WINDOW_BATCHES * usual))
    points = span.points
    return points[max(0, bisect_left(points, last.time - window + 1e-3, key=lambda point: point.time) - 1)]


def _alike(states: Mapping[int, _State]) -> dict[tuple[str, int], tuple[int, ...]]:
    """Ranks at one place by what is unusual about them, and by their batches once nobody moves any more."""
    batches = median(each.batches or 0 for each in states.values())
    rate = median(each.rate or 0.0 for each in states.values())
    share = median(each.loader_share or 0.0 for each in states.values())
    stands = all(each.still_seconds is not None or each.age > SILENT_SECONDS for each in states.values())
    apart = 0.0 if stands else max(_APART_BATCHES, _APART_SECONDS * rate)

    def note(each: _State) -> str:
        if each.what or each.seconds <= 0:
            return each.what
        if each.age > SILENT_SECONDS:
            return "silent"
        if (each.batches or 0) < batches - apart:
            return "behind"
        if stands:
            return STANDS
        if (each.read + _APART_BATCHES) / each.seconds < _SLOW_TIMES * rate:
            return "slow"
        return "slow loader" if (each.loader_share or 0.0) > max(share + _SLOW_SHARE, _LOADER_TIMES * share) else ""

    return ranks_by({rank: (note(each), each.batches or 0 if stands else 0) for rank, each in states.items()})


def _row(note: str, ranks: Sequence[_State]) -> Row:
    batches = [each.batches for each in ranks if each.batches is not None]
    latest = max((each.fit for each in ranks if each.fit.learning_rates), key=_last_tick, default=ranks[0].fit)
    return Row(
        tuple(each.fit.rank for each in ranks),
        tuple(dict.fromkeys(each.fit.host for each in ranks if each.fit.host)),
        ranks[0].place,
        min(batches, default=None),
        max(batches, default=None),
        _median(each.rate for each in ranks),
        _median(each.loader_share for each in ranks),
        latest.learning_rates,
        max(each.age for each in ranks),
        min((each.still_seconds for each in ranks if each.still_seconds is not None), default=None),
        note,
    )


def _last_tick(fit: Fit) -> float:
    return fit.tick.time if fit.tick else fit.begin


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _urgency(row: Row) -> int:
    """How far to the top a row belongs; the smallest comes first."""
    said = next((each for each in (row.span, row.note) if each and each in _ORDER), "")
    return len(_ORDER) if row.span in (ENDINGS["finished"], ENDINGS["closed"]) else _ORDER.index(said)

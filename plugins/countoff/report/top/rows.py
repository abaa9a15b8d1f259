"""What ranks are doing at this moment, those that do the same together: the facts of the live view.

Ticks of ranks come up to five seconds apart, and never at the same moment. So ranks count as different only where they
differ by more than that explains, or once nobody moves any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from countoff.core.trace.format import SILENT_SECONDS
from countoff.report.model import Fit, Run, Span
from countoff.report.ranks import ranks_by

_WINDOW_SECONDS, _LONGEST_WINDOW_SECONDS, _WINDOW_BATCHES = 30.0, 300.0, 3
"""Rates are those of the last 30 s, or of the last three batches where these take longer."""
_APART_SECONDS, _APART_BATCHES = 12.0, 2
"""A rank is behind if it lacks more batches than the others read in this time, and more than so many."""
_SLOW_TIMES, _SLOW_SHARE, _LOADER_TIMES = 0.8, 0.1, 1.5
"""A rank is slow below so many times the usual rate. Its loader is slow if it waits for it by this share of the time
more than is usual, and so many times as long."""
ENDINGS = {
    "finished": "finished",
    "verdict": "ended by the verdict",
    "failed": "failed",
    "closed": "left before the end",
    "signal": "ended by a signal",
}
"""How ranks have ended, by how a trace says it."""
_NOTES = ("lost", "silent", "behind", "slow", "slow loader")
_NO_TRACE, _OUTSIDE = "no trace", ("before the first span", "between spans")
STATES = ("in a span", "outside of spans", *_NOTES, _NO_TRACE, *ENDINGS.values())
"""All values of `Row.state`."""
ODD_STATES = (*_NOTES, ENDINGS["failed"], ENDINGS["signal"])
"""Those that tell which ranks to look at."""


@dataclass(frozen=True)
class Row:
    """Ranks that are doing the same.

    Attributes:
        ranks: The ranks, ascending.
        hosts: The names of their hosts.
        where: The span they are in, or how they have ended.
        note: Why they are not with the others: ``lost`` (the verdict names them), ``silent``, ``behind``, ``slow``,
            ``slow loader``; or what ended them.
        batches: The fewest and the most batches of one of them in this span; None outside of spans, and before the
            first tick of a span.
        batches_per_second: Half of them are at least so fast; None if that is not known.
        loader_share: The share of the time that half of them wait at least for their loader; None if not known.
        learning_rates: One for each parameter group, as the last of their lines has it.
        age_seconds: Seconds since the last line of the rank that has been silent longest; None without a line.
    """

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    where: str
    note: str = ""
    batches: tuple[int, int] | None = None
    batches_per_second: float | None = None
    loader_share: float | None = None
    learning_rates: tuple[float, ...] = ()
    age_seconds: float | None = None

    @property
    def state(self) -> str:
        """What these ranks are doing, as one of `STATES`: without the names of spans and the texts of exceptions."""
        if self.where in (_NO_TRACE, *ENDINGS.values()):
            return self.where
        if self.note in _NOTES:
            return self.note
        return "outside of spans" if self.where in _OUTSIDE else "in a span"


class _Sample(NamedTuple):
    time: float
    batches: int
    loader_seconds: float


@dataclass(slots=True)
class _Followed:
    """One rank, and how far it was lately in its span."""

    fit: Fit
    span: Span | None = None
    clock_ahead: float = 0.0
    samples: list[_Sample] = field(default_factory=list)

    def follow(self, fit: Fit) -> None:
        """Takes over what is new."""
        span = fit.open[-1] if fit.open else None
        if fit is not self.fit or span is not self.span or fit.clock_ahead != self.clock_ahead:
            self.fit, self.span, self.clock_ahead = fit, span, fit.clock_ahead
            self.samples = []
            if span is not None:
                self.samples = [_Sample(span.begin, span.before, 0.0)]
                self.samples += [_Sample(each.time, each.batches, each.loader_seconds) for each in span.ticks[-8:]]
        tick = fit.tick
        if span is None or tick is None:
            return
        newest = _Sample(tick.time, tick.batches, tick.loader_seconds)
        # After an evaluation inside an epoch, the last tick is that of the evaluation.
        if newest[1:] == (span.batches, span.loader_seconds) and newest.time > self.samples[-1].time:
            self.samples.append(newest)
        newest = self.samples[-1]
        usual = (newest.time - span.begin) / max(1, newest.batches - span.before)
        window = min(_LONGEST_WINDOW_SECONDS, max(_WINDOW_SECONDS, _WINDOW_BATCHES * usual))
        while len(self.samples) > 2 and self.samples[1].time <= newest.time - window:
            del self.samples[0]

    def since(self, now: float) -> tuple[int, float, float]:
        """Batches and seconds of waiting for the loader within the window, and its length in seconds."""
        first, newest = self.samples[0], self.samples[-1]
        end = max(newest.time, now - SILENT_SECONDS)
        return newest.batches - first.batches, newest.loader_seconds - first.loader_seconds, end - first.time


class _State(NamedTuple):
    """What one rank is doing, and how fast, if it is in a span."""

    fit: Fit
    place: tuple[int, str, str]
    batches: int | None
    read: int
    seconds: float
    loader_share: float | None
    age: float
    ticked: bool = False

    @property
    def rate(self) -> float | None:
        return self.read / self.seconds if self.ticked and self.seconds > 0 else None


class LiveRanks:
    """Follows the ranks of a run from look to look."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Followed] = {}
        self._ahead = 0.0
        self._newest = 0.0

    def rows(self, run: Run, time: float) -> list[Row]:
        """Returns what the ranks are doing, the slowest first.

        Args:
            run: The run, brought up to date.
            time: The time of this host, in seconds since the epoch. Its clock may differ from rank 0's.
        """
        now = self._now(run, time)
        verdict = run.verdict
        lost = verdict.ranks if verdict and verdict.kind == "LostRank" else ()
        states: dict[int, _State] = {}
        for rank, fit in run.fits.items():
            followed = self._ranks.setdefault(rank, _Followed(fit))
            followed.follow(fit)
            state = _state(followed, now)
            if rank in lost and fit.ending is None:
                state = state._replace(place=(*state.place[:2], "lost"))
            states[rank] = state
        found: list[tuple[tuple[int, int, float, int], Row]] = []
        for (opened, where, what), ranks in ranks_by({rank: state.place for rank, state in states.items()}).items():
            for (note, batches), alike in _classes({rank: states[rank] for rank in ranks}).items():
                row = _row(where, what or note, [states[rank] for rank in alike])
                found.append(((_severity(row), opened, row.batches_per_second or 0.0, batches), row))
        rows = [row for _, row in sorted(found, key=lambda pair: (pair[0], pair[1].ranks))]
        missing = run.missing
        return [Row(tuple(missing), (), _NO_TRACE), *rows] if missing else rows

    def _now(self, run: Run, time: float) -> float:
        """The time by the clock of rank 0, as far as lines that have just come in tell it."""
        newest = run.end
        if newest > self._newest:
            known, self._newest = self._newest, newest
            if known or newest > time:  # at the first look, the last line may be old
                self._ahead = time - newest
        return time - self._ahead


def _state(followed: _Followed, now: float) -> _State:
    """What a rank is doing."""
    fit, span = followed.fit, followed.span
    opened = fit.dropped_spans + len(fit.spans)
    age = max(0.0, now - fit.last)
    if fit.ending is not None:
        return _State(fit, (opened, ENDINGS[fit.ending.how], fit.ending.what), None, 0, 0.0, None, age)
    if span is None:
        where = _OUTSIDE[bool(fit.spans)]
        return _State(fit, (opened, where, ""), None, 0, 0.0, None, age)
    read, waited, seconds = followed.since(now)
    ticked = len(followed.samples) > 1
    share = min(1.0, max(0.0, waited / seconds)) if ticked and seconds > 0 else None
    return _State(fit, (opened, span.name, ""), span.batches or span.before, max(0, read), seconds, share, age, ticked)


def _classes(states: Mapping[int, _State]) -> dict[tuple[str, int], tuple[int, ...]]:
    """Ranks at one place by what is odd about them, and by their batches once nobody moves any more."""
    batches = median(each.batches or 0 for each in states.values())
    rate = median(each.rate or 0.0 for each in states.values())
    share = median(each.loader_share or 0.0 for each in states.values())
    stands = rate == 0 and all(each.seconds >= _WINDOW_SECONDS for each in states.values())
    apart = 0.0 if stands else max(_APART_BATCHES, _APART_SECONDS * rate)

    def note(each: _State) -> str:
        if each.batches is None:
            return ""
        if each.age > SILENT_SECONDS:
            return "silent"
        if each.batches < batches - apart:
            return "behind"
        if each.seconds > 0 and (each.read + _APART_BATCHES) / each.seconds < _SLOW_TIMES * rate:
            return "slow"
        if (each.loader_share or 0.0) > max(share + _SLOW_SHARE, _LOADER_TIMES * share):
            return "slow loader"
        return ""

    return ranks_by({rank: (note(each), each.batches or 0 if stands else 0) for rank, each in states.items()})


def _row(where: str, note: str, ranks: Sequence[_State]) -> Row:
    batches = [each.batches for each in ranks if each.batches or (each.ticked and each.batches == 0)]
    with_rates = [each.fit.tick for each in ranks if each.fit.tick is not None and each.fit.tick.learning_rates]
    latest = max(with_rates, key=lambda tick: tick.time, default=None)
    return Row(
        tuple(each.fit.rank for each in ranks),
        tuple(dict.fromkeys(each.fit.host for each in ranks if each.fit.host)),
        where,
        note,
        (min(batches), max(batches)) if batches else None,
        _median(each.rate for each in ranks),
        _median(each.loader_share for each in ranks),
        latest.learning_rates if latest else (),
        max(each.age for each in ranks),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _severity(row: Row) -> int:
    """How far to the top a row belongs; 0 comes first."""
    if row.where in (ENDINGS["finished"], ENDINGS["closed"]):
        return 4
    if row.where in (ENDINGS["failed"], ENDINGS["verdict"]) or row.note in ("lost", "silent"):
        return 0
    return {"behind": 1, "slow": 1, "slow loader": 2}.get(row.note, 3)

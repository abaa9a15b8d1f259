"""Who was slow: in a span, and on a host."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from countoff.core.messages import names_of
from countoff.report.facts.parts import NONE, Cell, Column, Table
from countoff.report.facts.spans import Key, is_evaluation, spans_of
from countoff.report.model import Run, Span
from countoff.report.words import duration

_NOISE_SECONDS = 0.01
"""Ranks that are no farther apart come at the same time."""
_SLOW_SECONDS, _SLOW_SHARE, _SLOW_TIMES = 1.0, 0.05, 1.5
"""A rank waits longer than others if it is by this many seconds, this share of the span, and as many times as long."""


@dataclass(frozen=True)
class Pace:
    """Who was slow in one span.

    Attributes:
        key: The span.
        is_evaluation: Whether it is an evaluation.
        seconds: Its length, as half of the ranks had it that have closed it; if none has, how long it lasted at least.
        closed: Whether a rank has closed it.
        spread_seconds: Seconds from the first rank at its end to the last; None with fewer than two ranks at its end.
        last: The rank that was last at its end; None if the spread is no more than clocks and noise explain.
        measured: Whether the waits for the loader were measured; some frameworks do not tell them of evaluations.
        waited: The rank whose loader waited longest.
        waited_seconds: Seconds that it waited.
        median_seconds: Seconds that half of the other ranks waited at least.
        slow: Ranks that waited clearly longer than most.
        paused: The rank with the longest pause in its own code or its loader, not in a collective; None without one.
        pause_seconds: Seconds of that pause.
        pause_is_outlier: Whether it is clearly longer than the longest ones of most ranks.
    """

    key: Key
    is_evaluation: bool
    seconds: float
    closed: bool
    spread_seconds: float | None
    last: int | None
    measured: bool
    waited: int
    waited_seconds: float
    median_seconds: float
    slow: tuple[int, ...]
    paused: int | None
    pause_seconds: float
    pause_is_outlier: bool


@dataclass(frozen=True)
class HostPace:
    """What one host's ranks have waited.

    Attributes:
        host: The host's name.
        ranks: Its ranks.
        loader_seconds: Seconds that one of its ranks waited for its loader, on average.
        loader_share: The same as a share of the time in train epochs and evaluations.
        last: Spans at whose end one of its ranks was the last.
        pause_seconds: Seconds of pauses of one of its ranks, on average.
    """

    host: str
    ranks: tuple[int, ...]
    loader_seconds: float
    loader_share: float
    last: int
    pause_seconds: float


def paces_of(run: Run) -> list[Pace]:
    """Who was slow in each span, in the order in which they began."""
    pauses = _own_pauses(run)
    return [_pace(run, key, spans, pauses) for key, spans in spans_of(run).items()]


def _pace(run: Run, key: Key, spans: Mapping[int, Span], pauses: Mapping[int, float]) -> Pace:
    ends = {rank: span.end for rank, span in spans.items() if span.end is not None}
    waited = max(spans, key=lambda rank: spans[rank].loader_seconds)
    others = [span.loader_seconds for rank, span in spans.items() if rank != waited]
    paused = {rank: pauses.get(id(span), 0.0) for rank, span in spans.items()}
    longest = max(paused, key=lambda rank: paused[rank])
    return Pace(
        key,
        is_evaluation=is_evaluation(spans),
        seconds=_lasted(run, spans),
        closed=bool(ends),
        spread_seconds=max(ends.values()) - min(ends.values()) if len(ends) > 1 else None,
        last=_last(run, ends),
        measured=spans[waited].is_measured,
        waited=waited,
        waited_seconds=spans[waited].loader_seconds,
        median_seconds=median(others) if others else 0.0,
        slow=slow_loaders(spans),
        paused=longest if paused[longest] else None,
        pause_seconds=paused[longest],
        pause_is_outlier=len(spans) > 1 and paused[longest] > _clearly_longer(spans, list(paused.values())),
    )


def hosts_of(run: Run, paces: Iterable[Pace]) -> list[HostPace]:
    """What the ranks of each host have waited, the one that waited longest first; not those without a name."""
    lasts = Counter(run.fits[pace.last].host for pace in paces if pace.last is not None)
    found: list[HostPace] = []
    for host, ranks in run.hosts.items():
        fits = [run.fits[rank] for rank in ranks]
        loader = sum(fit.loader_seconds for fit in fits)
        inside = sum(fit.span_seconds for fit in fits)
        pauses = sum(fit.pause_seconds for fit in fits)
        share = loader / inside if inside else 0.0
        found.append(HostPace(host, ranks, loader / len(fits), share, lasts[host], pauses / len(fits)))
    return sorted(found, key=lambda each: (-each.loader_seconds, each.host))


def slow_table(paces: Iterable[Pace]) -> Table:
    """Who was slow in each span, as a table."""
    columns = (
        Column("span"),
        Column("took", is_number=True),
        Column("first rank to last at its end", is_number=True),
        Column("last"),
        Column("waited longest for its loader"),
        Column("it waited", is_number=True),
        Column("the other ranks' median", is_number=True),
        Column("longest pause in its own code", is_number=True),
    )
    note = (
        "≠: clearly slower than most. A pause is a time of more than a second without a batch; its own code includes "
        "its loader, and not the wait for other ranks in a collective. A dash: none, or not measured."
    )
    return Table(columns, [(Cell(str(pace.key)), *_cells(pace)) for pace in paces], "Who is slow", note)


def _cells(pace: Pace) -> Iterator[Cell]:
    at_least = "" if pace.closed else "≥ "
    yield Cell(at_least + (duration(pace.seconds) if pace.closed or pace.seconds else ""))
    yield NONE if pace.spread_seconds is None else Cell(duration(pace.spread_seconds))
    yield NONE if pace.last is None else Cell(f"rank {pace.last}")
    if pace.measured:
        yield Cell(f"rank {pace.waited}") if pace.waited_seconds else NONE
        yield Cell(duration(pace.waited_seconds) + (" ≠" if pace.slow else ""), is_highlighted=bool(pace.slow))
        yield Cell(duration(pace.median_seconds))
    else:
        yield from 3 * [Cell("–", hint="not measured")]
    if pace.paused is None:
        yield NONE
    else:
        text = f"rank {pace.paused}: {duration(pace.pause_seconds)}"
        yield Cell(text + (" ≠" if pace.pause_is_outlier else ""), is_highlighted=pace.pause_is_outlier)


def hosts_table(hosts: Iterable[HostPace]) -> Table:
    """What the ranks of each host have waited, as a table."""
    columns = (
        Column("host"),
        Column("ranks"),
        Column("waited for loaders, per rank", is_number=True),
        Column("share of the time", is_number=True),
        Column("paused, per rank", is_number=True),
        Column("spans with its rank last", is_number=True),
    )
    rows = [
        (
            Cell(each.host),
            Cell(names_of(each.ranks)),
            Cell(duration(each.loader_seconds)),
            Cell(f"{100 * each.loader_share:.0f} %"),
            Cell(duration(each.pause_seconds)),
            Cell(str(each.last)),
        )
        for each in hosts
    ]
    return Table(columns, rows, "Hosts")


def slow_loaders(spans: Mapping[int, Span]) -> tuple[int, ...]:
    """The ranks that waited for their loader clearly longer than most in one span."""
    if len(spans) < 2:
        return ()
    least = _clearly_longer(spans, [span.loader_seconds for span in spans.values()])
    return tuple(rank for rank, span in spans.items() if span.loader_seconds > least)


def _clearly_longer(spans: Mapping[int, Span], seconds: Sequence[float]) -> float:
    """The seconds above which a rank's are clearly longer than those of most ranks in a span."""
    usual = median(seconds)
    length = median(span.last - span.begin for span in spans.values())
    return max(usual + _SLOW_SECONDS, usual + _SLOW_SHARE * length, _SLOW_TIMES * usual)


def _last(run: Run, ends: Mapping[int, float]) -> int | None:
    """The rank that was last; None if it is not clear."""
    if len(ends) < 2:
        return None
    first, last = min(ends, key=lambda rank: ends[rank]), max(ends, key=lambda rank: ends[rank])
    fits = run.fits[first], run.fits[last]
    error = sum(fit.clock_error or 0.0 for fit in fits) if fits[0].host != fits[1].host else 0.0
    return last if ends[last] - ends[first] > max(_NOISE_SECONDS, error) else None


def _own_pauses(run: Run) -> dict[int, float]:
    """Seconds of the longest pause in a rank's own code or its loader, by the identity of the innermost span."""
    found: dict[int, float] = {}
    for fit in run.fits.values():
        begins = [span.begin for span in fit.spans]
        for pause in fit.pauses:
            if pause.where == "collective":
                continue
            for span in reversed(fit.spans[: bisect_right(begins, pause.begin)]):
                if span.end is None or pause.begin < span.end:
                    found[id(span)] = max(found.get(id(span), 0.0), pause.seconds)
                    break
                if not span.depth:
                    break
    return found


def _lasted(run: Run, spans: Mapping[int, Span]) -> float:
    """Seconds that a span lasted; if no rank has closed it, seconds that one of them was in it at least."""
    closed = [span.end - span.begin for span in spans.values() if span.end is not None]
    return median(closed) if closed else max(run.fits[rank].last - span.begin for rank, span in spans.items())

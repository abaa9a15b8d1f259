"""What the lanes of the page show: which ranks have one, and the blocks in each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from countoff.core.words import count_of
from countoff.report.facts.classes import RankClass, classes_of
from countoff.report.model import Fit, Pause, Run, Span, Tick, Trace
from countoff.report.ranks import label_of
from countoff.report.words import duration

MOST_LANES = 256
_MOST_BLOCKS = 40_000
"""Of train epochs on a page, and of evaluations: a browser draws so many at once while somebody zooms."""
_FEWEST_TICKS = 24
_PLACES = {"loader": "the loader", "collective": "a collective", "code": "its own code"}


class Block(NamedTuple):
    """A part of a train epoch or an evaluation in a lane, as long as one tick or a few.

    Attributes:
        lane: The index of the lane.
        left: When it begins, in seconds since the epoch.
        right: When it ends.
        span: The span.
        batches: Batches of the span until its end.
        steps: Optimizer steps of the training until its end.
        rate: Batches per second.
        share: The share of the time that the rank waited for its loader.
        measured: Whether this was measured; some frameworks do not tell it of evaluations.
    """

    lane: int
    left: float
    right: float
    span: str
    batches: int
    steps: int
    rate: float
    share: float
    measured: bool


class NotedBlock(NamedTuple):
    """A pause in a lane, or the rest of a span that was not closed.

    Attributes:
        lane: The index of the lane.
        left: When it begins, in seconds since the epoch.
        right: When it ends.
        note: What it was, in words.
    """

    lane: int
    left: float
    right: float
    note: str


@dataclass(frozen=True)
class Lane:
    """One lane.

    Attributes:
        ranks: Its ranks; the first of them is drawn.
        label: Their names.
        hosts: The names of their hosts, on one line.
        odd: Why they are not like most ranks; empty for these.
        fits: What the first of them has recorded in each run.
        ends: When it left each run; where its trace has no end, when that was known at the latest.
        summary: The lane in words.
    """

    ranks: tuple[int, ...]
    label: str
    hosts: str
    odd: str
    fits: tuple[Fit, ...]
    ends: tuple[float, ...]
    summary: str


def lanes_of(trace: Trace) -> list[Lane]:
    """The lanes of a trace: one per rank, or per class of ranks if there are too many. The odd ones come first."""
    if not trace.runs:
        return []
    run = trace.runs[-1]
    classes = classes_of(run)
    if run.world_size <= MOST_LANES:
        classes = [
            RankClass((rank,), each.reasons, run.fits.get(rank), (run.fits[rank].host,) if rank in run.fits else ())
            for each in classes
            for rank in each.ranks
        ]
        # Those that are like most are in order, also where they are several classes, as with `uneven_train`.
        classes.sort(key=lambda each: (not each.reasons, () if each.reasons else each.ranks))
    rest = classes[MOST_LANES - 1 :]
    if len(rest) > 1:
        ranks = tuple(sorted(rank for each in rest for rank in each.ranks))
        classes[MOST_LANES - 1 :] = [RankClass(ranks, ("other classes",), run.fits.get(ranks[0]), ())]
    return [_lane(trace.runs, each) for each in classes]


def _lane(runs: Sequence[Run], ranks: RankClass) -> Lane:
    first = ranks.ranks[0]
    fits = tuple(run.fits[first] for run in runs if first in run.fits)
    hosts = [host for host in ranks.hosts if host]
    place = f"{hosts[0]} … {hosts[-1]} ({len(hosts)})" if len(hosts) > 2 else ", ".join(hosts)
    label, odd = label_of(ranks.ranks), "; ".join(ranks.reasons)
    ends = tuple(_end(run, run.fits[first]) for run in runs if first in run.fits)
    verdict = runs[-1].verdict
    lost = verdict is not None and verdict.kind == "LostRank" and first in verdict.ranks
    summary = _summary(label, place, odd, ranks, fits, lost=lost)
    return Lane(ranks.ranks, label, place, odd, fits, ends, summary)


def _end(run: Run, fit: Fit) -> float:
    """When a rank left. If it was killed within a span, nothing tells: at the verdict, or when the others had ended."""
    if fit.ending is not None or not fit.open:
        return fit.last
    latest = run.verdict.time if run.verdict else run.end
    return min(max(fit.last, latest), run.end)


def _ending(fit: Fit, *, lost: bool) -> str:
    """How a fit has ended, in words."""
    if fit.ending is None:
        return "its trace has no end: killed, or crashed" if lost else "its trace has no end: killed, or still running"
    if fit.ending.how == "signal":
        return f"ended by {fit.ending.what or 'a signal'}"
    return fit.ending.how + (f" ({fit.ending.what})" if fit.ending.what else "")


def _summary(label: str, place: str, odd: str, ranks: RankClass, fits: Sequence[Fit], *, lost: bool) -> str:
    parts = [f"{label}{f' on {place}' if place else ''}"]
    if len(ranks.ranks) > 1:
        parts[0] += f" (drawn: rank {ranks.ranks[0]})"
    if odd:
        parts.append(odd)
    for fit in fits[-1:]:
        epochs = sum(not span.is_evaluation for span in fit.spans)
        parts.append(f"{count_of(epochs, 'epoch')}, {count_of(fit.steps, 'step')}")
        if fit.spans:
            last = fit.open[-1] if fit.open else fit.spans[-1]
            counted = f": {count_of(last.batches, 'batch')}" if last.batches or last.end is not None else ""
            parts.append(f"last in {last.name}{counted}")
        waited = sum(span.loader_seconds for span in fit.spans)
        parts.append(f"waited {duration(waited)} for the loader")
        if fit.pause_count:
            parts.append(f"{count_of(fit.pause_count, 'pause')} of {duration(fit.pause_seconds)} in all")
        parts.append(_ending(fit, lost=lost))
    return "; ".join(parts)


def blocks_of(lanes: Sequence[Lane], *, evaluations: bool) -> list[Block]:
    """The blocks of train epochs, or those of evaluations, in all lanes."""
    most = max(_FEWEST_TICKS, _MOST_BLOCKS // max(1, len(lanes)))
    found: list[Block] = []
    for index, lane in enumerate(lanes):
        for fit in lane.fits:
            every = 1 + sum(len(span.ticks) for span in fit.spans) // most
            for span in fit.spans:
                if span.is_evaluation == evaluations:
                    found += _blocks(index, fit, span, every)
    return found


def pauses_of(lanes: Sequence[Lane], where: str) -> list[NotedBlock]:
    """The pauses in all lanes that were in the loader, in a collective or in other code."""
    return [
        NotedBlock(index, pause.begin, pause.begin + pause.seconds, _note(pause))
        for index, lane in enumerate(lanes)
        for fit in lane.fits
        for pause in fit.pauses
        if pause.where == where
    ]


def rests_of(lanes: Sequence[Lane], *, certain: bool, evaluations: bool) -> list[NotedBlock]:
    """What ticks do not cover of spans that were not closed, in all lanes.

    Args:
        lanes: The lanes.
        certain: The rest until the rank's last line; otherwise, from there to the time at which it was gone.
        evaluations: Those of evaluations; otherwise, those of train epochs.
    """
    found: list[NotedBlock] = []
    for index, lane in enumerate(lanes):
        for fit, end in zip(lane.fits, lane.ends, strict=True):
            for span in fit.open:
                if span.is_evaluation != evaluations:
                    continue
                counted = f": at least {count_of(span.batches, 'batch')}" if span.batches else ""
                said = f"{span.name}, not closed{counted}"
                if certain:
                    pieces = _pieces(span.last, fit.last, _inner(fit, span))
                    found += (NotedBlock(index, *piece, said) for piece in pieces)
                elif span is fit.open[-1] and fit.last < end:
                    found.append(NotedBlock(index, fit.last, end, f"{said}; no more data from this rank"))
    return found


def _note(pause: Pause) -> str:
    at = f", at {pause.frames[0]}" if pause.frames else ""
    return f"{duration(pause.seconds)} without a batch, in {_PLACES[pause.where]}{at}"


def _blocks(lane: int, fit: Fit, span: Span, every: int) -> Iterator[Block]:
    """The blocks of a span; not where other spans were open within it."""
    inner = _inner(fit, span)
    before = span.points[0]
    for tick in _thinned(span, every):
        pieces = list(_pieces(before.time, tick.time, inner))
        seconds = sum(right - left for left, right in pieces)
        if not seconds:
            continue
        rate = max(0.0, (tick.batches - before.batches) / seconds)
        share = min(1.0, max(0.0, (tick.loader_seconds - before.loader_seconds) / seconds))
        for left, right in pieces:
            yield Block(lane, left, right, span.name, tick.batches, tick.steps, rate, share, span.is_measured)
        before = tick


def _inner(fit: Fit, span: Span) -> list[Span]:
    """The spans that were opened within a span."""
    return [each for each in fit.spans if each.depth == span.depth + 1 and each.begin >= span.begin]


def _pieces(left: float, right: float, inner: Sequence[Span]) -> Iterator[tuple[float, float]]:
    """What is left of a time without the spans within it."""
    for span in inner:
        if left <= span.begin < right:
            if left < span.begin:
                yield left, span.begin
            left = right if span.end is None else span.end
    if left < right:
        yield left, right


def _thinned(span: Span, every: int) -> Sequence[Tick]:
    """Every so many ticks, and the last one."""
    ticks = span.ticks[every - 1 :: every]
    return [*ticks, *span.ticks[-1:]] if ticks[-1:] != span.ticks[-1:] else ticks

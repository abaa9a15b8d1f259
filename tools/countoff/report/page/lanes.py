"""The lanes of the page: which ranks have one, and what is drawn in each, as shapes that the template writes as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from countoff.core.messages import count_of
from countoff.report.facts.classes import RankClass, class_row, classes_of
from countoff.report.model import Fit, Pause, Run, Span, Trace
from countoff.report.page.axis import TimeAxis
from countoff.report.words import clock, duration

MOST_LANES = 256
_MOST_SHAPES, _FEWEST_OF_A_LANE = 12_000, 24
"""Shapes of one kind on a page, and how many of them each lane may have at least: a page of many lanes stays small."""
_LEAST_SHARE, _LEAST_WIDTH = 0.05, 0.08
"""A smaller share of waiting for the loader is not drawn; and no shape is narrower, in percent."""
_PLACES = {"loader": "the loader", "collective": "a collective", "code": "its own code"}

Piece = tuple[float, float]
"""From when until when, in seconds since the epoch."""


class Shape(NamedTuple):
    """A block in a lane.

    Attributes:
        kind: What it is, as the style sheet and the legend name it.
        left: Where it begins, in percent of the lane.
        width: How wide it is, in percent.
        text: What it says.
    """

    kind: str
    left: float
    width: float
    text: str


@dataclass(frozen=True)
class Lane:
    """One lane.

    Attributes:
        label: The names of its ranks, the first of which is drawn.
        host: The names of their hosts, on one line.
        reasons: Why they are not like most ranks; empty for these.
        text: All that the table of ranks says of them.
        shapes: What is drawn, from the back to the front.
        waits: A path around the shares of time that it waited for its loader, in a lane of 1,000 by 100.
        crosses: Where it left by a verdict or an exception, or its trace has no end, in percent.
    """

    label: str
    host: str
    reasons: str
    text: str
    shapes: Sequence[Shape]
    waits: str
    crosses: Sequence[float]


def lanes_of(trace: Trace, axis: TimeAxis) -> list[Lane]:
    """The lanes of a trace: one per rank, or per class of ranks if there are too many. The outliers come first."""
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
    most = max(_FEWEST_OF_A_LANE, _MOST_SHAPES // len(classes))
    return [_lane(trace.runs, each, axis, most) for each in classes]


def _lane(runs: Sequence[Run], ranks: RankClass, axis: TimeAxis, most: int) -> Lane:
    label, host, reasons, *more = (cell.text for cell in class_row(runs[-1], ranks))
    names = ("", "on", "", "got to", "waited for the loader", "end:")
    said = zip(names, (label, host, reasons, *more), strict=True)
    text = "; ".join(f"{name} {cell}".strip() for name, cell in said if cell != "–")
    fits = [(run, run.fits[ranks.ranks[0]]) for run in runs if ranks.ranks[0] in run.fits]
    shapes = [shape for run, fit in fits for shape in _shapes(run, fit, axis, most)]
    waits = "".join(_waits(fit, axis, most) for _, fit in fits)
    crosses = [axis.place(_left(run, fit)) for run, fit in fits if _ends_badly(fit)]
    return Lane(label, "" if host == "–" else host, "" if reasons == "–" else reasons, text, shapes, waits, crosses)


def _ends_badly(fit: Fit) -> bool:
    return fit.ending is None or fit.ending.how in ("verdict", "failed")


def _left(run: Run, fit: Fit) -> float:
    """When a rank left. If it was killed within a span, nothing tells: at the verdict, or when the others had ended."""
    if fit.ending is not None or not fit.open:
        return fit.last
    latest = run.verdict.time if run.verdict else run.end
    return min(max(fit.last, latest), run.end)


def _shapes(run: Run, fit: Fit, axis: TimeAxis, most: int) -> list[Shape]:
    """What is drawn of one fit: train epochs, evaluations, what is uncertain, pauses; not more than so many of each."""

    def shape(kind: str, left: float, right: float, text: str) -> Shape:
        place = axis.place(left)
        times = f"{text}; {clock(left)} – {clock(right)}"
        return Shape(kind, place, max(_LEAST_WIDTH, axis.place(right) - place), times)

    pieces = [
        (piece, span)
        for span, inner in _nested(fit)
        for piece in _pieces(span.begin, fit.last if span.end is None else span.end, inner)
    ]
    train = [each for each in pieces if not each[1].is_evaluation]
    every = 1 + len(train) // most
    shapes = [shape("train", *_joined(train[at : at + every])) for at in range(0, len(train), every)]
    evaluations = [each for each in pieces if each[1].is_evaluation]
    longest = sorted(evaluations, key=lambda each: each[0][0] - each[0][1])[:most]
    shapes += [shape("evaluation", *piece, _said(span)) for piece, span in longest]
    if fit.open and fit.last < (end := _left(run, fit)):
        shapes.append(shape("unknown", fit.last, end, f"{_said(fit.open[-1])}; no more data from this rank"))
    pauses = sorted(fit.pauses, key=lambda pause: -pause.seconds)[:most]
    shapes += [shape(each.where, each.begin, each.begin + each.seconds, _paused(each)) for each in pauses]
    return shapes


def _joined(pieces: Sequence[tuple[Piece, Span]]) -> tuple[float, float, str]:
    """Train epochs that are too many to be drawn one by one, from the first to the last."""
    (left, _), first = pieces[0]
    (_, right), last = pieces[-1]
    return left, right, _said(first) if first is last else f"{first.name} – {_said(last)}"


def _said(span: Span) -> str:
    """A span in words."""
    counted = f": {count_of(span.batches, 'batch')}, {count_of(span.steps, 'step')}" if span.batches else ""
    if span.end is None:
        return f"{span.name}, not closed{counted and f': at least{counted[1:]}'}"
    waited = f"; waited {duration(span.loader_seconds)} for the loader" if span.is_measured else ""
    return f"{span.name}{counted}{waited}"


def _paused(pause: Pause) -> str:
    at = f", at {pause.frames[0]}" if pause.frames else ""
    return f"{duration(pause.seconds)} without a batch, in {_PLACES[pause.where]}{at}"


def _nested(fit: Fit) -> Iterator[tuple[Span, list[Span]]]:
    """The spans of a rank, each with those that were opened right within it."""
    for at, span in enumerate(fit.spans, 1):
        within = takewhile(lambda each, depth=span.depth: each.depth > depth, fit.spans[at:])
        yield span, [each for each in within if each.depth == span.depth + 1]


def _pieces(left: float, right: float, inner: Sequence[Span]) -> Iterator[Piece]:
    """What is left of a time without the spans within it."""
    for span in inner:
        if left <= span.begin < right:
            if left < span.begin:
                yield left, span.begin
            left = right if span.end is None else span.end
    if left < right:
        yield left, right


def _waits(fit: Fit, axis: TimeAxis, most: int) -> str:
    """A path around the shares of time that a rank waited for its loader, each as long as one tick or a few."""
    blocks: list[tuple[float, float, int]] = []
    every = 1 + sum(len(span.ticks) for span in fit.spans) // most
    for left, right, share in (block for nested in _nested(fit) for block in _shares(*nested, every)):
        x, until, height = 10 * axis.place(left), 10 * axis.place(right), round(20 * share) * 5
        if blocks and blocks[-1][1:] == (x, height):
            x = blocks.pop()[0]
        blocks.append((x, until, height))
    return "".join(f"M{x:.4g} 100V{100 - height}H{until:.4g}V100z" for x, until, height in blocks if height)


def _shares(span: Span, inner: Sequence[Span], every: int) -> Iterator[tuple[float, float, float]]:
    """From when until when a rank waited for which share of the time; not where other spans were open within."""
    before = span.points[0]
    for tick in [*span.ticks[every - 1 : -1 : every], *span.ticks[-1:]]:
        pieces = list(_pieces(before.time, tick.time, inner))
        seconds = sum(right - left for left, right in pieces)
        if not seconds:
            continue
        share = min(1.0, (tick.loader_seconds - before.loader_seconds) / seconds)
        yield from ((left, right, share if share >= _LEAST_SHARE else 0.0) for left, right in pieces)
        before = tick

"""The learning rate by optimizer step, and where ranks have different ones.

Ranks write ticks at different steps, so ticks prove no difference. Ranks are compared at points where all have done the
same: the start and the end of a train epoch, and the points of which a `LearningRateMismatch` tells.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from countoff.core.checks.learning_rates import LEARNING_RATE_MISMATCH
from countoff.core.messages import names_of, number_of
from countoff.core.verdict import Verdict
from countoff.report.facts.parts import NONE, Cell, Column, Curve, Lines, Part, RateLine, Table
from countoff.report.model import Fit, Run, Tick
from countoff.report.ranks import outlier_ranks, ranks_by, ranks_in
from countoff.report.words import number

_MOST_RATES, _MOST_POINTS = 8, 300
"""Lines of a run, and points of a line."""
_DIGITS = 6
"""Those that a trace has."""

Rates = tuple[float, ...]


class ComparedPoint(NamedTuple):
    """A point at which the ranks' learning rates are compared.

    Attributes:
        step: The optimizer steps until then.
        words: What it is.
    """

    step: int
    words: str


def rate_lines_of(run: Run) -> list[RateLine]:
    """A line for each parameter group, as the lowest rank that knows it has recorded it.

    Where ranks have different learning rates, each group of ranks has its lines.
    """
    lines: list[RateLine] = []
    differing = _groups(_differing(run))[:_MOST_RATES]
    for ranks in differing or [()]:
        points = _points(run, ranks)
        steps = sorted(points)
        most = _MOST_RATES // max(1, len(differing))
        groups = min(most, *(len(rates) for rates in points.values())) if points else 0
        lines += [RateLine(steps, [points[step][group] for step in steps], ranks) for group in range(groups)]
    return lines


def rates_shown(run: Run, lines: Sequence[RateLine]) -> list[Part]:
    """The learning rates as a curve, or as a line where they never change; and the table where ranks differ."""
    parts: list[Part] = []
    apart = rates_table(run)
    different = {rate for line in lines for rate in line.rates}
    if len(different) > 1:
        parts.append(Curve(lines, run.horizons))
    elif different and not apart.rows:
        parts.append(Lines([f"Constant: {number(*different)}"]))
    if run.horizons:
        parts.append(Lines([f"The schedule would have ended at step {horizon:,}." for horizon in run.horizons]))
    return [*parts, apart] if apart.rows else parts


def rates_table(run: Run) -> Table:
    """The learning rates of each group of ranks where they differ first and last; no rows where they never do."""
    points = _differing(run)
    shown = list(dict.fromkeys([min(points), max(points)])) if points else []
    outliers = {point: outlier_ranks(points[point]) for point in shown}
    columns = [Column("ranks"), *(Column(point.words, is_number=True) for point in shown)]
    rows = [
        [Cell(names_of(ranks)), *(_cell(points[point].get(ranks[0]), ranks[0] in outliers[point]) for point in shown)]
        for ranks in _groups(points)
    ]
    return Table(columns, rows, "The ranks' learning rates differ")


def ranks_with_other_rates(run: Run) -> set[int]:
    """The ranks that had other learning rates than most somewhere."""
    return {rank for rates in _differing(run).values() for rank in outlier_ranks(rates)}


def _cell(rates: Rates | None, outlier: bool) -> Cell:
    if rates is None:
        return NONE
    words = ", ".join(number_of(rate, _DIGITS) for rate in rates[:_MOST_RATES])
    return Cell(f"≠ {words}" if outlier else words, outlier)


def _groups(points: Mapping[ComparedPoint, Mapping[int, Rates]]) -> list[tuple[int, ...]]:
    """The ranks that had the same learning rates at all points where ranks differ; the fewest come first."""
    ranks = sorted({rank for rates in points.values() for rank in rates})
    groups = ranks_by({rank: tuple(rates.get(rank) for rates in points.values()) for rank in ranks})
    return sorted(groups.values(), key=lambda group: (len(group), group))


def _differing(run: Run) -> dict[ComparedPoint, dict[int, Rates]]:
    """The points at which ranks had different learning rates, in order, with the rates of each rank there."""
    found: defaultdict[ComparedPoint, dict[int, Rates]] = defaultdict(dict)
    for rank, fit in run.fits.items():
        for point, rates in _compared(fit):
            found[point][rank] = rates
    verdicts = [("the verdict", run.verdict), *(("the warning", warning) for warning in run.warnings)]
    for words, verdict in verdicts:
        if verdict is not None and verdict.kind == LEARNING_RATE_MISMATCH.name:
            step = run.steps_before + max(_numbers(verdict, "steps"), default=0)
            found[ComparedPoint(step, f"at {words}")].update(_rates_in(verdict, run))
    return {point: rates for point, rates in sorted(found.items()) if _differ(rates)}


def _differ(rates: Mapping[int, Rates]) -> bool:
    """Whether ranks with as many parameter groups have other rates; the stages of a pipeline have other groups."""
    values = set(rates.values())
    return len(values) > len({len(value) for value in values})


def _compared(fit: Fit) -> Iterator[tuple[ComparedPoint, Rates]]:
    """The learning rates of a rank at the start and the end of each train epoch, as far as they are known."""
    for span in fit.spans:
        if span.is_evaluation:
            continue
        points = [("start", span.start), ("end", span.ticks[-1] if span.end is not None and span.ticks else None)]
        for words, point in points:
            if point is not None and point.learning_rates:
                yield ComparedPoint(point.steps, f"step {point.steps:,}, {words} of {span.name}"), point.learning_rates


def _rates_in(verdict: Verdict, run: Run) -> Iterator[tuple[int, Rates]]:
    """The learning rates of ranks in the table of a verdict."""
    for row in verdict.rows:
        try:
            rates = tuple(float(rate) for rate in str(row.get("rate", "")).split(", "))
        except ValueError:
            continue  # a dash: this rank has not been there
        yield from ((rank, rates) for rank in ranks_in(row.get("rank"), run.fits))


def _numbers(verdict: Verdict, column: str) -> list[int]:
    return [row[column] for row in verdict.rows if isinstance(row.get(column), int)]


def _points(run: Run, ranks: Sequence[int]) -> dict[int, Rates]:
    """The learning rates of a run by step, from the lowest of some ranks that knows them; no ranks: of all."""
    fits = [fit for rank, fit in run.fits.items() if not ranks or rank in ranks]
    ticks = next((ticks for fit in fits if (ticks := _rated(fit))), [])
    every = 1 + len(ticks) // _MOST_POINTS
    return {tick.steps: tick.learning_rates for tick in [*ticks[::every], *ticks[-1:]]}


def _rated(fit: Fit) -> list[Tick]:
    """How far a rank was in its train epochs, where it knew its learning rates."""
    spans = [span for span in fit.spans if not span.is_evaluation]
    return [point for span in spans for point in span.points if point.learning_rates]

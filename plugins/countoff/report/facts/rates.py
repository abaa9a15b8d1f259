"""The learning rate by optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from countoff.report.model import Run

_MOST_RATES, _MOST_POINTS = 8, 2_000
"""Parameter groups that have a line, and points of a line."""


class RateLine(NamedTuple):
    """The learning rates of one parameter group.

    Attributes:
        steps: The optimizer steps, ascending.
        rates: The learning rate at each of them.
    """

    steps: list[int]
    rates: list[float]


def rate_lines_of(runs: Sequence[Run]) -> list[RateLine]:
    """A line for each parameter group of each training from its start, as the lowest rank that knows it recorded it.

    A run that resumes goes on with the line of the run before, where its checkpoint was written.
    """
    trainings: list[dict[int, tuple[float, ...]]] = []
    for run in runs:
        before, points = run.steps_before, _points(run)
        if before and trainings:  # what the run before did after the checkpoint is not part of the training
            trainings[-1] = {step: rates for step, rates in trainings[-1].items() if step <= before} | points
        elif points:
            trainings.append(points)
    lines: list[RateLine] = []
    for points in trainings:
        steps = sorted(points)
        groups = min(_MOST_RATES, *(len(rates) for rates in points.values())) if points else 0
        lines += [RateLine(steps, [points[step][group] for step in steps]) for group in range(groups)]
    return lines


def only_rate(lines: Sequence[RateLine]) -> float | None:
    """The learning rate if it never changes, and None otherwise."""
    found = {rate for line in lines for rate in line.rates}
    return found.pop() if len(found) == 1 else None


def _points(run: Run) -> dict[int, tuple[float, ...]]:
    """The learning rates by step, from the lowest rank that knows them."""
    for fit in run.fits.values():
        spans = [span for span in fit.spans if not span.is_evaluation]
        ticks = [point for span in spans for point in span.points if point.learning_rates]
        if ticks:
            every = 1 + len(ticks) // _MOST_POINTS
            return {tick.steps: tick.learning_rates for tick in [*ticks[::every], ticks[-1]]}
    return {}

"""The learning rate as a picture: lines in a field of 1,000 by 100, and what is written at its edges."""

from __future__ import annotations

from typing import NamedTuple

from countoff.core.messages import number_of
from countoff.report.facts.parts import Curve
from countoff.report.ranks import label_of

_COLORS = 5
"""Those of the style sheet."""


class Line(NamedTuple):
    """A line: the number of its colour, its points, and whose it is."""

    color: int
    points: str
    label: str


class Picture:
    """A curve as the template draws it.

    Args:
        curve: The curve.

    Attributes:
        lines: The lines.
        horizons: Where schedules would have ended, in percent from the left.
        top: The learning rate at the upper edge.
        bottom: That at the lower edge.
        first: The step at the left edge.
        last: That at the right edge.
        text: The picture in words.
    """

    def __init__(self, curve: Curve) -> None:
        rates = [rate for line in curve.lines for rate in line.rates]
        steps = [step for line in curve.lines for step in line.steps]
        self._low, self._high = min(0.0, *rates), max(rates)
        self._begin, self._end = min(steps), max(*steps, *curve.horizons, min(steps) + 1)
        self.lines = [
            Line(
                number % _COLORS,
                " ".join(self._point(*each) for each in zip(line.steps, line.rates, strict=True)),
                label_of(line.ranks) if line.ranks else "",
            )
            for number, line in enumerate(curve.lines)
        ]
        self.horizons = [self._x(step) for step in curve.horizons]
        self.top, self.bottom = number_of(self._high), number_of(self._low)
        self.first, self.last = f"step {self._begin:,}", f"step {self._end:,}"
        self.text = (
            f"The learning rate from step {steps[0]:,}, where it is {number_of(rates[0])}, to step {steps[-1]:,}, "
            f"where it is {number_of(rates[-1])}; it is {self.top} at most"
        )

    def _x(self, step: float) -> float:
        return 100 * (step - self._begin) / (self._end - self._begin)

    def _point(self, step: int, rate: float) -> str:
        height = (rate - self._low) / (self._high - self._low or 1.0)
        return f"{10 * self._x(step):.5g},{100 - 100 * height:.4g}"

"""The time axis of the lanes: where times are on it, and what is written there.

Long times between runs, in which nothing ran, are cut out of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from countoff.report.model import Run
from countoff.report.words import clock, duration

_MARKED_SHARE, _KEPT_SHARE = 0.01, 0.04
"""Shares of the time in which something ran: a shorter gap is not marked, and of a longer one so much is left."""
_CUT_SHARE = 0.1
"""A gap longer than that is cut."""
_SHORTEST = 1e-3
"""Seconds that the axis has at least."""
_SMALL = [each * unit for unit in (0.001, 0.01, 0.1, 1.0) for each in (1, 2, 5)]
_LARGE = [10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 10_800, 21_600, 43_200]
_STEPS = [*_SMALL, *_LARGE, *(86_400.0 * days for days in (1, 2, 7, 30, 90, 365))]
"""Seconds from one label to the next."""
_CHARACTER = 2.1
"""Percent of the axis that a character of a label takes on the screen of a telephone."""


class Label(NamedTuple):
    """A text on the axis: its place in percent, which of its ends is there, and what it says."""

    place: float
    anchor: str
    text: str

    @property
    def bounds(self) -> tuple[float, float]:
        """From where to where it is."""
        begin = self.place - {"start": 0.0, "middle": 0.5, "end": 1.0}[self.anchor] * _CHARACTER * len(self.text)
        return begin, begin + _CHARACTER * len(self.text)


@dataclass(frozen=True)
class Gap:
    """A time between two runs.

    Attributes:
        begin: When the last rank of the runs before left, in seconds since the epoch.
        end: When the first rank of the next run began.
        cut: Seconds of it that the axis leaves out.
    """

    begin: float
    end: float
    cut: float

    @property
    def words(self) -> str:
        """What it is, in words."""
        return f"{duration(self.end - self.begin)} between runs"


def gaps_of(runs: Sequence[Run]) -> list[Gap]:
    """The gaps between runs that are worth a sync point, in the order of time."""
    found: list[tuple[float, float]] = []
    ordered = sorted(runs, key=lambda run: run.begin)
    until, ran = ordered[0].begin, 0.0
    for run in ordered:
        if run.begin > until:
            found.append((until, run.begin))
        ran += max(0.0, run.end - max(until, run.begin))
        until = max(until, run.end)
    marked = [(begin, end) for begin, end in found if end - begin > _MARKED_SHARE * ran]
    return [Gap(begin, end, _cut(end - begin, ran)) for begin, end in marked]


def _cut(seconds: float, ran: float) -> float:
    """Seconds to leave out of a gap."""
    return seconds - _KEPT_SHARE * ran if seconds > _CUT_SHARE * ran else 0.0


class TimeAxis:
    """Places times on an axis from which parts of gaps are cut. What it places must not lie within a gap.

    Args:
        runs: The runs that it has; at least one.

    Attributes:
        gaps: The gaps between them, in the order of time.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self.gaps = gaps_of(runs)
        self._begin, self._end = min(run.begin for run in runs), max(run.end for run in runs)
        self._ends = [gap.end for gap in self.gaps]
        self._cut = [0.0, *accumulate(gap.cut for gap in self.gaps)]
        self._seconds = max(_SHORTEST, self._end - self._begin - self._cut[-1])

    def place(self, time: float) -> float:
        """Where a time is, in percent from the left."""
        seconds = time - self._begin - self._cut[bisect_right(self._ends, time)]
        return min(100.0, max(0.0, 100 * seconds / self._seconds))

    def times(self) -> list[Label]:
        """Round times in UTC, as many as have room."""
        step = next((step for step in _STEPS if self._fits(step)), _STEPS[-1])
        bounds = [self._begin, *(bound for gap in self.gaps for bound in (gap.begin, gap.end)), self._end]
        labels: list[Label] = []
        for begin, end in list(pairwise(bounds))[::2]:
            first = -(-begin // step)
            number = int((end - first * step) / step + 1)
            labels += (_label(self.place(time), clock(time, step)) for time in _from(first, step, number))
        return list(apart(sorted(labels, key=lambda label: label.anchor != "middle")))

    def _fits(self, step: float) -> bool:
        """Whether labels so many seconds apart have room side by side."""
        return 100 * step / self._seconds > _CHARACTER * len(clock(self._begin, step))

    def gap_labels(self) -> list[Label]:
        """What stands at the gaps."""
        return [_label((self.place(gap.begin) + self.place(gap.end)) / 2, gap.words) for gap in self.gaps]

    def labels(self, texts: Sequence[tuple[float, str]]) -> list[Label]:
        """Texts at their times."""
        return [_label(self.place(time), text) for time, text in texts]


def _from(first: float, step: float, number: int) -> Iterator[float]:
    return (step * (first + each) for each in range(number))


def _label(place: float, text: str) -> Label:
    half = _CHARACTER * len(text) / 2
    return Label(place, "start" if place < half else "end" if place > 100 - half else "middle", text)


def apart(labels: Sequence[Label]) -> Iterator[Label]:
    """Those of some labels that have room, the first ones before the later ones."""
    shown: list[tuple[float, float]] = []
    for label in labels:
        begin, end = label.bounds
        if all(end < left or right < begin for left, right in shown):
            shown.append(label.bounds)
            yield label

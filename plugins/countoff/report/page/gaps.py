"""The times between runs in which nothing ran: the page cuts the long ones out of its time axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from countoff.report.model import Run
from countoff.report.words import duration

_MARKED_SHARE, _KEPT_SHARE = 0.01, 0.04
"""Shares of the time in which something ran: a shorter gap is not marked, and of a longer one so much is left."""
_CUT_SHARE = 0.1
"""A gap longer than that is cut."""
_HOUR, _MINUTE = 3_600.0, 60.0


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
    """The gaps between runs that are worth a mark, in the order of time."""
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
    """Seconds to leave out of a gap: whole minutes or hours, so that the labels of the axis stay round."""
    if seconds <= _CUT_SHARE * ran:
        return 0.0
    unit = _HOUR if ran > 2 * _HOUR else _MINUTE
    return max(0.0, (seconds - _KEPT_SHARE * ran) // unit * unit)


class TimeAxis:
    """Places times on an axis from which parts of gaps are cut. What it places must not lie within a gap.

    Args:
        gaps: The gaps, in the order of time.

    Attributes:
        gaps: The gaps.
    """

    def __init__(self, gaps: Sequence[Gap] = ()) -> None:
        self.gaps = gaps
        self._ends = np.array([gap.end for gap in gaps], dtype="f8")
        self._cut = np.concatenate([[0.0], np.cumsum([gap.cut for gap in gaps])])

    @property
    def is_cut(self) -> bool:
        """Whether anything is cut."""
        return bool(self._cut[-1])

    @property
    def steps(self) -> list[tuple[float, float]]:
        """For each gap, the place of its end and the milliseconds that are left out at it."""
        return [(self.place(gap.end), 1000 * gap.cut) for gap in self.gaps if gap.cut]

    def place(self, time: float) -> float:
        """Where a time is on the axis, in milliseconds."""
        return float(self.places([time])[0])

    def places(self, times: Sequence[float]) -> Any:
        """Where times are on the axis, in milliseconds, as an array."""
        seconds = np.array(times, dtype="f8")
        return 1000 * (seconds - self._cut[np.searchsorted(self._ends, seconds, side="right")])

"""The spans of a run: each with all ranks that were in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from countoff.report.model import Run, Span


class Key(NamedTuple):
    """One span of all ranks: its name, and how many spans of this name came before it."""

    name: str
    number: int

    def __str__(self) -> str:
        return f"{self.name} ({self.number + 1})" if self.number else self.name


def spans_of(run: Run) -> dict[Key, dict[int, Span]]:
    """The spans of a run, each with the ranks that were in it, in the order in which they began."""
    found: dict[Key, dict[int, Span]] = {}
    for rank, fit in run.fits.items():
        numbers: Counter[str] = Counter()
        for span in fit.spans:
            found.setdefault(Key(span.name, numbers[span.name]), {})[rank] = span
            numbers[span.name] += 1
    return dict(sorted(found.items(), key=lambda item: min(span.begin for span in item[1].values())))


def is_evaluation(spans: Mapping[int, Span]) -> bool:
    """Whether a span of all ranks is an evaluation."""
    return next(iter(spans.values())).is_evaluation

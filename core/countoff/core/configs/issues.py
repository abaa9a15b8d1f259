"""What was noticed about a configuration: one line each, the worst first.

What goes wrong in silence is worse than what stops: a run that dies at its start costs minutes, one that trains on
five eighths of its data costs the run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["CODES", "ConfigIssue", "Level", "worst_first"]

Level = Literal["silent", "stops", "note"]
CODES = (
    *("dims", "batch", "dp-rank", "chunks", "warm-up", "horizon", "uneven", "override"),
    *("experts", "sequence-length", "micro-batches", "mesh", "machines", "world-size", "unknown-field"),
    *("exponent", "first-step", "data-ranks", "length", "repeats", "dropped"),
)
"""The short names of all findings."""
_ORDER: tuple[Level, ...] = ("silent", "stops", "note")


@dataclass(frozen=True)
class ConfigIssue:
    """One thing that was noticed.

    Attributes:
        level: ``silent``: the run goes on and is wrong; ``stops``: the run fails with an error; ``note``: worth
            knowing, no fault.
        code: A short name, by which a finding can be ignored.
        text: What it is, with the numbers, and what to do; one line.
    """

    level: Level
    code: str
    text: str

    @property
    def line(self) -> str:
        """The finding as it is printed.

        Example:
            >>> ConfigIssue("note", "warm-up", "steps is 10").line
            'note    warm-up: steps is 10'
        """
        return f"{self.level:<7} {self.code}: {self.text}"

    @property
    def is_fault(self) -> bool:
        """Whether something has to be done."""
        return self.level != "note"


def worst_first(issues: Iterable[ConfigIssue]) -> list[ConfigIssue]:
    """Returns each finding once, the silent ones first; the order among equals stays.

    Example:
        >>> [one.level for one in worst_first([ConfigIssue("note", "a", ""), ConfigIssue("silent", "b", "")])]
        ['silent', 'note']
    """
    return sorted(dict.fromkeys(issues), key=lambda issue: _ORDER.index(issue.level))

"""The issues of a configuration: one line each, the worst first.

A silent mistake is worse than one that stops the run: a run that fails at its start costs minutes, a run that trains on
five eighths of its data is lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["CODES", "ConfigIssue", "Level", "counted", "worst_first"]

Level = Literal["silent", "stops", "note"]
CODES = (
    *("dims", "batch", "dp-rank", "chunks", "warm-up", "horizon", "uneven", "override"),
    *("experts", "sequence-length", "micro-batches", "mesh", "machines", "world-size", "unknown-field"),
    *("exponent", "first-step", "data-ranks", "length", "repeats", "dropped"),
    *("checkpoints", "learning-rate", "deepspeed"),
    *("unknown-value",),
)
"""The short names of all kinds of issues."""
_ORDER: tuple[Level, ...] = ("silent", "stops", "note")


@dataclass(frozen=True)
class ConfigIssue:
    """One thing that is wrong with a configuration, or worth knowing about it.

    Attributes:
        level: ``silent``: the run goes on and is wrong; ``stops``: the run fails with an error; ``note``: worth
            knowing, no fault.
        code: The short name of its kind, by which it can be ignored.
        text: What is wrong, with the numbers, and what to do; one line.
    """

    level: Level
    code: str
    text: str

    @property
    def line(self) -> str:
        """The issue as it is printed.

        Example:
            >>> ConfigIssue("note", "warm-up", "steps is 10").line
            'note    warm-up: steps is 10'
        """
        return f"{self.level:<7} {self.code}: {self.text}"

    @property
    def is_fault(self) -> bool:
        """Whether the configuration must be changed."""
        return self.level != "note"


def worst_first(issues: Iterable[ConfigIssue]) -> list[ConfigIssue]:
    """Returns each issue once, silent ones first, then those that stop the run; equal levels keep their order.

    Example:
        >>> [one.level for one in worst_first([ConfigIssue("note", "a", ""), ConfigIssue("silent", "b", "")])]
        ['silent', 'note']
    """
    return sorted(dict.fromkeys(issues), key=lambda issue: _ORDER.index(issue.level))


def counted(number: float, noun: str) -> str:
    """Returns a number with its noun.

    Example:
        >>> counted(1, "step"), counted(4096, "token")
        ('1 step', '4,096 tokens')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

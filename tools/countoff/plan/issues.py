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
CODES = {
    "dims": "sizes of the mesh do not multiply to the world size, or leave no whole number to infer",
    "batch": "a global batch or a ramp does not divide, or three batch numbers disagree",
    "dp-rank": "by lingua's formula for the share that a rank reads, data stays unread",
    "chunks": "lingua would never read some files",
    "warm-up": "a warm-up is longer than the run or than its own schedule, or the scheduler leaves it out",
    "horizon": "a learning-rate schedule does not end where the run ends",
    "uneven": "ranks have different numbers of batches, so the first one without data leaves the others waiting",
    "override": "the framework takes another value than the one that is written, for a dim or a schedule",
    "machines": "the processes do not divide by the machines",
    "world-size": "the configuration is for another number of ranks than the check",
    "unknown-field": "nothing reads a field: it may be misspelt",
    "length": "the run has no step at all, has no end, or two lengths are given and one has no effect",
}
"""The short names of all kinds of issues, and what each means."""
_ORDER: tuple[Level, ...] = ("silent", "stops", "note")


@dataclass(frozen=True)
class ConfigIssue:
    """One thing that is wrong with a configuration, or worth knowing about it.

    Attributes:
        level: ``silent``: the run goes on and is wrong; ``stops``: the run fails with an error; ``note``: worth
            knowing, no fault.
        code: The short name of its kind, by which it can be ignored.
        wrong: What is wrong, with the numbers.
        remedy: What to do; empty where nothing is to be done, or that follows from what is wrong.
    """

    level: Level
    code: str
    wrong: str
    remedy: str = ""

    @property
    def text(self) -> str:
        """What is wrong, and what to do; one line.

        Example:
            >>> ConfigIssue("silent", "horizon", "the decay ends early", "leave it out").text
            'the decay ends early; leave it out'
        """
        return f"{self.wrong}; {self.remedy}" if self.remedy else self.wrong

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

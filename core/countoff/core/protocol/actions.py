"""Actions: what the protocol asks the runtime to do. They leave `State` through its outbox, in order."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from countoff.core.verdict import Verdict


@dataclass(frozen=True)
class WriteEntry:
    """Append an entry to the log, unless the log holds its content already.

    Attributes:
        entry: The entry, as JSON types.
    """

    entry: dict[str, Any]


@dataclass(frozen=True)
class PrintWarning:
    """Print a warning on this rank.

    Attributes:
        verdict: The warning.
    """

    verdict: Verdict


@dataclass(frozen=True)
class AddOne:
    """Add 1 to a counter in the store. The rank that completes it appends an entry to the log.

    Attributes:
        opened: Index of the sync point that opened the span; with `key` it names the counter.
        key: The counter, the same on all ranks. It is complete whenever every rank has added as often.
        entry: The entry, as JSON types.
        single: Whether blocks must have one batch, because this rank fetches nothing ahead. From then on the counter
            tells that to the rank that completes it, whose entry then has the ``size`` 1.
    """

    opened: int
    key: str
    entry: dict[str, Any]
    single: bool = False


Action = WriteEntry | PrintWarning | AddOne


class Outbox(queue.SimpleQueue[Any]):
    """Actions to be carried out, oldest first. The writer thread of the process is told of each.

    Attributes:
        told: Called after each `put`, on the thread that has put something.
    """

    told: Callable[[], object] | None = None

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Adds an action, or a job of the runtime, behind those that wait."""
        super().put(item, block, timeout)
        if self.told is not None:
            self.told()

    def tell(self, told: Callable[[], object]) -> None:
        """Sets who is told of each action, and tells of those that wait already."""
        self.told = told  # set first: an action that another thread puts now is told of twice, but none is missed
        for _ in range(self.qsize()):
            told()

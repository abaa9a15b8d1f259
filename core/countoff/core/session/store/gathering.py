"""Records of other ranks, gathered in the background: looked for again and again, never waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from countoff.core.protocol.records import Records

if TYPE_CHECKING:
    from countoff.core.session.store.channel import Channel

REMINDER_SECONDS = 10


class Pollable(Protocol):
    """Something that the writer looks at in between, until it is done."""

    def poll(self, channel: Channel) -> bool:
        """Looks once, without blocking; True when there is nothing left to do."""
        ...


class Gathering:
    """Gathers one report of each of many ranks.

    Args:
        name: The name under which they report; equal on all ranks.
        ranks: The ranks that owe a record.
        deadline: When to go on without the missing ones, by `time.monotonic()`.
        done: Called once, with the records and the ranks that are missing.
        missed: Called every ten seconds with the ranks that are missing.
        keep: Whether the records stay in the store, to be gathered again.
        after: Those that must be done before this one is.

    Attributes:
        is_done: Whether it has all records that it will have.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        deadline: float,
        done: Callable[[Records, list[int]], None],
        missed: Callable[[list[int]], None] | None = None,
        *,
        keep: bool = False,
        after: Sequence[Gathering] = (),
    ) -> None:
        self.is_done = False
        self._after = after
        self._keep = keep
        self._name = name
        self._ranks = list(ranks)
        self._deadline = deadline
        self._done = done
        self._missed = missed
        self._next_reminder = time.monotonic() + REMINDER_SECONDS

    def end_by(self, deadline: float) -> None:
        """Goes on without the missing ranks at this time, if that is earlier."""
        self._deadline = min(self._deadline, deadline)

    def poll(self, channel: Channel) -> bool:
        """Looks once; True when it has called `done`."""
        if not all(each.is_done for each in self._after):
            return False
        now = time.monotonic()
        if not channel.has_reports(self._name, self._ranks) and now < self._deadline:
            if self._missed is not None and now > self._next_reminder:
                self._next_reminder = now + REMINDER_SECONDS
                if missing := self._missing(channel.reports(self._name, self._ranks)):  # else they have come since
                    self._missed(missing)
            return False
        records = channel.reports(self._name, self._ranks)
        if not self._keep:
            channel.forget(self._name, list(records))
        self.is_done = True
        self._done(records, self._missing(records))
        return True

    def _missing(self, records: Records) -> list[int]:
        return [rank for rank in self._ranks if rank not in records]


class Awaiting:
    """Looks for one key of another rank.

    Args:
        key: The key.
        done: Called once, with the record, however late it comes.
    """

    def __init__(self, key: str, done: Callable[[dict[str, Any]], None]) -> None:
        self._key = key
        self._done = done

    def poll(self, channel: Channel) -> bool:
        """Looks once; True when it has called `done`."""
        record = channel.find(self._key)
        if record is not None:
            self._done(record)
        return record is not None


class Deleted:
    """Looks whether keys are gone: another rank has deleted them, as nobody needs them any more.

    Args:
        keys: The keys.
        done: Called once all of them are.
    """

    def __init__(self, keys: Sequence[str], done: Callable[[], None]) -> None:
        self._keys = keys
        self._done = done

    def poll(self, channel: Channel) -> bool:
        """Looks once; True when it has called `done`."""
        gone = not any(channel.has(key) for key in self._keys)
        if gone:
            self._done()
        return gone

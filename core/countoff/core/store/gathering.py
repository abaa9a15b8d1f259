"""Records of other ranks, gathered in the background: looked for again and again, never waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from countoff.core.protocol.records import Records

if TYPE_CHECKING:
    from countoff.core.store.channel import Channel

REMINDER_SECONDS = 10


class Pollable(Protocol):
    """Something that the speaker looks at in between, until it is done."""

    def poll(self, channel: Channel) -> bool:
        """Looks once, without blocking; True when there is nothing left to do."""
        ...


class Gathering:
    """Gathers one record of each of many ranks, under one key per rank.

    Args:
        name: What is gathered; equal on all ranks.
        ranks: The ranks that owe a record.
        deadline: When to go on without the missing ones, by `time.monotonic()`.
        done: Called once, with the records and the ranks that are missing.
        missed: Called every ten seconds with the ranks that are missing.
        keep: Whether the records stay in the store, to be gathered again.
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
    ) -> None:
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
        keys = {rank: f"{self._name}/{rank}" for rank in self._ranks}
        now = time.monotonic()
        complete = channel.has(*keys.values()) if keys else True
        if not complete and now < self._deadline:
            if self._missed is not None and now > self._next_reminder:
                self._next_reminder = now + REMINDER_SECONDS
                self._missed([rank for rank, key in keys.items() if not channel.has(key)])
            return False
        present = self._ranks if complete else [rank for rank, key in keys.items() if channel.has(key)]
        records = dict(zip(present, channel.get_many([keys[rank] for rank in present]), strict=True))
        for rank in () if self._keep else present:
            channel.delete(keys[rank])
        self._done(records, [rank for rank in self._ranks if rank not in records])
        return True


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
        if not channel.has(self._key):
            return False
        self._done(channel.get(self._key))
        return True

"""The session of a process with the other ranks: its place in the log, its heartbeats, how soon the store answers.

All guards of a process share it, so it knows for which guard an entry of the log is. It does no I/O and lasts longer
than the threads: a process may close all of its guards, and go on where it was in the log.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from countoff.core.protocol.records import parse_count
from countoff.core.session.liveness.heartbeats import Heartbeats
from countoff.core.session.state import State

if TYPE_CHECKING:
    from countoff.core.session.store.channel import Channel

_PROMPT_SECONDS = 0.05
_SLOW_SECONDS = 0.25


class Session:
    """What the guards of one process share, from the rendezvous on.

    Args:
        rank: This rank.
        ranks: The ranks that meet, ascending.
        seconds: Seconds between two heartbeats.

    Attributes:
        rank: This rank.
        ranks: The ranks that meet, ascending.
        heartbeats: Those of this rank and of others.
        read: Entries of the log read so far; the next one is entry number `read`.
        lock: Held while an entry is received, so that its effects are there once `read` has grown.
        connected: Whether the writer has a connection to the store.
        busy_since: When the job under way began, by `time.monotonic()`; 0 between two jobs.
        last_turn_seconds: How long the last job took.
        store_address: Address and port at which the store was reached.
    """

    def __init__(self, rank: int, ranks: Sequence[int], seconds: float = 1.0) -> None:
        self.rank = rank
        self.ranks = ranks
        self.heartbeats = Heartbeats(rank, ranks, seconds)
        self.read = 0
        self.lock = threading.RLock()
        self._awaited: int | None = None
        self.connected = False
        self.busy_since = 0.0
        self.last_turn_seconds = 0.0
        self.store_address: tuple[str, int] = ("", 0)
        self._states: dict[int, State] = {}
        self._known = set[int]()  # the guards that have been begun here
        self.early: dict[int, list[Mapping[str, Any]]] = {}

    def await_next(self) -> int:
        """Returns the index of the next entry, for which the reader is about to wait."""
        with self.lock:
            self._awaited = self.read
            return self.read

    def arrived(self) -> None:
        """The reader waits for no entry any more: it has one, or has lost the store."""
        with self.lock:
            self._awaited = None

    @property
    def passed(self) -> int:
        """Entries of the log that this rank needs no more, so that others may delete them: `read`, or fewer.

        The reader may still wait for one that this rank has received already, by its writer. It would wait for ever
        if that one were deleted.
        """
        with self.lock:
            return self.read if self._awaited is None else self._awaited

    def register(self, number: int, state: State) -> None:
        """Adds a guard. It receives its entries of the log, those too that came before it began.

        Args:
            number: Number of the guard, counted from 0 on every rank alike.
            state: Its state.
        """
        with self.lock:
            self._states[number] = state
            self._known.add(number)
            for entry in self.early.pop(number, ()):
                state.receive(entry)

    def remove(self, number: int) -> None:
        """Removes a guard that has closed: its entries are skipped from here on."""
        with self.lock:
            self._states.pop(number, None)

    def receive(self, index: int, entry: Mapping[str, Any]) -> None:
        """Receives entry `index` of the log, from whichever thread reads it first; a known one changes nothing.

        Raises:
            KeyError, TypeError, ValueError: If it is not an entry that countoff writes.
        """
        with self.lock:
            if index != self.read:
                return
            self.read += 1
            number = parse_count(entry["guard"])
            if number in self._states:
                self._states[number].receive(entry)
            elif number not in self._known:  # of a guard that other ranks have begun before this one
                self.early.setdefault(number, []).append(entry)

    def forget(self, channel: Channel) -> None:
        """Removes what this rank has written at a place where no rank meets any more.

        Args:
            channel: The channel of the whole process, at that place.
        """
        self.heartbeats.forget(channel, self.read)
        channel.delete(f"lifeline/{self.rank}")
        if self.rank == self.ranks[0]:
            channel.delete("lifeline")
            for number in self._known:
                channel.delete(f"{number}/plan")

    @property
    def prompt(self) -> bool:
        """Whether the store answers at once: no job has been under way for longer than a sync point may wait."""
        since = self.busy_since
        return since == 0.0 or time.monotonic() - since < _PROMPT_SECONDS

    @property
    def slow(self) -> bool:
        """Whether the store takes long to answer: it is overdue, or the last job took over a quarter of a second."""
        return not self.prompt or self.last_turn_seconds > _SLOW_SECONDS

"""Heartbeats: each rank writes a number that grows, and notices whose number grows no more.

A rank on the same host is seen by its process instead (`processes`), so heartbeats decide only about other hosts.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from countoff.core.checks.lost import lost_rank
from countoff.core.protocol.records import Records, parse_count, parse_rank
from countoff.core.session.liveness import hosts
from countoff.core.session.liveness.processes import Process, host_id
from countoff.core.session.state import State
from countoff.core.settings import Settings
from countoff.core.verdict import Verdict

if TYPE_CHECKING:
    from countoff.core.session.store.channel import Channel

_RANKS_PER_SECOND = 2000
"""With more, heartbeats come less often: those of so many keep the store's host busy for 0.07 s of each second."""
_MISSED = 6
"""A rank that is called lost has missed about so many."""


def seconds_between(ranks: int, settings: Settings) -> float:
    """Returns the seconds between two heartbeats of a rank.

    Args:
        ranks: How many ranks meet.
        settings: The rank's settings.

    Example:
        >>> [seconds_between(ranks, Settings()) for ranks in (2, 2000, 10_000, 100_000)]
        [1.0, 1.0, 5.0, 30.0]
    """
    return max(1.0, min(_patience(settings) / _MISSED, ranks / _RANKS_PER_SECOND))


def _patience(settings: Settings) -> float:
    # A rank that holds the interpreter in a single long call sends no heartbeat: it is slow, and not lost.
    return max(settings.lost_seconds, settings.stall_seconds)


class _Heard(NamedTuple):
    """The last heartbeat of another rank.

    Attributes:
        number: Its number.
        since: Since when there was no other one, by `time.monotonic()`.
        every: The seconds after which that rank sends the next one.
    """

    number: int
    since: float
    every: float


class Heartbeats:
    """Writes this rank's heartbeats and reads those of others. Used by the writer thread alone.

    The first rank watches all ranks, every other rank watches the first one.

    Args:
        rank: This rank.
        ranks: The ranks that meet, ascending; the first one may host the store.
        seconds: Seconds between two heartbeats.

    Attributes:
        host: The id of this host.
        seconds: Seconds between two heartbeats.
        all_registered: Whether all ranks are known to have registered.
        neighbours: Processes of this host that are ranks, by rank.
        hosts: Names of the hosts of the first rank and of this host's ranks, by rank, where the job has more than one
            host. They are known without the store.
    """

    def __init__(self, rank: int, ranks: Sequence[int], seconds: float = 1.0) -> None:
        self._rank = rank
        self._ranks = ranks
        self._first = ranks[0]
        self.host = host_id()
        self.seconds = seconds
        self.sent = 0
        self._took = 0.0
        self._last: dict[int, _Heard] = {}  # by rank
        self._looked_at = 0.0
        self._read_by_all = self._pruned = 0  # entries of the log
        self._place = 0  # on this host; 0 before this rank has registered
        self.all_registered = False
        self.neighbours: dict[int, Process] = {}
        self.hosts: dict[int, str] = {}

    def register(self, channel: Channel) -> None:
        """Tells the others where this rank is; a second call does nothing."""
        if not self._place:
            self._place = hosts.register(channel, self._rank, self.host)

    def forget(self, channel: Channel, read: int) -> None:
        """Removes what this rank has written at a place where no rank meets any more.

        Args:
            channel: The channel of the whole process, at that place.
            read: Entries of the log there.
        """
        if self._place:
            hosts.forget(channel, self._rank, self.host, self._place)
        channel.delete(heartbeat_key(self._rank))
        if self._rank == self._first:
            self.all_have_read(read)
            self.prune(channel)

    def write(self, channel: Channel, read: int) -> None:
        """Writes one heartbeat.

        Args:
            channel: The channel of the whole process.
            read: Entries of the log that this rank needs no more.
        """
        self.sent += 1
        if self._rank == self._first:
            self.send_time(channel, read)
        else:
            channel.set(heartbeat_key(self._rank), self._record(read))

    def send(self, channel: Channel, read: int) -> None:
        """Writes one heartbeat and looks at those of others.

        Args:
            channel: The channel of the whole process.
            read: Entries of the log that this rank needs no more.
        """
        self.write(channel, read)
        self.find_neighbours(channel)
        records = self._look(channel)
        if self._rank == self._first and len(records) == len(self._ranks) - 1:
            self.find_neighbours(channel, complete=True)  # a rank sends no heartbeat before it has registered
            self.all_have_read(min([read, *(parse_count(record["read"]) for record in records.values())]))

    def all_have_read(self, entries: int) -> None:
        """Takes note on the first rank that no rank needs so many first entries of the log any more."""
        self._read_by_all = max(self._read_by_all, entries)

    def prune(self, channel: Channel, is_idle: Callable[[], bool] = lambda: True) -> None:
        """Removes the entries of the log that no rank needs any more, one after the other.

        Args:
            channel: The channel of the whole process.
            is_idle: Whether to go on: nobody waits for what this thread has to do.
        """
        while self._pruned < self._read_by_all and is_idle():
            channel.delete(f"log/{self._pruned}")
            self._pruned += 1

    def find_neighbours(self, channel: Channel, *, complete: bool = False) -> None:
        """Learns which processes on this host are ranks, so that the watchdog can see them die.

        Args:
            channel: The channel of the whole process.
            complete: Whether all ranks have registered, so that this look is the last one.
        """
        if self.all_registered:
            return
        places = min(channel.add(f"host/{self.host}", 0), len(self._ranks))
        keys = [f"host/{self.host}/{place}" for place in range(len(self.neighbours) + 1, places + 1)]
        written = keys if not keys or channel.has(*keys) else list(itertools.takewhile(channel.has, keys))
        for record in channel.get_many(written):
            process = Process.from_json(record)
            self.neighbours.setdefault(parse_rank(process.rank, self._ranks), process)
        self.hosts = self._names_of_hosts(channel)
        self.all_registered = complete

    def _names_of_hosts(self, channel: Channel) -> dict[int, str]:
        first = channel.find(f"rank/{self._first}")
        if first is None or (first["host"] == self.host and not hosts.several(channel)):
            return {}
        named = hosts.names_from({self._first: first, self._rank: hosts.own_record(channel, self.host)})
        return {**named, **dict.fromkeys(self.neighbours, named[self._rank])}

    def reporter(self, verdict: Verdict) -> int:
        """The rank that prints a verdict whole for this host: the first one that can."""
        lost = verdict.ranks if verdict.gone else ()
        able = [rank for rank, process in list(self.neighbours.items()) if process.state() == "alive"]
        return min([self._rank, *(rank for rank in able if rank not in lost)])

    def report_silence(
        self,
        channel: Channel,
        state: State,
        vouched: Callable[[Channel, int], bool] = lambda channel, rank: False,
    ) -> None:
        """Proposes that a rank on another host is lost, if a guard's fit has gone on too long without its heartbeat.

        Args:
            channel: The guard's channel.
            state: The guard's state.
            vouched: Whether a rank is known to be there, heartbeat or not. It gets the channel of the whole process.
        """
        now = time.monotonic()
        for rank, heard in self._last.items():
            silence = max(_patience(state.settings), 3 * heard.every)
            if now - heard.since <= silence or rank in self.neighbours:
                continue
            if not takes_part(channel, rank) or vouched(channel.whole, rank):
                continue
            # A rank that had ended all its fits sends a heartbeat before it begins the next one.
            if channel.whole.get(heartbeat_key(rank))["heartbeat"] == heard.number:
                state.propose(lost_rank(rank, f"has not been heard for {silence:.0f} s"))

    def send_time(self, channel: Channel, read: int) -> None:
        """Writes the first rank's heartbeat, with its time and how long the one before took to write; see `clocks`."""
        key = heartbeat_key(self._rank)
        began, now = time.perf_counter(), time.time()
        channel.set(key, {**self._record(read), "time": now, "took": self._took})
        channel.has(key)  # the store answers in order: the heartbeat is there before this returns
        self._took = time.perf_counter() - began

    def _look(self, channel: Channel) -> Records:
        others = self._ranks[1:] if self._rank == self._first else [self._first]
        # No rank removes its heartbeat: once all have sent one, there is nothing to check for first.
        known = len(self._last) == len(others) or channel.has(*map(heartbeat_key, others))
        heard = others if known else [rank for rank in others if channel.has(heartbeat_key(rank))]
        now = time.monotonic()
        if now - self._looked_at > 3 * self.seconds:  # this rank was paused, or its store was: no other was silent
            self._last = {rank: heard._replace(since=now) for rank, heard in self._last.items()}
        self._looked_at = now
        records = dict(zip(heard, channel.get_many([*map(heartbeat_key, heard)]), strict=True))
        for rank, record in records.items():
            if rank not in self._last or record["heartbeat"] != self._last[rank].number:
                self._last[rank] = _Heard(record["heartbeat"], now, float(record.get("every", 1.0)))
        return records

    def _record(self, read: int) -> dict[str, Any]:
        # By its own settings, the heartbeats of this rank may be slower than those of the rank that reads this.
        return {"heartbeat": self.sent, "read": read, "every": self.seconds}


def heartbeat_key(rank: int) -> str:
    """Returns the key of a rank's heartbeats; those of the first rank also tell its time."""
    return f"heartbeat/{rank}"


def begin_fit(channel: Channel, rank: int) -> None:
    """Tells the others that this rank takes part in a guard's fit; `channel` is the guard's."""
    channel.report("joined", rank, {"joined": True})


def say_goodbye(channel: Channel, rank: int) -> None:
    """Tells the others that this rank takes part no more, so that none waits for it or reports it as lost."""
    channel.take_back("joined", rank)


def takes_part(channel: Channel, rank: int) -> bool:
    """Whether a rank has begun a guard's fit and has not said goodbye."""
    return channel.has_reports("joined", [rank])


def announce_signal(channel: Channel, rank: int) -> None:
    """Tells the others that this rank is about to end by a SIGTERM; `channel` is the guard's.

    For those that get one too. To any other rank it is lost.
    """
    channel.report("signal", rank, {"signal": True})


def has_signal(channel: Channel, rank: int) -> bool:
    """Whether a rank has told that it ends by a SIGTERM: it is not why its launcher ends the others."""
    return channel.has_reports("signal", [rank])

"""Heartbeats: each rank writes a number that grows, and notices whose number grows no more.

A rank on the same host is seen by its process instead (`processes`), so heartbeats decide only about other hosts.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

from countoff.core.protocol.judgement import lost_rank
from countoff.core.protocol.records import parse_count
from countoff.core.protocol.state import State
from countoff.core.runtime.processes import Process, host_id

if TYPE_CHECKING:
    from countoff.core.runtime.channel import Channel

HEARTBEAT_SECONDS = 1.0
SILENCE_SECONDS = 30.0
"""Without a heartbeat for so long, or for `stall_seconds` if that is more, a rank on another host is lost."""
_LOG_MARGIN = 64


class Heartbeats:
    """Writes this rank's heartbeats and reads those of others. Used by the speaker thread alone.

    Rank 0 watches all ranks, every other rank watches rank 0.

    Args:
        state: This rank's state.

    Attributes:
        neighbours: Processes of this host that are ranks, by rank.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._host = host_id()
        self._sent = 0
        self._last: dict[int, tuple[int, float]] = {}  # each rank's heartbeat, and since when it is the same
        self._looked_at = 0.0
        self._pruned = 0
        self._all_introduced = False
        self.neighbours: dict[int, Process] = {}

    def introduce(self, channel: Channel) -> None:
        """Tells the ranks on this host which process this rank is."""
        process = Process.own(self._state.rank)
        place = channel.add(f"host/{self._host}", 1)
        record = {"rank": process.rank, "pid": process.pid, "began": process.began}
        channel.set(f"host/{self._host}/{place}", record)

    def send(self, channel: Channel) -> None:
        """Writes one heartbeat and looks at those of others."""
        state = self._state
        self._sent += 1
        channel.set(f"heartbeat/{state.rank}", {"heartbeat": self._sent, "read": state.log.read})
        self.find_neighbours(channel)
        self._look(channel, list(range(1, state.world_size)) if state.rank == 0 else [0])

    def find_neighbours(self, channel: Channel, *, complete: bool = False) -> None:
        """Learns which processes on this host are ranks, so that the watchdog can see them die.

        Args:
            channel: The speaker's channel.
            complete: Whether all ranks have introduced themselves, so that this look is the last one.
        """
        if self._all_introduced:
            return
        self._all_introduced = complete
        places = min(channel.add(f"host/{self._host}", 0), self._state.world_size)
        keys = [f"host/{self._host}/{place}" for place in range(len(self.neighbours) + 1, places + 1)]
        written = keys if not keys or channel.has(*keys) else list(itertools.takewhile(channel.has, keys))
        for record in channel.get_many(written):
            process = Process.from_json(record)
            self.neighbours.setdefault(parse_count(process.rank, self._state.world_size), process)

    def _look(self, channel: Channel, others: list[int]) -> None:
        keys = [f"heartbeat/{rank}" for rank in others]
        # No rank removes its heartbeat: once all have sent one, there is nothing to check for first.
        complete = len(self._last) == len(others) or channel.has(*keys)
        heard = others if complete else [rank for rank in others if channel.has(f"heartbeat/{rank}")]
        now = time.monotonic()
        if now - self._looked_at > 3 * HEARTBEAT_SECONDS:  # this rank was paused, or its store was: no other was silent
            self._last = {rank: (heartbeat, now) for rank, (heartbeat, _) in self._last.items()}
        self._looked_at = now
        # A rank that holds the interpreter in a single long call sends no heartbeat: it is slow, and not lost.
        silence = max(SILENCE_SECONDS, self._state.settings.stall_seconds)
        records = dict(zip(heard, channel.get_many([f"heartbeat/{rank}" for rank in heard]), strict=True))
        for rank, record in records.items():
            heartbeat, since = self._last.get(rank, (-1, now))
            if record["heartbeat"] != heartbeat:
                self._last[rank] = (record["heartbeat"], now)
            elif now - since > silence and rank not in self.neighbours and not channel.has(f"bye/{rank}"):
                self._state.propose(lost_rank(rank, f"has not been heard for {silence:.0f} s"))
        if self._state.rank == 0 and len(records) == len(others):
            self._prune(channel, min([record["read"] for record in records.values()], default=0))

    def _prune(self, channel: Channel, read_by_all: int) -> None:
        # A listener may still be on its way to an entry that its own speaker has read: leave a margin.
        for index in range(self._pruned, min(read_by_all, self._state.log.read) - _LOG_MARGIN):
            channel.delete(f"log/{index}")
            self._pruned = index + 1

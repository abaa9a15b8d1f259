"""Simulates many hosts whose ranks have one voice each, in few processes: see `simulated` for the ranks.

Each host has its own `Voice`, and each rank its own `VoicedChannel`: the real ones. These parts are simulated:

- A rank asks its voice by a direct call. Real ranks send a line of JSON through a socket of their own.
- The voices of one process share two connections to the store. Real voices have two each.
- One thread takes the turns of all ranks and voices of a process, so the ranks of a host report one right after the
  other. Where one of a real host is more than 20 ms later than the others, the host's report is written twice.
- One listener thread waits in the store for all voices, and makes the `wait` and the `get` of each. Only then do their
  ranks receive the entry.
- No rank searches for the voice of its host: each knows it. A real rank makes a `check` and a `get` for it before, and
  the one that becomes the voice a `check` more, and two compare-and-sets.

A host never loses its voice here.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.simulated import RANKS_PER_HOST, RankGroup, SimulatedRank, serve
from countoff.core.store.channel import Channel
from countoff.core.store.voice import Voice
from countoff.core.store.voiced import VoicedChannel, Way

_ADDRESSES = "127.0.0.1", "127.0.0.1"


class SimulatedVoice:
    """The voice of one host, without its threads. Its ranks always wait for the next entry of the log, as real ones do.

    Args:
        up: The channel on which it speaks with the store.
        ranks: The ranks of its host.
    """

    def __init__(self, up: Channel, ranks: Sequence[SimulatedRank]) -> None:
        self._up = up
        self._ranks = ranks
        self._every = ranks[0].link.heartbeats.seconds
        self._ahead = 0.0
        self._lock = threading.Lock()  # a real one has one thread for all requests, to which the listener hands entries
        self._wanted: deque[int] = deque()
        self._fetched: deque[dict[str, Any]] = deque()
        self._arrived: deque[tuple[SimulatedRank, int, dict[str, Any]]] = deque()

    def join(self) -> dict[int, VoicedChannel]:
        """Begins to speak for the ranks of its host; returns the channel of each."""
        number = self._up.add("voices", 1)
        self._voice = Voice(
            self._up,
            number,
            self._wanted.append,
            every=self._every,
            expected=len(self._ranks),
            clock=lambda: time.monotonic() + self._ahead,
        )
        channels: dict[int, VoicedChannel] = {}
        for rank in (rank.state.rank for rank in self._ranks):
            self._voice.join(rank)
            channels[rank] = VoicedChannel(Way(_Line(self, rank), rank, number, _ADDRESSES, _no_other_way))
        return channels

    def answer(self, rank: int, request: Sequence[Any], reply: Callable[[Any], object]) -> None:
        """Answers a request of a rank."""
        with self._lock:
            self._voice.answer(rank, request, reply)

    def listen(self) -> None:
        """All ranks wait for the next entry of the log."""
        for rank in self._ranks:
            self._await_next(rank)
        self._deliver()

    def fetch(self, log: Channel, length: int) -> bool:
        """Waits in the store for the entries for which its ranks wait, up to that length; whether there was one."""
        while len(self._fetched) < len(self._wanted) and (index := self._wanted[len(self._fetched)]) < length:
            self._fetched.append(log.wait(f"log/{index}"))
        return bool(self._fetched)

    def tell(self) -> None:
        """Lets its ranks receive what it has fetched."""
        while self._fetched:
            with self._lock:
                self._voice.hear(self._wanted.popleft(), self._fetched.popleft())
            self._deliver()

    def tend(self, seconds: float | None = None) -> None:
        """Writes what is due after so many seconds, which pass at once; by default those between two heartbeats."""
        self._ahead += self._every if seconds is None else seconds
        with self._lock:
            self._voice.tend()

    def _await_next(self, rank: SimulatedRank) -> None:
        index = rank.link.await_next()
        self.answer(rank.state.rank, ["wait", f"log/{index}"], lambda entry: self._arrived.append((rank, index, entry)))

    def _deliver(self) -> None:
        while self._arrived:
            rank, index, entry = self._arrived.popleft()
            rank.link.arrived()
            rank.link.receive(index, entry)
            self._await_next(rank)


class _Line:
    """The requests of one rank to the voice of its host."""

    def __init__(self, voice: SimulatedVoice, rank: int) -> None:
        self._voice = voice
        self._rank = rank

    def ask(self, request: Sequence[Any]) -> Any:
        """Returns the answer, which is there at once."""
        answers: list[Any] = []
        self._voice.answer(self._rank, request, answers.append)
        [answer] = answers
        return answer

    def leave(self) -> None:
        """Is never called."""
        _no_other_way()

    def late_answers(self) -> dict[str, Any]:
        """Nothing: each answer is there at once."""
        return {}

    def shut(self) -> None:
        """Does nothing."""


def _no_other_way() -> Channel:
    raise AssertionError("a simulated host does not lose its voice")


class VoicedGroup(RankGroup):
    """The simulated hosts of one process. Their ranks are neighbours, `RANKS_PER_HOST` on each host."""

    def __post_init__(self) -> None:
        super().__post_init__()
        hosts: dict[int, list[SimulatedRank]] = {}
        for rank in self.ranks:
            hosts.setdefault(rank.state.rank // RANKS_PER_HOST, []).append(rank)
        self._voices = [SimulatedVoice(self.speaker_channel, ranks) for ranks in hosts.values()]
        self._channels: dict[int, VoicedChannel] = {}

    def channel_of(self, rank: SimulatedRank) -> Channel:
        """Returns the channel of a rank through its voice."""
        return self._channels[rank.state.rank]

    def introduce(self) -> None:
        """The voices begin to speak, and every rank writes which host it is on."""
        for voice in self._voices:
            self._channels |= voice.join()
        super().introduce()
        for voice in self._voices:
            voice.listen()

    def heartbeat(self) -> None:
        """Every rank sends one heartbeat, and so does every voice."""
        super().heartbeat()
        for voice in self._voices:
            voice.tend()

    def exit(self) -> None:
        """All ranks exit without having ended the fit."""
        super().exit()
        for voice in self._voices:  # goodbyes are reports, which wait for those of other ranks for a while
            voice.tend(seconds=0.1)

    def receive_until(self, length: int) -> None:
        """Every rank receives the log up to that length, as its listener does."""
        for voice in self._voices:
            while voice.fetch(self.listener_channel, length):
                voice.tell()

    def _listen(self, index: int) -> None:
        for voice in self._voices:
            voice.fetch(self.listener_channel, index + 1)
        self._fetched_at = time.monotonic()
        for voice in self._voices:
            voice.tell()
        self._received_at = time.monotonic()


def group_process(commands: Connection, ranks: Sequence[int], world_size: int, port: int) -> None:
    """Runs a group of hosts; see `simulated.serve`."""
    serve(commands, VoicedGroup([SimulatedRank(rank, world_size) for rank in ranks], port))

"""Many ranks in few processes: the protocol's own code on a real TCPStore, with few connections and no training.

Each simulated rank has its own `Guard`, `State`, `Speaker` and `RollCall`. What is simulated: the ranks of one process
share two connections (real ranks have two each), one thread takes the turns of all their speakers (real ranks have a
thread each), one ear waits in the store for all of them and then makes each one's own `wait` and `get`; eight
neighbouring ranks say that they are on one host. Everything that goes to the store is what the real code sends.
"""

import heapq
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  (public in torch's documentation)

from countoff.core import Guard, Settings
from countoff.core.runtime.channel import Channel
from countoff.core.runtime.roll_call import RollCall
from countoff.core.runtime.speaker import Speaker

PREFIX = "countoff/0123456789ab/0/"  # as long as a real one
RANKS_PER_HOST = 8
_KINDS = {
    "log": "mark",
    "plan": "roll call",
    "span": "roll call",
    "tick": "tick",
    "beat": "beat",
    "host": "host",
    "data": "data identity",
}
_POLL_SECONDS = 0.005  # the speaker's: between two looks, at first
Counts = dict[str, list[int]]
"""Operations, bytes sent and bytes received (keys and values, without framing), by kind and operation."""


def added(*counts: Counts) -> Counts:
    """The sum of several counts."""
    total: Counts = defaultdict(lambda: [0, 0, 0])
    for each in counts:
        for name, values in each.items():
            total[name] = [old + new for old, new in zip(total[name], values, strict=True)]
    return dict(total)


def plan_of(rank: int, world_size: int) -> dict[str, Any]:
    """A plan as an adapter makes it."""
    plan = {"batches_per_epoch": 100, "batch_size": 32, "gradient_accumulation_steps": 1, "max_epochs": 3}
    return plan | {"max_steps": -1, "position": [0, 0, 0], "dp_degree": world_size, "dp_rank": rank}


class CountingStore:
    """A client of the store that counts what goes through it, by the first part of the key."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.counts: Counts = defaultdict(lambda: [0, 0, 0])

    def take(self) -> Counts:
        """What has been counted since the last time."""
        taken, self.counts = self.counts, defaultdict(lambda: [0, 0, 0])
        return dict(taken)

    def _count(self, operation: str, keys: Sequence[str], sent: int = 0, received: int = 0) -> None:
        kind = _KINDS.get(keys[0][len(PREFIX) :].partition("/")[0], "other") if keys else "other"
        entry = self.counts[f"{kind}: {operation}"]
        entry[0] += 1
        entry[1] += sum(map(len, keys)) + sent
        entry[2] += received

    def set(self, key: str, value: str) -> None:
        self._count("set", [key], len(value))
        self._store.set(key, value)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        standing = self._store.compare_set(key, expected, value)
        self._count("compare_set", [key], len(expected) + len(value), len(standing))
        return standing

    def check(self, keys: list[str]) -> bool:
        self._count("check", keys, 0, 1)
        return self._store.check(keys)

    def get(self, key: str) -> bytes:
        value = self._store.get(key)
        self._count("get", [key], 0, len(value))
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self._store.multi_get(keys)
        self._count("multi_get", keys, 0, sum(map(len, values)))
        return values

    def wait(self, keys: list[str], timeout: Any) -> None:
        self._store.wait(keys, timeout)
        self._count("wait", keys, 0, 1)

    def add(self, key: str, amount: int) -> int:
        self._count("add", [key], 8, 8)
        return self._store.add(key, amount)

    def delete_key(self, key: str) -> bool:
        self._count("delete_key", [key], 0, 8)
        return self._store.delete_key(key)


def counting_channel(port: int) -> tuple[Channel, CountingStore]:
    """A real channel whose client counts."""
    channel = Channel("127.0.0.1", port, PREFIX)
    counting = CountingStore(channel._store)  # pyright: ignore[reportPrivateUsage]
    channel._store = counting  # pyright: ignore[reportPrivateUsage]
    return channel, counting


class TurnedSpeaker(Speaker):
    """A speaker without a thread: whoever has the channel gives it its turns."""

    def write(self, entry: dict[str, Any], redundant: Callable[[], bool], hold: float) -> None:
        """Queues the entry; training, of which there is none here, waits for nothing."""
        del hold
        self.hand(self.append(entry, redundant))

    def turn(self, channel: Channel, *, beat: bool = False) -> bool:
        """Does what has been handed over, then looks and beats once; whether something is still awaited."""
        self._next_beat = 0.0 if beat else time.monotonic() + 3600
        self.hand(lambda channel: None)  # a turn waits for a job
        while not self._jobs.empty():
            self._turn(channel)
        return bool(self._pending)

    def introduce(self, channel: Channel, host: str) -> None:
        """Says which host it is on, as a speaker does when it starts."""
        self._host = host
        self._introduce(channel)

    @property
    def pause(self) -> float:
        """Seconds until the next look, as the real thread would have it."""
        return _POLL_SECONDS * 2 ** min(self._polls // 20, 6)


@dataclass
class Unwatched:
    """What a guard asks of its watch, without threads."""

    speaker: TurnedSpeaker
    failure: str = ""

    def close(self) -> None:
        """Nothing to close."""


class SimulatedRank:
    """One rank's guard with all that it has, but threads."""

    def __init__(self, rank: int, world_size: int) -> None:
        settings = Settings(deadline_seconds=600.0)
        self.guard: Any = Guard(settings, rank=rank, world_size=world_size, learning_rates=lambda: [0.1])
        self.state = self.guard._state
        self.speaker = TurnedSpeaker(self.state, connect=_never, lost=_raise)
        self.host = f"{rank // RANKS_PER_HOST:013d}-4026531836"  # as long as a real one
        self.guard._watch = Unwatched(self.speaker)
        self.guard._roll_call = RollCall(self.state, self.speaker)
        self.answered = threading.Event()

    def count_off(self) -> None:
        """Hands over a plan as Lightning's adapter makes it."""
        versions = {"python": "3.11.7", "torch": "2.13.0", "countoff": "0.5.0", "lightning": "2.6.6"}
        self.answered = self.guard._roll_call.count_off(
            {"plan": plan_of(self.state.rank, self.state.world_size), "versions": versions}
        )

    def listen(self, channel: Channel, index: int) -> None:
        """What the listener, blocked in its wait for an entry of the log, does when that comes."""
        self.state.receive(index, channel.wait(f"log/{index}"))


@dataclass
class Crew:
    """The simulated ranks of one process, their two connections, and what they are told to do."""

    ranks: list[SimulatedRank]
    port: int
    mouth: Channel = field(init=False)
    ear: Channel = field(init=False)
    _heard_at: float = 0.0
    _ear_thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self.mouth, self._said = counting_channel(self.port)
        self.ear, self._heard = counting_channel(self.port)

    def introduce(self) -> None:
        """All ranks say where they are."""
        for rank in self.ranks:
            rank.speaker.introduce(self.mouth, rank.host)

    def count_off(self) -> None:
        """The roll call of the fit's start, until every rank has its answer."""
        for rank in self.ranks:
            rank.count_off()
        self._turn_until_quiet()
        if not all(rank.answered.is_set() for rank in self.ranks):
            raise RuntimeError("a simulated rank has had no answer to its plan")

    def _turn_until_quiet(self) -> None:
        due = [(0.0, place) for place in range(len(self.ranks))]
        while due:
            at, place = heapq.heappop(due)
            time.sleep(max(0.0, at - time.monotonic()))
            speaker = self.ranks[place].speaker
            if speaker.turn(self.mouth):
                heapq.heappush(due, (time.monotonic() + speaker.pause, place))

    def beat(self) -> None:
        """Every rank beats once."""
        for rank in self.ranks:
            rank.speaker.turn(self.mouth, beat=True)

    def listen(self) -> None:
        """The ear waits in the store for the next entry, then hears it for each rank; returns at once."""
        index = self.ranks[0].state.ledger.read
        self._ear_thread = threading.Thread(target=self._listen, args=[index], name="ear")
        self._ear_thread.start()

    def _listen(self, index: int) -> None:
        for rank in self.ranks:
            rank.listen(self.ear, index)
        self._heard_at = time.monotonic()

    def heard(self) -> float:
        """When the last of these ranks knew the entry, by `time.monotonic()`."""
        if self._ear_thread is not None:
            self._ear_thread.join()
        return self._heard_at

    def call(self, method: str, *arguments: Any) -> float:
        """Every rank passes a mark (calls its guard's method), then says so; returns when the first began to."""
        began = time.monotonic()
        for rank in self.ranks:
            getattr(rank.guard, method)(*arguments)
        for rank in self.ranks:
            rank.speaker.turn(self.mouth)
        return began

    def lead(self, method: str, *arguments: Any) -> float:
        """The first rank alone passes a mark; returns when it began to."""
        began = time.monotonic()
        getattr(self.ranks[0].guard, method)(*arguments)
        self.ranks[0].speaker.turn(self.mouth)
        return began

    def follow(self, method: str, *arguments: Any) -> None:
        """All ranks but the first pass the mark that it has passed."""
        for rank in self.ranks[1:]:
            getattr(rank.guard, method)(*arguments)
            rank.speaker.turn(self.mouth)

    def settle(self) -> None:
        """Whatever is still gathered behind training, until it is done."""
        self._turn_until_quiet()

    def batches(self, count: int) -> None:
        """Every rank starts so many batches, and says what there is to say."""
        for rank in self.ranks:
            for _ in range(count):
                rank.guard.batch()
            rank.speaker.turn(self.mouth)

    def leave(self) -> None:
        """All ranks leave without having ended the fit, so each appends its goodbye to the log."""
        for rank in self.ranks:
            goodbye = {"type": "goodbye", "rank": rank.state.rank}
            rank.speaker.hand(rank.speaker.append(goodbye))
            rank.speaker.turn(self.mouth)

    def take(self) -> Counts:
        """What this process has sent since the last time."""
        said, heard = self._said.take(), self._heard.take()
        return added(said, heard)

    def verdicts(self) -> list[str]:
        """What any of these ranks has found; healthy ranks find nothing."""
        return [rank.state.end.headline for rank in self.ranks if rank.state.end is not None]


def crew_process(commands: Connection, ranks: Sequence[int], world_size: int, port: int) -> None:
    """A process that does what it is told: (method, arguments) in, (result, processor seconds) out; None ends it."""
    crew = Crew([SimulatedRank(rank, world_size) for rank in ranks], port)
    commands.send("ready")
    while (command := commands.recv()) is not None:
        method, *arguments = command
        began = time.process_time()
        try:
            result = getattr(crew, method)(*arguments)
        except Exception as error:
            commands.send((error, 0.0))
            return
        commands.send((result, time.process_time() - began))


def store_process(commands: Connection) -> None:
    """The store's host: tells its port, then its processor seconds so far each time it is asked; None ends it."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    commands.send(store.port)
    while commands.recv() is not None:
        commands.send(time.process_time())


def _never() -> Channel:
    raise RuntimeError("a simulated speaker is given its channel")


def _raise(error: Exception) -> None:
    raise error

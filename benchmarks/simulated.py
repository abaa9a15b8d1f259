"""Simulates many ranks in few processes: the real protocol code on a real TCPStore, with few connections, no training.

Each simulated rank has its own `Guard`, `State`, `Writer` and `RollCall`. These parts are simulated:

- The ranks of one process share two connections, and a client of the default store. Real ranks have these each.
- One thread takes the turns of all their writers. Real ranks have a thread each.
- One reader thread waits in the store for all of them, and then makes the `wait` and the `get` of each rank.
- Eight neighbouring ranks report that they are on the same host.
- At the start of a fit, a rank looks once for the answer when it has reported, and then when there is one. A real rank
  looks every few milliseconds at first, and less often later.

Everything that is sent to the store is what the real code sends.
"""

import heapq
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]  (public in torch's documentation)

from countoff.core import FitPlan, Guard, Settings
from countoff.core.checks.check import FitStart
from countoff.core.protocol import credits as credits_of_protocol
from countoff.core.protocol.credits import Credits
from countoff.core.session.store.channel import Channel, decode
from countoff.core.session.store.rendezvous import Question, choose_place, keep_publishing, pause_since, publish
from countoff.core.session.threads.even_pass import EvenPass
from countoff.core.session.threads.roll_call import RollCall
from countoff.core.session.threads.writer import Writer

PREFIX = "countoff/0123456789ab/"  # as long as a real one
GUARD = "0/"
RANKS_PER_HOST = 8
_KINDS = {
    "log": "sync point",
    "passed": "sync point",
    "announced": "sync point",
    "plan": "roll call",
    "joined": "roll call",
    "span": "roll call",
    "tick": "tick",
    "heartbeat": "heartbeat",
    "host": "host",
    "hosts": "host",
    "rank": "host",
    "data": "data identity",
    "even": "credits",
}
Counts = dict[str, list[int]]
"""Operations, bytes sent and bytes received (keys and values, without framing), by kind and operation."""


def added(*counts: Counts) -> Counts:
    """Returns the sum of several counts."""
    total: Counts = defaultdict(lambda: [0, 0, 0])
    for each in counts:
        for name, values in each.items():
            total[name] = [old + new for old, new in zip(total[name], values, strict=True)]
    return dict(total)


def plan_of(rank: int, world_size: int) -> FitPlan:
    """Returns a plan as an adapter makes it."""
    return FitPlan(
        batches_per_epoch=100,
        batch_size=32,
        gradient_accumulation_steps=1,
        max_epochs=3,
        max_steps=-1,
        position=[0, 0, 0],
        dp_degree=world_size,
        dp_rank=rank,
    )


class CountingStore:
    """A client of the store that counts its operations, by the first part of the key.

    Args:
        store: The client.
        waits: Whether a `get` waits for its key, as the reader's does: the host then gets a `wait` and a `get`.

    Attributes:
        credit_keys: All keys of credits that were in use.
    """

    def __init__(self, store: Any, *, waits: bool = False) -> None:
        self._store = store
        self._waits = waits
        self.counts: Counts = defaultdict(lambda: [0, 0, 0])
        self.credit_keys: set[str] = set()

    def take(self) -> Counts:
        """Returns the counts since the last call."""
        taken, self.counts = self.counts, defaultdict(lambda: [0, 0, 0])
        return dict(taken)

    def _count(self, operation: str, keys: Sequence[str], sent: int = 0, received: int = 0) -> None:
        name = keys[0][len(PREFIX) :].removeprefix(GUARD) if keys else ""
        name = name.partition("/")[0]
        kind = _KINDS.get(name, "other") if keys and keys[0].startswith(PREFIX) else "rendezvous"
        if name == "even":
            self.credit_keys.update(keys)
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
        if self._waits:
            self._count("wait", [key], 0, 1)
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self._store.multi_get(keys)
        self._count("multi_get", keys, 0, sum(map(len, values)))
        return values

    def set_timeout(self, timeout: Any) -> None:
        self._store.set_timeout(timeout)

    def add(self, key: str, amount: int) -> int:
        self._count("add", [key], 8, 8)
        return self._store.add(key, amount)

    def delete_key(self, key: str) -> bool:
        self._count("delete_key", [key], 0, 8)
        return self._store.delete_key(key)


class CountingDefaultStore(PrefixStore):
    """The job's default store, as a rank has it; it counts its operations.

    Attributes:
        counting: What counts them.
    """

    def __init__(self, store: TCPStore) -> None:
        super().__init__("default_pg", store)
        self.counting: Any = CountingStore(PrefixStore("default_pg", store))
        self.set, self.get = self.counting.set, self.counting.get
        self.add, self.check = self.counting.add, self.counting.check


def counting_channel(port: int, *, waits: bool = False) -> tuple[Channel, CountingStore]:
    """Returns a real channel and its client, which counts; `waits` as in `CountingStore`."""
    channel = Channel("127.0.0.1", port, PREFIX)
    counting = CountingStore(channel._store, waits=waits)  # pyright: ignore[reportPrivateUsage]
    channel._store = counting  # pyright: ignore[reportPrivateUsage]
    return channel, counting


@dataclass
class ThreadlessMember:
    """What a guard needs of `Registration`, without threads."""

    writer: Writer
    failure: str = ""

    def close(self) -> None:
        """Does nothing: there is no thread to end."""


class SimulatedRank:
    """One rank's guard, with everything but its threads.

    Args:
        rank: The rank.
        world_size: Ranks of the job.
        trace_dir: As in the settings.

    Attributes:
        rate: Its learning rate.
        begun: Its roll call and what its fit begins with; None before that.
    """

    def __init__(self, rank: int, world_size: int, trace_dir: str | None = None) -> None:
        settings = Settings(deadline_seconds=600.0, trace_dir=trace_dir)
        self.rate = 0.1
        self.guard: Any = Guard(settings, rank=rank, world_size=world_size, learning_rates=lambda: [self.rate])
        self.state = self.guard.state
        self.writer = Writer(self.state)
        self.session = self.writer.session
        self.session.busy_since = (
            1.0  # the store is slow: sync points do not wait, because there is no training that must
        )
        self.session.heartbeats.host = f"{rank // RANKS_PER_HOST:013d}-4026531836"  # as long as a real one
        self.answered = threading.Event()
        self.even: EvenPass | None = None
        self.begun: tuple[RollCall, FitStart] | None = None

    def begin_even(self, lookahead: int, batches: int) -> None:
        """Makes the open train epoch an even pass over a loader with so many batches. Its blocks do not grow."""
        credits_of_protocol._GROWTH = 1  # pyright: ignore[reportPrivateUsage]  (a busy machine decides on it otherwise)
        span = self.state.spans[-1]
        credits = Credits(span.opened, lookahead)
        self.state.begin_credits(span, credits)
        self.even = EvenPass(self.state, span, credits, iter(range(batches)))

    def train(self, until: int) -> bool:
        """Takes batches without waiting, until it has that many; returns whether it has, or the pass is over."""
        even = self.even
        while even is not None and self.guard.batches < until:
            if not even.is_ready():
                return False
            try:
                next(even)
            except StopIteration:
                self.even = None
                return True
            self.state.spans[-1].started += 1  # without a tick, which has a cost of its own
        return True

    def begin(self, plan: FitPlan) -> tuple[RollCall, FitStart]:
        """Tells the guard's checks that the fit begins, with a plan as Lightning's adapter makes it."""
        versions = {"python": "3.11.7", "torch": "2.13.0", "countoff": "0.5.0", "lightning": "2.6.6"}
        start = FitStart(plan, versions)
        self.begun = self.guard.meet(ThreadlessMember(self.writer), start), start
        return self.begun

    def count_off(self) -> None:
        """Reports what the fit begins with."""
        call, start = self.begun or self.begin(plan_of(self.state.rank, self.state.world_size))
        self.answered = call.count_off(start)

    def turn(self, channel: Channel) -> bool:
        """Does all queued jobs, then polls; returns whether it must poll again."""
        part = channel.at(GUARD)
        self.writer.look(part)
        while not self.state.outbox.empty():  # what a look hands over too
            self.writer.turn(part)
            self.writer.look(part)
        self.session.heartbeats.prune(channel)
        return self.writer.seconds_until_look is not None

    def heartbeat(self, channel: Channel) -> None:
        """Sends a heartbeat, and looks at those of others."""
        self.session.heartbeats.send(channel, self.session.read)
        self.session.heartbeats.report_silence(channel.at(GUARD), self.state)

    def receive(self, channel: Channel, index: int) -> None:
        """Waits for an entry of the log and receives it, as the reader does."""
        self.session.receive(index, channel.wait(f"log/{index}"))


@dataclass
class RankGroup:
    """The simulated ranks of one process and their two connections. Its methods are called from another process."""

    ranks: list[SimulatedRank]
    port: int
    writer_channel: Channel = field(init=False)
    reader_channel: Channel = field(init=False)
    _received_at: float = 0.0
    _reader_thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self.writer_channel, self._writer_store = counting_channel(self.port)
        self.reader_channel, self._reader_store = counting_channel(self.port, waits=True)
        client = TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False)
        self._default_store: Any = CountingDefaultStore(client)

    def meet(self, world_size: int) -> None:
        """Rank 0 says where the ranks meet until all have asked; every other rank returns with the place."""
        store, began = self._default_store, time.monotonic()
        if self.ranks[0].state.rank == 0:

            def over(seconds: float) -> bool:
                time.sleep(seconds)
                uncounted = PrefixStore("default_pg", store.underlying_store)
                return decode(uncounted.get("countoff/0"))["asked"] == world_size - 1

            place = choose_place(store)
            publish(store, 0, place)
            keep_publishing(store, 0, place, world_size, over)
        else:
            questions = [Question(store, 0) for _ in self.ranks]
            while questions := [question for question in questions if question.answer() is None]:
                time.sleep(pause_since(began, world_size))

    def register(self) -> None:
        """Every rank writes which host it is on."""
        for rank in self.ranks:
            rank.session.heartbeats.register(self.writer_channel)

    def count_off(self) -> None:
        """Every rank reports what its fit begins with, and looks once for the answer."""
        for rank in self.ranks:
            rank.count_off()
            rank.turn(self.writer_channel)

    def finish_count_off(self) -> None:
        """Takes the turns of all writers until every rank has its answer."""
        self.finish_polling()
        if not all(rank.answered.is_set() for rank in self.ranks):
            raise RuntimeError("a simulated rank got no answer to its plan")

    def finish_polling(self) -> None:
        """Takes the turns of all writers until none has anything left to poll, such as an open roll call."""
        due = [(0.0, place) for place in range(len(self.ranks))]
        while due:
            at, place = heapq.heappop(due)
            time.sleep(max(0.0, at - time.monotonic()))
            rank = self.ranks[place]
            if rank.turn(self.writer_channel):
                pause = rank.writer.seconds_until_look or 0.0
                heapq.heappush(due, (time.monotonic() + pause, place))

    def heartbeat(self) -> None:
        """Every rank sends one heartbeat."""
        for rank in self.ranks:
            rank.heartbeat(self.writer_channel)

    def start_reader(self) -> None:
        """Starts a thread that waits in the store for the next entry and receives it for each rank."""
        index = self.ranks[0].session.read
        self._reader_thread = threading.Thread(target=self._read, args=[index], name="reader")
        self._reader_thread.start()

    def _read(self, index: int) -> None:
        for rank in self.ranks:
            rank.receive(self.reader_channel, index)
        self._received_at = time.monotonic()

    def join_reader(self) -> float:
        """Waits for the reader; returns when the last rank knew, by `time.monotonic()`."""
        if self._reader_thread is not None:
            self._reader_thread.join()
        return self._received_at

    def call(self, method: str, *arguments: Any) -> float:
        """Every rank passes a sync point (a method of its guard), then writes it; returns when the first one began."""
        began = time.monotonic()
        for rank in self.ranks:
            getattr(rank.guard, method)(*arguments)
        for rank in self.ranks:
            rank.turn(self.writer_channel)
        return began

    def call_first(self, method: str, *arguments: Any) -> float:
        """Only the first rank passes a sync point; returns when it began."""
        began = time.monotonic()
        getattr(self.ranks[0].guard, method)(*arguments)
        self.ranks[0].turn(self.writer_channel)
        return began

    def call_others(self, method: str, *arguments: Any) -> None:
        """All ranks but the first pass the sync point that the first one has passed."""
        for rank in self.ranks[1:]:
            getattr(rank.guard, method)(*arguments)
            rank.turn(self.writer_channel)

    def batches(self, count: int) -> None:
        """Every rank starts `count` batches and writes what is due."""
        for rank in self.ranks:
            for _ in range(count):
                rank.guard.batch()
            rank.turn(self.writer_channel)

    def begin_even(self, lookahead: int, batches: int) -> None:
        """Every rank's open train epoch becomes an even pass."""
        for rank in self.ranks:
            rank.begin_even(lookahead, batches)

    def train(self, until: int) -> tuple[bool, int]:
        """Every rank takes the batches that it is granted, up to that many, and writes what is due.

        Returns:
            Whether all have that many, or have ended; and the length of the log as far as one of them knows it.
        """
        done = [rank.train(until) for rank in self.ranks]
        for rank in self.ranks:
            rank.turn(self.writer_channel)
        return all(done), max(rank.session.read for rank in self.ranks)

    def receive_until(self, length: int) -> None:
        """Every rank receives the log up to that length, as its reader does."""
        for rank in self.ranks:
            while rank.session.read < length:
                rank.receive(self.reader_channel, rank.session.read)

    def forget_until(self, length: int) -> None:
        """Rank 0 removes the log up to that length, as it does once the heartbeats say that all ranks have read it."""
        if self.ranks[0].state.rank == 0:
            heartbeats = self.ranks[0].session.heartbeats
            heartbeats.all_have_read(length)
            heartbeats.prune(self.writer_channel)

    def credit_keys(self) -> set[str]:
        """Returns all keys of credits that these ranks have used."""
        return self._writer_store.credit_keys

    def exit(self) -> None:
        """All ranks exit without having ended the fit, so their goodbyes must end the readers' waits."""
        for rank in self.ranks:  # at the same moment: none knows yet that another one leaves
            rank.writer.say_goodbye()
        for rank in self.ranks:
            rank.turn(self.writer_channel)

    def take(self) -> Counts:
        """Returns what this process has sent and received since the last call."""
        stores = self._writer_store, self._reader_store, self._default_store.counting
        return added(*(store.take() for store in stores))

    def verdicts(self) -> list[str]:
        """Returns the verdicts of these ranks; healthy ranks have none."""
        return [rank.state.end.headline for rank in self.ranks if rank.state.end is not None]


def group_process(commands: Connection, ranks: Sequence[int], world_size: int, port: int) -> None:
    """Runs a group of ranks; see `serve`."""
    serve(commands, RankGroup([SimulatedRank(rank, world_size) for rank in ranks], port))


def serve(commands: Connection, group: RankGroup) -> None:
    """Calls the methods of a group: reads (method, arguments), answers (result, CPU seconds); None ends it."""
    commands.send("ready")
    while (command := commands.recv()) is not None:
        method, *arguments = command
        began = time.process_time()
        try:
            result = getattr(group, method)(*arguments)
        except Exception as error:
            commands.send((error, 0.0))
            return
        commands.send((result, time.process_time() - began))


def store_process(commands: Connection) -> None:
    """Hosts the store: sends its port, then its CPU seconds so far for each message; None ends it."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    commands.send(store.port)
    while commands.recv() is not None:
        commands.send(time.process_time())

"""The speaker: the one thread that writes to the store, so that the training thread never has to."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from countoff.core.protocol.log import parse_count
from countoff.core.protocol.state import State
from countoff.core.runtime import shutdown
from countoff.core.runtime.processes import Process, host_id
from countoff.core.runtime.roll_call import Gathering, Records
from countoff.core.verdict import TABLE_ROWS, Verdict, lost_rank, odd_ranks

if TYPE_CHECKING:
    from countoff.core.runtime.channel import Channel

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 30.0
"""Without a beat for so long, or for `stall_seconds` if that is more, a rank on another host is lost."""
_POLL_SECONDS = 0.005
_PROMPT_SECONDS = 0.05
_SLOW_SECONDS = 0.25
_SILENT_SECONDS = 5.0
MARK_SECONDS = 0.05
"""The longest that a mark may hold up training, whatever the store does."""
_SETTLE_SECONDS = 0.3
_LOG_MARGIN = 64
_GATHER_SECONDS = 1.5

Job = Callable[["Channel"], object]


class _Pollable(Protocol):
    def poll(self, channel: Channel) -> bool: ...


class Speaker:
    """Does, one after the other, what the other threads hand it; beats in between.

    Args:
        state: This rank's state.
        connect: Opens this thread's channel; may take seconds.
        lost: Called when the store cannot be reached any more.
    """

    def __init__(self, state: State, connect: Callable[[], Channel], lost: Callable[[Exception], None]) -> None:
        self._state = state
        self._connect = connect
        self._lost = lost
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._pending: list[_Pollable] = []
        self._beats: dict[int, tuple[int, float]] = {}
        self._pruned = 0
        self._next_beat = 0.0
        self._took = 0.0
        self._beat = 0
        self._heard_at = 0.0
        self._polls = 0
        self._host = host_id()
        self._met_all = False
        self.neighbours: dict[int, Process] = {}
        self.busy_since = 0.0
        self.channel: Channel | None = None
        self.thread = threading.Thread(target=self._run, name="countoff speaker", daemon=True)

    def hand(self, job: Job | None) -> None:
        """Queues a job; None ends the thread after those before it."""
        self._jobs.put(job)

    def poll(self, pollable: _Pollable) -> None:
        """Queues something to be looked at until it is done, often at first."""

        def begin(channel: Channel) -> None:
            del channel
            self._pending.append(pollable)
            self._polls = 0

        self.hand(begin)

    @property
    def prompt(self) -> bool:
        """Whether the store answers at once: nothing has been under way for longer than a mark may wait."""
        since = self.busy_since
        return since == 0.0 or time.monotonic() - since < _PROMPT_SECONDS

    @property
    def slow(self) -> bool:
        """Whether the store takes long to answer: it is overdue, or its last turn took over a quarter of a second."""
        return not self.prompt or self._took > _SLOW_SECONDS

    def append(self, entry: dict[str, Any], redundant: Callable[[], bool] = lambda: False) -> Job:
        """A job that appends to the log, unless the log says it already when its turn comes."""

        def job(channel: Channel) -> None:
            state = self._state
            while not redundant() and state.end is None:
                index = state.ledger.read
                standing = channel.claim(f"log/{index}", entry)
                state.receive(index, standing)
                if standing == entry:
                    return

        return job

    def write(self, entry: dict[str, Any], redundant: Callable[[], bool], hold: float) -> None:
        """Appends to the log, and waits for that, but never longer than `MARK_SECONDS` in all.

        Args:
            entry: The entry.
            redundant: Whether the log says it already.
            hold: Seconds for which an objection of another rank is awaited after it.
        """
        done, prompt, append = threading.Event(), self.prompt, self.append(entry, redundant)
        self.hand(lambda channel: (append(channel), done.set()))
        if prompt and done.wait(MARK_SECONDS - hold) and hold:
            self._state.ended.wait(hold)

    def _run(self) -> None:
        try:
            self.channel = channel = self._connect()
            self._introduce(channel)
            while self._turn(channel):
                self._took = time.monotonic() - self.busy_since
                self.busy_since = 0.0
        except Exception as error:  # whatever the store does, training goes on or hears why not
            with contextlib.suppress(Exception):  # this rank may fall silent from here on: that is no death
                if self.channel is not None:
                    announce_stopped(self.channel, self._state.rank)
            self._lost(error)

    def _turn(self, channel: Channel) -> bool:
        wait = max(0.0, self._next_beat - time.monotonic())
        if self._pending:
            wait = min(wait, _POLL_SECONDS * 2 ** min(self._polls // 20, 6))
            self._polls += 1
        try:
            job = self._jobs.get(timeout=wait)
        except queue.Empty:
            job = _nothing
        self.busy_since = time.monotonic()
        if job is None:
            return False
        job(channel)
        for pollable in list(self._pending):
            if not self._jobs.empty():
                break  # marks first, and the end
            if pollable.poll(channel):
                self._pending.remove(pollable)
        overdue = time.monotonic() - self._next_beat
        if overdue >= 0 and (self._jobs.empty() or overdue > _SILENT_SECONDS):
            self._next_beat = time.monotonic() + BEAT_SECONDS
            self._do_beat(channel)
        return True

    def _introduce(self, channel: Channel) -> None:
        process = Process.own(self._state.rank)
        place = channel.add(f"host/{self._host}", 1)
        record = {"rank": process.rank, "pid": process.pid, "began": process.began}
        channel.set(f"host/{self._host}/{place}", record)

    def _do_beat(self, channel: Channel) -> None:
        state = self._state
        self._beat += 1
        channel.set(f"beat/{state.rank}", {"beat": self._beat, "read": state.ledger.read})
        self.look_around(channel)
        others = range(1, state.world_size) if state.rank == 0 else (0,)
        self._hear_beats(channel, others)

    def look_around(self, channel: Channel, *, complete: bool = False) -> None:
        """Learns which processes on this host are ranks, so that the watchdog can see them die.

        Args:
            channel: The speaker's channel.
            complete: Whether all ranks have introduced themselves, so that this look is the last one.
        """
        if self._met_all:
            return
        self._met_all = complete
        met = len(self.neighbours)
        places = min(channel.add(f"host/{self._host}", 0), self._state.world_size)
        keys = [f"host/{self._host}/{place}" for place in range(met + 1, places + 1)]
        there = keys if not keys or channel.has(*keys) else list(itertools.takewhile(channel.has, keys))
        for record in channel.get_many(there):
            process = Process.from_json(record)
            self.neighbours.setdefault(parse_count(process.rank, self._state.world_size), process)

    def _hear_beats(self, channel: Channel, others: Sequence[int]) -> None:
        keys = [f"beat/{rank}" for rank in others]
        # Nobody takes its beat back: once all have beaten, there is nothing to ask for first.
        everybody = len(self._beats) == len(others) or channel.has(*keys)
        heard = list(others) if everybody else [rank for rank in others if channel.has(f"beat/{rank}")]
        now = time.monotonic()
        if now - self._heard_at > 3 * BEAT_SECONDS:  # this rank was paused, or its store was: nobody else was silent
            self._beats = {rank: (beat, now) for rank, (beat, _) in self._beats.items()}
        self._heard_at = now
        # One that holds the interpreter in a single long call cannot beat: it is no more lost than a slow one is.
        silence = max(SILENCE_SECONDS, self._state.settings.stall_seconds)
        records = dict(zip(heard, channel.get_many([f"beat/{rank}" for rank in heard]), strict=True))
        for rank, record in records.items():
            beat, since = self._beats.get(rank, (-1, now))
            if record["beat"] != beat:
                self._beats[rank] = (record["beat"], now)
            elif now - since > silence and rank not in self.neighbours and not channel.has(f"bye/{rank}"):
                self._state.propose(lost_rank(rank, f"has not been heard for {silence:.0f} s"))
        if self._state.rank == 0 and len(records) == len(others):
            self._prune(channel, min([record["read"] for record in records.values()], default=0))

    def _prune(self, channel: Channel, read_by_all: int) -> None:
        # A listener may still be on its way to an entry that its own speaker has read: leave it far behind.
        for index in range(self._pruned, min(read_by_all, self._state.ledger.read) - _LOG_MARGIN):
            channel.delete(f"log/{index}")
            self._pruned = index + 1

    def conclude(self, channel: Channel) -> None:
        """Says the verdict on this rank, with the table of what every rank had counted.

        Every rank posts its row once its training thread has met the verdict or is evidently blocked; rank 0
        gathers and publishes the table, and all print it.
        """
        state = self._state
        verdict = state.end
        if verdict is None or state.said.is_set():
            return
        state.answered.wait(_SETTLE_SECONDS)
        channel.set(f"row/{state.rank}", state.last_words())
        dead = verdict.ranks if verdict.gone else ()
        if state.rank == 0:
            known = state.present or range(state.world_size)
            # A plan that still lies there came after the roll call: a late rank, but one that counts.
            here = [rank for rank in range(state.world_size) if rank in known or channel.has(f"plan/{rank}")]
            owed = [rank for rank in here if rank not in dead]
            table: list[Records] = []
            gathering = Gathering("row", owed, time.monotonic() + _GATHER_SECONDS, lambda rows, _: table.append(rows))
            while not gathering.poll(channel):
                time.sleep(_POLL_SECONDS)
            self._publish_table(channel, verdict, table[0], len(owed))
        elif 0 not in dead:
            _until(channel, "table", deadline=time.monotonic() + _SETTLE_SECONDS + _GATHER_SECONDS + 0.2)
        shutdown.print_verdict(state, with_table(channel, verdict, state.remedies))
        channel.set(f"told/{state.rank}", {"told": True})
        if state.rank == 0:  # it may host the store: the others hear before it goes
            told = [f"told/{rank}" for rank in range(1, state.world_size) if rank not in dead]
            _until(channel, *told, deadline=time.monotonic() + 1.0)
        state.said.set()

    def _publish_table(self, channel: Channel, verdict: Verdict, rows: Records, owed: int) -> None:
        odd = odd_ranks(rows.values(), verdict.ranks) if verdict.mark_index >= 0 else verdict.ranks
        order = sorted(rows, key=lambda rank: (rank not in odd, rank))
        for place, rank in enumerate(order[:TABLE_ROWS]):
            channel.set(f"table/{place}", rows[rank])
        spread = max((row["known"] for row in rows.values()), default=0.0) - verdict.time
        known = spread if len(rows) == owed == self._state.world_size and 0 <= spread < SILENCE_SECONDS else None
        failed = next(((rank, rows[rank]["failure"]) for rank in sorted(rows) if rows[rank]["failure"]), None)
        channel.set("table", {"rows": len(order), "odd": list(odd[:8]), "spread": known, "failed": failed})


def with_table(channel: Channel, verdict: Verdict, remedies: Mapping[str, str]) -> Verdict:
    """The verdict with the table that rank 0 has published, if it has.

    A rank that failed by itself is the better cause: what others proved is what its failure looked like to them.
    """
    if not channel.has("table"):
        return verdict
    header = channel.get("table")
    counted = int(header["rows"])
    shown = min(counted, TABLE_ROWS)
    keys = [f"table/{place}" for place in range(shown)]
    rows = tuple(channel.get_many(keys)) if keys and channel.has(*keys) else ()
    if header["failed"] is not None:
        rank, describe_mark = header["failed"]
        failed = lost_rank(int(rank), str(describe_mark), gone=False)
        return replace(failed, rows=rows, counted=counted, remedy=remedies.get("LostRank", ""))
    odd = tuple(int(rank) for rank in header["odd"])
    spread = header["spread"]
    spread = None if spread is None else float(spread)
    return replace(verdict, ranks=odd, rows=rows, counted=counted, spread_seconds=spread)


def announce_stopped(channel: Channel, rank: int) -> None:
    """Tells the others that this rank compares no more, so that nobody waits for it or takes it for dead."""
    channel.set(f"bye/{rank}", {"bye": True})
    if rank == 0 and not channel.has("plan"):
        channel.set("plan", {"compared": 0, "agreed": []})


def _until(channel: Channel, *keys: str, deadline: float) -> bool:
    while keys and not channel.has(*keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _nothing(channel: Channel) -> None:
    del channel

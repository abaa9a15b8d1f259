"""The speaker: the one thread that writes to the store, so that the training thread never has to."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from countoff.core.protocol.actions import PrintWarning, WriteEntry
from countoff.core.protocol.state import State
from countoff.core.runtime import shutdown
from countoff.core.runtime.agreement import Agreement
from countoff.core.runtime.gathering import Pollable
from countoff.core.runtime.heartbeats import HEARTBEAT_SECONDS, Heartbeats

if TYPE_CHECKING:
    from countoff.core.runtime.channel import Channel

MARK_SECONDS = 0.05
"""The longest that a mark may hold up training, whatever the store does."""
_POLL_SECONDS = 0.005
_FIRST_LOOK_SECONDS = 0.0001
_PROMPT_SECONDS = 0.05
_SLOW_SECONDS = 0.25
_SILENT_SECONDS = 5.0

Job = Callable[["Channel"], object]


class Speaker:
    """Carries out this rank's actions and jobs, one after the other, and sends heartbeats in between.

    Args:
        state: This rank's state. Its outbox is the queue that this thread empties.
        connect: Opens this thread's channel; may take seconds.
        lost: Called when the store cannot be reached any more.

    Attributes:
        heartbeats: Those of this rank and of others.
        busy_since: When the job under way began, by `time.monotonic()`; 0 between two jobs.
        channel: This thread's channel, once it is connected.
        thread: The thread.
    """

    def __init__(self, state: State, connect: Callable[[], Channel], lost: Callable[[Exception], None]) -> None:
        self._state = state
        self._connect = connect
        self._lost = lost
        self._pending: list[Pollable] = []
        self._next_heartbeat = 0.0
        self._last_turn_seconds = 0.0
        self._polls = 0
        self._ending = False
        self.heartbeats = Heartbeats(state)
        self.busy_since = 0.0
        self.channel: Channel | None = None
        self.thread = threading.Thread(target=self._run, name="countoff speaker", daemon=True)

    def hand(self, job: Job | None) -> None:
        """Queues a job, behind the actions in the outbox; None ends the thread after the jobs before it, and theirs."""
        self._state.outbox.put(job)

    def poll(self, pollable: Pollable) -> None:
        """Queues something to be looked at until it is done, often at first."""

        def begin(channel: Channel) -> None:
            del channel
            self._pending.append(pollable)
            self._polls = 0

        self.hand(begin)

    @property
    def prompt(self) -> bool:
        """Whether the store answers at once: no job has been under way for longer than a mark may wait."""
        since = self.busy_since
        return since == 0.0 or time.monotonic() - since < _PROMPT_SECONDS

    @property
    def slow(self) -> bool:
        """Whether the store takes long to answer: it is overdue, or the last turn took over a quarter of a second."""
        return not self.prompt or self._last_turn_seconds > _SLOW_SECONDS

    def append(self, entry: dict[str, Any], redundant: Callable[[], bool] = lambda: False) -> Job:
        """Returns a job that appends to the log, unless the log holds the content already when its turn comes."""

        def job(channel: Channel) -> None:
            state = self._state
            while not redundant() and state.end is None:
                index = state.log.read
                standing = channel.claim(f"log/{index}", entry)
                state.receive(index, standing)
                if standing == entry:
                    return

        return job

    def catch_up(self, channel: Channel) -> None:
        """Receives what the log holds by now, without waiting for the listener. Runs on this thread."""
        state = self._state
        while state.end is None and channel.has(f"log/{(index := state.log.read)}"):
            state.receive(index, channel.get(f"log/{index}"))

    def write(
        self,
        entry: dict[str, Any],
        redundant: Callable[[], bool],
        hold: float = 0.0,
        agreement: Agreement | None = None,
    ) -> None:
        """Appends to the log. With `hold` it also waits, but never longer than `MARK_SECONDS` in all.

        Args:
            entry: The entry.
            redundant: Whether the log holds its content already.
            hold: Seconds to wait after that, so that a peer's objection arrives before the next collective.
            agreement: The agreement of all ranks with the entry, which ends that wait; None where a rank is missing.
        """
        done, append, waits = threading.Event(), self.append(entry, redundant), hold > 0 and self.prompt

        def job(channel: Channel) -> None:
            append(channel)
            if agreement is not None:
                agreement.count(channel)
            if waits:
                self._wait_for_objection(channel, agreement, time.monotonic() + hold)
            done.set()

        self.hand(job)
        if waits:
            done.wait(MARK_SECONDS)

    def _wait_for_objection(self, channel: Channel, agreement: Agreement | None, deadline: float) -> None:
        """Waits until a verdict arrives or is to be written, all ranks agree, or the time is over."""
        state, pause = self._state, _FIRST_LOOK_SECONDS
        while not (agreement is not None and agreement.reached) and state.proposed is None:
            left = deadline - time.monotonic()
            if left <= 0 or state.ended.wait(min(pause, left)):
                return
            pause *= 2  # so that many waiting ranks do not keep the store busy
            if agreement is not None:
                agreement.look(channel)

    def _run(self) -> None:
        try:
            self.channel = channel = self._connect()
            self.heartbeats.introduce(channel)
            while self._turn(channel):
                self._last_turn_seconds = time.monotonic() - self.busy_since
                self.busy_since = 0.0
        except Exception as error:  # whatever the store does, training goes on or is told why not
            with contextlib.suppress(Exception):  # this rank may send nothing from here on: that is no death
                if self.channel is not None:
                    announce_stopped(self.channel, self._state.rank)
            self._lost(error)

    def _turn(self, channel: Channel) -> bool:
        """Does the next job, then what is due; False when the thread is to end."""
        outbox = self._state.outbox
        try:
            job = outbox.get(timeout=self._seconds_until_due())
        except queue.Empty:
            job = _nothing
        self.busy_since = time.monotonic()
        if job is None:
            if self._ending or outbox.empty():
                return False
            self._ending = True
            outbox.put(None)  # behind what the jobs before it have handed over
            return True
        self._carry_out(job, channel)
        for pollable in list(self._pending):
            if not outbox.empty():
                break  # marks first, and verdicts
            if pollable.poll(channel):
                self._pending.remove(pollable)
        if self._state.end is not None and self._is_done():
            return False
        overdue = time.monotonic() - self._next_heartbeat
        if overdue >= 0 and (outbox.empty() or overdue > _SILENT_SECONDS):
            self._next_heartbeat = time.monotonic() + HEARTBEAT_SECONDS
            self.heartbeats.send(channel)
        return True

    def _is_done(self) -> bool:
        """Returns whether nothing is left to do after a verdict: it is printed, and the process is to end with it."""
        state = self._state
        return state.printed.is_set() and state.outbox.empty() and state.settings.on_divergence == "raise"

    def _seconds_until_due(self) -> float:
        wait = max(0.0, self._next_heartbeat - time.monotonic())
        if self._pending:
            wait = min(wait, _POLL_SECONDS * 2 ** min(self._polls // 20, 6))
            self._polls += 1
        return wait

    def _carry_out(self, job: Any, channel: Channel) -> None:
        state = self._state
        match job:
            case WriteEntry(entry):
                if state.comparing:
                    self.append(entry, lambda: state.is_written(entry))(channel)
            case PrintWarning(verdict):
                shutdown.print_to_stderr(verdict, state.rank)
            case _:
                job(channel)


def announce_stopped(channel: Channel, rank: int) -> None:
    """Tells the others that this rank compares no more, so that none waits for it or reports it as lost."""
    channel.set(f"bye/{rank}", {"bye": True})
    if rank == 0 and not channel.has("plan"):
        channel.set("plan", {"compared": 0, "agreed": []})


def _nothing(channel: Channel) -> None:
    del channel

"""The three daemon threads of a guard: the listener hears, the speaker says, the watchdog sees that both can.

The listener blocks in one `wait` on its own client, so news arrive in microseconds and cost nothing until they do.
The watchdog does no I/O on the store at all: it is the one that still acts when the store's host is frozen.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from typing import Any

from countoff.core.protocol.state import State
from countoff.core.runtime import gloo_interrupt, shutdown, stacks
from countoff.core.runtime.channel import Channel, ChannelError, answers, default_store, rendezvous
from countoff.core.runtime.speaker import Speaker, announce_stopped
from countoff.core.runtime.stall import Stall
from countoff.core.verdict import Verdict, lost_rank
from countoff.core.verdict import describe_mark as describe_mark

_LOOK_SECONDS = 0.1
_STOPPED_SECONDS = 2.0
_STORE_SECONDS = 30.0
_JOIN_SECONDS = 1.0
_CLOSE_SECONDS = 3.0
_OVERSLEPT_SECONDS = 1.0
_RAISE_SECONDS = 1.0
_FINISHED_POLL_SECONDS = 0.02
_started: weakref.WeakSet[Watch] = weakref.WeakSet()


class Watch:
    """Connects a guard's state to the other ranks, until it is closed.

    Args:
        state: This rank's state.
        number: Number of the guard in this process; equal on all ranks.
    """

    def __init__(self, state: State, number: int) -> None:
        self.state = state
        self._number = number
        self._where: tuple[str, int, str] | None = None
        self._kept: tuple[Any, ...] = ()  # the stores: the job may destroy its process group long before its end
        self._met = threading.Event()
        self._closing = threading.Event()
        self._closed = threading.Event()
        self._leaving = threading.Lock()
        self._ears: Channel | None = None
        self._accused: set[int] = set()
        self.failure: str = ""
        self.speaker = Speaker(state, self._connect, self._store_lost)
        self._listener = threading.Thread(target=self._listen, name="countoff listener", daemon=True)
        self._watchdog = threading.Thread(target=self._guard, name="countoff watchdog", daemon=True)
        self._stall = Stall(state, self.speaker)

    def start(self) -> None:
        """Starts the threads; they connect by themselves.

        A guard that has ended, and still sees to it that the program does, ceases: the program has outlived it.
        """
        for outlived in [watch for watch in _started if watch.state.end is not None]:
            outlived.close()
        _started.add(self)
        self._stay = shutdown.at_exit(self.close)
        for thread in (self.speaker.thread, self._listener, self._watchdog):
            thread.start()

    def stand_by(self, answered: threading.Event) -> None:
        """Waits for the answer to this rank's plan, hardly longer than `deadline_seconds`.

        Without it training goes on. What ranks count from there on is compared all the same, unless the store is mute.
        """
        patience = time.monotonic() + self.state.settings.deadline_seconds + 1.0
        while not (answered.wait(0.02) or self.state.ended.is_set() or self.failure or time.monotonic() > patience):
            pass
        heard = answered.is_set() or self.state.ended.is_set() or self.failure
        if not (heard or (self._where is not None and self.speaker.prompt)):
            self.stop_comparing("the job's store does not answer")

    def close(self) -> None:
        """Says goodbye and ends the threads within a second or so, from any thread, any number of times."""
        if not self._leaving.acquire(blocking=False):
            self._closed.wait(_CLOSE_SECONDS)  # another thread is at it, or has done it
            return
        try:
            self._close()
        finally:
            self._closed.set()

    def leave(self) -> None:
        """Closes behind the caller's back, who has no time to wait."""
        threading.Thread(target=self.close, name="countoff closer", daemon=True).start()

    def _close(self) -> None:
        state, speaker = self.state, self.speaker
        if self._where is not None and (state.end is not None or state.proposed is not None):
            shutdown.wait_until_printed(state)
        if state.end is None and speaker.channel is not None:
            told = threading.Event()
            speaker.hand(lambda channel: (channel.set(f"bye/{state.rank}", {"bye": True}), told.set()))
            if not state.finished:  # nobody has told the listeners yet: one entry wakes our own
                speaker.hand(speaker.append({"type": "goodbye", "rank": state.rank}))
            told.wait(0.2)
        self._closing.set()
        self._met.set()
        speaker.hand(None)
        self._join(self._listener, self._ears)
        self._join(speaker.thread, speaker.channel)
        self._join(self._watchdog, None)
        for channel in (self._ears, speaker.channel):
            if channel is not None:
                channel.release()
        self._kept = self._kept[1:]  # the job may open its store's port again; the one that we host serves the others
        self._stay()

    def _join(self, thread: threading.Thread, channel: Channel | None) -> None:
        if thread is threading.current_thread() or thread.ident is None:
            return
        thread.join(_JOIN_SECONDS / 4)
        if thread.is_alive() and channel is not None:  # blocked in the store: a shut socket wakes it
            channel.shut()
            thread.join(_JOIN_SECONDS)

    def _connect(self) -> Channel:
        # On the speaker's thread: the default store's client may be frozen, and every 25th connection takes seconds.
        store = default_store()
        if store is None:
            raise RuntimeError("torch.distributed is not initialised")
        deadline = time.monotonic() + self.state.settings.deadline_seconds
        host, port, prefix, hosted = rendezvous(
            store, self._number, rank=self.state.rank, deadline=deadline, given_up=self._closing.is_set
        )
        self._kept = store, hosted
        channel = Channel(host, port, prefix)
        self._where = host, port, prefix
        self._met.set()
        return channel

    def _listen(self) -> None:
        self._met.wait()
        if self._where is None or self._closing.is_set():
            return
        try:
            self._ears = channel = Channel(*self._where)
        except Exception as error:  # the speaker has a connection, so the store is there
            self.stop_comparing(f"there is no second connection to the job's store: {_first_line(error)}")
            return
        try:
            while not self._closing.is_set():
                index = self.state.ledger.read
                if self.state.finished and not channel.has(f"log/{index}"):
                    self._closing.wait(_FINISHED_POLL_SECONDS)  # a `wait` here would have to be woken to leave
                    continue
                self.state.receive(index, channel.wait(f"log/{index}"))
                if self.state.end is not None:
                    self.speaker.hand(self.speaker.conclude)
                    return
        except Exception as error:  # torch names a lost store by several exceptions
            self._store_lost(error)

    def _store_lost(self, error: Exception) -> None:
        """The store is out of reach: after the end it may be, before that it is the end."""
        self._met.set()
        if self._closing.is_set() or self.state.end is not None or self.state.finished:
            return
        if isinstance(error, (ChannelError, RecursionError)) or not isinstance(error, (RuntimeError, OSError)):
            self.stop_comparing(f"the control channel holds something that countoff has not written: {error!r}"[:400])
            return
        if self._where is None:  # it has never been reached
            self.stop_comparing(_first_line(error))
            return
        why = f"The job's store went with it: {_first_line(error)}"
        patience = time.monotonic() + 0.5
        while time.monotonic() < patience and not (self._closing.wait(0.02) or self.state.finished):
            for rank, process in list(self.speaker.neighbours.items()):
                if process.state() == "gone":
                    self._conclude_alone(lost_rank(rank, f"died without a word (pid {process.pid})", why))
                    return
        if self._closing.is_set() or self.state.finished:
            return
        if not answers(*self._where[:2]):
            self._conclude_alone(lost_rank(0, "or whoever hosts the job's store is gone", why))
            return
        with contextlib.suppress(Exception):  # the store is there, and has not understood us or not been understood
            announce_stopped(Channel(*self._where), self.state.rank)
        self.stop_comparing(f"the connection to the job's store broke: {_first_line(error)}")

    def stop_comparing(self, reason: str) -> None:
        """This rank trains on without comparing, and says so once."""
        with self.state.lock:
            if self.failure:
                return
            self.failure = reason
        self._met.set()
        shutdown.print_to_stderr(
            Verdict("LateRank", f"{reason} (this rank trains on without comparing)"), self.state.rank
        )

    def _conclude_alone(self, verdict: Verdict) -> None:
        """Ends without the store: each rank says what it knows."""
        state = self.state
        state.adopt(state.proposed or verdict)  # what this rank has proved itself is the better cause
        if state.end is not None:
            shutdown.print_verdict(state, state.end)
            state.said.set()

    def _guard(self) -> None:
        seen_stopped: dict[int, float] = {}
        looked = time.monotonic()
        while not self._closing.wait(_LOOK_SECONDS):
            late, looked = time.monotonic() - looked, time.monotonic()
            if late > _OVERSLEPT_SECONDS:  # the job was paused, or something held the interpreter: nobody got on
                self._stall.moved_at += late
            if self.state.end is not None:
                self._see_it_end()
                return
            if self.failure:
                return
            self._look_at_neighbours(seen_stopped)
            self._look_at_speaker()
            self._stall.look()

    def _look_at_neighbours(self, seen_stopped: dict[int, float]) -> None:
        for rank, process in list(self.speaker.neighbours.items()):
            found = "alive" if rank == self.state.rank or rank in self._accused else process.state()
            if found == "alive":
                seen_stopped.pop(rank, None)
                continue
            since = seen_stopped.setdefault(rank, time.monotonic())
            if found == "gone" and not self.state.finished:
                self._accuse(process.rank, f"died without a word (pid {process.pid})", "It was killed, or it crashed.")
            elif found == "stopped" and time.monotonic() - since > _STOPPED_SECONDS:
                self._accuse(process.rank, f"is stopped (pid {process.pid}, SIGSTOP)", "It will not go on by itself.")

    def _accuse(self, rank: int, describe_mark: str, why: str) -> None:
        verdict = lost_rank(rank, describe_mark, f"{why} {self._before_that(rank)}".strip())
        self._accused.add(rank)

        heard = threading.Event()

        def accuse(channel: Channel) -> None:
            if not channel.has(f"bye/{rank}"):
                self.state.propose(verdict)
            heard.set()

        self.speaker.hand(accuse)
        patience = time.monotonic() + 0.5
        while time.monotonic() < patience and not (heard.is_set() or self._closing.is_set()):
            if self.state.ended.wait(0.01):
                return
        if not (heard.is_set() or self._closing.is_set() or self.state.finished):
            self._conclude_alone(verdict)

    def _before_that(self, rank: int) -> str:
        """What may have been the beginning of a rank's end: a mark of its own that no rank shares, or a warning."""
        state = self.state
        with state.lock:
            mark = state.ledger.first_ahead()
        if mark is not None and mark.rank == rank:
            return f"Before that it {describe_mark(mark)}, a place that rank {state.rank} has not come to."
        return "; ".join(f"before that, {notice.sentence}" for notice in state.notices[:1])

    def _look_at_speaker(self) -> None:
        since = self.speaker.busy_since
        if since and self._where and time.monotonic() - max(since, self._stall.moved_at) > _STORE_SECONDS:
            why = f"Neither the store nor this rank has got on for {_STORE_SECONDS:.0f} s."
            self._conclude_alone(lost_rank(0, "or whoever hosts the job's store does not answer", why))

    def _see_it_end(self) -> None:
        """Sees to it that this process ends with the verdict, whatever its main thread is blocked in."""
        state, patience = self.state, max(self.state.settings.grace_seconds, _LOOK_SECONDS)
        began = time.monotonic()
        token: Any = None
        cut = False
        while not self._closing.wait(_LOOK_SECONDS):
            now = time.monotonic()
            if not state.said.is_set() and now - began > shutdown.PRINT_SECONDS and state.end is not None:
                shutdown.print_verdict(state, state.end)
                state.said.set()
            if state.settings.on_divergence == "warn":
                if state.said.is_set():
                    return
                continue
            place, answered = stacks.main_thread(), state.answered.is_set()
            moving, token = place.token != token, place.token
            if (answered and place.state != "collective") or (moving and (answered or cut)):
                began = now  # it is on its way out, and may take its time
            elif now - began > patience and state.said.is_set():
                if cut:
                    shutdown.exit_now()
                gloo_interrupt.cut_collectives()  # unless a peer has: then the error is under way
                cut, began = True, time.monotonic() - patience + _RAISE_SECONDS


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]

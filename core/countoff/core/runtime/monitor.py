"""The monitor: connects one guard to the other ranks, with three daemon threads that it starts and joins.

The listener receives, the speaker writes, the watchdog makes sure that both can and that the process ends with a
verdict. Each of the first two has a client of its own on the job's store, because one client serialises its calls.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from typing import Any

from countoff.core.protocol.judgement import DIED, lost_rank
from countoff.core.protocol.records import goodbye_entry
from countoff.core.protocol.state import State
from countoff.core.runtime import shutdown
from countoff.core.runtime.channel import Channel, ChannelError, answers, default_store, rendezvous
from countoff.core.runtime.listener import Listener
from countoff.core.runtime.session import Session, first_line
from countoff.core.runtime.speaker import Speaker, announce_stopped
from countoff.core.runtime.verdict_table import print_with_table
from countoff.core.runtime.watchdog import Watchdog

_JOIN_SECONDS = 1.0
_CLOSE_SECONDS = 3.0
_GOODBYE_SECONDS = 0.2
_BETTER_CAUSE_SECONDS = 0.5
_started: weakref.WeakSet[Monitor] = weakref.WeakSet()


class Monitor:
    """Connects a guard's state to the other ranks, until it is closed.

    Args:
        state: This rank's state.
        number: Number of the guard in this process; equal on all ranks.

    Attributes:
        state: This rank's state.
        session: What the threads share.
        speaker: This rank's speaker.
    """

    def __init__(self, state: State, number: int) -> None:
        self.state = state
        self.session = Session(state)
        self._number = number
        self._stores: tuple[Any, ...] = ()  # kept: the job may destroy its process group long before its end
        self._close_begun = threading.Lock()
        self._closed = threading.Event()
        self.speaker = Speaker(state, self._connect, self._store_lost)
        self._listener = Listener(self.session, self._conclude, self._store_lost)
        self._watchdog = Watchdog(self.session, self.speaker)

    @property
    def failure(self) -> str:
        """Why this rank has stopped comparing; empty while it compares."""
        return self.session.failure

    def start(self) -> None:
        """Starts the threads, which connect by themselves.

        Closes earlier monitors that have a verdict but whose process survived.
        """
        for survived in [monitor for monitor in _started if monitor.state.end is not None]:
            survived.close()
        _started.add(self)
        self._unregister = shutdown.at_exit(self.close)
        for thread in (self.speaker.thread, self._listener.thread, self._watchdog.thread):
            thread.start()

    def wait_for_roll_call(self, answered: threading.Event) -> None:
        """Waits for the answer to this rank's plan, hardly longer than `deadline_seconds`.

        Without an answer training goes on. What ranks count from then on is still compared, unless the store does not
        answer either.

        Args:
            answered: Set once the answer is there.
        """
        session, ended = self.session, self.state.ended
        deadline = time.monotonic() + self.state.settings.deadline_seconds + 1.0
        while not (answered.wait(0.02) or ended.is_set() or session.failure or time.monotonic() > deadline):
            pass
        decided = answered.is_set() or ended.is_set() or session.failure
        if not (decided or (session.address is not None and self.speaker.prompt)):
            session.stop_comparing("the job's store does not answer")

    def close(self) -> None:
        """Says goodbye and ends the threads within a second or so, from any thread, any number of times."""
        if not self._close_begun.acquire(blocking=False):
            self._closed.wait(_CLOSE_SECONDS)  # another thread is closing, or has closed
            return
        try:
            self._close()
        finally:
            self._closed.set()

    def close_in_background(self) -> None:
        """Closes on a background thread; returns at once."""
        threading.Thread(target=self.close, name="countoff closer", daemon=True).start()

    def _close(self) -> None:
        state, speaker, session = self.state, self.speaker, self.session
        if session.address is not None and (state.end is not None or state.proposed is not None):
            shutdown.wait_until_printed(state)
        if state.end is None and speaker.channel is not None:
            self._say_goodbye()
        session.closing.set()
        session.met.set()
        _join(self._listener.thread, self._listener.channel)
        self._conclude()  # a verdict may have come while this rank said goodbye; without one this prints nothing
        speaker.hand(None)
        if session.address is not None and (state.end is not None or state.proposed is not None):
            shutdown.wait_until_printed(state)
        _join(speaker.thread, speaker.channel)
        if state.end is not None:  # it came with the speaker's last jobs
            shutdown.print_verdict(state, state.end)
        _join(self._watchdog.thread, None)
        for channel in (self._listener.channel, speaker.channel):
            if channel is not None:
                channel.release()
        # The job may open its store's port again; the store that this rank hosts still serves the others.
        self._stores = self._stores[1:]
        self._unregister()

    def _say_goodbye(self) -> None:
        state, speaker = self.state, self.speaker
        told = threading.Event()
        speaker.hand(lambda channel: (channel.set(f"bye/{state.rank}", {"bye": True}), told.set()))
        if not state.finished:  # the listeners do not know yet: one entry wakes our own
            speaker.hand(speaker.append(goodbye_entry(state.rank)))
        told.wait(_GOODBYE_SECONDS)

    def _connect(self) -> Channel:
        # On the speaker's thread: the default store's client may be frozen, and a look-up of a name may take seconds.
        session = self.session
        store = default_store()
        if store is None:
            raise RuntimeError("torch.distributed is not initialised")
        deadline = time.monotonic() + self.state.settings.deadline_seconds
        host, port, prefix, hosted = rendezvous(
            store, self._number, rank=self.state.rank, deadline=deadline, given_up=session.closing.is_set
        )
        self._stores = store, hosted
        channel = Channel(host, port, prefix, session.closing.is_set)
        session.address = host, port, prefix
        session.met.set()
        return channel

    def _conclude(self) -> None:
        self.speaker.hand(lambda channel: print_with_table(channel, self.state))

    def _store_lost(self, error: Exception) -> None:
        """Decides what a lost store means: nothing (after the fit), no more comparing, or a lost rank."""
        session, state = self.session, self.state
        session.met.set()
        if session.closing.is_set() or state.end is not None or state.finished:
            return
        if isinstance(error, (ChannelError, RecursionError)) or not isinstance(error, (RuntimeError, OSError)):
            session.stop_comparing(
                f"the control channel holds something that countoff has not written: {error!r}"[:400]
            )
            return
        if session.address is None:  # it was never reached
            session.stop_comparing(first_line(error))
            return
        why = f"The job's store went with it: {first_line(error)}"
        deadline = time.monotonic() + _BETTER_CAUSE_SECONDS
        while time.monotonic() < deadline and not (session.closing.wait(0.02) or state.finished):
            for rank, process in list(self.speaker.heartbeats.neighbours.items()):
                if process.state() == "gone":
                    event = f"died without a word (pid {process.pid})"
                    session.conclude_alone(lost_rank(rank, event, why, subject=DIED))
                    return
        if session.closing.is_set() or state.finished:
            return
        if not answers(*session.address[:2]):
            session.conclude_alone(lost_rank(0, "or whoever hosts the job's store is gone", why))
            return
        with contextlib.suppress(Exception):  # the store answers, but one of the two has misunderstood the other
            announce_stopped(Channel(*session.address, session.closing.is_set), state.rank)
        session.stop_comparing(f"the connection to the job's store broke: {first_line(error)}")


def _join(thread: threading.Thread, channel: Channel | None) -> None:
    if thread is threading.current_thread() or thread.ident is None:
        return
    thread.join(_JOIN_SECONDS / 4)
    if thread.is_alive() and channel is not None:  # blocked in the store: shutting its socket wakes it
        channel.shut()
        thread.join(_JOIN_SECONDS)

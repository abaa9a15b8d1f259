"""The three daemon threads of a process, for as long as one of its guards is open.

The reader receives the log: it blocks in `wait`, so an entry arrives within microseconds. The writer writes, the
watchdog makes sure that both can and that the process ends with a verdict. Each of the first two has a client of its
own on the job's store, because one client serialises its calls. All guards of a process share the three.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from countoff.core.ending import sigterm
from countoff.core.session.liveness.heartbeats import seconds_between
from countoff.core.session.liveness.lifelines import Lifelines, Loss
from countoff.core.session.liveness.processes import Deaths
from countoff.core.session.state import State
from countoff.core.session.store import kept
from countoff.core.session.store.channel import Channel
from countoff.core.session.store.rendezvous import StoreAddress, prefix_of
from countoff.core.session.threads.guard_status import GuardStatus, first_line
from countoff.core.session.threads.join import join
from countoff.core.session.threads.session import Session
from countoff.core.session.threads.watchdog import LOOK_SECONDS, Watchdog
from countoff.core.session.threads.writer import Writer, announce_stopped
from countoff.core.settings import Settings
from countoff.core.waiting import TimedQueue

_log = logging.getLogger("countoff")
_FIRST_LOOK_SECONDS = 0.1
"""After so long, a rank that has connected first looks for the others of its host: its report to all comes before."""
TEND_SECONDS = 1.0
"""Between two looks at the lifelines."""
_FINISHED_POLL_SECONDS = 0.02
_LEAVING_SECONDS = 0.5
"""So long nothing is asked of the store once its host has said goodbye: a call that its end meets prints a trace."""
_LEFT_POLL_SECONDS = 0.5
_SILENT_SECONDS = 5.0
_ALERT_SECONDS = 1.0
"""So long after a rank of this host has ended, the watchdog looks often: the launcher is about to end the others."""
_ALERT_LOOK_SECONDS = 0.01
_lock = threading.Lock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
_Key = tuple[int, int, str]  # process, because a forked one has no threads; rank, because tests have several; nonce
_sessions: weakref.WeakKeyDictionary[Any, dict[_Key, Session]] = weakref.WeakKeyDictionary()
"""By the job's store."""
_running: weakref.WeakValueDictionary[_Key, ProcessThreads] = weakref.WeakValueDictionary()


class Served(Protocol):
    """A guard that these threads serve: a part of `countoff.core.session.threads.registration.Registration`."""

    @property
    def number(self) -> int: ...  # noqa: D102
    @property
    def state(self) -> State: ...  # noqa: D102
    @property
    def writer(self) -> Writer: ...  # noqa: D102
    @property
    def watchdog(self) -> Watchdog: ...  # noqa: D102
    @property
    def status(self) -> GuardStatus: ...  # noqa: D102
    def conclude(self) -> None: ...  # noqa: D102
    def lose(self, error: Exception) -> None: ...  # noqa: D102


class ProcessThreads:
    """The threads of a process and their two clients of the store.

    Args:
        place: Where the ranks meet. A store that this rank hosts there lives as long as this object.
        session: What outlives the threads.
        store: The job's default store, kept alive while a guard is open: the job may destroy its process group long
            before its end.
        settings: Those of the first guard.

    Attributes:
        place: Where the ranks meet.
        store: The job's default store.
        lifelines: Those of this process.
        places_before: Where this process has met the others in earlier fits, by the beginning of the keys there, with
            what it has left there.
        connected: Set once the writer has its connection, or will have none.
        reader_connected: Set once the reader has its connection, or will have none although the writer has one.
        writer_thread: The thread that writes.
        reader_thread: The thread that receives the log.
        writer_channel: The connection of the former, once it has one.
    """

    def __init__(self, place: StoreAddress, session: Session, store: Any, settings: Settings) -> None:
        self.place = place
        self.store = store
        self.lifelines = Lifelines(session.rank, session.ranks, settings.lost_seconds, session.heartbeats)
        self._settings = settings
        self._session = session
        self._registrations: dict[int, Served] = {}
        self._lock = threading.Lock()
        self._over = False
        self.closing = threading.Event()
        self._woken = threading.Event()  # the reader, out of a pause
        self._ready = TimedQueue[Writer | None]()
        self._parts: dict[int, Channel] = {}
        self._next_heartbeat = self._next_tending = 0.0
        self._pause = _FINISHED_POLL_SECONDS
        self.places_before: list[tuple[str, Session]] = []
        self.writer_channel: Channel | None = None
        self._reader_channel: Channel | None = None
        self._idle: list[Channel] = []  # of threads that have ended in order: no call is under way, and none has failed
        self._keeps = True
        self._deaths: Deaths | None = None
        self.connected = threading.Event()
        self.reader_connected = threading.Event()
        self.writer_thread = self._thread("writer", self._write)
        self.reader_thread = self._thread("reader", self._read)
        self._watchdog_thread = self._thread("watchdog", self._watch)

    def add(self, registration: Served) -> bool:
        """Serves a guard from here on; False if the threads are ending, or have lost the store.

        Raises:
            RuntimeError: If a thread cannot be started, as where the limit of processes is reached.
        """
        writer = registration.writer
        writer.join(self._session)
        with self._lock:
            if self._over:
                return False
            started = bool(self._registrations)
            self._registrations[registration.number] = registration
        self._woken.set()
        registration.state.outbox.tell(functools.partial(self._ready.put, writer))
        if not started:
            try:
                for thread in (self._watchdog_thread, self.reader_thread, self.writer_thread):
                    thread.start()
            except RuntimeError:
                self.remove(registration)
                self.close()
                raise
        return True

    def remove(self, registration: Served) -> bool:
        """Waits for no entry for the sake of a guard any more; its jobs are still carried out.

        Returns:
            Whether that was the last guard. The reader has then ended, and `close` ends the other threads.
        """
        with self._lock:
            self._registrations.pop(registration.number, None)
            self._keeps &= registration.state.end is None  # another fit after a verdict is one from nothing
            last = not self._registrations
            self._over |= last
        if last:
            self.closing.set()
            self.connected.set()
            self._woken.set()
            if self._deaths is not None:
                self._deaths.wake()
            join(self.reader_thread, lambda: self._reader_channel)
        return last

    def close(self) -> None:
        """Ends the threads, within a second or so; one that is still connecting ends with its try to connect."""
        self._ready.put(None)
        join(self.writer_thread, lambda: self.writer_channel)
        join(self._watchdog_thread)
        self.lifelines.close()  # the others know by now whether this rank takes part in a fit
        self._parts.clear()
        for channel in self._idle if self._keeps else ():
            kept.keep(self.store, channel)
        for channel in (self._reader_channel, self.writer_channel):
            if channel is not None:
                channel.release()
        # The job may open its store's port again; the store that this rank hosts still serves the others.
        self.store = None

    @property
    def reached(self) -> bool:
        """Whether the store was reached at all."""
        return self.writer_channel is not None

    @property
    def open(self) -> bool:
        """Whether a guard can still join: the threads run, and have not lost the store."""
        return not self._over

    def _thread(self, name: str, run: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=run, name=f"countoff {name}", daemon=True)

    def _all(self) -> list[Served]:
        with self._lock:
            return list(self._registrations.values())

    def _connect(self) -> Channel:
        place = self.place
        channel = kept.take(self.store, place)
        channel = channel or Channel(place.host, place.port, place.prefix, self.closing.is_set)
        channel.keep_alive(self._settings.lost_seconds)
        channel.be_patient(self._settings.stall_seconds)
        return channel

    def _lose(self, error: Exception) -> None:
        """Ends the threads' work after the store was lost; each guard decides what that means for it."""
        with self._lock:
            self._over = True
        for registration in self._all():
            registration.lose(error)

    # The reader.

    def _read(self) -> None:
        self.connected.wait()
        if self.closing.is_set() or not self._session.connected:
            return
        try:
            self._reader_channel = channel = self._connect()
        except Exception as error:  # the writer has a connection, so the store exists
            if self.closing.is_set():
                return  # the guards were closed before this thread had a connection: there is nothing to report
            with self._lock:
                self._over = True
            for registration in self._all():
                registration.status.stop_comparing(
                    f"there is no second connection to the job's store: {first_line(error)}"
                )
            return
        finally:
            self.reader_connected.set()
        try:
            while self._receive(channel):
                pass
        except Exception as error:  # torch names a lost store by several exceptions
            self._session.arrived()
            self._lose(error)
        else:
            self._session.arrived()
            self._idle.append(channel)

    def _receive(self, channel: Channel) -> bool:
        """Receives the next entry of the log, unless no guard has any use for it; False when the thread is to end."""
        session = self._session
        index = session.await_next()  # the effects of all entries before this one are there
        registrations = self._all()
        for registration in registrations:
            if registration.state.end is not None:
                registration.conclude()
        waiting = [registration.state for registration in registrations if registration.state.end is None]
        if not waiting and self._over:
            return False
        finished = all(state.finished for state in waiting)
        # A `wait` without need would have to be interrupted to leave, and breaks where rank 0 leaves with its store.
        # No rank that leaves after another one writes an entry, which would end it.
        leaving = finished or all(state.finished or state.left is not None for state in waiting)
        if leaving and self._host_leaves():
            self._woken.wait(_LEAVING_SECONDS)
        if leaving and channel.is_over():  # torch would print a trace of C++ for a call now
            return False
        if leaving and not (waiting and channel.has(f"log/{index}")):
            session.arrived()
            self._woken.wait(self._pause)
            self._woken.clear()
            self._pause = _FINISHED_POLL_SECONDS if finished else min(2 * self._pause, _LEFT_POLL_SECONDS)
        else:
            self._pause = _FINISHED_POLL_SECONDS
            entry = channel.wait(f"log/{index}")
            session.arrived()
            session.receive(index, entry)
        return not self.closing.is_set()

    # The writer.

    def _write(self) -> None:
        session = self._session
        try:
            self.writer_channel = channel = self._connect()
            session.store_address = channel.store_address() or self.place.host, self.place.port
            session.busy_since = time.monotonic()
            session.connected = True
            self.connected.set()  # the reader connects while this thread registers its rank
            self.lifelines.open(channel)
            session.heartbeats.register(channel)
            session.heartbeats.write(channel, session.passed)  # before any guard begins its fit
            self._next_heartbeat = time.monotonic() + session.heartbeats.seconds
            self._next_tending = time.monotonic() + _FIRST_LOOK_SECONDS
            session.busy_since = 0.0
            while self._turn(channel):
                session.last_turn_seconds = time.monotonic() - session.busy_since
                session.busy_since = 0.0
            if not channel.is_over():
                self.lifelines.withdraw(channel)
                self._idle.append(channel)
        except Exception as error:  # whatever the store does, training goes on or is told why not
            self.connected.set()
            for registration in self._all():  # this rank may send nothing from here on: that is no death
                with contextlib.suppress(Exception):  # the store that is lost is asked once more
                    if self.writer_channel is not None:
                        announce_stopped(self._part(registration.number, self.writer_channel), registration.state)
            self._lose(error)
        finally:
            session.connected = False

    def _turn(self, channel: Channel) -> bool:
        """Does the next job of any guard, then what is due; False when the thread is to end."""
        session, ready = self._session, self._ready
        writers: list[Writer | None] = []
        with contextlib.suppress(queue.Empty):
            writers.append(ready.get(self._seconds_until_due()))
        if not writers and self._host_leaves():
            return True
        if self._has_left(channel):
            return False
        session.busy_since = time.monotonic()
        for writer in writers:
            if writer is None:
                return False
            writer.turn(self._part(writer.number, channel))
        registrations = [registration for registration in self._all() if not registration.writer.is_done]
        if not registrations and self._end_if_done():
            return False
        for registration in registrations:
            if not ready:
                registration.writer.look(self._part(registration.number, channel))
        if self.places_before and any(registration.state.complete for registration in registrations):
            prefix, before = self.places_before.pop()  # all ranks have come here
            before.forget(channel.at_root(prefix))
        if self._is_due(self._next_tending):
            self._tend(channel)
        if self._is_due(self._next_heartbeat):
            self._send_heartbeat(channel)
            for registration in registrations:
                part = self._part(registration.number, channel)
                session.heartbeats.report_silence(part, registration.state, self.lifelines.vouches)
        session.heartbeats.prune(channel, lambda: not ready)
        return True

    def _host_leaves(self) -> bool:
        """Whether the rank that may host the store has just said goodbye, after the fits of all guards."""
        states, now = [registration.state for registration in self._all()], time.monotonic()
        return bool(states) and all(state.finished and now - state.host_left_at < _LEAVING_SECONDS for state in states)

    def _has_left(self, channel: Channel) -> bool:
        """Whether the store's host has left, after the fits of all guards: torch would print a trace for a call now."""
        registrations = self._all()
        return (
            bool(registrations)
            and all(registration.state.finished for registration in registrations)
            and channel.is_over()
        )

    def _is_due(self, at: float) -> bool:
        overdue = time.monotonic() - at
        return overdue >= 0 and (not self._ready or overdue > _SILENT_SECONDS)

    def _tend(self, channel: Channel) -> None:
        """Looks after the lifelines, however rare heartbeats are. The first time, it finds this host's ranks."""
        self._next_tending = time.monotonic() + TEND_SECONDS
        if not self._session.heartbeats.neighbours:
            self._session.heartbeats.find_neighbours(channel)
        self.lifelines.tend(channel)

    def _send_heartbeat(self, channel: Channel) -> None:
        self._next_heartbeat = time.monotonic() + self._session.heartbeats.seconds
        self._session.heartbeats.send(channel, self._session.passed)

    def _end_if_done(self) -> bool:
        """Ends the writer and the reader after a verdict: rank 0 may leave now, and the store with it."""
        with self._lock:
            done = bool(self._registrations) and all(
                registration.writer.is_done for registration in self._registrations.values()
            )
            self._over |= done
        return done

    def _seconds_until_due(self) -> float:
        if self._host_leaves():
            return _LEAVING_SECONDS
        looks = [registration.writer.seconds_until_look for registration in self._all()]
        due = max(0.0, min(self._next_heartbeat, self._next_tending) - time.monotonic())
        return min([due, *(seconds for seconds in looks if seconds is not None)])

    def _part(self, number: int, channel: Channel) -> Channel:
        """The channel of one guard."""
        if number not in self._parts:
            self._parts[number] = channel.at(f"{number}/")
        return self._parts[number]

    # The watchdog.

    def _watch(self) -> None:
        self._deaths = deaths = Deaths()
        sigterm.hold()
        try:
            self._look_until_closing(deaths)
        finally:
            deaths.close()
            sigterm.release()

    def _look_until_closing(self, deaths: Deaths) -> None:
        looked, alert_until = time.monotonic(), 0.0
        while not self.closing.is_set():
            deaths.watch(list(self._session.heartbeats.neighbours.values()))
            if deaths.wait(_ALERT_LOOK_SECONDS if time.monotonic() < alert_until else LOOK_SECONDS):
                alert_until = time.monotonic() + _ALERT_SECONDS
            if sigterm.received():
                self._end_by_signal()
            if self.closing.is_set():
                return
            late, looked = time.monotonic() - looked, time.monotonic()
            for registration in self._all():
                registration.watchdog.look(late)
            for loss in self._poll():
                for registration in self._all():
                    registration.watchdog.report(loss)

    def _end_by_signal(self) -> None:
        """Lets each guard say what has happened, then ends the process by the signal that it has been sent."""
        try:
            for registration in self._all():
                registration.watchdog.explain_sigterm(registration.conclude)
        finally:
            sigterm.pass_on()

    def _poll(self) -> list[Loss]:
        """Looks at the lifelines. If that fails, this thread must go on: it also ends the process after a verdict."""
        try:
            return self.lifelines.poll()
        except Exception:  # a part that was lost costs evidence; the end of this thread would cost the verdict
            _log.debug("the lifelines of rank %d are closed: heartbeats decide", self._session.rank, exc_info=True)
            self.lifelines.close()
            return []


def place_in_use(rank: int, store: Any) -> StoreAddress | None:
    """Where the guards of this process that are open meet the other ranks; None if there are none on this store."""
    with _lock:
        for (pid, owner, _), threads in list(_running.items()):
            if (pid, owner) == (os.getpid(), rank) and threads.open and threads.store is store:
                return threads.place
    return None


def connect(registration: Served, place: StoreAddress, store: Any) -> ProcessThreads:
    """Lets a guard share the threads of this process that meet the others at a place; makes them where there are none.

    Args:
        registration: The guard.
        place: Where the ranks meet.
        store: The job's default store.
    """
    state = registration.state
    key = os.getpid(), state.rank, place.nonce
    with _lock:
        threads = _running.get(key)
        if threads is None or not threads.add(registration):
            sessions = _sessions.setdefault(store, {})
            open_ones = [each for each, threads in _running.items() if threads.open]
            # At any other place of this store, no rank meets any more.
            before = [each for each in sessions if each[:2] == key[:2] and each not in (key, *open_ones)]
            places_before = [(prefix_of(each[2]), sessions.pop(each)) for each in before]
            # The process goes on where it was in the log, if all of its guards were closed for a while.
            beat = seconds_between(len(state.ranks), state.settings)
            session = sessions.setdefault(key, Session(state.rank, state.ranks, beat))
            threads = _running[key] = ProcessThreads(place, session, store, state.settings)
            threads.places_before = places_before
            threads.add(registration)
    return threads

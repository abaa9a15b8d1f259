"""One guard among those that share the threads of its process.

It meets the other ranks, is served by the threads while the guard is open, and decides what a lost store means for it.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from typing import Any

from countoff.core.at_exit import at_exit
from countoff.core.checks.lost import lost_host, lost_rank, lost_store
from countoff.core.ending import shutdown
from countoff.core.ending.table import post_row, print_with_table
from countoff.core.session.liveness.lifelines import Lifelines
from countoff.core.session.liveness.processes import Process
from countoff.core.session.state import State
from countoff.core.session.store.channel import Channel, ChannelError, probe
from countoff.core.session.store.kept import keeps
from countoff.core.session.store.rendezvous import (
    choose_place,
    default_store,
    find_place,
    keep_publishing,
    keep_refusing,
    next_number,
    publish,
    store_of,
    take_back,
    take_refusal,
)
from countoff.core.session.subgroup import Subgroup
from countoff.core.session.threads.guard_status import CLOSER, GuardStatus, first_line
from countoff.core.session.threads.process_threads import ProcessThreads, connect, place_in_use
from countoff.core.session.threads.watchdog import Watchdog
from countoff.core.session.threads.writer import SYNC_SECONDS, Writer, announce_stopped
from countoff.core.verdict import Verdict

DRAIN_SECONDS = 1.0
_LOOK_SECONDS = 0.05
_CLOSE_SECONDS = 3.0
_GOODBYE_SECONDS = 0.2
BETTER_CAUSE_SECONDS = 0.5
_RECENT_SECONDS = 5.0
_started: weakref.WeakSet[Registration] = weakref.WeakSet()


class Registration:
    """Connects a guard's state to the other ranks, until it is closed.

    Args:
        state: This rank's state.
        subgroup: The ranks that meet, if they are a part of the job.

    Attributes:
        state: This rank's state.
        number: Number of the guard among those that have met in the same store; equal on all ranks.
        status: Whether it still takes part in the comparison.
        writer: Its writer.
        watchdog: Its watchdog.
    """

    def __init__(self, state: State, subgroup: Subgroup | None = None) -> None:
        self.state = state
        self._subgroup = subgroup
        number = 0
        with contextlib.suppress(Exception):  # as where the group was destroyed, which `_meet` says
            number = next_number(self._store())
        self.number = number
        self.writer = writer = Writer(state, number)
        self.status = GuardStatus(state, hosts=lambda: writer.session.heartbeats.hosts)
        self.watchdog = Watchdog(self.status, self.writer)
        self.threads: ProcessThreads | None = None
        self._concluded = False
        self._all_met = threading.Event()  # or this rank is closing
        self._close_begun = threading.Lock()
        self._closed = threading.Event()
        # On a thread of its own: the default store's client may be frozen, and a look-up of a name may take seconds.
        self._meeting = threading.Thread(target=self._meet, name="countoff rendezvous", daemon=True)

    @property
    def failure(self) -> str:
        """Why this rank has stopped comparing; empty while it compares."""
        return self.status.failure

    def start(self) -> None:
        """Starts to meet the other ranks, in the background.

        Closes earlier guards that the process has survived: those that have a verdict, and those whose loop an
        exception has left.
        """
        for earlier in list(_started):
            if earlier.state.end is not None:
                earlier.close(survived=True)
            elif earlier.status.left:
                earlier.status.close_left()
        _started.add(self)
        self._unregister = at_exit(self.close)
        try:
            self._meeting.start()
        except RuntimeError as error:  # as where the limit of processes is reached
            self.status.stop_comparing(first_line(error))

    def wait_for_roll_call(self, answered: threading.Event) -> None:
        """Waits for the answer to this rank's plan, hardly longer than `deadline_seconds`.

        Without an answer training goes on. What ranks count from then on is still compared, unless the store does not
        answer either.

        Args:
            answered: Set once the answer is there.
        """
        status, ended = self.status, self.state.ended
        deadline = time.monotonic() + self.state.settings.deadline_seconds + 1.0
        while not (answered.wait(0.02) or ended.is_set() or status.failure or time.monotonic() > deadline):
            pass
        if self.state.complete:
            self._all_met.set()
            self._meeting.join(DRAIN_SECONDS)  # it has done its work, and is about to end
        if (
            answered.is_set() and self.threads is not None
        ):  # so that it receives what the others find in the first batch
            self.threads.reader_connected.wait(min(SYNC_SECONDS, max(0.0, deadline - time.monotonic())))
        session = self.writer.session
        decided = answered.is_set() or ended.is_set() or status.failure
        if not (decided or (session.connected and session.prompt)):
            status.stop_comparing("the job's store does not answer")
        elif not decided and self.state.settings.keeps_even:
            status.stop_comparing(f"rank {self.state.ranks[0]} has not answered")

    def close(self, *, survived: bool = False) -> None:
        """Says goodbye and leaves the threads within a second or so, from any thread, any number of times.

        Where ranks are kept even and the store is slow, it takes as long as the last entries, at most `lost_seconds`.
        It waits up to 6 s for a connection that is still being made.

        Args:
            survived: Whether the process has survived its verdict and begins another fit, so that NCCL may be busy
                for that.
        """
        if not self._close_begun.acquire(blocking=False):
            self._closed.wait(_CLOSE_SECONDS)  # another thread is closing, or has closed
            return
        try:
            if not survived:
                self.watchdog.free_nccl()
            self._close()
        finally:
            self._closed.set()

    def close_in_background(self) -> None:
        """Closes on a background thread, where one can be started; returns at once then."""
        try:
            threading.Thread(target=self.close, name=CLOSER, daemon=True).start()
        except RuntimeError:
            self.close()

    def conclude(self) -> None:
        """Has the verdict printed, with its table, if there is one; a second call changes nothing."""
        if self.state.end is not None and not self._concluded:
            self._concluded = True
            self.writer.submit(lambda channel: print_with_table(channel, self.state, self.writer.session.heartbeats))

    def post_row(self) -> None:
        """Posts this rank's row of a table that there may be later, when its process is gone."""
        self.writer.submit(lambda channel: post_row(channel, self.state))

    def _close(self) -> None:
        state, writer = self.state, self.writer
        connected = writer.session.connected
        if connected and (state.end is not None or state.proposed is not None):
            shutdown.wait_until_printed(state)
        if connected and state.end is None:
            writer.say_goodbye().wait(_GOODBYE_SECONDS)
        self.status.closing.set()
        self._all_met.set()
        if self._meeting.ident is not None:
            self._meeting.join(DRAIN_SECONDS)
        if self.threads is not None:
            self.leave(self.threads)
        self._unregister()

    def leave(self, threads: ProcessThreads) -> None:
        """Leaves the threads once this rank has told what it has to tell; part of `close`."""
        state, writer = self.state, self.writer
        reachable = threads.open  # if not, the writer may be blocked in a call to a host that is gone
        last = threads.remove(self)
        self.conclude()  # a verdict may have come while this rank said goodbye
        writer.submit(None)
        if writer.session.connected:
            if state.end is not None or state.proposed is not None:
                shutdown.wait_until_printed(state)
            self._drain(DRAIN_SECONDS if reachable else 0)
        writer.session.remove(self.number)  # not earlier: the goodbye depends on those that are in the log
        if state.end is not None:  # it came with the writer's last jobs
            shutdown.print_verdict(state, state.end)
        if last:
            threads.close()

    def _drain(self, seconds: float) -> None:
        """Waits until the writer has done its last job, at most so long; longer where ranks are kept even.

        There another rank may wait for what this one has yet to write, and no other entry would end that wait. A store
        that does not answer for `lost_seconds` ends it.
        """
        state, writer = self.state, self.writer
        if seconds and state.settings.keeps_even and state.end is None:
            seconds = max(seconds, state.settings.lost_seconds)
        deadline = time.monotonic() + seconds
        while not writer.drained.wait(min(_LOOK_SECONDS, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline or not writer.session.connected:
                return

    def _meet(self) -> None:
        state, given_up = self.state, self.status.closing.is_set
        try:
            store = self._store()
            if store is None:
                raise RuntimeError("torch.distributed is not initialised")
            if state.leads:  # its choice is that of all ranks
                new = 0 if keeps(store) else state.ranks[-1] + 1
                place = place_in_use(state.rank, store) or choose_place(store, new)
                publish(store, self.number, place)
            else:
                deadline = time.monotonic() + state.settings.deadline_seconds
                place = find_place(store, self.number, state.ranks[-1] + 1, deadline=deadline, given_up=given_up)
            if place.refused:
                self.status.stop_comparing(place.refused, everywhere=True)
            elif not given_up():
                self.threads = connect(self, place, store)
        except Exception as error:  # whatever the store does, training goes on or is told why not
            self.lose(error)
            return
        with contextlib.suppress(Exception):  # the threads themselves say what a lost store means
            if state.leads and place.refused:
                keep_refusing(store, self.number, place, state.ranks[-1] + 1, state.world_size - 1)
            elif state.leads:
                keep_publishing(store, self.number, place, state.ranks[-1] + 1, self._need_not_answer)
                if state.complete:
                    take_back(store, self.number)
            elif place.refused:
                take_refusal(store, place)

    def _store(self) -> Any:
        """The store in which the ranks find one another; None without a process group."""
        return default_store() if self._subgroup is None else store_of(self._subgroup.group)

    def _need_not_answer(self, seconds: float) -> bool:
        """Waits so long; returns whether no rank can ask any more where to meet, or is compared if it does."""
        return self._all_met.wait(seconds) or self.state.ended.is_set()

    def lose(self, error: Exception) -> None:
        """Decides what a lost store means: nothing (after the fit), no more comparing, or a lost rank."""
        status, state = self.status, self.state
        if status.closing.is_set() or state.end is not None or state.finished:
            return
        if isinstance(error, (ChannelError, RecursionError)) or not isinstance(error, (RuntimeError, OSError)):
            status.stop_comparing(f"the control channel holds something that countoff has not written: {error!r}"[:400])
            return
        if self.threads is None or not self.threads.reached:
            status.stop_comparing(first_line(error))
            return
        place, lifelines = self.threads.place, self.threads.lifelines
        why = f"The job's store went with it: {first_line(error)}"
        deadline = time.monotonic() + BETTER_CAUSE_SECONDS
        found = probe(*self.writer.session.store_address)
        while time.monotonic() < deadline and not (status.closing.wait(0.02) or state.finished):
            if found == "silent":
                continue  # a neighbour that is gone was only the first to know
            # One that never came may have ended before.
            if state.complete and any(each.state() == "gone" for each in self._neighbours()):
                return  # the watchdog names it once this rank needs it
        if status.closing.is_set() or state.finished:
            return
        if state.end is not None:
            return
        if found == "open":  # a process that is killed does not close all its connections at once
            found = probe(*self.writer.session.store_address)
        if found != "open" and self._subgroup is not None and not state.settings.keeps_even:
            status.stop_comparing("the job's store has ended")  # perhaps with a rank that takes no part here
            return
        if found != "open":
            status.conclude_alone(self._lost_store(lifelines, found, why))
            return
        with contextlib.suppress(Exception):  # the store answers, but one of the two has misunderstood the other
            channel = Channel(place.host, place.port, place.prefix, status.closing.is_set)
            announce_stopped(channel.at(f"{self.number}/"), state)
        status.stop_comparing(f"the connection to the job's store broke: {first_line(error)}")

    def _neighbours(self) -> list[Process]:
        return list(self.writer.session.heartbeats.neighbours.values())

    def _lost_store(self, lifelines: Lifelines, found: str, why: str) -> Verdict:
        """The verdict where the store cannot be reached any more."""
        seconds, hub = self.state.settings.lost_seconds, lifelines.hub
        heartbeats = self.writer.session.heartbeats
        elsewhere = hub is not None and hub.host != heartbeats.host
        recent = [loss for loss in lifelines.losses if time.monotonic() - loss.at < _RECENT_SECONDS]
        if recent:
            return recent[0].verdict()
        if found == "silent" and hub is not None and hub.has_store and elsewhere and hub.ranks:
            return lost_host(
                heartbeats.hosts.get(self.state.ranks[0], self.writer.session.store_address[0]), hub.ranks, seconds
            )
        if found == "silent":
            return lost_store(self.writer.session.store_address[0], seconds)
        return lost_rank(0, "or whoever hosts the job's store is gone", why)

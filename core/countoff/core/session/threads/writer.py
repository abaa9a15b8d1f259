"""The writer of one guard: all that it writes to the store, so that the training thread never has to.

One thread carries out the jobs of all writers of a process, in the order in which they were submitted
(`process_threads.ProcessThreads`).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from countoff.core.ending import shutdown
from countoff.core.protocol.actions import AddOne, PrintWarning, WriteEntry
from countoff.core.protocol.records import Records, goodbye_entry
from countoff.core.session.liveness import hosts
from countoff.core.session.liveness.heartbeats import say_goodbye
from countoff.core.session.state import State
from countoff.core.session.store.agreement import Agreement
from countoff.core.session.store.gathering import Gathering, Pollable
from countoff.core.session.threads.session import Session
from countoff.core.verdict import at_hosts
from countoff.core.waiting import first_pause

if TYPE_CHECKING:
    from countoff.core.session.store.channel import Channel

SYNC_SECONDS = 0.05
"""The longest that a sync point may hold up training, whatever the store does."""
_POLL_SECONDS = 0.005
_LONGEST_POLL_SECONDS = 0.32
_DOUBLINGS = 9
_FIRST_LOOK_SECONDS = 0.0001
_SINGLE = 1 << 40
"""What a rank that fetches nothing ahead adds to a counter besides its 1: more than all ranks add to it otherwise."""

Job = Callable[["Channel"], object]


class _Pace:
    """When something is due that is done once per so many seconds, the first time at once."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = time.monotonic()

    def is_due(self) -> bool:
        """Whether it is due; if so, it is due again only later."""
        due = self.seconds_left() == 0.0
        if due:
            self._next = time.monotonic() + self._seconds
        return due

    def seconds_left(self) -> float:
        """Until it is due."""
        return max(0.0, self._next - time.monotonic())


class Writer:
    """Carries out a guard's actions and jobs, one after the other. All `channel` arguments are the guard's.

    Args:
        state: This rank's state. Its outbox is the queue that `turn` empties.
        number: Number of the guard in this process; equal on all ranks.

    Attributes:
        number: Number of the guard.
        session: What the guards of this process share; one of its own until the guard has met the other ranks.
        drained: Set once the last job is done: the one before `submit(None)`, and what that has submitted.
    """

    def __init__(self, state: State, number: int = 0) -> None:
        self.number = number
        self.state = state
        self.pending: list[Pollable] = []
        self._polls = 0
        self._first_pause = _POLL_SECONDS
        self._slow: dict[Pollable, _Pace] = {}
        self._ending = False
        self.drained = threading.Event()
        self.join(Session(state.rank, state.ranks))

    def join(self, session: Session) -> None:
        """Shares a session with the other guards of this process from here on."""
        self.session = session
        session.register(self.number, self.state)

    def submit(self, job: Job | None) -> None:
        """Queues a job, behind the actions in the outbox; None is the end, after the jobs before it and theirs."""
        self.state.outbox.put(job)

    def poll(self, pollable: Pollable, *, awaited: bool = False) -> None:
        """Queues something to be looked at until it is done, often at first.

        Args:
            pollable: It.
            awaited: Whether training waits for it: then this rank looks as often as the number of ranks allows.
        """

        def begin(channel: Channel) -> None:
            del channel
            self.pending.append(pollable)
            self._polls = 0
            self._first_pause = first_pause(self.state.ranks[-1] + 1) if awaited else _POLL_SECONDS

        self.submit(begin)

    def poll_every(self, pollable: Pollable, seconds: float) -> None:
        """Queues something to be looked at once per so many seconds until it is done: nobody waits for it.

        Args:
            pollable: It.
            seconds: The seconds between two looks.
        """
        self.submit(lambda _: self._slow.setdefault(pollable, _Pace(seconds)))

    def gather(
        self,
        name: str,
        ranks: Sequence[int],
        deadline: float,
        done: Callable[[Records, list[int]], None],
        missed: Callable[[list[int]], None] | None = None,
        *,
        keep: bool = False,
        awaited: bool = False,
    ) -> Gathering:
        """Gathers one record of each of many ranks in the background; see `Gathering`, and `poll` for `awaited`."""
        gathering = Gathering(name, ranks, deadline, done, missed, keep=keep)
        self.poll(gathering, awaited=awaited)
        return gathering

    def forget(self, keys: Iterable[str]) -> None:
        """Queues a job that deletes keys of the guard."""
        left = list(keys)

        def delete(channel: Channel) -> None:
            for key in left:
                channel.delete(key)

        self.submit(delete)

    def catch_up_now(self, worth_waiting: Callable[[], bool]) -> None:
        """Receives what the log holds by now, and waits until what follows from it is done.

        Args:
            worth_waiting: Whether to go on waiting.
        """
        done = threading.Event()

        def catch_up(channel: Channel) -> None:
            self.catch_up(channel)
            self.submit(lambda _: done.set())

        self.submit(catch_up)
        while not done.wait(0.02) and worth_waiting():
            pass

    def append(self, entry: dict[str, Any], redundant: Callable[[], bool] = lambda: False) -> Job:
        """Returns a job that appends to the log, unless the log holds the content already when its turn comes."""
        addressed = {**entry, "guard": self.number}

        def job(channel: Channel) -> None:
            session, log = self.session, channel.whole
            while True:
                with session.lock:  # an entry that the reader is receiving has then had its effects
                    if redundant() or self.state.end is not None:
                        return
                    index = session.read
                logged = log.compare_and_set(f"log/{index}", addressed)
                session.receive(index, logged)
                if logged == addressed:
                    return

        return job

    def catch_up(self, channel: Channel) -> None:
        """Receives what the log holds by now, without waiting for the reader. Runs on the writer thread."""
        session, log = self.session, channel.whole
        while self.state.end is None and log.has(f"log/{(index := session.read)}"):
            session.receive(index, log.get(f"log/{index}"))

    def read_log(self) -> None:
        """Queues a job that receives what the log holds by then."""
        self.submit(self.catch_up)

    def write(
        self,
        entry: dict[str, Any],
        redundant: Callable[[], bool],
        hold: float = 0.0,
        agreement: Agreement | None = None,
    ) -> None:
        """Appends to the log. With `hold` it also waits, but never longer than `SYNC_SECONDS` in all.

        Args:
            entry: The entry.
            redundant: Whether the log holds its content already.
            hold: Seconds to wait after that, so that a peer's objection arrives before the next collective.
            agreement: The agreement of all ranks with the entry, which ends that wait; None where a rank is missing.
        """
        done, append, waits = threading.Event(), self.append(entry, redundant), hold > 0 and self.session.prompt

        def job(channel: Channel) -> None:
            append(channel)
            if agreement is not None:
                agreement.count(channel)
            if waits:
                self.wait_for_objection(channel, agreement, time.monotonic() + hold)
            done.set()

        self.submit(job)
        if waits:
            done.wait(SYNC_SECONDS)

    def wait_for_objection(self, channel: Channel, agreement: Agreement | None, deadline: float) -> None:
        """Waits until a verdict arrives or is to be written, all ranks agree, or the time is over."""
        state, pause = self.state, _FIRST_LOOK_SECONDS
        while not (agreement is not None and agreement.reached) and state.proposed is None:
            left = deadline - time.monotonic()
            if left <= 0 or state.ended.wait(min(pause, left)):
                return
            pause *= 2  # so that many waiting ranks do not keep the store busy
            if agreement is not None:
                agreement.look(channel)

    def say_goodbye(self) -> threading.Event:
        """Tells the others that this rank closes the guard; returns an event that is set once none waits for it.

        Where its fit has not ended, the log must hold a goodbye, which ends the readers' waits. The first one does,
        whoever writes it, and so does rank 0's, with which the store may go. So rank 0 says goodbye in the log also
        where its fit has ended.
        """
        state, told = self.state, threading.Event()
        self.submit(lambda channel: (say_goodbye(channel, state.rank), told.set()))
        if state.finished and state.leads:
            self.submit(self.append({**goodbye_entry(state.rank), "ended": True}))
        elif not state.finished:
            self.submit(self.append(goodbye_entry(state.rank), lambda: not state.leads and state.left is not None))
        return told

    def turn(self, channel: Channel) -> None:
        """Carries out the oldest action or job, if there is one."""
        outbox = self.state.outbox
        try:
            job = outbox.get_nowait()
        except queue.Empty:
            return
        if job is not None:
            self.carry_out(job, channel)
        elif self._ending or outbox.empty():
            self.drained.set()
        else:
            self._ending = True
            outbox.put(None)  # behind what the jobs before it have submitted

    def look(self, channel: Channel) -> None:
        """Looks at what is polled, unless there is a job: sync points first, and verdicts."""
        for pollable in list(self.pending):
            if not self.state.outbox.empty():
                return
            if pollable.poll(channel):
                self.pending.remove(pollable)
        self._polls += bool(self.pending)
        for pollable, pace in list(self._slow.items()):
            if not self.state.outbox.empty():
                return
            if pace.is_due() and pollable.poll(channel):
                del self._slow[pollable]

    @property
    def seconds_until_look(self) -> float | None:
        """After how many seconds `look` is due; None where nothing is polled."""
        paces = [pace.seconds_left() for pace in self._slow.values()]
        if self.pending:
            paces.append(min(self._first_pause * 2 ** min(self._polls // 20, _DOUBLINGS), _LONGEST_POLL_SECONDS))
        return min(paces, default=None)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do after a verdict: it is printed, and the process is to end with it."""
        state = self.state
        return (
            state.end is not None
            and state.printed.is_set()
            and state.outbox.empty()
            and state.settings.on_divergence == "raise"
        )

    def carry_out(self, job: Any, channel: Channel) -> None:
        """Does one thing that the state has asked for."""
        state = self.state
        match job:
            case WriteEntry(entry):
                if state.comparing:
                    self.append(entry, lambda: state.is_written(entry))(channel)
            case PrintWarning(verdict):
                named = hosts.names(channel.whole, verdict.ranks)
                shutdown.print_warning(state, at_hosts(verdict, named))
            case AddOne():
                if state.comparing and state.end is None:
                    self._add_one(job, channel)
            case _:
                job(channel)

    def _add_one(self, action: AddOne, channel: Channel) -> None:
        state = self.state
        began = time.monotonic()
        counted = channel.add(action.key, 1 + _SINGLE * action.single)
        if counted % _SINGLE % state.world_size == 0:
            entry = {**action.entry, "size": 1} if counted >= _SINGLE else action.entry
            self.append(entry)(channel)  # all ranks may be waiting for it
        state.added(action, time.monotonic() - began)


def announce_stopped(channel: Channel, state: State) -> None:
    """Tells the others that this rank compares no more, so that none waits for it or reports it as lost."""
    say_goodbye(channel, state.rank)
    if state.leads and not channel.has("plan"):
        channel.set("plan", {"compared": 0, "agreed": []})

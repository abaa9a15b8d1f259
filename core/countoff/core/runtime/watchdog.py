"""The watchdog of one guard: it makes no call to the store, and so still acts when the store's host is frozen.

One thread looks through the watchdogs of all guards of a process (`connection.Connection`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from countoff.core.protocol.judgement import DIED, STOPPED, describe_mark, lost_rank
from countoff.core.runtime import collectives, gloo_interrupt, nccl, shutdown, stacks
from countoff.core.runtime.channel import Channel, knock
from countoff.core.runtime.heartbeats import takes_part
from countoff.core.runtime.lifelines import Loss
from countoff.core.runtime.processes import Process
from countoff.core.runtime.session import Session
from countoff.core.runtime.speaker import Speaker
from countoff.core.runtime.stall import Stall
from countoff.core.verdict import Verdict

LOOK_SECONDS = 0.1
_STOPPED_SECONDS = 2.0
_OVERSLEPT_SECONDS = 1.0
_ANSWER_SECONDS = 0.5
_RAISE_SECONDS = 1.0
_FREE_SECONDS = 30.0
_ABORTED = (
    "this rank has not ended {:g} s after the verdict, so countoff aborts its NCCL communicators. The step under way "
    "is incomplete: do not resume from a checkpoint that is written after this line."
)


class Watchdog:
    """Watches this host's ranks, the store's answers, stalls, and, after a verdict, that this process ends.

    Args:
        session: The guard's session.
        speaker: Its speaker.
    """

    def __init__(self, session: Session, speaker: Speaker) -> None:
        self._session = session
        self._state = session.state
        self._speaker = speaker
        self._stall = Stall(session.state, speaker)
        self._accused: set[int] = set()
        self._stopped_since: dict[int, float] = {}
        self._ending = _Ending()

    def look(self, late: float) -> None:
        """Looks once; to be called about every `LOOK_SECONDS`.

        Args:
            late: Seconds since the last look.
        """
        # If it overslept, the job was paused or something held the interpreter: no rank made progress.
        if late > _OVERSLEPT_SECONDS:
            self._stall.moved_at += late
            self._stopped_since.clear()  # others were paused as well, and may be about to go on
        if self._state.end is not None:
            self._ensure_process_ends()
        elif self._compares:
            self._look_at_neighbours()
            self._look_at_store()
            self._stall.look()

    @property
    def _compares(self) -> bool:
        return not (self._session.failure or self._session.closing.is_set())

    def report(self, loss: Loss) -> None:
        """Reports a lifeline that has broken, unless the fit has ended."""
        if self._state.end is None and self._compares and not self._state.finished:
            verdict = loss.verdict(self._before_that(loss.ranks[0]))
            if loss.has_store and self._state.complete:
                self._session.conclude_alone(verdict)
            else:
                self._accuse(verdict)

    def _look_at_neighbours(self) -> None:
        for rank, process in list(self._speaker.line.heartbeats.neighbours.items()):
            found = "alive" if rank == self._state.rank or rank in self._accused else process.state()
            if found == "alive":
                self._stopped_since.pop(rank, None)
                continue
            since = self._stopped_since.setdefault(rank, time.monotonic())
            if found == "gone" and not self._state.finished:
                self._accuse_neighbour(rank, self._loss_of(process))
            elif found == "stopped" and time.monotonic() - since > _STOPPED_SECONDS:
                event = f"is stopped (pid {process.pid}, SIGSTOP)"
                why = f"It will not go on by itself. {self._before_that(rank)}".strip()
                self._accuse_neighbour(rank, lost_rank(rank, event, why, subject=STOPPED))

    def _accuse_neighbour(self, rank: int, verdict: Verdict) -> None:
        self._accused.add(rank)
        # A neighbour may have ended because the store's host is gone: it was only the first to know.
        if not self._accuse(verdict, unless=self._store_is_silent):
            self._accused.discard(rank)

    def gone_neighbour(self) -> Verdict | None:
        """Returns the loss of a rank of this host whose process is gone although it takes part in the fit.

        For a rank that is about to fail. Until then, nobody is accused once rank 0 has left: others may end with it.
        Waits half a second for the store, at most.
        """
        neighbours = list(self._speaker.line.heartbeats.neighbours.items())
        gone = {rank: each for rank, each in neighbours if rank != self._state.rank and each.state() == "gone"}
        found: list[int] = []
        checked = threading.Event()

        def check(channel: Channel) -> None:
            found.extend(rank for rank in sorted(gone) if takes_part(channel, rank))
            checked.set()

        if gone:
            self._speaker.hand(check)
            checked.wait(_ANSWER_SECONDS)
        return self._loss_of(gone[found[0]]) if found else None

    def _loss_of(self, process: Process) -> Verdict:
        why = f"It was killed, or it crashed. {self._before_that(process.rank)}".strip()
        return lost_rank(process.rank, f"is gone (pid {process.pid})", why, subject=DIED)

    def _store_is_silent(self) -> bool:
        return knock(*self._speaker.line.store_address) == "silent"

    def _accuse(self, verdict: Verdict, unless: Callable[[], bool] = lambda: False) -> bool:
        """Proposes that ranks are lost, if one of them takes part in this fit; prints it alone without a store.

        Args:
            verdict: What has happened to them.
            unless: Where the store does not answer, whether to say nothing yet.

        Returns:
            Whether it is settled.
        """
        session = self._session
        checked = threading.Event()

        def accuse(channel: Channel) -> None:
            if any(takes_part(channel, rank) for rank in verdict.ranks):
                self._state.propose(verdict)
            checked.set()

        self._speaker.hand(accuse)
        deadline = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline and not (checked.is_set() or session.closing.is_set()):
            if self._state.ended.wait(0.01):
                return True
        answered = checked.is_set() or session.closing.is_set() or self._state.finished
        if not answered and unless():
            return False
        if self._state.complete and not answered:
            session.conclude_alone(verdict)
        return True

    def _before_that(self, rank: int) -> str:
        """What may have led to the loss of a rank: a mark that it alone has passed, or a warning."""
        state = self._state
        with state.lock:
            mark = state.log.first_ahead()
        if mark is not None and mark.rank == rank:
            return f"Before that it {describe_mark(mark)}, a place that rank {state.rank} has not come to."
        return "; ".join(f"before that, {notice.sentence}" for notice in state.notices[:1])

    def _look_at_store(self) -> None:
        line = self._speaker.line
        since = line.busy_since
        # A host that is gone is found by the keepalive of the listener's connection. This store's host is there.
        patience = max(self._state.settings.lost_seconds, self._state.settings.stall_seconds)
        if since and line.connected and time.monotonic() - max(since, self._stall.moved_at) > patience:
            why = f"Neither the store nor this rank has made progress for {patience:.0f} s."
            self._session.conclude_alone(lost_rank(0, "or whoever hosts the job's store does not answer", why))

    def _ensure_process_ends(self) -> None:
        """Makes sure that this process ends with the verdict, whatever its main thread is blocked in.

        A main thread that runs Python code raises by itself. One that is blocked in a collective gets `grace_seconds`,
        then the collective is interrupted; a second later the process is ended.
        """
        state, now, ending = self._state, time.monotonic(), self._ending
        if self._session.closing.is_set():
            return
        ending.begin(now)
        if not state.printed.is_set() and now - ending.known_at > shutdown.PRINT_SECONDS and state.end is not None:
            shutdown.print_verdict(state, state.end)
            state.printed.set()
        if state.settings.on_divergence == "warn":
            return
        grace = max(state.settings.grace_seconds, LOOK_SECONDS)
        place, answered = stacks.main_thread(), state.answered.is_set()
        moving, ending.token = place.token != ending.token, place.token
        on_its_way_out = answered and place.state != "collective"
        if on_its_way_out or (moving and (answered or ending.cut_at)):
            ending.since = now  # it may take its time
            # What it does last, such as a checkpoint, may wait for NCCL.
            if (
                ending.is_recent(now)
                and state.printed.is_set()
                and ending.standstill.seconds(now, moving=moving) > grace
            ):
                self._abort_nccl()
        elif ending.abort is not None and ending.abort.under_way:
            ending.since = now - grace + _RAISE_SECONDS
        elif ending.cut_at and now - ending.cut_at < _RAISE_SECONDS:
            gloo_interrupt.cut_collectives()  # again: a group whose thread was busy at that moment was not found
        elif now - ending.since > grace and state.printed.is_set():
            if ending.cut_at:
                shutdown.exit_now()
            gloo_interrupt.cut_collectives()  # unless a peer has: then the error is under way
            self._abort_nccl()
            ending.cut_at = time.monotonic()
            ending.since = ending.cut_at - grace + _RAISE_SECONDS

    def free_nccl(self) -> None:
        """Aborts the communicators of NCCL whose collectives never end after a verdict. Runs on the closing thread.

        Without that, `destroy_process_group` would wait for them. As long as NCCL completes collectives, it is waited
        for. A process that has survived its verdict for a minute is left alone.
        """
        state, began = self._state, time.monotonic()
        if state.end is None or state.settings.on_divergence == "warn":
            return
        ending = self._ending
        ending.begin(began)
        if not ending.is_recent(began) or not collectives.unfinished():
            return
        shutdown.wait_until_printed(state)
        standstill = _Standstill()
        while ending.abort is None and collectives.unfinished() and time.monotonic() - began < _FREE_SECONDS:
            if standstill.seconds(time.monotonic()) > state.settings.grace_seconds:
                self._abort_nccl()
            time.sleep(LOOK_SECONDS)
        while ending.abort is not None and ending.abort.under_way:
            time.sleep(LOOK_SECONDS)

    def _abort_nccl(self) -> None:
        """Aborts this process's communicators of NCCL, once."""
        ending = self._ending
        with ending.lock:
            if ending.abort is not None:
                return
            ending.abort = nccl.abort_communicators()
        if ending.abort is not None:
            shutdown.print_line(self._state.rank, _ABORTED.format(self._state.settings.grace_seconds))


class _Standstill:
    """For how long NCCL has had unfinished collectives and completed none."""

    def __init__(self) -> None:
        self._unfinished: object = None
        self._since = 0.0

    def seconds(self, now: float, *, moving: bool = False) -> float:
        """The seconds at this look; 0 where the main thread has moved since the last one."""
        unfinished = collectives.unfinished()
        if moving or not unfinished or unfinished != self._unfinished:
            self._unfinished, self._since = unfinished, now
        return now - self._since


@dataclass
class _Ending:
    """What is known of this process's end after a verdict. The watchdog and the thread that closes may both use it.

    Attributes:
        since: Since when the main thread has been where it is, by `time.monotonic()`.
        known_at: When the verdict was first seen here; 0 before that.
        token: Where the main thread was at the last look.
        cut_at: When its collectives were first interrupted; 0 before that.
        abort: The abort of its communicators of NCCL, if there is one.
        lock: Held while that begins.
        standstill: For how long nothing has moved, as the watchdog sees it.
    """

    since: float = 0.0
    known_at: float = 0.0
    token: Any = None
    cut_at: float = 0.0
    abort: nccl.Abort | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    standstill: _Standstill = field(default_factory=_Standstill)

    def begin(self, now: float) -> None:
        """Takes note of when the verdict is first seen."""
        with self.lock:
            if not self.known_at:
                self.since = self.known_at = now

    def is_recent(self, now: float) -> bool:
        """Whether the process may be ending with its verdict. Later it has survived it, and does something else."""
        return now - self.known_at < shutdown.ENDING_SECONDS

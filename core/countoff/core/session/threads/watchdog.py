"""The watchdog of one guard: it makes no call to the store, and so still acts when the store's host is frozen.

One thread looks through the watchdogs of all guards of a process (`process_threads.ProcessThreads`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from countoff.core import constants
from countoff.core.checks.lost import AHEAD, DIED, STOPPED, Need, is_lost, loss_of, lost_rank
from countoff.core.ending import gloo, nccl, shutdown
from countoff.core.protocol.records import Absence, SyncPoint, absence_entry
from countoff.core.session.liveness import collectives, stacks
from countoff.core.session.liveness.heartbeats import announce_signal, has_signal, takes_part
from countoff.core.session.liveness.lifelines import Loss
from countoff.core.session.liveness.processes import Process
from countoff.core.session.state import State
from countoff.core.session.store.channel import Channel, probe
from countoff.core.session.threads.guard_status import GuardStatus
from countoff.core.session.threads.stall import Stall
from countoff.core.session.threads.writer import Writer
from countoff.core.verdict import Verdict

LOOK_SECONDS = 0.1
_BUSY_LOOK_SECONDS = 0.5
"""So often a thread that runs code of its own is looked at while another rank is away: a look costs it time."""
_OVERSLEPT_SECONDS = 1.0
ANSWER_SECONDS = 0.5
_RAISE_SECONDS = 1.0
_FREE_SECONDS = 30.0
_LAST_WORDS_SECONDS = 1.5
"""So long a SIGTERM is held back at most until a verdict is printed; then, until the places are told. Where the store
answers, it takes a few milliseconds."""
_ABORTED = (
    "this rank has not ended {:g} s after the verdict, so countoff aborts its NCCL communicators. The step under way "
    "is incomplete: do not resume from a checkpoint that is written after this line."
)


class Watchdog:
    """Watches this host's ranks, the store's answers, stalls, and, after a verdict, that this process ends.

    Args:
        status: The guard's status.
        writer: Its writer.
    """

    def __init__(self, status: GuardStatus, writer: Writer) -> None:
        self.status = status
        self._state = status.state
        self._writer = writer
        self._stall = Stall(status.state, writer)
        self._waiting = _Waiting(status.state)
        self._settled: set[int] = set()
        self._asked: set[int] = set()
        self._broken: dict[int, Loss] = {}
        self._away_since: dict[tuple[int, str, bool, int | None], float] = {}
        self._ending = _Ending()

    def look(self, late: float) -> None:
        """Looks once; to be called about every `LOOK_SECONDS`.

        Args:
            late: Seconds since the last look.
        """
        # If it overslept, the job was paused or something held the interpreter: no rank made progress.
        if late > _OVERSLEPT_SECONDS:
            self._stall.moved_at += late
            self._waiting.begin_again()  # others were paused as well, and may be about to go on
        if self._state.end is not None:
            self._ensure_process_ends()
        elif self.status.left:
            self.status.close_if_over()
        elif self._compares:
            self._look_for_losses()
            self._look_at_store()
            self._stall.look()

    @property
    def _compares(self) -> bool:
        return not (self.status.failure or self.status.closing.is_set())

    def report(self, loss: Loss) -> None:
        """Reports a lifeline that has broken, unless the fit has ended.

        A host that does not answer is lost. A single rank that is gone is lost once another one needs it.
        """
        if self._state.end is not None or not self._compares or self._state.finished:
            return
        if not loss.host:
            self._broken[loss.ranks[0]] = loss
            self._tell_of(loss)
            return
        verdict = loss.verdict(self._before_that(loss.ranks[0]))
        if loss.has_store and self._state.complete:
            self.status.conclude_alone(verdict)
        else:
            self._accuse(verdict)

    def _tell_of(self, loss: Loss) -> None:
        """Tells the ranks that have no lifeline to a rank that it is gone, if it takes part in the fit."""
        entry = absence_entry(loss.absence())

        def tell(channel: Channel) -> None:
            if takes_part(channel, loss.ranks[0]) and self._state.comparing:
                self._writer.append(entry, lambda: self._state.is_written(entry))(channel)

        self._writer.submit(tell)

    def _look_for_losses(self) -> None:
        """Reports a rank that is away as soon as this rank needs it (`checks.lost`)."""
        away, now = self._away(), time.monotonic()
        since = {each: (each.rank, each.subject, each.certain, each.begun) for each in away}
        self._away_since = {key: self._away_since.get(key, now) for key in since.values()}
        if not away:
            return
        state, waited = self._state, self._waiting.seconds(now)
        need = Need(state.begun, failed=state.collective_failed, counts_off=not state.complete)
        for absence, key in since.items():
            known = now - self._away_since[key]
            if is_lost(absence, replace(need, known=known, waited=min(waited, known)), state.settings):
                self._report_absence(absence)

    def _away(self) -> list[Absence]:
        """The ranks that are away, as far as this rank knows, beginning with those that have said why."""
        state, away = self._state, dict[int, Absence]()
        # Once rank 0 has left, others may end with it.
        told = {
            rank: each
            for rank, each in list(state.absences.items())
            if rank not in self._settled and not (state.finished and each.subject == DIED)
        }
        for rank, process in list(self._writer.session.heartbeats.neighbours.items()):
            found = "alive" if rank == state.rank or rank in self._settled else process.state()
            if found == "gone" and rank in told:
                told[rank] = replace(told[rank], certain=True)
            elif found == "gone" and not state.finished:
                self._ask_whether_it_takes_part(rank)
                away[rank] = self._absence_of(process)
            elif found == "stopped":
                event = f"is stopped (pid {process.pid}, SIGSTOP)"
                why = f"It will not go on by itself. {self._before_that(rank)}".strip()
                away[rank] = Absence(rank, event, why, STOPPED)
        for rank, loss in self._broken.items():
            if not state.finished and rank not in self._settled:
                away[rank] = loss.absence(self._before_that(rank))
        return [*told.values(), *(each for rank, each in away.items() if rank not in told)]

    def _ask_whether_it_takes_part(self, rank: int) -> None:
        """Finds out in the background whether a rank whose process is gone has said goodbye before."""

        def settle(channel: Channel) -> None:
            if not takes_part(channel, rank):
                self._settled.add(rank)

        if rank not in self._asked:
            self._asked.add(rank)
            self._writer.submit(settle)

    def _report_absence(self, absence: Absence) -> None:
        rank = absence.rank
        if rank in self._settled:
            return
        self._settled.add(rank)
        # A neighbour may have ended because the store's host is gone: it was only the first to know.
        unless = self._store_is_silent if rank in self._writer.session.heartbeats.neighbours else lambda: False
        if not self._accuse(loss_of(absence), unless=unless, told=rank in self._state.absences):
            self._settled.discard(rank)

    def gone_neighbour(self) -> Verdict | None:
        """Returns the loss of a rank of this host whose process is gone although it takes part in the fit.

        For a rank that is about to fail. Until then, nobody is accused once rank 0 has left: others may end with it.
        Waits half a second for the store, at most.
        """
        neighbours = list(self._writer.session.heartbeats.neighbours.items())
        gone = {rank: each for rank, each in neighbours if rank != self._state.rank and each.state() == "gone"}
        found: list[int] = []
        checked = threading.Event()

        def check(channel: Channel) -> None:
            found.extend(rank for rank in sorted(gone) if takes_part(channel, rank))
            checked.set()

        if gone:
            self._writer.submit(check)
            checked.wait(ANSWER_SECONDS)
        return loss_of(self._absence_of(gone[found[0]])) if found else None

    def explain_sigterm(self, conclude: Callable[[], None]) -> None:
        """Prints and writes why this process has been sent a SIGTERM, if a rank of this host is lost.

        Other ranks of the host get that signal too: one that tells so is not the cause.

        Args:
            conclude: Has the verdict printed, with its table.
        """
        state, deadline = self._state, time.monotonic() + _LAST_WORDS_SECONDS
        if self._compares and not state.finished:
            self._look_a_last_time(deadline)
            if state.end is not None:
                state.answered.set()  # nobody waits for the training thread any more
                conclude()
                state.printed.wait(max(0.0, deadline - time.monotonic()))
        verdict = state.end or state.proposed
        if verdict is not None:
            shutdown.print_verdict(state, verdict)
        if state.observer is not None:
            state.observer.ended_by("SIGTERM")
        state.alerts.wait()

    def _look_a_last_time(self, deadline: float) -> None:
        """Proposes the loss of a neighbour that is gone and takes part; waits for the verdict.

        Where the store does not answer, this rank decides alone.

        Args:
            deadline: For the verdict, by `time.monotonic()`.
        """
        state, writer, checked = self._state, self._writer, threading.Event()
        neighbours = writer.session.heartbeats.neighbours

        def gone() -> list[Process]:
            return [each for rank, each in sorted(neighbours.items()) if rank != state.rank and each.state() == "gone"]

        def look(channel: Channel) -> None:
            announce_signal(channel, state.rank)
            writer.catch_up(channel)  # a verdict of others may be there, and not here yet
            writer.session.heartbeats.find_neighbours(channel.whole)
            for process in gone():
                if takes_part(channel, process.rank) and not has_signal(channel, process.rank):
                    state.propose(loss_of(self._absence_of(process)))
            checked.set()

        writer.submit(look)
        if not checked.wait(ANSWER_SECONDS):
            if state.complete and state.end is None and (found := gone()):
                self.status.conclude_alone(loss_of(self._absence_of(found[0])))
        elif state.proposed is not None:
            state.ended.wait(max(0.0, deadline - time.monotonic()))

    def _absence_of(self, process: Process) -> Absence:
        why = f"It was killed, or it crashed. {self._before_that(process.rank)}".strip()
        subject = DIED if self._sync_point_beyond(process.rank) is None else AHEAD
        return Absence(process.rank, f"is gone (pid {process.pid})", why, subject, certain=True)

    def _store_is_silent(self) -> bool:
        return probe(*self._writer.session.store_address) == "silent"

    def _accuse(self, verdict: Verdict, *, unless: Callable[[], bool] = lambda: False, told: bool = False) -> bool:
        """Proposes that ranks are lost, if one of them takes part in this fit; prints it alone without a store.

        Args:
            verdict: What has happened to them.
            unless: Where the store does not answer, whether to say nothing yet.
            told: Whether the rank has said so itself, so that it need not take part any more.

        Returns:
            Whether it is settled.
        """
        status = self.status
        checked = threading.Event()

        def accuse(channel: Channel) -> None:
            if told or any(takes_part(channel, rank) for rank in verdict.ranks):
                self._state.propose(verdict)
            checked.set()

        self._writer.submit(accuse)
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline and not (checked.is_set() or status.closing.is_set()):
            if self._state.ended.wait(0.01):
                return True
        answered = checked.is_set() or status.closing.is_set() or self._state.finished
        if not answered and unless():
            return False
        if self._state.complete and not answered:
            status.conclude_alone(verdict)
        return True

    def _before_that(self, rank: int) -> str:
        """What may have led to the loss of a rank: a sync point that it alone has passed, or a warning."""
        state, sync_point = self._state, self._sync_point_beyond(rank)
        if sync_point is not None:
            before = f"Before that it {sync_point.in_words}, a place that rank {state.rank} has not come to."
            if state.steps > sync_point.steps:  # though it has not come so far
                steps = f"{sync_point.steps} optimizer steps"
                before += f" It had applied {steps} there, and rank {state.rank} {state.steps} before."
            return before
        return shutdown.warned_before(state) or ""

    def _sync_point_beyond(self, rank: int) -> SyncPoint | None:
        """The sync point that a rank was the first to pass, and that this rank has not come to, if there is one."""
        with self._state.lock:
            sync_point = self._state.log.first_ahead()
        return sync_point if sync_point is not None and sync_point.rank == rank else None

    def _look_at_store(self) -> None:
        session = self._writer.session
        since = session.busy_since
        # A host that is gone is found by the keepalive of the reader's connection. This store's host is there.
        patience = max(self._state.settings.lost_seconds, self._state.settings.stall_seconds)
        if since and session.connected and time.monotonic() - max(since, self._stall.moved_at) > patience:
            why = f"Neither the store nor this rank has made progress for {patience:.0f} s."
            self.status.conclude_alone(lost_rank(0, "or whoever hosts the job's store does not answer", why))

    def _ensure_process_ends(self) -> None:
        """Makes sure that this process ends with the verdict, whatever its training thread is blocked in.

        A training thread that runs Python code raises by itself. One that is blocked in a collective gets 3 s,
        then the collective is interrupted; a second later the process is ended.
        """
        state, now, ending = self._state, time.monotonic(), self._ending
        if self.status.closing.is_set():
            return
        if not ending.known_at and state.end is not None and state.end.kind == "Stalled":
            ending.stalled_in = stacks.thread(state.evidence.trainer).state
        ending.begin(now)
        if not state.printed.is_set() and now - ending.known_at > shutdown.PRINT_SECONDS and state.end is not None:
            shutdown.print_verdict(state, state.end)
            state.printed.set()
        if state.settings.on_divergence == "warn" or ending.is_over or state.is_caught():
            return  # a program that has caught what has reached it goes on with something else
        grace = max(constants.GRACE_SECONDS, LOOK_SECONDS)
        answered, moving, on_its_way_out = state.answered.is_set(), False, False
        if answered or ending.cut_at or now - ending.since > grace:  # before that, nothing depends on where it is
            moving = ending.look_at(state.evidence.trainer, now, grace)
            if ending.has_left_the_cut:
                ending.is_over = True
                return
            on_its_way_out = answered and ending.state != "collective"
            # One that has stalled the job in a loop of its own moves, but no cut makes it leave that loop.
            moving = moving and (answered or ending.stalled_in in ("", "collective") or ending.abort is not None)
        if on_its_way_out or (moving and (answered or ending.cut_at)):
            ending.since = now  # it may take its time
            # What it does last, such as a checkpoint, may wait for NCCL.
            if (
                ending.is_recent(now)
                and state.printed.is_set()
                and ending.standstill.seconds(now, moving=moving) > grace
            ):
                self.abort_nccl()
        elif ending.abort is not None and ending.abort.under_way:
            ending.since = now - grace + _RAISE_SECONDS
        elif ending.cut_at and now - ending.cut_at < _RAISE_SECONDS:
            gloo.cut_collectives()  # again: a group whose thread was busy at that moment was not found
        elif now - ending.since > grace and state.printed.is_set():
            if ending.cut_at:
                shutdown.exit_now()
            gloo.cut_collectives()  # unless a peer has: then the error is under way
            self.abort_nccl()
            ending.cut_at, ending.cut_in = time.monotonic(), ending.state
            ending.since = ending.cut_at - grace + _RAISE_SECONDS

    def free_nccl(self) -> None:
        """Aborts the communicators of NCCL whose collectives never end after a verdict. Runs on the closing thread.

        Without that, `destroy_process_group` would wait for them. It waits as long as NCCL completes collectives. It
        also waits for an abort that has begun, because CUDA must not end before that. A process that has survived its
        verdict for a minute is left alone.
        """
        state, began = self._state, time.monotonic()
        if state.end is None or state.settings.on_divergence == "warn":
            return
        ending = self._ending
        ending.begin(began)
        if not ending.is_recent(began):
            return
        nccl.skip_torch_cleanup()
        if collectives.unfinished():
            shutdown.wait_until_printed(state)
        standstill = _Standstill()
        while ending.abort is None and collectives.unfinished() and time.monotonic() - began < _FREE_SECONDS:
            if standstill.seconds(time.monotonic()) > constants.GRACE_SECONDS:
                self.abort_nccl()
            time.sleep(LOOK_SECONDS)
        while ending.abort is not None and ending.abort.under_way:
            time.sleep(LOOK_SECONDS)

    def abort_nccl(self) -> None:
        """Aborts this process's communicators of NCCL, once."""
        ending = self._ending
        with ending.lock:
            if ending.abort is not None:
                return
            ending.abort = nccl.abort_communicators()
        if ending.abort is not None:
            shutdown.print_line(self._state.rank, _ABORTED.format(constants.GRACE_SECONDS))


class _Waiting:
    """For how long this rank's training thread has waited for another rank, without moving.

    In a collective, it waits. A kernel of NCCL can be waited for anywhere, by a thread that looks as if it ran code of
    its own, and so can the store. So a thread that does not move at all inside of a span also waits: where NCCL is in
    use, from 3 s on, otherwise from `stall_seconds` on.

    Args:
        state: This rank's state.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self.begin_again()

    def begin_again(self) -> None:
        """Forgets what was seen before."""
        self._seen: Any = None
        self._since = self._next_look = self._stood = 0.0

    def seconds(self, now: float) -> float:
        """The seconds at this look; 0 where the thread has moved since the last one."""
        if now >= self._next_look:
            self._stood = self._look(now)
        return self._stood

    def _look(self, now: float) -> float:
        place, unfinished = stacks.thread(self._state.evidence.trainer), collectives.unfinished()
        seen = self._state.progress(), place.state, place.token, unfinished
        if seen != self._seen:
            self._seen, self._since = seen, now
        stood = now - self._since
        if place.state == "collective" or unfinished:
            return stood
        self._next_look = now + _BUSY_LOOK_SECONDS
        if not self._state.spans:
            return 0.0
        return max(0.0, stood - (constants.GRACE_SECONDS if nccl.is_used() else self._state.settings.stall_seconds))


class _Standstill:
    """For how long NCCL has had unfinished collectives and completed none."""

    def __init__(self) -> None:
        self._unfinished: object = None
        self._since = 0.0

    def seconds(self, now: float, *, moving: bool = False) -> float:
        """The seconds at this look; 0 where the training thread has moved since the last one."""
        unfinished = collectives.unfinished()
        if moving or not unfinished or unfinished != self._unfinished:
            self._unfinished, self._since = unfinished, now
        return now - self._since


@dataclass
class _Ending:
    """What is known of this process's end after a verdict. The watchdog and the thread that closes may both use it.

    Attributes:
        since: Since when the training thread has been where it is, by `time.monotonic()`.
        known_at: When the verdict was first seen here; 0 before that.
        state: Whether the training thread was in its code, in its loader or in a collective when it was last looked at.
        token: Where it was.
        seen_at: When that was.
        cut_at: When its collectives were first interrupted; 0 before that.
        cut_in: Where the training thread was then, as `state`.
        is_over: Whether that has got it out of a collective, so that nothing more is done about it.
        stalled_in: Where the training thread was when a stall was first seen as the verdict, as `state`.
        abort: The abort of its communicators of NCCL, if there is one.
        lock: Held while that begins.
        standstill: For how long nothing has moved, as the watchdog sees it.
    """

    since: float = 0.0
    known_at: float = 0.0
    state: str = ""
    token: str | None = None
    seen_at: float = 0.0
    cut_at: float = 0.0
    cut_in: str = ""
    is_over: bool = False
    stalled_in: str = ""
    abort: nccl.Abort | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    standstill: _Standstill = field(default_factory=_Standstill)

    def begin(self, now: float) -> None:
        """Takes note of when the verdict is first seen."""
        with self.lock:
            if not self.known_at:
                self.since = self.known_at = now

    def look_at(self, thread: int, now: float, grace: float) -> bool:
        """Looks where the thread that trains is; returns whether it has moved since the last time.

        To look costs it a little time. So one that runs its own code, and has a `grace` from the moment when it runs
        into a collective, is looked at ten times in a `grace`.
        """
        if self.state in ("code", "loader") and not self.cut_at and now - self.seen_at < grace / 10:
            return False
        place = stacks.thread(thread)
        moved = place.token != self.token
        self.state, self.token, self.seen_at = place.state, place.token, now
        return moved

    @property
    def has_left_the_cut(self) -> bool:
        """Whether the training thread was in a collective that was interrupted, and has left it."""
        return self.cut_in == "collective" and self.state != "collective"

    def is_recent(self, now: float) -> bool:
        """Whether the process may be ending with its verdict. Later it has survived it, and does something else."""
        return now - self.known_at < shutdown.ENDING_SECONDS

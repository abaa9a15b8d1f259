"""The watchdog: the thread that does no I/O on the store, and so still acts when the store's host is frozen."""

from __future__ import annotations

import threading
import time
from typing import Any

from countoff.core.protocol.judgement import DIED, STOPPED, describe_mark, lost_rank
from countoff.core.runtime import gloo_interrupt, shutdown, stacks
from countoff.core.runtime.channel import Channel
from countoff.core.runtime.session import Session
from countoff.core.runtime.speaker import Speaker
from countoff.core.runtime.stall import Stall

_LOOK_SECONDS = 0.1
_STOPPED_SECONDS = 2.0
_STORE_SECONDS = 30.0
_OVERSLEPT_SECONDS = 1.0
_ANSWER_SECONDS = 0.5
_RAISE_SECONDS = 1.0


class Watchdog:
    """Watches this host's ranks, the store's answers, stalls, and, after a verdict, that this process ends.

    Args:
        session: What the guard's threads share.
        speaker: This rank's speaker.

    Attributes:
        thread: The thread.
    """

    def __init__(self, session: Session, speaker: Speaker) -> None:
        self._session = session
        self._state = session.state
        self._speaker = speaker
        self._stall = Stall(session.state, speaker)
        self._accused: set[int] = set()
        self._stopped_since: dict[int, float] = {}
        self.thread = threading.Thread(target=self._run, name="countoff watchdog", daemon=True)

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._session.closing.wait(_LOOK_SECONDS):
            late, looked = time.monotonic() - looked, time.monotonic()
            # If it overslept, the job was paused or something held the interpreter: no rank made progress.
            if late > _OVERSLEPT_SECONDS:
                self._stall.moved_at += late
            if self._state.end is not None:
                self._ensure_process_ends()
                return
            if self._session.failure:
                return
            self._look_at_neighbours()
            self._look_at_store()
            self._stall.look()

    def _look_at_neighbours(self) -> None:
        for rank, process in list(self._speaker.heartbeats.neighbours.items()):
            found = "alive" if rank == self._state.rank or rank in self._accused else process.state()
            if found == "alive":
                self._stopped_since.pop(rank, None)
                continue
            since = self._stopped_since.setdefault(rank, time.monotonic())
            if found == "gone" and not self._state.finished:
                self._accuse(rank, f"died without a word (pid {process.pid})", "It was killed, or it crashed.", DIED)
            elif found == "stopped" and time.monotonic() - since > _STOPPED_SECONDS:
                self._accuse(rank, f"is stopped (pid {process.pid}, SIGSTOP)", "It will not go on by itself.", STOPPED)

    def _accuse(self, rank: int, event: str, why: str, subject: str) -> None:
        """Proposes that a rank of this host is lost, unless it has said goodbye; prints it alone without a store."""
        session = self._session
        verdict = lost_rank(rank, event, f"{why} {self._before_that(rank)}".strip(), subject=subject)
        self._accused.add(rank)
        checked = threading.Event()

        def accuse(channel: Channel) -> None:
            if not channel.has(f"bye/{rank}"):
                self._state.propose(verdict)
            checked.set()

        self._speaker.hand(accuse)
        deadline = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline and not (checked.is_set() or session.closing.is_set()):
            if self._state.ended.wait(0.01):
                return
        if not (checked.is_set() or session.closing.is_set() or self._state.finished):
            session.conclude_alone(verdict)

    def _before_that(self, rank: int) -> str:
        """What may have led to the loss of a rank: a mark that it alone has passed, or a warning."""
        state = self._state
        with state.lock:
            mark = state.log.first_ahead()
        if mark is not None and mark.rank == rank:
            return f"Before that it {describe_mark(mark)}, a place that rank {state.rank} has not come to."
        return "; ".join(f"before that, {notice.sentence}" for notice in state.notices[:1])

    def _look_at_store(self) -> None:
        since = self._speaker.busy_since
        connected = self._session.address is not None
        if since and connected and time.monotonic() - max(since, self._stall.moved_at) > _STORE_SECONDS:
            why = f"Neither the store nor this rank has made progress for {_STORE_SECONDS:.0f} s."
            self._session.conclude_alone(lost_rank(0, "or whoever hosts the job's store does not answer", why))

    def _ensure_process_ends(self) -> None:
        """Makes sure that this process ends with the verdict, whatever its main thread is blocked in.

        A main thread that runs Python code raises by itself. One that is blocked in a gloo collective gets
        `grace_seconds`, then the collective is interrupted; a second later the process is ended.
        """
        state, grace = self._state, max(self._state.settings.grace_seconds, _LOOK_SECONDS)
        began = time.monotonic()
        token: Any = None
        interrupted = False
        while not self._session.closing.wait(_LOOK_SECONDS):
            now = time.monotonic()
            if not state.printed.is_set() and now - began > shutdown.PRINT_SECONDS and state.end is not None:
                shutdown.print_verdict(state, state.end)
                state.printed.set()
            if state.settings.on_divergence == "warn":
                if state.printed.is_set():
                    return
                continue
            place, answered = stacks.main_thread(), state.answered.is_set()
            moving, token = place.token != token, place.token
            if (answered and place.state != "collective") or (moving and (answered or interrupted)):
                began = now  # it is on its way out, and may take its time
            elif now - began > grace and state.printed.is_set():
                if interrupted:
                    shutdown.exit_now()
                gloo_interrupt.cut_collectives()  # unless a peer has: then the error is under way
                interrupted, began = True, time.monotonic() - grace + _RAISE_SECONDS

"""Whether one guard still takes part: it may be closing, have stopped comparing, or been left by an exception."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from countoff.core.checks import late
from countoff.core.checks.lost import unprotected
from countoff.core.ending import shutdown
from countoff.core.levels import effect
from countoff.core.session.state import State
from countoff.core.verdict import Verdict, at_hosts, remedy_for

CLOSER = "countoff closer"
"""Name of a thread that closes a guard in the background."""
STORE_ENDED = "the job's store has ended the connection"
"""What all ranks say of a store that is gone."""
_CLOSER_SECONDS = 1.0
_ENDINGS = ("failed to recv, got 0 bytes", "connection reset by peer", "broken pipe")
"""What torch's client says of a connection that the store has ended, whatever the case of its letters.

It depends on what it was doing in that moment. torch 2.13 begins some of these texts with a capital letter.
"""


@dataclass
class GuardStatus:
    """Whether one guard still takes part in the comparison, and how it stops.

    Attributes:
        state: This rank's state.
        closing: Set once the guard is closing.
        failure: Why this rank has stopped comparing; empty while it compares.
        left: Whether an exception has left this rank's loop, so that it needs no other rank.
        hosts: Returns the names of hosts, by rank, that are known without the store.
    """

    state: State
    closing: threading.Event = field(default_factory=threading.Event)
    failure: str = ""
    left: bool = False
    hosts: Callable[[], Mapping[int, str]] = dict[int, str]
    _is_over: Callable[[], bool] = lambda: False
    _close: Callable[[], None] | None = None

    def leave(self, is_over: Callable[[], bool], close: Callable[[], None]) -> None:
        """Lets this rank need no other one any more, and has the guard closed once what has ended its loop is over.

        Args:
            is_over: Whether it is over.
            close: Closes the guard. Called once, on a thread of its own.
        """
        self._is_over, self._close, self.left = is_over, close, True

    def close_if_over(self) -> None:
        """Has the guard closed if the loop was left by what is over; returns at once. For the watchdog thread."""
        if self._close is not None and self._is_over():
            with contextlib.suppress(RuntimeError):  # no thread can be started: the next fit closes it
                threading.Thread(target=self.close_left, name=CLOSER, daemon=True).start()

    def close_left(self) -> None:
        """Closes the guard if its loop was left, whether or not what has ended it is over."""
        close, self._close = self._close, None
        if close is not None:
            close()

    def stop_comparing(self, reason: str, *, everywhere: bool = False) -> None:
        """Lets this rank train on without comparing, and prints that once.

        Args:
            reason: Why, as the beginning of a sentence.
            everywhere: Whether no rank compares, all for this reason, so that the first one alone prints it.
        """
        if self.state.settings.keeps_even and not self.closing.is_set():
            self.conclude_alone(unprotected(self.state.rank, reason))
            return
        with self.state.lock:
            if self.failure:
                return
            self.failure = reason
            self.state.comparing = False
        if not everywhere:
            shutdown.print_warning(self.state, late.alone(reason))
        elif self.state.leads:
            shutdown.print_warning(self.state, late.none_compares(reason))

    def conclude_alone(self, verdict: Verdict) -> None:
        """Ends the fit without the store: each rank prints what it knows, whole, as none knows what others print."""
        state = self.state
        found = at_hosts(replace(verdict, remedy=remedy_for(verdict, state.remedies)), self.hosts())
        if state.proposed is None and effect(found, state.settings.levels) != "raise":
            with state.lock:
                state.comparing, self.failure = False, self.failure or found.sentence
            shutdown.print_warning(state, found)
            return
        state.adopt(state.proposed or found)  # what this rank has proved itself is the better cause
        if state.end is not None:
            shutdown.print_verdict(state, state.end)
            state.printed.set()


def wait_for_closers() -> None:
    """Waits a moment for threads that close a guard: none is to run when the interpreter ends."""
    for each in threading.enumerate():
        if each.name == CLOSER and each is not threading.current_thread():
            each.join(_CLOSER_SECONDS)


def first_line(error: Exception) -> str:
    r"""The first line of an exception's text, or its type; torch's own are many lines long.

    All ranks say the same of a store that is gone.

    >>> first_line(RuntimeError("failed to recv, got 0 bytes\nException raised from recvBytes"))
    "the job's store has ended the connection"
    """
    line = (str(error).splitlines() or [type(error).__name__])[0][:120]
    return STORE_ENDED if any(each in line.lower() for each in _ENDINGS) else line

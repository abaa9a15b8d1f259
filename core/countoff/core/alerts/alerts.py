"""How sinks are told of a guard's findings, and how long the end of a process waits for that."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Literal

from countoff.core.alerts.notifications import NotTold
from countoff.core.alerts.sinks import AlertSink, addresses, of_host, of_user
from countoff.core.finding import Finding
from countoff.core.settings import Settings
from countoff.core.verdict import Verdict

__all__ = ["NOTIFY_SECONDS", "Alerts", "addressed", "wait_for_all"]

_log = logging.getLogger("countoff")
NOTIFY_SECONDS = 5.0
"""For so long at most, the end of a process waits until the sinks are told."""
_THREAD = "countoff alert"
_all: weakref.WeakSet[Alerts] = weakref.WeakSet()
addressed: set[tuple[int, str]] = set()
"""The kinds of which a process, by its pid, has sent a warning to the addresses. A program may fit a thousand times."""


class Alerts:
    """Tells of one guard's findings.

    Args:
        settings: The user's choices.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._until = 0.0
        self._told = threading.Event()
        self._warning: list[threading.Thread] = []
        _all.add(self)

    @property
    def is_wanted(self) -> bool:
        """Whether there is a function or an address of the user's; looks for entry points, once."""
        return bool(self._own)

    @functools.cached_property
    def _own(self) -> list[AlertSink]:
        return of_user(self._settings) + addresses(self._settings)

    def expect(self) -> None:
        """Lets `wait` wait: a verdict is about to be printed, and to be told then."""
        self._until = time.monotonic() + NOTIFY_SECONDS

    def tell(
        self, verdict: Verdict, *, for_host: bool, claim: Callable[[], bool], say: Callable[[str], object]
    ) -> None:
        """Begins to tell of the verdict that ends the job; returns at once.

        Args:
            verdict: The verdict, after it was printed and written.
            for_host: Whether this rank tells for its host: in the log, and in its container's termination log.
            claim: Takes the user's sinks for this rank; returns whether it has got them, and no other rank had.
            say: Prints one line, if a function of the user's fails.
        """
        sinks = of_host(ends=True) if for_host else []
        try:
            if self._own and claim():
                sinks += self._own
        finally:  # a store that has just ended
            _begin(self._finding(verdict, "error"), sinks, self._told, say)

    def warn(self, verdict: Verdict, say: Callable[[str], object]) -> None:
        """Begins to tell of what does not end the job; returns at once. `close` waits for it.

        The addresses are told of the first warning of each kind in this process.

        Args:
            verdict: The warning, after it was printed.
            say: Prints one line, if a function of the user's fails.
        """
        sent, settings = (os.getpid(), verdict.kind), self._settings
        own = [] if sent in addressed else addresses(settings)
        addressed.add(sent)

        def begin() -> None:
            sinks = of_host(ends=False) + of_user(settings) + own
            for thread in _begin(self._finding(verdict, "warning"), sinks, threading.Event(), say):
                thread.join()

        self._warning = [each for each in self._warning if each.is_alive()]
        self._warning += _on_a_thread(begin)  # to look for entry points takes some tens of milliseconds

    def close(self) -> None:
        """Waits until the sinks are told of all warnings, for `NOTIFY_SECONDS` at most."""
        if threading.current_thread().name == _THREAD:
            return  # a function of the user's ends the fit: what waits for it must not be waited for
        until = time.monotonic() + NOTIFY_SECONDS
        for thread in self._warning:
            thread.join(max(0.0, until - time.monotonic()))

    def wait(self) -> None:
        """Waits until the sinks are told of the verdict, if there is one, for `NOTIFY_SECONDS` at most."""
        self._told.wait(max(0.0, self._until - time.monotonic()))

    def _finding(self, verdict: Verdict, level: Literal["error", "warning"]) -> Finding:
        paths = self._settings.verdict_file if level == "error" else None, self._settings.trace_dir
        return Finding(verdict, level, tuple(path for path in paths if path is not None))


def _begin(
    finding: Finding, sinks: Sequence[AlertSink], done: threading.Event, say: Callable[[str], object]
) -> list[threading.Thread]:
    """Tells each sink on a thread of its own, so that none waits for another one; returns the threads."""
    left, lock = len(sinks), threading.Lock()

    def tell(sink: AlertSink) -> None:
        nonlocal left
        try:
            _tell(sink, finding, say)
        finally:
            with lock:
                left -= 1
            if not left:
                done.set()

    if not sinks:
        done.set()
    return [thread for sink in sinks for thread in _on_a_thread(lambda sink=sink: tell(sink))]


def _tell(sink: AlertSink, finding: Finding, say: Callable[[str], object]) -> None:
    try:
        sink.tell(finding)
    except (Exception, SystemExit) as error:
        # Of any other error the type alone: its text may hold an address.
        reason = str(error) if isinstance(error, NotTold) else type(error).__name__
        if sink.is_users:
            say(f"{sink.name} raised {reason}, and was not told of {finding.kind}")
        else:
            _log.debug("%s was not told of %s: %s", sink.name, finding.kind, reason)


def _on_a_thread(target: Callable[[], None]) -> list[threading.Thread]:
    """Calls it on a thread, which is returned, or at once where no thread can be started."""
    thread = threading.Thread(target=target, name=_THREAD, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is about to end, and starts no thread any more (3.12)
        target()
        return []
    return [thread]


def wait_for_all() -> None:
    """Waits as `Alerts.wait` does, for all guards of this process."""
    for each in list(_all):
        each.wait()

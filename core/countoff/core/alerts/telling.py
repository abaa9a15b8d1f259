"""How the places are told of a guard's findings, and how long the end of a process waits for that."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from countoff.core.alerts.alert import Alert, NotTold, Place
from countoff.core.alerts.notifications import Notifications
from countoff.core.alerts.termination_log import TerminationLog
from countoff.core.settings import Settings
from countoff.core.verdict import Verdict

__all__ = ["ADDRESSES", "RUNS", "TELL_SECONDS", "Claim", "Telling", "addressed", "wait_for_all"]

_log = logging.getLogger("countoff")
TELL_SECONDS = 5.0
"""For so long at most, the end of a process waits until the places are told."""
RUNS, ADDRESSES = "runs", "addresses"
"""What one rank of a job tells: the runs of trackers, and the addresses of the user."""
Claim = Callable[[str], bool]
"""Takes `RUNS` or `ADDRESSES` for this rank; returns whether it has got it, and no other rank had."""
_all: weakref.WeakSet[Telling] = weakref.WeakSet()
addressed: set[tuple[int, str]] = set()
"""The kinds of which a process, by its pid, has sent a warning to the addresses. A program may fit a thousand times."""


class Telling:
    """The alerts of one guard.

    Args:
        settings: The user's choices.
        trackers: Returns the runs of trackers that are open in this process; called when there is something to tell.
    """

    def __init__(self, settings: Settings, trackers: Callable[[], Sequence[Place]] = tuple) -> None:
        self._settings = settings
        self._trackers = trackers
        self._until = 0.0
        self._told = threading.Event()
        self._warned: set[str] = set()
        _all.add(self)

    def expect(self) -> None:
        """Lets `wait` wait: a verdict is about to be printed, and to be told then."""
        self._until = time.monotonic() + TELL_SECONDS

    def tell(self, verdict: Verdict, *, for_host: bool, claim: Claim) -> None:
        """Begins to tell of the verdict that ends the job; returns at once.

        Args:
            verdict: The verdict, after it was printed and written.
            for_host: Whether this rank speaks for its host: in its container's termination log.
            claim: Asked for what this rank could tell.
        """
        places: list[Place] = []
        log = TerminationLog(self._settings.termination_log)
        if for_host and log.exists:
            places.append(log)
        try:
            if self._settings.notify and claim(ADDRESSES):
                places.append(Notifications(self._settings.notify))
            if (runs := self._open_runs()) and claim(RUNS):
                places += runs
        finally:  # a store that has just ended
            self._begin(self._alert(verdict, ends=True), places, self._told)

    def warn(self, verdict: Verdict) -> None:
        """Begins to tell of what does not end the job; returns at once. Nothing waits for it.

        The runs are told of the first warning of each kind in each fit, the addresses of the first one in this process.

        Args:
            verdict: The warning, after it was printed.
        """
        places: list[Place] = []
        if verdict.kind not in self._warned:
            self._warned.add(verdict.kind)
            places += self._open_runs()
        sent = os.getpid(), verdict.kind
        if self._settings.notify and sent not in addressed:
            addressed.add(sent)
            places.append(Notifications(self._settings.notify))
        self._begin(self._alert(verdict, ends=False), places, threading.Event())

    def wait(self) -> None:
        """Waits until the places are told of the verdict, if there is one, for `TELL_SECONDS` at most."""
        self._told.wait(max(0.0, self._until - time.monotonic()))

    def _alert(self, verdict: Verdict, *, ends: bool) -> Alert:
        paths = self._settings.verdict_file if ends else None, self._settings.trace_dir
        return Alert(verdict, ends, tuple(path for path in paths if path is not None))

    def _open_runs(self) -> Sequence[Place]:
        if self._settings.notify is False:
            return ()
        with contextlib.suppress(Exception):  # a tracker that is just being closed
            return self._trackers()
        return ()

    def _begin(self, alert: Alert, places: Sequence[Place], done: threading.Event) -> None:
        """Tells each place on a thread of its own, so that none waits for another one."""
        left, lock = len(places), threading.Lock()

        def tell(place: Place) -> None:
            nonlocal left
            try:
                place.tell(alert)
            except Exception as error:
                reason = error if isinstance(error, NotTold) else type(error).__name__
                _log.debug("the alert was not told to %s: %s", place.name, reason)
            with lock:
                left -= 1
            if not left:
                done.set()

        if not places:
            done.set()
        for place in places:
            try:
                threading.Thread(target=tell, args=(place,), name="countoff alert", daemon=True).start()
            except RuntimeError:  # the interpreter is about to end, and starts no thread any more (3.12)
                tell(place)


def wait_for_all() -> None:
    """Waits as `Telling.wait` does, for all guards of this process."""
    for each in list(_all):
        each.wait()

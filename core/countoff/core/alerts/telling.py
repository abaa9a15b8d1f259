"""How the places are told of a guard's findings, and how long the end of a job waits for that."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

from countoff.core.alerts.alert import Alert, NotTold, Place
from countoff.core.alerts.notifications import Notifications
from countoff.core.alerts.termination_log import TerminationLog
from countoff.core.settings import Settings
from countoff.core.verdict import Verdict

__all__ = ["NOBODY", "TELL_SECONDS", "Reach", "Telling"]

Reach = Literal["run", "addresses", ""]
"""Whom a rank can tell; one that has a run of a tracker open is the better teller."""
_log = logging.getLogger("countoff")
TELL_SECONDS = 5.0
"""For so long at most, the end of a job waits until the places are told."""
NOBODY = -1
"""The teller where there is nobody to tell."""


class Telling:
    """The alerts of one guard.

    One rank of a job tells its trackers and the user's addresses: the teller. The others wait for it before they end,
    because a launcher that sees one rank end ends all of them.

    Args:
        settings: The user's choices.
        trackers: Returns the runs of trackers that are open in this process; called when there is something to tell.
    """

    def __init__(self, settings: Settings, trackers: Callable[[], Sequence[Place]] = tuple) -> None:
        self._settings = settings
        self._trackers = trackers
        self._until = 0.0
        self._told = threading.Event()
        self._teller_has_told: threading.Event | None = None
        self._warned: set[str] = set()

    @property
    def reaches(self) -> Reach:
        """Whom this rank would tell as the teller: a run that a tracker has open here, the user's addresses, nobody."""
        return "run" if self._open_runs() else "addresses" if self._settings.notify else ""

    def tell(self, verdict: Verdict, *, for_host: bool, for_job: bool) -> None:
        """Begins to tell of the verdict that ends the job; returns at once.

        Args:
            verdict: The verdict, after it was printed and written.
            for_host: Whether this rank speaks for its host: in its container's termination log.
            for_job: Whether it is the teller.
        """
        log = TerminationLog(self._settings.termination_log)
        places: list[Place] = [log] if for_host and log.exists else []
        if for_job:
            places += self._places_of_job()
        self._until = time.monotonic() + TELL_SECONDS
        self._begin(self._alert(verdict, ends=True), places, self._told)

    def warn(self, verdict: Verdict) -> None:
        """Begins to tell of what does not end the job; returns at once. Nothing waits for it.

        The first warning of each kind is told.
        """
        if verdict.kind not in self._warned:
            self._warned.add(verdict.kind)
            self._begin(self._alert(verdict, ends=False), self._places_of_job(), threading.Event())

    def expect(self) -> Callable[[], None]:
        """Lets `wait` wait for another rank too, the teller.

        Returns:
            To be called once that has told all, or is gone.
        """
        self._teller_has_told = threading.Event()
        return self._teller_has_told.set

    def wait(self) -> None:
        """Waits until the places are told, for `TELL_SECONDS` after the verdict at most."""
        for told in (self._told, self._teller_has_told):
            if self._until and told is not None:
                told.wait(max(0.0, self._until - time.monotonic()))

    def _alert(self, verdict: Verdict, *, ends: bool) -> Alert:
        paths = self._settings.verdict_file if ends else None, self._settings.trace_dir
        return Alert(verdict, ends, tuple(path for path in paths if path is not None))

    def _places_of_job(self) -> list[Place]:
        addresses = self._settings.notify
        return [*([Notifications(addresses)] if addresses else []), *self._open_runs()]

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

        try:
            for place in places:
                threading.Thread(target=tell, args=(place,), name="countoff alert", daemon=True).start()
        except RuntimeError:  # the interpreter is about to end, and starts no thread any more
            done.set()
        if not places:
            done.set()

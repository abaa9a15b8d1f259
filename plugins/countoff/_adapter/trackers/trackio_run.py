"""Trackio: an alert of the run, in its dashboard and at the webhook of the run, if there is one.

Trackio knows its current run by a context variable, which other threads do not have. But each open run has a thread
that sends what it is given, so the runs are found by their threads.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from countoff.core.alerts.alert import Alert
from countoff.core.waiting import until

__all__ = ["TrackioRun", "find"]

_WRITE_SECONDS = 4.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class TrackioRun:
    """A run of Trackio.

    Args:
        run: The run.
    """

    run: Any
    name = "Trackio"

    def tell(self, alert: Alert) -> None:
        """Sends an alert, and waits until the run's thread has written it: the process may be ended hard then."""
        levels = sys.modules["trackio"].AlertLevel
        self.run.alert(title=alert.title, text=alert.text, level=levels.ERROR if alert.ends else levels.WARN)
        until(self._is_written, time.monotonic() + _WRITE_SECONDS, _POLL_SECONDS)

    def _is_written(self) -> bool:
        run = vars(self.run)
        return not run.get("_queued_alerts") and run.get("_sending_batch") is None


def find() -> list[TrackioRun]:
    """Returns the runs whose thread is alive."""
    module = sys.modules.get("trackio.run")
    if module is None:
        return []
    targets = [vars(thread).get("_target") for thread in threading.enumerate()]
    runs = [getattr(target, "__self__", None) for target in targets]
    return [TrackioRun(run) for run in runs if type(run) is module.Run]

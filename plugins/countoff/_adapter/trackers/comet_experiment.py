"""Comet: a tag and values of the experiment, and a notification, which Comet mails as the user's settings there say."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from countoff._adapter.trackers.words import values
from countoff.core.alerts.alert import Alert

__all__ = ["CometExperiment", "find"]


@dataclass(frozen=True)
class CometExperiment:
    """An experiment of Comet.

    Args:
        experiment: The experiment.
    """

    experiment: Any
    name = "Comet"

    def tell(self, alert: Alert) -> None:
        """Writes the alert, and waits until it is sent: the process may be ended hard then."""
        experiment, named = self.experiment, values(alert)
        experiment.add_tag(f"countoff: {alert.verdict.kind}")
        experiment.log_others(named)
        experiment.send_notification(alert.title, status="failed" if alert.ends else "warning", additional_data=named)
        experiment.flush()


def find() -> list[CometExperiment]:
    """Returns the experiment that is running, if there is one."""
    comet = sys.modules.get("comet_ml")
    experiment = None if comet is None else comet.get_running_experiment()
    return [CometExperiment(experiment)] if experiment is not None and experiment.alive else []

"""MLflow: tags of the run, and its status.

A run that the program has started by `mlflow.start_run` is active in one thread. MLflow has the runs of all threads in
`mlflow.tracking.fluent._active_run_stack`, and looks there itself. Lightning's logger has no active run, but a client.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from countoff._adapter.trackers.words import values
from countoff.core.alerts.alert import Alert

__all__ = ["MlflowRun", "find"]


@dataclass(frozen=True)
class MlflowRun:
    """A run of MLflow.

    Args:
        run_id: Its id.
        client: The client of the logger that has begun it; None: the program's own.
    """

    run_id: str
    client: Any = None
    name = "MLflow"

    def tell(self, alert: Alert) -> None:
        """Writes the alert as tags in one request, and then that the run has failed, if it has."""
        mlflow = sys.modules["mlflow"]
        client = self.client or mlflow.MlflowClient()
        client.log_batch(self.run_id, tags=[mlflow.entities.RunTag(*each) for each in values(alert).items()])
        if alert.ends:
            client.set_terminated(self.run_id, "FAILED")


def find(loggers: Callable[[], Iterable[Any]] = tuple) -> list[MlflowRun]:
    """Returns the active runs of all threads, and those of loggers.

    Args:
        loggers: Returns the framework's loggers.
    """
    fluent = sys.modules.get("mlflow.tracking.fluent")
    if fluent is None:
        return []
    runs: dict[str, MlflowRun] = {}
    for logger in loggers():
        fields = getattr(logger, "__dict__", {})
        if fields.get("_mlflow_client") is not None and fields.get("_initialized"):
            runs[fields["_run_id"]] = MlflowRun(fields["_run_id"], fields["_mlflow_client"])
    for stack in fluent._active_run_stack.get_all_thread_values().values():
        for run in stack:
            runs.setdefault(run.info.run_id, MlflowRun(run.info.run_id))
    return list(runs.values())

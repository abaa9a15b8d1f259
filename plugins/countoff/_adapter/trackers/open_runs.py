"""All runs that are open in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from countoff._adapter.trackers import comet_experiment, mlflow_run, tensorboard_writer, trackio_run, wandb_run
from countoff.core.alerts.alert import Place

__all__ = ["open_runs"]


def open_runs(loggers: Callable[[], Iterable[Any]] = tuple) -> list[Place]:
    """Returns the runs that are open now. Quick, and without any I/O; may be called on any thread.

    Args:
        loggers: Returns the framework's loggers, for a tracker that shows its run nowhere else.
    """
    finders: list[Callable[[], Sequence[Place]]] = [
        wandb_run.find,
        trackio_run.find,
        lambda: mlflow_run.find(loggers),
        comet_experiment.find,
        tensorboard_writer.find,
    ]
    places: list[Place] = []
    for find in finders:
        with contextlib.suppress(Exception):  # of a tracker that is just being closed, or of an unknown version
            places += find()
    return places

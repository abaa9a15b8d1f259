"""The record in Composer's checkpoints of how far a run has come, and where Composer goes on after it loads one."""

from __future__ import annotations

import json
from typing import Any

from countoff._adapter.checkpoints import without_data
from countoff.core import Guard
from countoff.core.checks.resume import Restored

__all__ = ["packed", "record_of", "restore", "unpacked"]


def record_of(state: Any, guard: Guard, *, left: int | None) -> dict[str, Any]:
    """Returns this rank's record for a checkpoint that Composer writes.

    Args:
        state: Composer's State.
        guard: The guard of the fit.
        left: Batches of the open epoch that every rank has yet to begin; None if that is not known.
    """
    epoch, batches, steps = _position(state)
    record = guard.resumes.record(state.batch, left=left, steps=steps)
    if record["epoch"] != epoch:  # written between the end of Composer's epoch and that of its span
        return {**record, "epoch": epoch, "batches": batches, "left": None, "prints": [], "last": ""}
    if record["batches"] != batches:  # written inside a batch, which Composer then does again
        return {**record, "batches": batches, "left": None, "last": ""}
    return record


def restore(state: Any, guard: Guard, record: Any, *, skipped: int | None) -> None:
    """Takes the record of a checkpoint before the first train epoch opens. A run whose time is set to 0 is a new one.

    Args:
        state: Composer's State.
        guard: The guard of the fit.
        record: What stood in the checkpoint.
        skipped: Batches that Composer has taken from the loader and not used; None if that is not known.
    """
    _, batches, steps = _position(state)
    if not steps:
        return
    restored_itself = "train" in state.dataset_resumption
    if batches and skipped == 0 and not restored_itself:  # spin_dataloaders=False accepts that samples are repeated
        record = without_data(record)
    samples = int(state.timestamp.sample_in_epoch) if restored_itself else None
    guard.resumes.restore(record, Restored(steps=steps, exact=True, samples=samples))


def packed(record: dict[str, Any]) -> dict[str, str]:
    """Returns a callback's state: one text, which sharded checkpoints do not take apart."""
    return {"record": json.dumps(record)}


def unpacked(state: Any) -> Any:
    """Returns the record in a callback's state; None if there is none. What cannot be read stays as it is."""
    text = state.get("record") if isinstance(state, dict) else None
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _position(state: Any) -> tuple[int, int, int]:
    """The train epoch, the batches of it and those of the whole run for which Composer's time stands."""
    time = state.timestamp
    return int(time.epoch), int(time.batch_in_epoch), int(time.batch)

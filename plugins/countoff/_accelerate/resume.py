"""Keeps the position of a run in a small file of its own, in the folder that `save_state` writes.

It does not use `register_for_checkpointing`: Accelerate rejects a checkpoint whose number of registered objects
differs, so a checkpoint written with countoff could not be loaded without it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from countoff._adapter.handle import Attached
from countoff.core import FitPlan

__all__ = ["FILE", "Position", "watch_checkpoints"]

FILE = "countoff.json"


class Position(NamedTuple):
    """How far a run has come: the train epoch, the batches begun in it on one rank, and optimizer steps in all."""

    epoch: int
    batches: int
    steps: int


def watch_checkpoints(
    accelerator: Any, attached: Attached, plan: FitPlan, versions: Mapping[str, str]
) -> Callable[[], None]:
    """Writes the position into every checkpoint from here on, and begins another fit from a checkpoint that is loaded.

    Args:
        accelerator: The Accelerator whose `save_state` and `load_state` are watched.
        attached: The handle of the loop.
        plan: What the ranks must agree on; the checkpoint's position replaces the one in it.
        versions: Versions whose differences get a warning.

    Returns:
        A function that ends that.
    """

    def save(models: Any, weights: Any, folder: str) -> None:
        each_node = accelerator.project_configuration.save_on_each_node
        if accelerator.is_local_main_process if each_node else accelerator.is_main_process:
            position = Position(*attached.passes.position, attached.steps_before + attached.guard.steps)
            Path(folder, FILE).write_text(json.dumps(position._asdict()), encoding="utf-8")

    def load(models: Any, folder: str) -> None:
        saved = _read(Path(folder, FILE))
        epoch, steps = (attached.passes.epoch, 0) if saved is None else (saved.epoch, saved.steps)
        position = None if saved is None else list(saved)
        attached.begin_again(dataclasses.replace(plan, position=position), versions, epoch=epoch, steps=steps)

    handles = accelerator.register_save_state_pre_hook(save), accelerator.register_load_state_pre_hook(load)

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def _read(path: Path) -> Position | None:
    """Returns the position in a checkpoint; None if a run without countoff wrote it, or another node has the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Position(*(int(found[name]) for name in Position._fields))
    except (OSError, ValueError, KeyError, TypeError):
        return None

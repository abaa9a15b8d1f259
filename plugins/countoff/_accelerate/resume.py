"""Where a resumed run goes on: a small file of our own in the folder that `save_state` writes.

Not `register_for_checkpointing`: Accelerate refuses a checkpoint whose number of registered objects differs, so one
written with countoff could not be loaded without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

FILE = "countoff.json"


class Position(NamedTuple):
    """How far a run has come: the train epoch, the batches begun in it on one rank, and optimizer steps in all."""

    epoch: int
    batches: int
    steps: int


def watch_checkpoints(
    accelerator: Any, position: Callable[[], Position], loaded: Callable[[Position | None], None]
) -> Callable[[], None]:
    """Writes the position into every checkpoint from here on, and tells of the one that a checkpoint holds.

    Args:
        accelerator: Whose `save_state` and `load_state`.
        position: Where this rank is.
        loaded: Called on every rank that loads a checkpoint; with None if there is no readable position in it.

    Returns:
        Ends it.
    """

    def save(models: Any, weights: Any, folder: str) -> None:
        each_node = accelerator.project_configuration.save_on_each_node
        if accelerator.is_local_main_process if each_node else accelerator.is_main_process:
            Path(folder, FILE).write_text(json.dumps(position()._asdict()), encoding="utf-8")

    def load(models: Any, folder: str) -> None:
        loaded(_read(Path(folder, FILE)))

    handles = accelerator.register_save_state_pre_hook(save), accelerator.register_load_state_pre_hook(load)

    def leave() -> None:
        for handle in handles:
            handle.remove()

    return leave


def _read(path: Path) -> Position | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Position(*(int(found[name]) for name in Position._fields))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # written by a run without countoff, or on another node

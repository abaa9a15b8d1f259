"""Keeps the position of a run in a small file of its own, in the folder that `save_state` writes.

It does not use `register_for_checkpointing`: Accelerate rejects a checkpoint whose number of registered objects
differs, so a checkpoint written with countoff could not be loaded without it. The hooks that Accelerate calls with the
folder are registered only while it saves or loads, so an Accelerator can be pickled at any other time as without
countoff.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from accelerate import Accelerator

from countoff._adapter.handle import Attached
from countoff._adapter.watched_methods import WatchedMethods
from countoff.core import FitPlan

__all__ = ["FILE", "Position", "watch_checkpoints"]

FILE = "countoff.json"
Around = Callable[[Any], contextlib.AbstractContextManager[Any]]
"""Takes an Accelerator whose method is called; returns a context for the call."""


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
        _write(Path(folder, FILE), Position(*attached.passes.position, attached.steps_before + attached.guard.steps))

    def load(models: Any, folder: str) -> None:
        saved = _read(Path(folder, FILE))
        epoch, steps = (attached.passes.epoch, 0) if saved is None else (saved.epoch, saved.steps)
        position = None if saved is None else list(saved)
        attached.begin_again(dataclasses.replace(plan, position=position), versions, epoch=epoch, steps=steps)

    def saving(of: Any) -> contextlib.AbstractContextManager[Any]:
        return _hook(of.register_save_state_pre_hook, save) if of is accelerator else contextlib.nullcontext()

    def loading(of: Any) -> contextlib.AbstractContextManager[Any]:
        return _hook(of.register_load_state_pre_hook, load) if of is accelerator else contextlib.nullcontext()

    with contextlib.ExitStack() as stack:
        stack.callback(_saves.add(saving))
        stack.callback(_loads.add(loading))
        return stack.pop_all().close


@contextlib.contextmanager
def _hook(register: Callable[[Any], Any], hook: Callable[..., None]) -> Iterator[None]:
    """A context in which a hook is registered: Accelerate calls it with the folder that it has chosen."""
    registered = register(hook)
    try:
        yield
    finally:
        registered.remove()


def _inside(watchers: Callable[[], WatchedMethods[Around]], original: Callable[..., Any]) -> Any:
    """Returns a method that calls Accelerate's own inside the watchers' contexts."""

    @functools.wraps(original)
    def method(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for watcher in watchers():
                stack.enter_context(watcher(accelerator))
            return original(accelerator, *args, **kwargs)

    return method


_saves: WatchedMethods[Around] = WatchedMethods(
    {(Accelerator, "save_state"): functools.partial(_inside, lambda: _saves)}
)
_loads: WatchedMethods[Around] = WatchedMethods(
    {(Accelerator, "load_state"): functools.partial(_inside, lambda: _loads)}
)


def _write(path: Path, position: Position) -> None:
    """Writes the position, on every rank: a rank may have a disk of its own.

    Where ranks share the folder, one of their equal files remains, and no rank ever reads half of one.
    """
    own = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    own.write_text(json.dumps(position._asdict()), encoding="utf-8")
    own.replace(path)


def _read(path: Path) -> Position | None:
    """Returns the position in a checkpoint; None if a run without countoff wrote it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Position(*(int(found[name]) for name in Position._fields))
    except (OSError, ValueError, KeyError, TypeError):
        return None

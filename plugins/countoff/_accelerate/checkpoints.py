"""Keeps a record of how far a run has come in a small file of its own, in the folder that `save_state` writes.

It does not use `register_for_checkpointing`: Accelerate rejects a checkpoint whose number of registered objects
differs, so a checkpoint written with countoff could not be loaded without it. The hooks that Accelerate calls with the
folder are registered only while it saves or loads, so an Accelerator can be pickled at any other time as without
countoff.
"""

from __future__ import annotations

import contextlib
import functools
import json
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from countoff._adapter.hooks import SharedHooks, until_gone
from countoff._adapter.own_loop import OwnLoop
from countoff.core.whole_file import write_whole

__all__ = ["FILE", "watch_checkpoints"]

FILE = "countoff_{}.json"
"""A record's name, by the process that has written it, as Accelerate names random states."""
Around = Callable[[Any], contextlib.AbstractContextManager[Any]]
"""Takes an Accelerator whose method is called; returns a context for the call."""


def watch_checkpoints(accelerator: Any, loop: OwnLoop) -> None:
    """Writes a record into every checkpoint from here on, and gives the loop that of a checkpoint that is loaded.

    Both are held weakly. What is put on Accelerate's class is taken back once the loop is gone.

    Args:
        accelerator: The Accelerator whose `save_state` and `load_state` are watched.
        loop: The loop.
    """
    of_loop, of_accelerator = weakref.ref(loop), weakref.ref(accelerator)

    def present(of: Any) -> OwnLoop | None:
        if (found := of_loop()) is None:
            removals.close()
        return found if of is of_accelerator() else None

    def saving(of: Any) -> contextlib.AbstractContextManager[Any]:
        if (own := present(of)) is None:
            return contextlib.nullcontext()

        def save(models: Any, weights: Any, folder: str) -> None:
            process = of.process_index
            record = json.dumps(own.state_dict()).encode()
            write_whole(str(Path(folder, FILE.format(process))), process, record)

        return _hook(of.register_save_state_pre_hook, save)

    def loading(of: Any) -> contextlib.AbstractContextManager[Any]:
        if (own := present(of)) is None:
            return contextlib.nullcontext()

        def load(models: Any, folder: str) -> None:
            own.load_state_dict(_read(Path(folder), of.process_index))

        return _hook(of.register_load_state_pre_hook, load)

    removals = contextlib.ExitStack()
    until_gone(loop, removals.close)
    removals.callback(_saves.add(saving))
    removals.callback(_loads.add(loading))


@contextlib.contextmanager
def _hook(register: Callable[[Any], Any], hook: Callable[..., None]) -> Iterator[None]:
    """A context in which a hook is registered: Accelerate calls it with the folder that it has chosen."""
    registered = register(hook)
    try:
        yield
    finally:
        registered.remove()


def _inside(watchers: Iterable[Around], method: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a method of Accelerate's inside the watchers' contexts."""
    with contextlib.ExitStack() as stack:
        for watcher in watchers:
            stack.enter_context(watcher(accelerator))
        return method(accelerator, *args, **kwargs)


_saves: SharedHooks[Around] = SharedHooks(lambda: {(Accelerator, "save_state"): functools.partial(_inside, _saves)})
_loads: SharedHooks[Around] = SharedHooks(lambda: {(Accelerator, "load_state"): functools.partial(_inside, _loads)})


def _read(folder: Path, process: int) -> Any:
    """Returns the record of a process in a checkpoint; an empty one if there is none.

    A folder that is written again by fewer processes keeps the files of the others, which are older. So if this
    process's own record has another position than the newest one, the newest one counts.
    """
    try:
        files = sorted(folder.glob(FILE.format("*")), key=lambda path: path.stat().st_mtime_ns)
        if not files:
            return {}
        own = folder / FILE.format(process)
        newest, mine = _content(files[-1]), _content(own) if own in files else None
    except OSError as error:
        return str(error)  # which is no record, and is refused where it is used
    return mine if mine is not None and _position(mine) == _position(newest) else newest


def _content(path: Path) -> Any:
    """Returns what a file holds; as text if that is not JSON, which is refused where it is used."""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        return json.loads(text)
    except ValueError:
        return text


def _position(record: Any) -> Any:
    names = ("epoch", "batches", "steps")
    return [record.get(name) for name in names] if isinstance(record, dict) else record

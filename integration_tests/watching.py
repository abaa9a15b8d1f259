"""Has countoff find loops by itself, in programs that attach nothing, as `countoff run` does."""

import contextlib
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from countoff._adapter.hooks import MethodHook
from countoff._adapter.observed_loop import active_loops

__all__ = ["WATCHING", "begun", "read_by_thread", "run_each", "watching_accelerators", "watching_loaders"]


@contextlib.contextmanager
def watching_accelerators() -> Iterator[None]:
    """A context in which Accelerators are watched; at its end, nothing of it is left."""
    from accelerate import Accelerator

    from countoff._run.watched_accelerators import WatchedAccelerators

    with contextlib.closing(WatchedAccelerators()) as watched, contextlib.ExitStack() as hooks:
        _place(hooks, Accelerator, "prepare", after=lambda accelerator, *_, **__: watched.add(accelerator))
        yield


@contextlib.contextmanager
def watching_loaders() -> Iterator[None]:
    """A context in which torch's loaders are watched; at its end, nothing of it is left."""
    from countoff._run.watched_loaders import WatchedLoaders

    def iterate(own: Callable[[Any], Iterator[Any]], loader: Any) -> Iterator[Any]:
        batches = own(loader)
        followed = watched.follow(loader, batches)
        return batches if followed is None else followed

    wrappers, engines = weakref.WeakSet[Any](), weakref.WeakSet[Any]()
    with contextlib.closing(WatchedLoaders(wrappers, engines)) as watched, contextlib.ExitStack() as hooks:
        _place(hooks, DistributedDataParallel, "__init__", after=lambda model, *_, **__: wrappers.add(model))
        if (deepspeed := sys.modules.get("deepspeed")) is not None:
            _place(hooks, deepspeed.DeepSpeedEngine, "__init__", after=lambda engine, /, *_, **__: engines.add(engine))
        _place(hooks, DataLoader, "__iter__", instead=iterate)
        yield


WATCHING: Final[Mapping[str, Callable[[], contextlib.AbstractContextManager[None]]]] = {
    "accelerate": watching_accelerators,
    "torch": watching_loaders,
    "transformers": watching_accelerators,
}
"""By the package of whose loops a program has one."""


def begun() -> list[str]:
    """The train epochs that the loops of this process have begun, and whether they were found."""
    return [
        f"{loop.passes.epoch} epochs of {loop.guard.steps} steps{', found' if loop.guard.evidence.found_by else ''}"
        for loop in active_loops()
    ]


def run_each(
    jobs: Mapping[str, Callable[[], list[str]]], watching: Callable[[], contextlib.AbstractContextManager[None]]
) -> dict[str, list[str]]:
    """Runs jobs one after the other, with a line between what they print; returns what each returns, by its name."""
    found: dict[str, list[str]] = {}
    for name, job in jobs.items():
        print(f"--- job {name}", file=sys.stderr, flush=True)
        with watching():
            found[name] = job()
            for loop in active_loops():
                loop.end()
    return found


def read_by_thread(loader: Iterable[Any]) -> Iterator[Any]:
    """Yields the batches of a loader that a thread of its own reads."""
    batches = queue.Queue[Any](2)

    def read() -> None:
        for batch in loader:
            batches.put(batch)
        batches.put(None)

    thread = threading.Thread(target=read)
    thread.start()
    yield from iter(batches.get, None)
    thread.join()


def _place(hooks: contextlib.ExitStack, owner: type, name: str, **calls: Callable[..., Any]) -> None:
    hooks.callback(MethodHook(owner, name, **calls).remove)

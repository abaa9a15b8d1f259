"""Has countoff count the loops of programs that attach nothing, as `countoff run` does."""

import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from countoff._adapter.hooks import MethodHook
from countoff._adapter.observed_loop import active_loops

__all__ = ["COUNTING", "begun", "counting_prepared", "read_by_thread", "run_each"]


@contextlib.contextmanager
def counting_prepared() -> Iterator[None]:
    """A context in which loops over what Accelerators prepare are counted; at its end, nothing of it is left."""
    from accelerate import Accelerator

    from countoff._run.prepared_loops import PreparedLoops

    with contextlib.closing(PreparedLoops()) as loops, contextlib.ExitStack() as hooks:
        hook = MethodHook(Accelerator, "prepare", after=lambda accelerator, *_, **__: loops.add(accelerator))
        hooks.callback(hook.remove)
        yield


COUNTING: Final[Mapping[str, Callable[[], contextlib.AbstractContextManager[None]]]] = {
    "accelerate": counting_prepared,
    "transformers": counting_prepared,
}
"""By the package of whose loops a program has one."""


def begun() -> list[str]:
    """The train epochs that the loops of this process have begun, and whether they attach nothing."""
    loops = [(loop, "" if loop.guard.evidence.counts_all else ", unattached") for loop in active_loops()]
    return [f"{loop.passes.epoch} epochs of {loop.guard.steps} steps{how}" for loop, how in loops]


def run_each(
    jobs: Mapping[str, Callable[[], list[str]]], counting: Callable[[], contextlib.AbstractContextManager[None]]
) -> dict[str, list[str]]:
    """Runs jobs one after the other, with a line between what they print; returns what each returns, by its name."""
    found: dict[str, list[str]] = {}
    for name, job in jobs.items():
        print(f"--- job {name}", file=sys.stderr, flush=True)
        with counting():
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

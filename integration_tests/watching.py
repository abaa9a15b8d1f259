"""Has countoff find loops over Accelerate's loaders, in programs that attach nothing, as `countoff run` does."""

import contextlib
from collections.abc import Iterator

from accelerate import Accelerator

from countoff._adapter.hooks import MethodHook
from countoff._run.watched_accelerators import WatchedAccelerators


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """A context in which Accelerators are watched; at its end, nothing of it is left."""
    watched = WatchedAccelerators()
    hook = MethodHook(Accelerator, "prepare", after=lambda accelerator, *_, **__: watched.add(accelerator))
    try:
        yield
    finally:
        hook.remove()
        watched.close()

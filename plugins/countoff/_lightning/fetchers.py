"""Lightning's data fetchers: what they hold, and how long they wait for a loader."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from countoff._adapter.hooks import MethodHook
from countoff.core import Guard

__all__ = ["FetchTimer", "count", "countable_fetcher", "fetcher_of", "module_fetches", "seen_exhausted"]


def fetcher_of(loop: Any, name: str) -> Any:
    """Returns an attribute of the loop's data fetcher; None where a version of Lightning does not have it."""
    return getattr(getattr(loop, "_data_fetcher", None), name, None)


def module_fetches(loop: Any) -> bool:
    """Returns whether the module fetches by itself, in training_step(dataloader_iter): its fetcher tells nothing."""
    return fetcher_of(loop, "iterator_wrapper") is not None


def seen_exhausted(loop: Any) -> bool:
    """Returns whether the loop's fetcher has seen the loader exhausted by fetching ahead."""
    return bool(fetcher_of(loop, "done")) and not module_fetches(loop)


def countable_fetcher(loop: Any) -> Any:
    """Returns the loop's data fetcher if its `fetched` and `done` describe what the loop has fetched; else None."""
    return None if module_fetches(loop) else getattr(loop, "_data_fetcher", None)


def count(guard: Guard, loop: Any) -> None:
    """Counts the batch that the loop is about to use, with what its fetcher has fetched."""
    fetcher = countable_fetcher(loop)
    if fetcher is None:
        guard.batch()
    else:
        guard.batch(fetcher.fetched, last=fetcher.done)


class FetchTimer:
    """Times each fetch of a loop's data fetcher, until it is removed.

    Args:
        loop: The loop. Some versions of Lightning do not show when its fetcher fetches; then nothing is timed.
        waited: Called after each fetch with the seconds that it took.
    """

    def __init__(self, loop: Any, waited: Callable[[float], None]) -> None:
        self._waited = waited
        self._began = 0.0
        self._hooks: tuple[MethodHook, ...] = ()
        fetcher = getattr(loop, "_data_fetcher", None)
        if hasattr(fetcher, "_start_profiler") and hasattr(fetcher, "_stop_profiler"):
            self._hooks = (
                MethodHook(fetcher, "_start_profiler", after=self._start),
                MethodHook(fetcher, "_stop_profiler", before=self._stop),
            )

    def remove(self) -> None:
        """Times no more fetches. Does nothing when called again."""
        for hook in self._hooks:
            hook.remove()

    def _start(self) -> None:
        self._began = time.perf_counter()

    def _stop(self) -> None:
        self._waited(time.perf_counter() - self._began)

"""Waiting for what tells nobody that it has changed, such as a key of the store. Whatever can tell has an event."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["until"]


def until(done: Callable[[], bool], deadline: float, every: float = 0.01) -> bool:
    """Waits until something is done; returns whether it is.

    Args:
        done: Whether it is; asked once at least.
        deadline: When to give up, by `time.monotonic()`.
        every: Seconds between two looks.

    Example:
        >>> looks = iter([False, False, True])
        >>> until(lambda: next(looks), time.monotonic() + 60), until(lambda: False, time.monotonic())
        (True, False)
    """
    while not (is_done := done()) and time.monotonic() < deadline:
        time.sleep(every)
    return is_done

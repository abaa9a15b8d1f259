"""Waiting for what tells nobody that it has changed, such as a key of the store. Whatever can tell has an event."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["first_pause", "until"]

_SECONDS_PER_RANK = 0.0002
_SHORTEST, _LONGEST = 0.001, 0.005


def first_pause(ranks: int) -> float:
    """Seconds between the first looks of a rank, where so many ranks wait for one another and look into one store.

    Up to 25 ranks together look at most 5,000 times a second. Each of more ranks looks 200 times.

    Args:
        ranks: How many look into that store.

    Example:
        >>> [first_pause(ranks) for ranks in (2, 8, 64, 4096)]
        [0.001, 0.0016, 0.005, 0.005]
    """
    return min(max(_SHORTEST, _SECONDS_PER_RANK * ranks), _LONGEST)


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

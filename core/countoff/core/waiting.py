"""Waiting: a queue whose `get` ends in time, and looks at what tells nobody that it has changed, as a key of a store.

Whatever can tell has an event.
"""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["TimedQueue", "first_pause", "until"]

_SECONDS_PER_RANK = 0.0002
_SHORTEST, _LONGEST = 0.001, 0.005
_T = TypeVar("_T")


class TimedQueue(Generic[_T]):
    """A queue that one thread empties, waiting only so long for the next item. `put` never waits.

    Before Python 3.13, ``get(timeout=...)`` of a `queue.SimpleQueue` may block for ever: where the time is over before
    it has begun to wait, it computes a negative time (`get` in Modules/_queuemodule.c), which means without an end.
    `queue.Queue` ends in time, but the handler of a signal must not call its `put`, which may have been interrupted.
    """

    def __init__(self) -> None:
        self._items = collections.deque[_T]()
        self._added = threading.Lock()  # released: something was put since the last look
        self._added.acquire()

    def put(self, item: _T) -> None:
        """Adds an item, from any thread."""
        self._items.append(item)
        if self._added.locked():
            with contextlib.suppress(RuntimeError):  # another thread has released it since
                self._added.release()

    def get(self, seconds: float = 0.0) -> _T:
        """Removes and returns the oldest item, after waiting for one for at most so many seconds.

        Raises:
            queue.Empty: If there is none.
        """
        deadline = time.monotonic() + seconds
        while not self._items:
            if not self._added.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise queue.Empty
        return self._items.popleft()

    def __len__(self) -> int:
        """How many items there are."""
        return len(self._items)


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

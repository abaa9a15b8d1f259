"""Observes loaders where they are iterated, in the classes of their framework: its own loaders, and not the user's.

Such a loader's class cannot be exchanged, because its framework looks at it, or the loader that is iterated need not be
the one that was set up. So while there are followers, the classes have an `__iter__` of countoff's, which asks them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from countoff._adapter.hooks import SharedHooks

__all__ = ["Follower", "LoaderFollowers"]

Follower = Callable[[Any, Iterator[Any]], Iterator[Any] | None]
"""Takes a loader that is about to be iterated and its own iterator; returns the iterator that the loop gets instead.

None stands for a loader that the follower does not know.
"""


class LoaderFollowers(SharedHooks[Follower]):
    """Those who follow the passes over loaders of some classes; the latest follower is asked first.

    Args:
        classes: Returns the classes, as far as they are imported.
    """

    def __init__(self, classes: Callable[[], Iterable[type]]) -> None:
        super().__init__(lambda: {(each, "__iter__"): self._iterate for each in classes()})

    def _iterate(self, iterate: Callable[[Any], Iterator[Any]], loader: Any) -> Iterator[Any]:
        batches = iterate(loader)
        for follower in self:
            found = follower(loader, batches)
            if found is not None:
                return found
        return batches

"""Replaces methods of a framework's classes while somebody watches them, and gives the framework its own ones back.

Nothing is put on an object of these classes, so the objects can be copied and pickled at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

__all__ = ["WatchedMethods"]

Watcher = TypeVar("Watcher")
_ORIGINAL = "countoff_original"


class WatchedMethods(Generic[Watcher]):
    """Some methods of a framework with those who watch them, the latest one first.

    Args:
        methods: Returns countoff's method for the framework's own, by class and name. It asks the watchers.
    """

    def __init__(self, methods: Mapping[tuple[type, str], Callable[[Any], Any]]) -> None:
        self._methods = methods
        self._watchers: list[Watcher] = []

    def __iter__(self) -> Iterator[Watcher]:
        return iter(self._watchers[::-1])

    def add(self, watcher: Watcher) -> Callable[[], None]:
        """Adds a watcher; the first one puts countoff's methods in place.

        Returns:
            A function that removes the watcher. With the last watcher, the framework's own methods are restored.
        """
        if not self._watchers:
            for (owner, name), make in self._methods.items():
                original = getattr(owner, name)
                replacement = make(original)
                setattr(replacement, _ORIGINAL, original)
                setattr(owner, name, replacement)
        self._watchers.append(watcher)

        def remove() -> None:
            self._watchers.remove(watcher)
            if not self._watchers:
                self._restore()

        return remove

    def _restore(self) -> None:
        for owner, name in self._methods:
            original = getattr(getattr(owner, name), _ORIGINAL, None)
            if original is not None:  # else other code has wrapped ours, which stays and has no watchers to ask
                setattr(owner, name, original)

"""The batch that a loop has, held so that it lives no longer than the loop itself lets it live."""

from __future__ import annotations

import weakref
from typing import Any

__all__ = ["HeldBatch"]

_CONTAINERS = (list, tuple, dict)
_MOST_PARTS, _MOST_LEVELS = 16, 3
"""A container with more parts, such as a list of numbers, is kept as it is, and so is one that lies deeper."""


class HeldBatch:
    """Refers to a batch, and keeps none of its tensors in memory.

    A list, a tuple or a dict cannot be referred to weakly, so what is in it is.

    Args:
        batch: The batch as the loader returned it.
    """

    __slots__ = ("_parts",)

    def __init__(self, batch: Any) -> None:
        kind = type(batch)
        try:
            if kind not in _CONTAINERS:
                self._parts: Any = weakref.ref(batch)
            elif len(batch) > _MOST_PARTS:
                self._parts = _weakly(batch)
            elif kind is dict:
                self._parts = dict, [*zip(batch, map(weakref.ref, batch.values()), strict=True)]
            else:
                self._parts = kind, [*map(weakref.ref, batch)]
        except TypeError:  # a part without weak references, such as a number
            self._parts = _weakly(batch)

    def get(self) -> Any:
        """Returns the batch, or an equal one; None if a part of it is gone."""
        try:
            return _restored(self._parts)
        except _Gone:
            return None


class _Gone(Exception):
    """A part of the batch is no longer in memory."""


class _Strong:
    """What cannot be referred to weakly: a number, a text, an object with slots."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def _weakly(value: Any, level: int = 0) -> Any:
    kind = type(value)
    if kind in _CONTAINERS:
        if level == _MOST_LEVELS or len(value) > _MOST_PARTS:
            return _Strong(value)
        if kind is dict:
            return kind, [(key, _weakly(each, level + 1)) for key, each in value.items()]
        return kind, [_weakly(each, level + 1) for each in value]
    try:
        return weakref.ref(value)
    except TypeError:
        return _Strong(value)


def _restored(parts: Any) -> Any:
    if type(parts) is _Strong:
        return parts.value
    if type(parts) is tuple:
        kind, inner = parts
        if kind is dict:
            return {key: _restored(each) for key, each in inner}
        return kind(map(_restored, inner))
    found = parts()
    if found is None:
        raise _Gone
    return found

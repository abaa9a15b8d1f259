"""Holds what is the user's, for as long as the user does."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["reference", "weakly"]


def weakly(objects: Iterable[Any]) -> Callable[[], list[Any]]:
    """Returns a function that returns those of some objects that still exist.

    An object of a class without weak references is held until the function is gone.

    >>> weakly([len])() == [len]
    True
    """
    references = [reference(each, each) for each in objects]
    return lambda: [found for each in references if (found := each()) is not None]


def reference(value: Any, otherwise: Any = None) -> Callable[[], Any]:
    """Returns a weak reference to an object; what returns `otherwise`, for one of a class without such, as a list."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: otherwise

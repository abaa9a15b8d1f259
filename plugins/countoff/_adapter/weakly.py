"""Holds what is the user's, for as long as the user does."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["weakly"]


def weakly(objects: Iterable[Any]) -> Callable[[], list[Any]]:
    """Returns a function that returns those of some objects that still exist.

    An object of a class without weak references is held until the function is gone.

    >>> weakly([len])() == [len]
    True
    """
    references = [_reference(each) for each in objects]
    return lambda: [found for each in references if (found := each()) is not None]


def _reference(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return functools.partial(_itself, value)


def _itself(value: Any) -> Any:
    return value

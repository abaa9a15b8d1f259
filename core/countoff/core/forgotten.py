"""Whether a program has caught an exception, and has forgotten it."""

from __future__ import annotations

import weakref
from collections.abc import Callable

__all__ = ["forgotten"]

_WITNESS = "countoff_witness"
"""An attribute of an exception: an object that lives as long."""


class _Witness:
    """Lives as long as the exception that it is an attribute of, to which Python gives no weak reference."""

    __slots__ = ("__weakref__",)

    def __reduce__(self) -> tuple[type[str], tuple[()]]:
        return str, ()  # a copy of the exception, as one sent to another process, says nothing about this one


def forgotten(error: BaseException) -> Callable[[], bool]:
    """Returns a function that tells whether a program has caught an exception, and nothing refers to it any more.

    Args:
        error: The exception. It is not kept alive.

    >>> error = ValueError()
    >>> is_over = forgotten(error)
    >>> found = [is_over()]
    >>> del error
    >>> [*found, is_over()]
    [False, True]
    """
    witness = _Witness()
    vars(error)[_WITNESS] = witness
    alive = weakref.ref(witness)
    return lambda: alive() is None

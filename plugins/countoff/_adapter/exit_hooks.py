"""Tells a fit that it ends early: by an exception that nothing catches, or by the end of the program.

A training loop has no hook for either, so these are `sys.excepthook` and a function that runs at interpreter exit.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable

from countoff._adapter.hooks import MethodHook
from countoff.core.ending import shutdown

__all__ = ["ExitHooks", "exception_at_exit", "is_over"]

_WITNESS = "countoff_witness"
"""An attribute of an exception: an object that lives as long."""


class _Witness:
    """Lives as long as the exception that it is an attribute of, to which Python gives no weak reference."""

    __slots__ = ("__weakref__",)

    def __reduce__(self) -> tuple[type[str], tuple[()]]:
        return str, ()  # a copy of the exception, as one sent to another process, says nothing about this one


def is_over(error: BaseException) -> Callable[[], bool]:
    """Returns a function that tells whether a program has caught an exception, and has forgotten it.

    Args:
        error: The exception. It is not kept alive.
    """
    witness = _Witness()
    vars(error)[_WITNESS] = witness
    alive = weakref.ref(witness)
    return lambda: alive() is None


def exception_at_exit() -> BaseException | None:
    """Returns the exception that ends this process where no excepthook is called: in a child of multiprocessing."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        return error.__context__ if error.code else None
    return error


class ExitHooks:
    """Hooks that are active until cancelled: that for exceptions at once, that for the program's end once registered.

    Args:
        failed: Called with the exception that ends the program, before its traceback is printed.
        at_exit: Called once or twice when the program ends.
    """

    def __init__(self, failed: Callable[[BaseException], None], at_exit: Callable[[], None]) -> None:
        self._at_exit = at_exit
        self._cancel_at_exit: Callable[[], None] | None = None
        self._excepthook = MethodHook(sys, "excepthook", before=lambda _, error, __: failed(error))

    def register_at_exit(self) -> None:
        """Registers, or registers again, the function for the program's end.

        Such functions run last in, first out: registered after a guard has begun, this one runs before the guard's.
        """
        if self._cancel_at_exit is not None:
            self._cancel_at_exit()
        self._cancel_at_exit = shutdown.at_exit(self._at_exit)

    def cancel(self) -> None:
        """Removes the hooks. Does nothing when called again."""
        if self._cancel_at_exit is not None:
            self._cancel_at_exit()
        self._excepthook.remove()

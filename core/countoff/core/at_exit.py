"""What is called when the program ends, also in a process that multiprocessing has started."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import sys
from collections.abc import Callable

__all__ = ["at_exit", "exception_at_exit"]


def at_exit(function: Callable[[], None]) -> Callable[[], None]:
    """Registers a function for the interpreter's end, also in a child of multiprocessing, which skips `atexit`.

    Args:
        function: Called once or twice; never in a process that was forked off this one.

    Returns:
        A function that removes the registration.
    """
    own = os.getpid()

    def call() -> None:
        if os.getpid() == own:
            function()

    atexit.register(call)
    finalizer = multiprocessing.util.Finalize(None, call, exitpriority=100)

    def cancel() -> None:
        atexit.unregister(call)
        finalizer.cancel()

    return cancel


def exception_at_exit() -> BaseException | None:
    """Returns the exception that ends this process where no excepthook is called: in a child of multiprocessing."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        return error.__context__ if error.code else None
    return error

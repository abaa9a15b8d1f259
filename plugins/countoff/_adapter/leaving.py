"""Fits that end early: by an exception, which the program may catch to fit again, or by the end of the program.

A training loop has no hook for either, so these are `sys.excepthook` and a function that runs at interpreter exit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from countoff._adapter.hooks import MethodHook
from countoff.core import Guard
from countoff.core.at_exit import at_exit, exception_at_exit
from countoff.core.forgotten import forgotten

__all__ = ["ExitHooks", "LeftFit"]


class ExitHooks:
    """Hooks that are active until cancelled: that for exceptions at once, that for the program's end once registered.

    Args:
        failed: Called with the exception that ends the program, before its traceback is printed.
        ended: Called once or twice when the program ends.
    """

    def __init__(self, failed: Callable[[BaseException], None], ended: Callable[[], None]) -> None:
        self._ended = ended
        self._cancel_at_exit: Callable[[], None] | None = None
        self._excepthook = MethodHook(sys, "excepthook", before=lambda _, error, __: failed(error))

    def register_at_exit(self) -> None:
        """Registers, or registers again, the function for the program's end.

        Such functions run last in, first out: registered after a guard has begun, this one runs before the guard's.
        """
        if self._cancel_at_exit is not None:
            self._cancel_at_exit()
        self._cancel_at_exit = at_exit(self._ended)

    def cancel(self) -> None:
        """Removes the hooks. Does nothing when called again."""
        if self._cancel_at_exit is not None:
            self._cancel_at_exit()
        self._excepthook.remove()


class LeftFit:
    """A fit that an exception has left. The other ranks are told at once, and are ended by it once they need this rank.

    If nothing catches the exception, it becomes the verdict.

    Args:
        guard: The fit's guard.
        error: The exception.
        close: Closes the fit. Called once or more often, also on a thread of its own.
    """

    def __init__(self, guard: Guard, error: BaseException, close: Callable[[], None]) -> None:
        self._guard = guard
        self._close = close
        self._is_over = forgotten(error)
        guard.failing(error)
        self._hooks = ExitHooks(guard.failed, self._at_exit)
        self._hooks.register_at_exit()

    def leave(self) -> None:
        """Has the fit closed once the program has caught the exception or fits again; at once if there is a verdict.

        To be called when the framework has taken its loop down. Until then this rank may still wait for another one.
        """
        if self._guard.verdict is None:
            self._guard.leave(self._is_over, self.close)
        else:
            self.close()

    def close(self) -> None:
        """Closes the fit. Does nothing when called again."""
        self._hooks.cancel()
        self._close()

    def _at_exit(self) -> None:
        if (error := exception_at_exit()) is not None:
            self._guard.failed(error)
        self.close()

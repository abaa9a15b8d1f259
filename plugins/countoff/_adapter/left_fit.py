"""A fit that an exception has left, and that the program may survive: it may catch the exception and fit again."""

from __future__ import annotations

from collections.abc import Callable

from countoff._adapter.exit_hooks import ExitHooks, exception_at_exit, is_over
from countoff.core import Guard

__all__ = ["LeftFit"]


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
        self._is_over = is_over(error)
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

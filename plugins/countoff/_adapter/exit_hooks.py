"""How a fit hears that it is left: by an exception that nothing catches, or by the program's end.

A training loop has no hook for either, so they are heard of at `sys.excepthook` and at the interpreter's exit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType

from countoff.core.runtime import shutdown


class ExitHooks:
    """Listens until it is cancelled; to exceptions at once, to the program's end from `listen_at_exit` on.

    Args:
        failed: Called with the exception that ends the program, before its traceback is printed.
        at_exit: Called once or twice when the program ends.
    """

    def __init__(self, failed: Callable[[BaseException], None], at_exit: Callable[[], None]) -> None:
        self._failed = failed
        self._at_exit = at_exit
        self._stay: Callable[[], None] | None = None
        self._excepthook = sys.excepthook
        sys.excepthook = self._tell_and_raise

    def listen_at_exit(self) -> None:
        """Hears of the program's end before those who have asked for that until now, as a guard that has begun."""
        if self._stay is not None:
            self._stay()
        self._stay = shutdown.at_exit(self._at_exit)

    def cancel(self) -> None:
        """Listens no more. The second time nothing happens."""
        if self._stay is not None:
            self._stay()
        if sys.excepthook == self._tell_and_raise:  # else somebody stands on top of it, and calls it
            sys.excepthook = self._excepthook

    def _tell_and_raise(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        self._failed(error)
        self._excepthook(kind, error, traceback)

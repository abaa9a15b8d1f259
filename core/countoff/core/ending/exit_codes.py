"""Exit codes that tell a scheduler whether to start the job again, where the user has chosen them."""

from __future__ import annotations

import sys
from types import TracebackType

from countoff.core.settings import Settings
from countoff.core.verdict import DivergenceError, Verdict

__all__ = ["EXIT_CODE", "VERDICT", "choose_codes", "code_of", "leave_with_code"]

EXIT_CODE = 87
"""Of a process whose main thread cannot be reached; unlike any signal's or Python's own, to be told apart in a log."""
VERDICT = "countoff_verdict"
"""An attribute of an exception: the verdict of the loss that has caused it, as that of a collective."""
_codes: dict[str, int] = {}
_placed = False


def code_of(verdict: Verdict | None, settings: Settings) -> int:
    """Returns the exit code of a process that ends without its main thread.

    Args:
        verdict: The verdict that ends it.
        settings: The user's choices.
    """
    return EXIT_CODE if verdict is None else settings.exit_codes.get(verdict.restart, EXIT_CODE)


def choose_codes(settings: Settings) -> None:
    """Lets an uncaught exception of a verdict end this process with the code that the user has chosen for it.

    Python has one exit code for all uncaught exceptions, and asks `sys.excepthook` to print each. If that raises a
    SystemExit, the interpreter ends with its code, in the usual order (`_PyErr_PrintEx`, Python/pythonrun.c). The hook
    stays until the process ends: that comes after the fit. Without a chosen code, nothing is changed.

    Args:
        settings: The user's choices, before the exception of a verdict is raised.
    """
    global _placed
    if not settings.exit_codes:
        return
    _codes.clear()
    _codes.update(settings.exit_codes)
    if _placed:
        return
    _placed, before = True, sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        leave_with_code(error)

    sys.excepthook = hook


def leave_with_code(error: BaseException) -> None:
    """Ends the process with the chosen code; to be called by a hook of `sys.excepthook`, when the error is printed.

    Args:
        error: The uncaught exception.

    Raises:
        SystemExit: If it, or what it was raised from, is a verdict's, and the user has chosen a code for that.
    """
    cause: BaseException | None = error
    seen: set[int] = set()  # a program can make a circle of causes
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        verdict = cause.verdict if isinstance(cause, DivergenceError) else vars(cause).get(VERDICT)
        if verdict is not None:
            if (code := _codes.get(verdict.restart)) is not None:
                raise SystemExit(code)
            return
        cause = cause.__cause__

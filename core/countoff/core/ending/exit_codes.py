"""Exit codes that tell a scheduler whether to start the job again, where the user has chosen them."""

from __future__ import annotations

import sys
from types import TracebackType

from countoff.core.settings import Settings
from countoff.core.verdict import DivergenceError, Verdict

__all__ = ["EXIT_CODE", "code_of", "ends_by_verdict", "exit_with", "note_of"]

EXIT_CODE = 87
"""Of a process whose main thread cannot be reached; unlike any signal's or Python's own, to be told apart in a log."""


def code_of(verdict: Verdict | None, settings: Settings) -> int:
    """Returns the exit code of a process that ends without its main thread.

    Args:
        verdict: The verdict that ends it.
        settings: The user's choices.
    """
    return EXIT_CODE if verdict is None else settings.exit_codes.get(verdict.restart, EXIT_CODE)


def exit_with(verdict: Verdict, settings: Settings) -> None:
    """Lets an uncaught exception of this verdict end the process with the code that the user has chosen for it.

    Python has one exit code for all uncaught exceptions, and asks `sys.excepthook` to print each. If that raises a
    SystemExit, the interpreter ends with its code, in the usual order (`_PyErr_PrintEx`, Python/pythonrun.c). Without a
    chosen code, nothing is changed.

    Args:
        verdict: The verdict, before its exception is raised.
        settings: The user's choices.
    """
    code = settings.exit_codes.get(verdict.restart)
    if code is None:
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if ends_by_verdict(error):
            raise SystemExit(code)

    sys.excepthook = hook


def note_of(verdict: Verdict) -> str:
    """What is added to an exception that another rank's loss has caused; printed below the traceback."""
    return f"countoff {verdict.headline}"


def ends_by_verdict(error: BaseException) -> bool:
    """Whether an exception is a verdict's, or carries its note."""
    notes = getattr(error, "__notes__", ())
    return isinstance(error, DivergenceError) or any(str(note).startswith("countoff ") for note in notes)

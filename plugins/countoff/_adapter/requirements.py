"""The error of an adapter whose framework is not installed: one line, with the command that installs it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["needs"]


@contextlib.contextmanager
def needs(framework: str, *, facade: str, install: str) -> Iterator[None]:
    """A context for the imports of a framework; an `ImportError` in it names the command that installs the framework.

    Where a module is missing, that line stands below a single traceback: the command mends it. Where a module is there
    and broken, its own error is the cause.

    Args:
        framework: The framework's name, for the message.
        facade: The module that the user imports.
        install: What `pip install` takes.

    Raises:
        ImportError: If an import in the context raises one.
    """
    try:
        yield
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError)
        raise ImportError(f"{facade} needs {framework}: pip install {install}") from (None if missing else error)

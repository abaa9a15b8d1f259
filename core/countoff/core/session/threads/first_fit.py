"""The moment at which a process begins its first fit: what looks after it until then ends there."""

from __future__ import annotations

import os
from collections.abc import Callable

__all__ = ["begin", "begun", "call"]

_begun = False
_calls: list[Callable[[], None]] = []


def begin() -> None:
    """Begins a fit; the first one of a process calls what waits for it."""
    global _begun
    if not _begun:
        _begun = True
        for function in _calls:
            function()


def begun() -> bool:
    """Returns whether a fit has begun in this process."""
    return _begun


def call(function: Callable[[], None]) -> None:
    """Has a function called when the first fit begins; never in a process that was forked off this one.

    Args:
        function: It must not wait.
    """
    _calls.append(function)


os.register_at_fork(after_in_child=_calls.clear)

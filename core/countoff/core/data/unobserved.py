"""Lets countoff use torch unseen by the modes of the program.

A mode sees every operation of its thread: one that counts operations would count ours, and a default device would
change where our tensors are made. torch is not imported: where there is a tensor, it has been already.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

__all__ = ["unobserved"]


def unobserved() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which no `TorchFunctionMode` or `TorchDispatchMode` sees what is done with tensors.

    In it, a tensor of a subclass is taken for a plain one, so it must not be used with operations.
    """
    torch = sys.modules.get("torch")
    return contextlib.nullcontext() if torch is None else _Unobserved(torch._C)


class _Unobserved:
    """Both guards of torch, on this thread; without the cost of a generator's context."""

    __slots__ = ("_dispatch", "_functions")

    def __init__(self, library: Any) -> None:
        self._functions, self._dispatch = library.DisableTorchFunction, library._DisableTorchDispatch

    def __enter__(self) -> None:
        self._functions, self._dispatch = self._functions(), self._dispatch()
        self._functions.__enter__()
        self._dispatch.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._dispatch.__exit__(*raised)
        self._functions.__exit__(*raised)

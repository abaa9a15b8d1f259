"""Counts the loops over what Accelerate prepares, in programs that attach nothing."""

from __future__ import annotations

import functools
from typing import Any

from countoff._adapter.hooks import MethodHook
from countoff._run.unobserved import say_unobserved

__all__ = ["hook"]


def hook(module: Any) -> None:
    """Counts the loops of the Accelerators that prepare something from here on.

    Args:
        module: ``accelerate.accelerator``.
    """
    MethodHook(module.Accelerator, "prepare", after=_prepared)


def _prepared(accelerator: Any, *_: Any, **__: Any) -> None:
    if accelerator.num_processes > 1 and (loops := _loops()) is not None:
        loops.add(accelerator)


@functools.cache
def _loops() -> Any:
    try:
        from countoff._run.prepared_loops import PreparedLoops
    except ImportError as error:  # another version of Accelerate, which lacks something
        say_unobserved("Accelerate", str(error))
        return None
    return PreparedLoops()

"""Watches the loops over what Accelerate prepares, in programs that attach nothing."""

from __future__ import annotations

import functools
from typing import Any

from countoff._adapter.hooks import MethodHook
from countoff._run.unobserved import say_unobserved

__all__ = ["hook"]


def hook(module: Any) -> None:
    """Watches the Accelerators that prepare something from here on.

    Args:
        module: ``accelerate.accelerator``.
    """
    MethodHook(module.Accelerator, "prepare", after=_prepared)


def _prepared(accelerator: Any, *_: Any, **__: Any) -> None:
    if accelerator.num_processes > 1 and (watched := _watched()) is not None:
        watched.add(accelerator)


@functools.cache
def _watched() -> Any:
    try:
        from countoff._run.watched_accelerators import WatchedAccelerators
    except ImportError as error:  # another version of Accelerate, which lacks something
        say_unobserved("Accelerate", str(error))
        return None
    return WatchedAccelerators()

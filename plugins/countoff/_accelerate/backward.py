"""Counts the backward passes that a loop, or the transformers Trainer, runs with Accelerate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate import Accelerator

from countoff._adapter.hooks import SharedHooks

__all__ = ["count_backward_passes"]


def count_backward_passes(count: Callable[[], None], accelerator: Any = None) -> Callable[[], None]:
    """Calls a function after each `Accelerator.backward` that raised nothing; returns a function that ends that.

    Args:
        count: Called without arguments.
        accelerator: The Accelerator; None: every one of this process.
    """

    def watcher(of: Any) -> None:
        if accelerator is None or of is accelerator:
            count()

    return _backward.add(watcher)


def _watched(backward: Callable[..., Any], accelerator: Any, *arguments: Any, **options: Any) -> Any:
    result = backward(accelerator, *arguments, **options)
    for watcher in _backward:
        watcher(accelerator)
    return result


_backward: SharedHooks[Callable[[Any], None]] = SharedHooks(lambda: {(Accelerator, "backward"): _watched})

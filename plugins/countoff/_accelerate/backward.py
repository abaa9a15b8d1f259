"""Counts the backward passes that a loop, or the transformers Trainer, runs with Accelerate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate import Accelerator

from countoff._adapter.hooks import SharedHooks

__all__ = ["count_backward_passes"]


def count_backward_passes(
    count: Callable[[], None], counts: Callable[[Any], bool] = lambda _: True
) -> Callable[[], None]:
    """Calls a function after each `Accelerator.backward` that raised nothing; returns a function that ends that.

    Args:
        count: Called without arguments.
        counts: Whether those of an Accelerator count.
    """

    def watcher(of: Any) -> None:
        if counts(of):
            count()

    return _backward.add(watcher)


def _watched(backward: Callable[..., Any], accelerator: Any, *arguments: Any, **options: Any) -> Any:
    result = backward(accelerator, *arguments, **options)
    for watcher in _backward:
        watcher(accelerator)
    return result


_backward: SharedHooks[Callable[[Any], None]] = SharedHooks(lambda: {(Accelerator, "backward"): _watched})

"""Observes what Accelerate's own objects tell of a loop: its backward passes, and where ranks may be uneven."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from accelerate import Accelerator

from countoff._accelerate.backward import count_backward_passes
from countoff._accelerate.loaders import watch_local_sgd
from countoff._accelerate.streams import watch_stream
from countoff._adapter.counted_loop import CountedLoop
from countoff._adapter.hooks import SharedHooks

__all__ = ["observe"]


def observe(accelerator: Any, loop: CountedLoop) -> Callable[[], None]:
    """Observes what tells of a loop besides its passes, from here on; returns a function that ends that.

    Args:
        accelerator: The Accelerator, which is held weakly.
        loop: The loop.
    """
    of_accelerator: weakref.ref[Any] = weakref.ref(accelerator)

    def is_own(of: Any) -> bool:
        return of is of_accelerator()

    def joined(of: Any) -> contextlib.AbstractContextManager[None]:
        return loop.uncounted() if is_own(of) else contextlib.nullcontext()

    def averages(of: Any, inside: bool) -> None:
        if is_own(of):
            loop.compare(not inside)

    def train_loader() -> Any:
        return None if loop.train_loader is None else loop.train_loader()

    with contextlib.ExitStack() as stack:
        stack.callback(watch_stream(train_loader, lambda: loop.guard.data))
        stack.callback(count_backward_passes(loop.micro_batch, is_own))
        stack.callback(_joins.add(joined))
        stack.callback(watch_local_sgd(averages))
        return stack.pop_all().close


def _enters_join(accelerator: Any) -> bool:
    """Whether `join_uneven_inputs` enters `Join`, and does not only warn that it cannot."""
    kind = accelerator.distributed_type.name
    several = kind.startswith("MULTI_") and kind != "MULTI_CPU"
    return getattr(accelerator, "multi_device", several)  # which is new in Accelerate 1.10


@contextlib.contextmanager
def _joined(
    join: Callable[..., Any], accelerator: Any, joinables: Any, even_batches: bool | None = None
) -> Iterator[None]:
    even = accelerator.even_batches if even_batches is None else even_batches
    with contextlib.ExitStack() as stack:
        stack.enter_context(join(accelerator, joinables, even_batches))
        for watcher in _joins if _enters_join(accelerator) and not even else ():
            stack.enter_context(watcher(accelerator))
        yield


_joins: SharedHooks[Callable[[Any], contextlib.AbstractContextManager[None]]] = SharedHooks(
    lambda: {(Accelerator, "join_uneven_inputs"): _joined}
)

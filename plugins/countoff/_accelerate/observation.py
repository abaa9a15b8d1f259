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
from countoff._adapter.hooks import SharedHooks, until_gone
from countoff._adapter.own_loop import OwnLoop

__all__ = ["observe", "watch_uneven"]


def observe(accelerator: Any, loop: CountedLoop) -> Callable[[], None]:
    """Observes what tells of a fit besides its passes, from here on; returns a function that ends that.

    Args:
        accelerator: The Accelerator, which is held weakly.
        loop: The fit's loop.
    """
    of_accelerator: weakref.ref[Any] = weakref.ref(accelerator)

    def train_loader() -> Any:
        return None if loop.train_loader is None else loop.train_loader()

    with contextlib.ExitStack() as stack:
        stack.callback(watch_stream(train_loader, lambda: loop.guard.data))
        stack.callback(count_backward_passes(loop.micro_batch, lambda of: of is of_accelerator()))
        return stack.pop_all().close


def watch_uneven(accelerator: Any, own: OwnLoop) -> None:
    """Lets nothing be compared inside a `Join` or a `LocalSGD` of Accelerate's, which begins before its first batch.

    Both are held weakly. What is put on Accelerate's classes is taken back once the loop is gone.

    Args:
        accelerator: The Accelerator.
        own: The user's loop.
    """
    of_own, of_accelerator = weakref.ref(own), weakref.ref(accelerator)

    def present(of: Any) -> OwnLoop | None:
        if (found := of_own()) is None:
            removals.close()
        return found if of is of_accelerator() else None

    def joined(of: Any) -> contextlib.AbstractContextManager[None]:
        found = present(of)
        return contextlib.nullcontext() if found is None else found.uncounted()

    def averages(of: Any, inside: bool) -> None:
        if (found := present(of)) is not None:
            found.compare(not inside)

    removals = contextlib.ExitStack()
    until_gone(own, removals.close)
    removals.callback(_joins.add(joined))
    removals.callback(watch_local_sgd(averages))


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

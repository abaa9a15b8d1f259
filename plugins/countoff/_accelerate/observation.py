"""Observes a loop of Accelerate from outside: its passes, its checkpoints, and where ranks may be uneven."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard

from countoff._accelerate.backward import count_backward_passes
from countoff._accelerate.checkpoints import watch_checkpoints
from countoff._accelerate.loaders import (
    even_prepared,
    followers,
    same_source,
    skipped_batches,
    watch_local_sgd,
)
from countoff._accelerate.streams import watch_stream
from countoff._adapter.hooks import SharedHooks
from countoff._adapter.observed_loaders import share_length
from countoff._adapter.observed_loop import ObservedLoop

__all__ = ["follow", "observe", "watch_joins"]


def observe(accelerator: Any, loop: ObservedLoop, train: Any) -> Callable[[], None]:
    """Observes the loop from here on, but for its passes; returns a function that ends that.

    Args:
        accelerator: The Accelerator.
        loop: The loop.
        train: The prepared train loader; None for none.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(watch_stream(train, lambda: loop.guard.data))
        stack.callback(watch_checkpoints(accelerator, loop))
        stack.callback(count_backward_passes(loop.micro_batch, accelerator))
        stack.callback(_uncounted_joins(accelerator, loop))
        stack.callback(_uncounted_local_sgd(accelerator, loop))
        if isinstance(train, DataLoaderShard):
            share_length(loop, train.base_dataloader)  # which tells the length of Accelerate's
        return stack.pop_all().close


def follow(loop: ObservedLoop, loaders: Mapping[str | None, Any]) -> Callable[[], None]:
    """Counts the passes over loaders from here on; returns a function that ends that.

    Args:
        loop: The loop, which counts the passes.
        loaders: The prepared loaders, by the evaluation's name; None for the train loader.
    """

    def find(loader: Any) -> tuple[bool, str | None]:
        for same in (lambda known: known is loader, lambda known: same_source(known, loader)):
            for name, known in loaders.items():
                if same(known):
                    return True, name
        return False, None

    def follower(loader: Any, batches: Iterator[Any]) -> Iterator[Any] | None:
        found, name = find(loader)
        if not found:
            return None
        return loop.passes.follow(
            batches,
            name,
            position=skipped_batches(loader),
            ahead=loader,  # it has fetched one batch more than it handed out
            loader=loader,
            even=even_prepared(loader, proven=name is None),
        )

    return followers.add(follower)


def watch_joins(watcher: Callable[[Any], contextlib.AbstractContextManager[None]]) -> Callable[[], None]:
    """Enters a watcher's context inside `accelerator.join_uneven_inputs` where it enables `Join`.

    Args:
        watcher: Called with the Accelerator.

    Returns:
        A function that removes the watcher. With the last watcher, Accelerate's class is restored.
    """
    return _joins.add(watcher)


def _uncounted_joins(accelerator: Any, loop: ObservedLoop) -> Callable[[], None]:
    """Compares nothing inside `accelerator.join_uneven_inputs` where it enables `Join`; returns what ends that."""

    def watcher(of: Any) -> contextlib.AbstractContextManager[None]:
        return loop.uncounted() if of is accelerator else contextlib.nullcontext()

    return watch_joins(watcher)


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


def _uncounted_local_sgd(accelerator: Any, loop: ObservedLoop) -> Callable[[], None]:
    """Compares nothing inside `LocalSGD`, whose ranks synchronise only every few steps; returns what ends that."""

    def watcher(of: Any, inside: bool) -> None:
        if of is accelerator:
            loop.compare(not inside)

    return watch_local_sgd(watcher)

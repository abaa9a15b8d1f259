"""Observes a loop of Accelerate from outside: its passes, its checkpoints, and where ranks may be uneven."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from countoff._accelerate.facts import horizon_at_epoch
from countoff._accelerate.resume import watch_checkpoints
from countoff._adapter.handle import Attached
from countoff._adapter.prepared_loaders import Follower, follow, same_source, skipped_batches, watch_local_sgd
from countoff.core import FitPlan

__all__ = ["observe"]


def observe(
    accelerator: Any,
    attached: Attached,
    loaders: Mapping[str | None, Any],
    plan: FitPlan,
    versions: Mapping[str, str],
) -> Callable[[], None]:
    """Observes the loop from here on; returns a function that ends that.

    Args:
        accelerator: The Accelerator.
        attached: The handle that counts the passes.
        loaders: The prepared loaders, by the evaluation's name; None for the train loader.
        plan: What the ranks must agree on, for the fit that begins from a checkpoint.
        versions: Versions whose differences get a warning.
    """

    def began(epoch: int) -> None:
        notice = horizon_at_epoch(accelerator, epoch)
        if notice is not None:
            attached.guard.warn(notice)

    attached.passes.began, attached.passes.expects_train = began, None in loaders
    with contextlib.ExitStack() as stack:
        stack.callback(follow(_follower(attached, loaders)))
        stack.callback(watch_checkpoints(accelerator, attached, plan, versions))
        stack.callback(_uncounted_joins(accelerator, attached))
        stack.callback(_uncounted_local_sgd(accelerator, attached))
        return stack.pop_all().close


def _follower(attached: Attached, loaders: Mapping[str | None, Any]) -> Follower:
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
        return attached.passes.follow(
            batches,
            name,
            position=skipped_batches(loader),
            ahead=lambda: loader.end_of_dataloader,  # it has fetched one batch more than it handed out
            loader=loader,
        )

    return follower


def _uncounted_joins(accelerator: Any, attached: Attached) -> Callable[[], None]:
    """Compares nothing inside `accelerator.join_uneven_inputs` where it enables `Join`; returns what ends that."""
    original = accelerator.join_uneven_inputs

    @contextlib.contextmanager
    def joined(joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        even = accelerator.even_batches if even_batches is None else even_batches
        with contextlib.ExitStack() as stack:
            stack.enter_context(original(joinables, even_batches))
            if accelerator.multi_device and not even:
                stack.enter_context(attached.uncounted())
            yield

    def remove() -> None:
        if accelerator.__dict__.get("join_uneven_inputs") is joined:
            del accelerator.join_uneven_inputs

    accelerator.join_uneven_inputs = joined
    return remove


def _uncounted_local_sgd(accelerator: Any, attached: Attached) -> Callable[[], None]:
    """Compares nothing inside `LocalSGD`, whose ranks synchronise only every few steps; returns what ends that."""

    def watcher(of: Any, inside: bool) -> None:
        if of is accelerator:
            attached.passes.comparing = not inside

    return watch_local_sgd(watcher)

"""countoff for Hugging Face Accelerate: ``attach(accelerator, train=…, eval=…)``, once, after ``prepare()``.

Accelerate has no callbacks. Passes are seen where its loaders are iterated, steps where torch applies them, resuming
in the hooks of `save_state` and `load_state`; the loop stays as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from countoff._accelerate import facts as reading
from countoff._accelerate.resume import Position, watch_checkpoints
from countoff._adapter.handle import Attached
from countoff._adapter.prepared_loaders import (
    Follower,
    follow,
    is_prepared,
    same_source,
    skipped_batches,
    watch_local_sgd,
)
from countoff._adapter.torch_facts import learning_rates, versions
from countoff.core import Guard, Settings
from countoff.core.totals import Totals

__all__ = ["Attached", "attach"]


def attach(
    accelerator: Any,
    *,
    train: Any = None,
    eval: Any = None,  # the name that every adapter uses
    epochs: int | None = None,
    max_steps: int | None = None,
    start_epoch: int = 0,
    **options: Any,
) -> Attached:
    """Watches a loop over prepared loaders. Collective: every rank must call it, after `accelerator.prepare()`.

    It waits for the other ranks at most `deadline_seconds`; nothing later waits for another rank, except that
    `accelerator.load_state()` counts off anew from the checkpoint's position.

    Args:
        accelerator: The Accelerator that has prepared the loaders.
        train: The prepared train loader.
        eval: The prepared evaluation loader, or a mapping from names to loaders.
        epochs: Epochs of the run, at least 0, if it is known: learning-rate schedules are held against it.
        max_steps: Optimizer steps after which the run ends, at least 0, if there is such a limit.
        start_epoch: Number of the first epoch, where a run resumes by other means than `accelerator.load_state()`.
        options: Those of `countoff.core.Settings`.

    Returns:
        A handle, which is also a context manager; without it, the program's end is the end of the fit.

    Raises:
        SettingsError: If an option or a ``COUNTOFF_*`` variable has a bad value.
        TypeError: If a loader was not prepared, or there is none.
        PlanMismatch: If ranks begin with different plans.
    """
    settings = Settings.resolve(**options)
    evals: Mapping[str, Any] = eval if isinstance(eval, Mapping) else {} if eval is None else {"evaluation": eval}
    loaders: dict[str | None, Any] = {**({} if train is None else {None: train}), **evals}
    _check_prepared(loaders)

    def new_guard() -> Guard:
        return Guard(
            settings,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            remedies=reading.REMEDIES,
            learning_rates=lambda: learning_rates(accelerator._optimizers),
        )

    facts = reading.train_facts(accelerator, train, epochs=epochs, max_steps=max_steps)
    dp_rank, dp_degree = reading.position_of(accelerator)
    totals = Totals(facts, dp_degree=dp_degree, framework="len(loader)")

    def counts(optimizer: Any) -> bool:
        prepared = [reading.unwrapped(each) for each in accelerator._optimizers]
        return not prepared or any(each is optimizer for each in prepared)

    attached = Attached(new_guard, totals, settings, epoch=start_epoch, steps_of=counts)
    if not settings.enabled:
        return attached
    plan = {
        "batches_per_epoch": reading.length_to_agree_on(facts),
        "batch_size": facts.batch_size,
        "gradient_accumulation_steps": facts.gradient_accumulation_steps,
        "max_epochs": epochs,
        "max_steps": max_steps,
        "dp_degree": dp_degree,
        "dp_rank": dp_rank,
    }
    found = versions("accelerate")

    def position() -> Position:
        epoch, batches = attached.passes.position
        return Position(epoch, batches, attached.steps_before + attached.guard.steps)

    def loaded(saved: Position | None) -> None:
        epoch, steps = (attached.passes.epoch, 0) if saved is None else (saved.epoch, saved.steps)
        place = None if saved is None else list(saved)
        attached.begin_again({**plan, "position": place}, found, epoch=epoch, steps=steps)

    def began(epoch: int) -> None:
        notice = reading.horizon_at_epoch(accelerator, epoch)
        if notice is not None:
            attached.guard.warn(notice)

    for name, loader in loaders.items():
        reading.say_lengths(accelerator, name or "train", loader)
    attached.passes.began, attached.passes.expects_train = began, train is not None
    with contextlib.ExitStack() as stack:
        stack.callback(follow(_follower(attached, loaders)))
        stack.callback(watch_checkpoints(accelerator, position, loaded))
        stack.callback(_uncounted_joins(accelerator, attached))
        stack.callback(_uncounted_local_sgd(accelerator, attached))
        release = stack.pop_all().close
    attached.begin(
        {**plan, "position": [start_epoch, 0, 0]},
        found,
        release,
        reading.alone(accelerator),
        reading.horizon_at_start(accelerator, totals.plan, epochs=epochs),
    )
    return attached


def _check_prepared(loaders: Mapping[str | None, Any]) -> None:
    if not loaders:
        raise TypeError("attach() needs a loader to watch: attach(accelerator, train=…, eval=…)")
    for name, loader in loaders.items():
        if not is_prepared(loader):
            raise TypeError(
                f"attach({'train' if name is None else 'eval'}=…) got a {type(loader).__name__} that Accelerate has "
                "not prepared: call attach() after accelerator.prepare(), with the loader that prepare() returned"
            )


def _follower(attached: Attached, loaders: Mapping[str | None, Any]) -> Follower:
    def follower(loader: Any, batches: Iterator[Any]) -> Iterator[Any] | None:
        for same in (lambda known: known is loader, lambda known: same_source(known, loader)):
            for name, known in loaders.items():
                if same(known):
                    left_out = skipped_batches(loader)
                    ahead = lambda: loader.end_of_dataloader  # noqa: E731  # it holds one batch more than it gave
                    return attached.passes.follow(batches, name, position=left_out, ahead=ahead, loader=loader)
        return None

    return follower


def _uncounted_joins(accelerator: Any, attached: Attached) -> Callable[[], None]:
    """Turns comparing off inside `accelerator.join_uneven_inputs`, where it enables `Join`; returns what ends that."""
    original = accelerator.join_uneven_inputs

    @contextlib.contextmanager
    def joined(joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        even = accelerator.even_batches if even_batches is None else even_batches
        with contextlib.ExitStack() as stack:
            stack.enter_context(original(joinables, even_batches))
            if accelerator.multi_device and not even:
                stack.enter_context(attached.uncounted())
            yield

    def leave() -> None:
        if accelerator.__dict__.get("join_uneven_inputs") is joined:
            del accelerator.join_uneven_inputs

    accelerator.join_uneven_inputs = joined
    return leave


def _uncounted_local_sgd(accelerator: Any, attached: Attached) -> Callable[[], None]:
    """Turns comparing off inside `LocalSGD`, whose ranks meet at so many steps and its exit; returns what ends that."""

    def told(of: Any, inside: bool) -> None:
        if of is accelerator:
            attached.passes.comparing = not inside

    return watch_local_sgd(told)

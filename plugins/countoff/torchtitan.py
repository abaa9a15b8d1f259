"""countoff for TorchTitan: ``attach(trainer)`` between building the trainer and ``trainer.train()``, on every rank.

Or without a line of code, in place of ``-m torchtitan.train``::

    torchrun --nproc-per-node 8 -m countoff.torchtitan --module llama3 --config llama3_8b

A batch is what the trainer takes from its loader at once: a micro-batch, where a pipeline reads those one by one.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from countoff._adapter.requirements import needs

with needs("TorchTitan", facade="countoff.torchtitan", install="torchtitan"):
    from torchtitan.components.dataloader import DataloaderExhaustedError  # pyright: ignore[reportMissingImports]
from countoff._adapter.guards import cannot_make_even, new_guard
from countoff._adapter.handle import Attached
from countoff._adapter.hooks import MethodHook
from countoff._adapter.options import own_arguments
from countoff._adapter.torch_facts import rank_and_world_size, versions
from countoff._torchtitan.config import facts_of, job_of, position_of, wrong_horizons
from countoff._torchtitan.words import WORDS
from countoff.core import FitPlan, Settings
from countoff.core.totals import Totals

__all__ = ["attach", "main"]


def attach(trainer: Any, **options: Any) -> Attached:
    """Watches a TorchTitan trainer from the moment at which it begins to read. Every rank must call it.

    Call it before ``trainer.train()``. The fit begins when the checkpoint has been loaded; then it waits for the other
    ranks at most `deadline_seconds`.

    Args:
        trainer: A ``torchtitan.trainer.Trainer``, or one of its subclasses.
        **options: The options of every adapter; see `Settings`.

    Returns:
        The handle; it is detached when ``train()`` returns.

    Raises:
        SettingsError: If an option or a ``COUNTOFF_*`` variable has a bad value.
    """
    settings = Settings.resolve(*own_arguments(attach), **options)
    cannot_make_even(settings, WORDS.framework)
    rank, world_size = rank_and_world_size()
    job = job_of(trainer)
    facts = facts_of(trainer, job)
    dp_rank, dp_degree = position_of(trainer, job, rank, world_size)
    make_guard = functools.partial(
        new_guard,
        settings,
        WORDS,
        rank=rank,
        world_size=world_size,
        optimizers=lambda: trainer.optimizers,
        models=lambda: trainer.model_parts,
    )
    attached = Attached(make_guard, Totals(facts, dp_degree=dp_degree, framework="TorchTitan"), settings, epoch=0)
    if not settings.enabled:
        return attached
    plan = FitPlan(
        batch_size=facts.batch_size,
        gradient_accumulation_steps=facts.gradient_accumulation_steps,
        max_steps=facts.max_steps,
        dp_degree=dp_degree,
        dp_rank=dp_rank,
    )

    def begin(read: Callable[[Any], Iterator[Any]], loader: Any) -> Iterator[Any]:
        batches = trainer.step * facts.gradient_accumulation_steps
        resumed = dataclasses.replace(plan, position=[0, batches, trainer.step])
        attached.begin(resumed, versions("torchtitan"), give_back, *wrong_horizons(job, world_size))
        trainer.metrics_processor.logger.log(attached.progress(), trainer.step)
        return _counted(attached, read(loader), batches)

    def watched(train: Callable[[], None]) -> None:
        try:
            with attached:
                train()
        finally:
            give_back()

    def give_back() -> None:
        for hook in hooks:
            hook.remove()

    hooks = [MethodHook(trainer, "batch_generator", instead=begin), MethodHook(trainer, "train", instead=watched)]
    return attached


def main() -> None:
    """Runs TorchTitan's own training program with every trainer attached."""
    from torchtitan import train as program  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    def train(_: Callable[[Any], None], trainer: Any) -> None:
        hook.remove()
        attach(trainer)
        trainer.train()

    hook = MethodHook(program.Trainer, "train", instead=train)
    program.main()


def _counted(attached: Attached, batches: Iterator[Any], position: int) -> Iterator[Any]:
    """Yields the batches, counted. TorchTitan's own error, which ends its loop, is counted as the end of the data."""
    ended: list[DataloaderExhaustedError] = []

    def until_the_end() -> Iterator[Any]:
        try:
            yield from batches
        except DataloaderExhaustedError as error:
            ended.append(error)

    yield from attached.passes.follow(until_the_end(), None, position=position)
    raise ended[0] if ended else DataloaderExhaustedError


if __name__ == "__main__":
    sys.exit(main())

"""countoff for TorchTitan: ``attach(trainer)`` between building the trainer and ``trainer.train()``, on every rank.

Or without a line of code, in place of ``-m torchtitan.train``::

    torchrun --nproc-per-node 8 -m countoff.torchtitan --module llama3 --config llama3_8b

A batch is what the trainer takes from its loader at once: a micro-batch, where a pipeline reads those one by one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from countoff._adapter.requirements import needs

with needs("TorchTitan", facade="countoff.torchtitan", install="torchtitan"):
    from torchtitan.components.dataloader import DataloaderExhaustedError  # pyright: ignore[reportMissingImports]
from countoff._adapter.fit import Fit, OwnRank, plan_of
from countoff._adapter.handle import Attached
from countoff._adapter.hooks import MethodHook
from countoff._adapter.observed_loop import ObservedLoop
from countoff._adapter.options import cannot_make_even, own_arguments
from countoff._adapter.torch_facts import rank_and_world_size, versions
from countoff._torchtitan.config import facts_of, job_of, position_of, wrong_horizons
from countoff._torchtitan.words import WORDS
from countoff.core import Settings
from countoff.core.totals import Totals

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from countoff.core.settings import OptionValues

__all__ = ["attach", "main"]


def attach(trainer: Any, **options: Unpack[OptionValues]) -> Attached:
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
    own = OwnRank(rank, world_size, *position_of(trainer, job, rank, world_size))
    fit = Fit(
        settings,
        WORDS,
        own,
        Totals(facts, dp_degree=own.dp_degree, framework=WORDS.framework),
        optimizers=lambda: trainer.optimizers,
        models=lambda: trainer.model_parts,
    )
    loop = ObservedLoop(fit)
    attached = Attached(loop)
    if not settings.enabled:
        return attached

    def begin(read: Callable[[Any], Iterator[Any]], loader: Any) -> Iterator[Any]:
        batches = trainer.step * facts.gradient_accumulation_steps
        plan = plan_of(facts, own, position=[0, batches, trainer.step])
        loop.begin(plan, versions("torchtitan"), *wrong_horizons(job, world_size))
        trainer.metrics_processor.logger.log(loop.progress(), trainer.step)
        return _counted(loop, read(loader), batches)

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
    loop.until_end(give_back)
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


def _counted(loop: ObservedLoop, batches: Iterator[Any], position: int) -> Iterator[Any]:
    """Yields the batches, counted. TorchTitan's own error, which ends its loop, is counted as the end of the data."""
    ended: list[DataloaderExhaustedError] = []

    def until_the_end() -> Iterator[Any]:
        try:
            yield from batches
        except DataloaderExhaustedError as error:
            ended.append(error)

    yield from loop.passes.follow(until_the_end(), None, position=position)
    raise ended[0] if ended else DataloaderExhaustedError


if __name__ == "__main__":
    sys.exit(main())

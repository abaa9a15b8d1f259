"""countoff for TorchTitan: ``Countoff(trainer)`` between building the trainer and ``trainer.train()``, on every rank.

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
from countoff._adapter.counted_loop import CountedLoop
from countoff._adapter.fit import Fit, OwnRank, plan_of
from countoff._adapter.hooks import MethodHook
from countoff._adapter.options import cannot_make_even, own_arguments
from countoff._adapter.torch_facts import rank_and_world_size, versions
from countoff._torchtitan.config import facts_of, job_of, position_of, wrong_horizons
from countoff._torchtitan.messages import MESSAGES
from countoff.core import Guard, Settings
from countoff.core.arithmetic.totals import Totals

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from countoff.core.settings import OptionValues

__all__ = ["Countoff", "main"]


class Countoff:
    """Counts what a TorchTitan trainer reads and steps, from the moment at which it begins to read.

    Make it on every rank, before ``trainer.train()``. The fit begins when the checkpoint has been loaded; then it waits
    for the other ranks at most `deadline_seconds`. It ends when ``train()`` returns.

    Args:
        trainer: A ``torchtitan.trainer.Trainer``, or one of its subclasses.
        options: The options of every adapter; see `Settings`.

    Raises:
        SettingsError: If an option or a ``COUNTOFF_*`` variable has a bad value.
    """

    def __init__(self, trainer: Any, **options: Unpack[OptionValues]) -> None:
        settings = Settings.resolve(*own_arguments(Countoff), **options)
        cannot_make_even(settings, MESSAGES.framework)
        self._trainer = trainer
        self._rank, self._world_size = rank_and_world_size()
        self._job = job_of(trainer)
        self._facts = facts_of(trainer, self._job)
        own = OwnRank(self._rank, self._world_size, *position_of(trainer, self._job, self._rank, self._world_size))
        fit = Fit(
            settings,
            MESSAGES,
            own,
            Totals(self._facts, dp_degree=own.dp_degree),
            optimizers=lambda: trainer.optimizers,
            models=lambda: trainer.model_parts,
        )
        self._own, self._loop = own, CountedLoop(fit)
        self._hooks: list[MethodHook] = []
        if settings.enabled:
            self._hooks += [
                MethodHook(trainer, "batch_generator", instead=self._begin),
                MethodHook(trainer, "train", instead=self._train),
            ]
            self._loop.until_end(self._give_back)

    @property
    def guard(self) -> Guard:
        """The guard of the fit."""
        return self._loop.guard

    def progress(self) -> dict[str, float]:
        """Returns the true totals as known by now, and this rank's progress, under the names of the logged metrics."""
        return self._loop.progress()

    @property
    def totals(self) -> str:
        """What is known of the run by now, in words."""
        return self._loop.totals

    def close(self) -> None:
        """Ends the fit, and takes back what was put on the trainer.

        Raises:
            DivergenceError: If another rank goes on, or has diverged before.
        """
        self._loop.end()
        self._give_back()

    def _begin(self, read: Callable[[Any], Iterator[Any]], loader: Any) -> Iterator[Any]:
        trainer, loop = self._trainer, self._loop
        batches = trainer.step * self._facts.gradient_accumulation_steps
        plan = plan_of(self._facts, self._own, position=[0, batches, trainer.step])
        loop.begin(plan, versions("torchtitan"), *wrong_horizons(self._job, self._world_size))
        if totals := loop.fit.news():
            trainer.metrics_processor.logger.log(totals, trainer.step)
        loop.fit.log_in_words()
        return _counted(loop, read(loader), batches)

    def _train(self, train: Callable[[], None]) -> None:
        try:
            train()
        except BaseException as error:
            self._loop.leave_by(error)
            raise
        else:
            self._loop.end()
        finally:
            self._give_back()

    def _give_back(self) -> None:
        for hook in self._hooks:
            hook.remove()


def main() -> None:
    """Runs TorchTitan's own training program with countoff in every trainer."""
    from torchtitan import train as program  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    def train(_: Callable[[Any], None], trainer: Any) -> None:
        hook.remove()
        Countoff(trainer)
        trainer.train()

    hook = MethodHook(program.Trainer, "train", instead=train)
    program.main()


def _counted(loop: CountedLoop, batches: Iterator[Any], position: int) -> Iterator[Any]:
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

"""Lightning's evaluations as a guard counts them: in a fit and outside of one."""

from __future__ import annotations

from typing import Any

from countoff._adapter.evaluation_totals import ObservedLengths
from countoff._adapter.fit import Fit
from countoff._lightning import bars
from countoff._lightning.even_fetches import EvenFetches, EvenLoaders
from countoff._lightning.fetchers import count, fetcher_of, module_fetches, seen_exhausted
from countoff._lightning.trainer import (
    eval_loop,
    evaluation_facts_of,
    has_loaders_in_a_row,
    log,
    metrics_of_evaluation,
)
from countoff.core import BatchPlan, LoaderFacts

__all__ = ["Evaluations"]


class Evaluations:
    """The evaluations of a fit, one after the other.

    Args:
        trainer: Lightning's Trainer.
        fit: The fit.
    """

    def __init__(self, trainer: Any, fit: Fit) -> None:
        self._trainer = trainer
        self._fit = fit
        self._guard = fit.guard
        self._pass: EvenFetches | EvenLoaders | None = None
        self._from_start = True
        self._facts: dict[int, LoaderFacts] = {}  # by the place of the loader, as the others
        self._lengths = ObservedLengths()
        self._seen: dict[int, int] = {}
        self._shown: int | None = None

    def start(self) -> None:
        """Opens an evaluation's span, or that of its first loader, and makes it even where ranks are to end alike."""
        trainer, guard, loop = self._trainer, self._guard, eval_loop(self._trainer)
        name, inside = "test" if trainer.testing else "validation", guard.open_span is not None
        self._from_start = not loop.batch_progress.current.ready  # else Lightning counts those before a checkpoint
        self._facts, self._seen = evaluation_facts_of(loop, self._fit.own), {}

        def open_span(name: str) -> None:
            guard.eval_start(name, train_exhausted=inside and seen_exhausted(trainer.fit_loop))

        def next_loader(index: int) -> None:
            guard.eval_end("exhausted")
            open_span(f"{name} loader {index}")

        stops = self._fit.settings.uneven_eval == "stop" and trainer.world_size > 1
        several = stops and has_loaders_in_a_row(loop)
        open_span(f"{name} loader 0" if several else name)
        if guard.makes_even and several:
            self._pass = EvenLoaders(guard, loop, next_loader)
        elif guard.makes_even:
            self._pass = EvenFetches(guard, loop._data_fetcher, evaluation=loop)

    def batch_start(self, loader_index: int) -> None:
        """Counts a batch.

        Args:
            loader_index: Which of the evaluation's loaders it is from.
        """
        if self._shown is not None and self._seen.get(loader_index) == self._shown:
            bars.give_back(self._trainer, self._kind, self._shown)
        if isinstance(self._pass, EvenLoaders):
            self._guard.batch()
            return
        if loader_index:
            self._guard.eval_loader(loader_index)
        count(self._guard, eval_loop(self._trainer))

    def batch_end(self, index: int, loader_index: int) -> None:
        """Shows the true length in Lightning's bar, which has begun by the end of a loader's first batch.

        Args:
            index: The batch's number in its loader.
            loader_index: Which of the evaluation's loaders it is from.
        """
        if loader_index not in self._seen and self._fit.settings.totals != "off":
            self._shown = self._length(loader_index)
            bars.show(self._trainer, self._kind, self._shown)
        self._seen[loader_index] = index + 1

    def end(self) -> None:
        """Closes the evaluation, and logs how much it has read, where that is proven."""
        loop, found = eval_loop(self._trainer), dict[str, float]()
        done = fetcher_of(loop, "done")
        if done and self._from_start:
            found = metrics_of_evaluation(loop, self._facts, self._fit.own.dp_degree)
            self._lengths.ended(self._seen)
        self.leave()
        self._guard.eval_end("exhausted" if done else "stopped")
        log(self._trainer, self._fit.changed(found))

    @property
    def _kind(self) -> str:
        """Of what Lightning's bar is."""
        return "test" if self._trainer.testing else "val"

    def _length(self, loader_index: int) -> int | None:
        """The batches of a loader of this evaluation, as its arithmetic or the evaluations before tell; else None."""
        if self._trainer.reload_dataloaders_every_n_epochs or module_fetches(eval_loop(self._trainer)):
            return None  # it may be another loader, or Lightning counts no batches
        if loader_index in self._facts:
            return BatchPlan.of(self._facts[loader_index], dp_degree=self._fit.own.dp_degree).batches_per_epoch
        return self._lengths.known.get(loader_index)

    def leave(self) -> None:
        """Takes back what was put on the loop for this evaluation. Does nothing when called again."""
        if self._pass is not None:
            self._pass.remove()
            self._pass = None

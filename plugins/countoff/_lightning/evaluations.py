"""Lightning's evaluations as a guard counts them: in a fit and outside of one."""

from __future__ import annotations

from typing import Any

from countoff._adapter.fit import Fit
from countoff._lightning.even_fetches import EvenFetches, EvenLoaders
from countoff._lightning.fetchers import count, fetcher_of, seen_exhausted
from countoff._lightning.trainer import eval_loop, has_loaders_in_a_row, log, metrics_of_evaluation

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

    def start(self) -> None:
        """Opens an evaluation's span, or that of its first loader, and makes it even where ranks are to end alike."""
        trainer, guard, loop = self._trainer, self._guard, eval_loop(self._trainer)
        name, inside = "test" if trainer.testing else "validation", guard.open_span is not None
        self._from_start = not loop.batch_progress.current.ready  # else Lightning counts those before a checkpoint

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
        if isinstance(self._pass, EvenLoaders):
            self._guard.batch()
            return
        if loader_index:
            self._guard.eval_loader(loader_index)
        count(self._guard, eval_loop(self._trainer))

    def end(self) -> None:
        """Closes the evaluation, and logs how much it has read, where that is proven."""
        loop = eval_loop(self._trainer)
        done = fetcher_of(loop, "done")
        found = metrics_of_evaluation(loop, self._fit.own) if done and self._from_start else {}
        self.leave()
        self._guard.eval_end("exhausted" if done else "stopped")
        log(self._trainer, found)

    def leave(self) -> None:
        """Takes back what was put on the loop for this evaluation. Does nothing when called again."""
        if self._pass is not None:
            self._pass.remove()
            self._pass = None

"""The train epochs of a fit of Lightning's Trainer, as a guard counts them.

Before every train batch Lightning broadcasts from rank 0, so ranks that differ pair wrong collectives or hang in the
next one. The last fetched batch is therefore announced before it is trained on, and batches that the fetcher has
fetched ahead count as fetched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from countoff._adapter.fit import Fit
from countoff._adapter.hooks import MethodHook
from countoff._lightning import bars
from countoff._lightning.even_fetches import EvenFetches, EvenLimits
from countoff._lightning.fetchers import FetchTimer, countable_fetcher, fetcher_of
from countoff._lightning.trainer import fingerprint_before_transfer, last_step

__all__ = ["TrainEpochs"]


class TrainEpochs:
    """The train epochs of a fit, one after the other.

    Args:
        trainer: Lightning's Trainer.
        fit: The fit.

    Attributes:
        batch: The batch that is being trained on, as Lightning hands it to its hooks, for as long as Lightning holds it
            too; None if there is none.
    """

    def __init__(self, trainer: Any, fit: Fit) -> None:
        self.batch: Any = None
        self._trainer = trainer
        self._fit = fit
        self._guard = fit.guard
        self._hooks = contextlib.ExitStack()  # what stands on Lightning's objects for one epoch
        self._limits: EvenLimits | None = None
        self._pass: EvenFetches | None = None
        self._at_first_batch = True
        self._shown = True
        self._total: int | None = None
        self._fetcher: Any = None
        self._last_step: int | None = None

    def make_even(self) -> Callable[[], None]:
        """Gives each epoch the same number of batches on every rank; returns a function that ends that."""
        self._limits = limits = EvenLimits(self._trainer, self._guard.common_batches)
        hook = MethodHook(self._trainer.fit_loop.epoch_loop, "on_run_start", after=lambda *_: self._begin_even())

        def end() -> None:
            hook.remove()
            limits.remove()
            self._limits = None

        return end

    def keep_batches(self) -> Callable[[], None]:
        """Lets go of each batch when Lightning does; returns a function that ends that."""
        return MethodHook(self._trainer.fit_loop.epoch_loop, "on_advance_end", before=self._drop_batch).remove

    def open_when_resumed(self) -> Callable[[], None]:
        """Opens an epoch in whose middle the fit resumes, before its first batch; returns a function that ends that."""
        loop = self._trainer.fit_loop.epoch_loop
        return MethodHook(loop, "on_run_start", after=lambda *_: self._open_resumed()).remove

    def show_totals(self) -> Callable[[], None]:
        """Shows the true length of each epoch in Lightning's bar; returns a function that ends that.

        Lightning's bar has begun then, and its first batch has not; where it resumes in mid-epoch, it may begin later.
        """
        loop = self._trainer.fit_loop.epoch_loop
        return MethodHook(loop, "on_run_start", before=lambda *_: self.show_total(self._fit.epoch_batches)).remove

    def show_total(self, batches: int | None, *, ended: bool = False) -> None:
        """Shows how many batches the epoch has, None if that is not known; and whether all of them are done."""
        self._shown, self._total = bars.show(self._trainer, "train", batches, ended=ended), batches

    def set_limits(self) -> None:
        """Sets Lightning's own numbers where epochs are made even: it may have loaded the train loader again."""
        if self._limits is not None:
            self._limits.set()

    def start(self) -> None:
        """Opens an epoch."""
        self._at_first_batch = True
        self._fit.expects(self._trainer.train_dataloader)  # Lightning may have loaded it again
        self.set_limits()
        self._guard.train_start(self._trainer.current_epoch)
        self._fit.epoch_begins(self._trainer.current_epoch, steps=self._trainer.global_step)
        self._hooks.callback(fingerprint_before_transfer(self._trainer, self._fit))

    def batch_start(self, batch: Any, index: int) -> None:
        """Counts a batch that is about to be trained on, and that has this index in the epoch."""
        self.batch = batch
        if self._at_first_batch:
            self._look_up()
        if (fetcher := self._fetcher) is None:
            self._guard.batch()
        else:
            over = self._last_step is not None and self._trainer.global_step >= self._last_step
            self._guard.batch(0 if over else fetcher.fetched, last=fetcher.done)
        if not self._shown:
            self.show_total(self._fit.epoch_batches)
        if index == self._total:
            bars.give_back(self._trainer, "train", index)

    def leave(self) -> bool:
        """Takes back what stands on Lightning's objects for one epoch, which it sets anew in the next one.

        Returns:
            Whether the loader was exhausted.
        """
        self._hooks.close()
        self._fetcher = self.batch = None
        return bool(fetcher_of(self._trainer.fit_loop, "done"))

    def leave_pass(self) -> None:
        """Gives Lightning's fetcher back what was its own. Does nothing when called again."""
        if self._pass is not None:
            self._pass.remove()
            self._pass = None

    def _look_up(self) -> None:
        """Looks up what does not change within an epoch, at its first batch."""
        self._at_first_batch = False
        loop = self._trainer.fit_loop
        if self._guard.open_span is None:  # resumed in mid-epoch: on_train_epoch_start does not fire
            self._guard.train_start(self._trainer.current_epoch, loop.epoch_loop.batch_progress.current.ready - 1)
        if self._pass is None:
            self._hooks.callback(FetchTimer(loop, self._guard.waited).remove)
        self._fetcher, self._last_step = countable_fetcher(loop), last_step(self._trainer)

    def _begin_even(self) -> None:
        """Makes the epoch even that is about to begin: Lightning has made its iterator, and used no batch."""
        guard, trainer = self._guard, self._trainer
        if trainer.fit_loop.epoch_loop.done:
            return
        self._open_resumed()
        if guard.makes_even:
            self.leave_pass()
            proven, common = guard.common_batches is not None, guard.common_length
            if trainer.reload_dataloaders_every_n_epochs:  # a loader may have another length than when the fit began
                common = None
            self._pass = EvenFetches(guard, trainer.fit_loop._data_fetcher, proven=proven, saved=True, common=common)

    def _open_resumed(self) -> None:
        """Opens an epoch in whose middle the fit resumes, before its first batch is read."""
        epoch_loop = self._trainer.fit_loop.epoch_loop
        # Lightning may end an epoch once more that ended before the checkpoint, and begins no batch in it then.
        over = epoch_loop.done or getattr(epoch_loop, "_is_training_done", False)
        if self._guard.open_span is None and not over:
            self._guard.train_start(self._trainer.current_epoch, epoch_loop.batch_progress.current.ready)
            self._hooks.callback(fingerprint_before_transfer(self._trainer, self._fit))

    def _drop_batch(self, *_: Any, **__: Any) -> None:
        self.batch = None

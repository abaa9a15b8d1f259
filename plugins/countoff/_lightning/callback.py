"""The callback for both Lightning packages: Lightning's hooks, in the order in which it calls them. Imports neither."""

from __future__ import annotations

import contextlib
from typing import Any

from countoff._adapter.issued import AnyLoader
from countoff._adapter.options import Options
from countoff._lightning.checkpoints import KEY
from countoff._lightning.even_fetches import CommonEstimate
from countoff._lightning.lightning_fit import LightningFit, common_length, makes_even
from countoff.core import Guard

__all__ = ["CountoffCallback"]


class CountoffCallback(Options):
    """Checks that all ranks count the same batches and steps, and shows the true totals.

    Every rank's Trainer must have it. The options, and the error for a bad one, are those of `Options`.

    A pickle or a copy of the callback, as of the Trainer that has it, holds the options only, also during a fit.
    """

    _of_the_fit = ("_fit", "_around", "_early", "_loaded", "_last_record")
    _fit: LightningFit | None = None
    _around: Any = None  # what stands on Lightning's objects before the fit, or after an exception has left it
    _early: AnyLoader | None = None  # from the begin of Lightning's fit to that of ours
    _loaded: Any = None  # the record of a checkpoint, for the fit that resumes from it
    _last_record: dict[str, Any] | None = None  # of the last fit, for checkpoints that are written after it

    @property
    def guard(self) -> Guard | None:
        """The guard of the current fit."""
        return None if self._fit is None else self._fit.guard

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Makes ready for a fit in which ranks are made even: schedules are made before it begins."""
        self.teardown(trainer, pl_module, stage)  # Lightning skips it after an exception that the program survives
        self._loaded = None
        if self._is_active(trainer) and stage == "fit" and makes_even(trainer, self.settings):
            self._around = CommonEstimate(trainer, lambda own: common_length(trainer, self.settings, own))

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Keeps the record of the checkpoint for the fit that resumes from it."""
        if self._is_active(trainer) and trainer.state.fn == "fit":
            self._loaded = checkpoint.get(KEY)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Records what is issued: Lightning makes the iterator, whose workers fetch ahead, before the next hook."""
        if self._is_active(trainer) and self.settings.compare_data:
            self._early = AnyLoader()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begins the fit: this is the first hook with final lengths and restored counters."""
        self._last_record = None
        if self._is_active(trainer):
            early, self._early = self._early or contextlib.nullcontext(), None
            self._close()
            loaded, self._loaded = self._loaded, None
            with early:
                self._fit = LightningFit(trainer, self.settings)
                self._fit.begin(loaded)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Opens the epoch's span."""
        if self._fit is not None:
            self._fit.epochs.start()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Counts the batch, with those that the fetcher has fetched ahead of it."""
        if self._fit is not None:
            self._fit.epochs.batch_start(batch, batch_idx)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Counts the micro-batch. Lightning calls it for automatic and for manual optimization."""
        if self._fit is not None:
            self._fit.guard.micro_batch()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Opens an evaluation, in a fit or alone."""
        if trainer.sanity_checking:
            return
        if self._fit is None and self._is_active(trainer):
            self._fit = LightningFit(trainer, self.settings)
            self._fit.begin_evaluation()
        if self._fit is not None:
            self._fit.evaluations.start()

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Counts an evaluation's batch."""
        if self._fit is not None and not trainer.sanity_checking:
            self._fit.evaluations.batch_start(dataloader_idx)

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Shows the evaluation's true length, once its bar has begun."""
        if self._fit is not None and not trainer.sanity_checking:
            self._fit.evaluations.batch_end(batch_idx, dataloader_idx)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Closes the evaluation."""
        if self._fit is not None and not trainer.sanity_checking:
            self._fit.evaluations.end()
            if trainer.state.fn != "fit":
                self._fit.guard.fit_end()

    on_test_start = on_validation_start
    on_test_batch_start = on_validation_batch_start
    on_test_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Closes the epoch's span, if one is open (none is after a resume at the last batch), and learns its length."""
        if self._fit is not None:
            self._fit.end_epoch()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Puts a record of how far the fit has come into the checkpoint."""
        record = None if self._fit is None else self._fit.record(in_batch=True)
        record = self._last_record if record is None else record
        if record is not None:
            checkpoint[KEY] = dict(record)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Ends the fit."""
        if self._fit is not None:
            self._fit.end()
            self._last_record = self._fit.last_record

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Tells the other ranks of the exception.

        The guard stays active until Lightning has taken its loop down: what it does before that may block in a
        collective, as a checkpoint that is saved on an exception. Then `teardown` is not called.
        """
        fit, self._fit = self._fit, None
        self._forget_early()
        if fit is not None:
            self._around = fit.leave_by(exception)
            self._last_record = fit.last_record or self._last_record

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Closes the guard."""
        self._close()

    def _is_active(self, trainer: Any) -> bool:
        """Whether this is the Trainer's first Countoff (the entry point may have added another), and is enabled.

        It is not one of the Trainer's callbacks where one of these calls it.
        """
        first = next((each for each in trainer.callbacks if isinstance(each, CountoffCallback)), self)
        return self.settings.enabled and first is self

    def _close(self) -> None:
        if self._around is not None:
            self._around.remove()
        self._forget_early()
        if self._fit is not None:
            self._fit.close()
        self._around = self._fit = None

    def _forget_early(self) -> None:
        if self._early is not None:
            self._early.close()
        self._early = None

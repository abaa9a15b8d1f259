"""countoff for Composer: ``Trainer(callbacks=[Countoff()])``.

Before every batch Composer's ranks agree on whether one of them has run out of data, and all of them stop there: uneven
ranks do not hang, they lose data without a message. The console, the schedules and the end of an epoch follow `len()`
of the loader. So loaders are read before the first batch and observed where they are iterated. A batch that was fetched
and discarded is the framework's design here, and no proof that ranks are out of step.
"""

from __future__ import annotations

from typing import Any

from countoff._adapter.requirements import needs

with needs("Composer", facade="countoff.composer", install="'countoff[composer]'"):
    from composer.core import Callback, State
    from composer.loggers import Logger
from countoff._adapter.options import Options
from countoff._adapter.sampling import fingerprint_batch
from countoff._composer.checkpoints import packed, unpacked
from countoff._composer.composer_fit import ComposerFit
from countoff._composer.displays import log
from countoff._composer.state import exception_at_close, length_of
from countoff.core import Guard

__all__ = ["Countoff"]


class Countoff(Options, Callback):
    """Checks that all ranks count the same batches and steps, and shows the true totals.

    Every rank's Trainer must have it. The options are those of every adapter; one that is not given comes from
    ``COUNTOFF_<NAME>``, then from the default. `totals="fix"` also sets Composer's own length where it is proven.
    """

    _of_the_fit = ("_fit", "_guard", "_corrected", "_loaded", "_last_record")
    _fit: ComposerFit | None = None
    _guard: Guard | None = None
    _corrected: tuple[Any, int] | None = None
    _loaded: Any = None
    _last_record: dict[str, Any] | None = None

    @property
    def guard(self) -> Guard | None:
        """The guard of the current fit, or of the last one."""
        return self._guard

    def state_dict(self) -> dict[str, Any]:
        """Returns a record of how far the fit has come, for Composer's checkpoint; nothing before a fit."""
        record = self._last_record
        if self._fit is not None and self._fit.train is not None:
            record = self._fit.record()
        return {} if record is None else packed(record)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keeps the record of a checkpoint for the fit that resumes from it."""
        self._loaded = unpacked(state)

    def after_load(self, state: State, logger: Logger) -> None:
        """Corrects a wrong length before `fit` reads it; that takes a roll call of its own."""
        if self._is_active(state) and self.settings.totals == "fix" and state.train_dataloader is not None:
            self._begin(state, train=True, quiet=True)
            self._finish()

    def fit_start(self, state: State, logger: Logger) -> None:
        """Begins the fit, with the loader in place and the position restored."""
        if self._is_active(state):
            self._last_record = None
            self._begin(state, train=True)
            if self._fit is not None:
                self._fit.loaded, self._loaded = self._loaded, None
            self._report(state, logger)

    def epoch_start(self, state: State, logger: Logger) -> None:
        """Opens the epoch's span; a run that resumes in the middle of an epoch does not get this event."""
        if self._fit is not None:
            self._fit.epoch_start(state)

    def batch_start(self, state: State, logger: Logger) -> None:
        """Counts the batch."""
        fit = self._fit
        if fit is None:
            return
        if fit.at_first_batch:
            fit.first_batch(state)
        guard = fit.guard
        guard.batch()
        if guard.data.fingerprints_due:
            if guard.once.reads is None:
                fit.fit.epoch_reads(spun=True)
            fingerprint_batch(guard.data, state.batch, state.train_dataloader)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Closes the epoch's span."""
        if self._fit is not None:
            if (length := self._fit.epoch_end(state)) is not None:
                self._corrected = state.train_dataloader, length
            self._report(state, logger)

    def eval_start(self, state: State, logger: Logger) -> None:
        """Opens an evaluation, in a fit or outside of one."""
        if self._fit is None and self._is_active(state):
            self._begin(state, train=False)
        if self._fit is not None:
            self._fit.eval_start(state)

    def eval_batch_start(self, state: State, logger: Logger) -> None:
        """Counts a batch of the evaluation."""
        if self._fit is not None:
            self._fit.eval_batch_start()

    def eval_end(self, state: State, logger: Logger) -> None:
        """Closes the evaluation, and logs once how much it has read."""
        if self._fit is not None:
            log(state, logger, self._fit.fit.changed(self._fit.evaluations.end(state)))

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Ends what `eval_start` began after the end of a fit: that fit's last evaluations come after `fit_end`."""
        if self._is_standalone():
            self._finish()

    def eval_standalone_end(self, state: State, logger: Logger) -> None:
        """Ends what `eval_start` began in `trainer.eval()`."""
        if self._is_standalone():
            self._finish()

    def fit_end(self, state: State, logger: Logger) -> None:
        """Ends the fit."""
        if self._fit is not None:
            self._last_record = self._fit.record()
            self._finish()

    def close(self, state: State, logger: Logger) -> None:
        """Closes the fit; reports the exception to the other ranks if one has ended it."""
        self._close_fit(exception_at_close())
        self._last_record = None  # the callback may serve another Trainer

    def _is_active(self, state: State) -> bool:
        """Returns whether this is the Trainer's first Countoff (its configuration may add another), and is enabled.

        It is not one of the Trainer's callbacks where one of these calls it.
        """
        first = next((each for each in state.callbacks if isinstance(each, Countoff)), self)
        return self.settings.enabled and first is self

    def _is_standalone(self) -> bool:
        """Returns whether an evaluation outside of a fit goes on."""
        return self._fit is not None and self._fit.train is None

    def _begin(self, state: State, *, train: bool, quiet: bool = False) -> None:
        self._close_fit()
        loader, length = self._corrected or (None, None)
        known = length if train and loader is state.train_dataloader and length == length_of(state) else None
        self._fit = ComposerFit(state, self.settings, train=train, corrected=known)
        self._guard = self._fit.guard
        self._fit.begin(state, quiet=quiet)
        if train and (length := self._fit.correct_length(state, quiet=quiet)) is not None:
            self._corrected = state.train_dataloader, length

    def _report(self, state: State, logger: Logger) -> None:
        if self._fit is not None and self._fit.train is not None:
            fit = self._fit.fit
            log(state, logger, fit.news(), fit.in_words())

    def _finish(self) -> None:
        if self._fit is not None:
            self._fit.finish()
        self._close_fit()

    def _close_fit(self, error: BaseException | None = None) -> None:
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.close(error)

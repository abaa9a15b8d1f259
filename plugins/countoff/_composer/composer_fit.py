"""One fit of Composer, or one standalone evaluation, from its start until it is closed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

from countoff._adapter.fit import NO_LOADERS, Fit, OwnRank
from countoff._adapter.leaving import ExitHooks, LeftFit
from countoff._adapter.loader_observer import LoaderObserver, ObservedPass
from countoff._adapter.options import with_common_end
from countoff._adapter.sharded_passes import count_sharded_passes
from countoff._adapter.torch_facts import on_optimizer_step, rank_and_world_size, versions
from countoff._composer.checkpoints import record_of, restore
from countoff._composer.displays import show, show_in_console
from countoff._composer.evaluations import Evaluations
from countoff._composer.loader_report import LoaderReport, batches_when_resumed, read_loader, unused_batches
from countoff._composer.messages import MESSAGES
from countoff._composer.schedules import schedules
from countoff._composer.state import exception_at_close, length_of, own_schedulers, plan_of, position_of
from countoff.core import DivergenceError, Settings

__all__ = ["ComposerFit"]


class ComposerFit:
    """A fit, or a standalone evaluation, with its guard and its loaders.

    Args:
        state: Composer's State.
        settings: The user's choices.
        train: Whether a fit begins; False for an evaluation outside of one.
        corrected: The length that countoff has set before for this train loader; None if it has not.

    Attributes:
        fit: What is as in every adapter.
        guard: The guard of the fit.
        evaluations: The evaluations in it.
        train: The report of the train loader; None for a standalone evaluation.
        at_first_batch: Whether the next train batch is the first of its pass.
        loaded: The record of the checkpoint from which the fit resumes, until its first epoch opens; None if there is
            none.
    """

    def __init__(self, state: Any, settings: Settings, *, train: bool, corrected: int | None = None) -> None:
        self._settings = settings = with_common_end(settings)
        self._corrected = corrected
        rank, world_size = rank_and_world_size()
        self._own = OwnRank(rank, world_size, *position_of(state, rank=rank, world_size=world_size))
        self.fit = Fit(
            settings,
            MESSAGES,
            self._own,
            steps_before=int(state.timestamp.batch),
            optimizers=lambda: state.optimizers,
            models=lambda: [state.model],
            schedulers=lambda: own_schedulers(state),
        )
        self.guard = self.fit.guard
        self._state = state
        self.loaded: Any = None
        self.at_first_batch = True
        self.train: LoaderReport | None = None
        self._observer: LoaderObserver | None = None
        self._resumed_at = 0
        self._duration, self._position = str(state.max_duration), int(state.timestamp.batch_in_epoch)
        self._replaced = False
        self._lengths_differ = False
        self._epoch_batches: int | None = None
        self._undo = contextlib.ExitStack()
        self._finished = self._closed = False
        if train:
            self._read_train(state, None if corrected is not None else length_of(state))
        self.evaluations = Evaluations(state, self.guard, self._own, fixes=settings.totals == "fix")

    def begin(self, state: Any, *, quiet: bool = False) -> None:
        """Begins the fit. Collective: every rank must call it.

        Args:
            state: Composer's State.
            quiet: Whether another fit follows, which compares the datasets.

        Raises:
            PlanMismatch: If ranks begin with different plans.
        """
        self._undo.callback(on_optimizer_step(lambda optimizer: self._step()).remove)
        exit_hooks = ExitHooks(self.guard.failed, lambda: self.close(exception_at_close()))
        self._undo.callback(exit_hooks.cancel)
        self._undo.callback(self.fit.reads.release)
        if self.train is not None:
            self._observe_train(state)
            if not state.auto_microbatching:  # else a rank that runs out of memory may have run a pass less
                self._undo.callback(count_sharded_passes(self.fit))
        plan = plan_of(state, self.train, self.evaluations.reports, self._own)
        self.fit.begin(
            plan, versions("mosaicml", "mosaicml-streaming"), loaders=NO_LOADERS if quiet else self._loaders(state)
        )
        self._lengths_differ = self._own.world_size > 1 and "own_batches_per_epoch" not in self.guard.agreed
        exit_hooks.register_at_exit()
        if self.train is not None:
            right = self.train.wrong_length() is None
            # Another fit(duration=…) may go on with the run.
            self.fit.watch_schedules(schedules(state, length_is_right=right), limited=True)
            self._undo.callback(self.fit.schedules.forget)
            self.fit.warn(self.fit.schedules.begin(self.fit.steps_before))
        if self._settings.totals != "off":
            self._undo.callback(show_in_console(state, self._length))

    def correct_length(self, state: Any, *, quiet: bool) -> int | None:
        """Warns about the train loader; sets Composer's length if that is wanted and proven on all ranks alike.

        Args:
            state: Composer's State.
            quiet: Whether to give no warning.

        Returns:
            The length that countoff has set; None if it has not.
        """
        report, length = self.train, self._corrected
        if report is None:
            return None
        if length is None and self._may_correct("proven_batches_per_epoch"):
            length = report.corrected_length
        self.fit.warn(*() if quiet else report.warnings(length))
        if length is not None:
            report.set_length(state, length)
        return length

    def epoch_start(self, state: Any) -> None:
        """Opens a train epoch."""
        if self._observer is not None and self._observer.loader is not state.train_dataloader:
            self._observe_train(state)
        self.at_first_batch, self._resumed_at = True, 0
        self._epoch_batches = self.train.totals.plan.batches_per_epoch if self.train is not None else None
        if self._observer is not None and self.train is not None and "train" not in state.dataset_resumption:
            self._observer.expected = self.train.own_batches if self.train.streaming is not None else None
        self._compare_loaded(skipped=None)
        self.guard.train_start(int(state.timestamp.epoch))
        self.fit.epoch_begins(int(state.timestamp.epoch))

    def first_batch(self, state: Any) -> None:
        """Notes which pass is used; opens the epoch if the run resumes in the middle of it."""
        self.at_first_batch = False
        if self.guard.open_span is None and self.train is not None:
            self._resumed_at = int(state.timestamp.batch_in_epoch)
            self._epoch_batches = batches_when_resumed(state, self.train, self._own.rank)
            begun = None if self._observer is None else self._observer.begun
            self._compare_loaded(skipped=None if begun is None else begun.batches - 1)
            self.guard.train_start(int(state.timestamp.epoch), self._resumed_at)
        if self._observer is not None and (this := self._observer.begun) is not None:
            self._observer.used = this
            this.skipped = this.batches - 1
        self._show(self._epoch_batches, train=True)

    def record(self) -> dict[str, Any]:
        """Returns this rank's record for a checkpoint."""
        length = None if self.train is None or self._lengths_differ else self.train.proven
        return record_of(self._state, self.guard, left=self.fit.batches_left(length))

    def epoch_end(self, state: Any) -> int | None:
        """Closes the train epoch, and learns its length where nothing proves it.

        Returns:
            The length that countoff has set; None if it has not.
        """
        report, guard = self.train, self.guard
        self._note_end(state)
        if guard.open_span is None or report is None:
            return None
        observed = self._observed()
        resumed_at, limit, notice, length = self._resumed_at, length_of(state), None, None
        used = guard.train_batches - resumed_at
        before = resumed_at if observed is None or observed.skipped == resumed_at else None
        unused = unused_batches(report, observed, used, before=before, length=limit)
        if unused is not None:
            guard.report_unused(unused)
        if before is not None and (limit is None or guard.train_batches < limit):
            # Composer ends an epoch before its length only when a rank has run out, and all ranks at the same batch.
            may_set = not resumed_at and not self._replaced and self._may_correct("batches_per_epoch")
            notice, length = report.learn(state, guard.train_batches, may_set=may_set)
            self._epoch_batches = guard.train_batches
            self._show(self._epoch_batches, train=True)
        if length is not None and notice is not None:
            guard.warn(notice)
            notice = None
        # With "stopped" the guard would conclude that no rank can have requested another batch.
        requested = observed is not None and (observed.exhausted or observed.batches - observed.skipped > used)
        # The shortest loader ends here by its own length, where the others have requested another batch.
        requested |= self._lengths_differ and limit is not None and guard.train_batches >= limit
        if observed is not None:
            observed.last = None
        guard.data.is_whole = True  # Composer asks for no batch beyond an epoch's length
        guard.train_end("exhausted" if requested else "stopped", notice=notice)
        return length

    def eval_start(self, state: Any) -> None:
        """Opens an evaluation, and sets its length if that is wanted and proven on all ranks alike."""
        self.evaluations.start(state, may_correct=self._may_correct("evaluations"))

    def eval_batch_start(self) -> None:
        """Counts a batch of an evaluation."""
        self.guard.batch()
        if self.guard.batches == 1:
            self._show(self.evaluations.length, train=False)

    def finish(self) -> None:
        """Closes the open spans and ends the fit.

        Raises:
            DivergenceError: If another rank goes on, or ranks are known to be out of step.
        """
        while (span := self.guard.open_span) is not None:
            end = self.guard.train_end if span.startswith("train") else self.guard.eval_end
            end("stopped")
        self._judge_run()
        self._finished = True
        self.guard.fit_end()

    def close(self, error: BaseException | None = None) -> None:
        """Restores the loaders, removes the hooks and closes the guard. Does nothing when called again.

        Args:
            error: The exception that ends the fit early; None where another fit begins in its place.
        """
        if self._closed:
            return
        self._closed = True
        if self._observer is not None:
            self._observer.release()
        self.evaluations.release()
        self._undo.close()
        if error is not None and error is sys.exc_info()[1] and not self._finished:
            LeftFit(self.guard, error, self.guard.close).leave()  # what handles it may catch it
            return
        if error is not None and not self._finished:
            self.guard.failed(error)
        elif not self._finished:
            with contextlib.suppress(DivergenceError):
                self.finish()
        self.guard.close()

    def _loaders(self, state: Any) -> Mapping[str | None, Any]:
        train: dict[str | None, Any] = {} if self.train is None else {None: state.train_dataloader}
        return {**train, **self.evaluations.loaders}

    def _step(self) -> None:
        self.guard.step()
        self.fit.stepped()

    def _length(self, train: bool) -> int | None:
        return self._epoch_batches if train else self.evaluations.length

    def _show(self, batches: int | None, *, train: bool) -> None:
        if self._settings.totals != "off":
            show(self._state, batches, train=train)

    def _compare_loaded(self, *, skipped: int | None) -> None:
        loaded, self.loaded = self.loaded, None
        if loaded is not None:
            restore(self._state, self.guard, loaded, skipped=skipped)

    def _observed(self) -> ObservedPass | None:
        """The pass of the train epoch; None if it is not observed."""
        if self._observer is None:
            return None
        return self._observer.begun if self.at_first_batch else self._observer.used

    def _note_end(self, state: Any) -> None:
        """Takes note of the end of a train epoch, also of one that has given no batch after a resume, and no hook."""
        position, self._position = self._position, 0
        observed, ended = self._observed(), state.previous_timestamp
        if observed is None or not observed.exhausted or self.train is None:
            self.fit.epoch_left()
        elif self.train.streaming is None and not self._replaced:  # streaming tells of its own early end
            batches, loader = int(ended.batch_in_epoch), state.train_dataloader
            self.fit.epoch_ended(int(ended.epoch), batches, loader, position=position)

    def _judge_run(self) -> None:
        """Warns if the fit ends because it has had its epochs, and some were too short."""
        state = self._state
        planned = None if self.train is None else self.train.facts.max_epochs
        if planned is not None and str(state.max_duration) == self._duration and int(state.timestamp.epoch) >= planned:
            self.fit.run_ended(steps=int(state.timestamp.batch))

    def _may_correct(self, name: str) -> bool:
        agreed = {name, "own_batches_per_epoch"} <= self.guard.agreed
        return self._settings.totals == "fix" and (self._own.world_size == 1 or agreed)

    def _read_train(self, state: Any, length: int | None) -> None:
        self.train = read_loader(
            state.train_dataloader,
            length=length,
            own=self._own,
            fixes=self._settings.totals == "fix",
            duration=state.max_duration,
        )
        self.fit.totals = self.train.totals

    def _observe_train(self, state: Any) -> None:
        """Observes the train loader, the first one or one that has replaced it; reads a new one first."""
        if self._observer is not None:
            self._observer.release()
            self._replaced = True
            self._read_train(state, length_of(state))
        self.fit.expects(state.train_dataloader)
        self._observer = LoaderObserver(
            state.train_dataloader,
            self.guard.waited,
            failing=self.guard.failing,
            failed=self.guard.failed,
            batch_requested=self.guard.batch_requested,
        )

"""One fit of Lightning's Trainer, or one evaluation outside of a fit, from its begin until it is closed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from countoff._adapter.even_loaders import saves_state
from countoff._adapter.fit import NO_LOADERS, Fit, OwnRank
from countoff._adapter.leaving import LeftFit
from countoff._adapter.mesh_position import data_position, mesh_of
from countoff._adapter.schedule_watch import run_length
from countoff._adapter.sharded_passes import count_sharded_passes
from countoff._adapter.torch_facts import on_optimizer_step, versions
from countoff._adapter.whole_epochs import may_begin_inside
from countoff._lightning.checkpoints import record_of, restore
from countoff._lightning.evaluations import Evaluations
from countoff._lightning.fetchers import seen_exhausted
from countoff._lightning.messages import MESSAGES, with_remedy
from countoff._lightning.train_epochs import TrainEpochs
from countoff._lightning.trainer import (
    after_teardown,
    announce_requests,
    begun_batches,
    ended_by_epochs,
    known_of_steps,
    loaders_of,
    log,
    plan_of,
    run_of,
    schedules,
    set_length,
    train_facts,
)
from countoff.core import FitPlan, Settings, Verdict
from countoff.core.arithmetic.totals import Totals

__all__ = ["LightningFit", "UntilTeardown", "common_length", "makes_even"]

_PACKAGES = "lightning", "pytorch-lightning"


def makes_even(trainer: Any, settings: Settings) -> bool:
    """Returns whether every rank's train epochs are to have the same number of batches."""
    return settings.uneven_train != "raise" and trainer.world_size > 1


def common_length(trainer: Any, settings: Settings, own: int | None) -> int | None:
    """Returns the batches of an epoch on every rank, before the fit. Collective: every rank must call it.

    Args:
        trainer: Lightning's Trainer.
        settings: The user's choices.
        own: The length of this rank's loader; None if it has none.
    """
    fit = Fit(replace(settings, trace_dir=None), MESSAGES, _own_rank(trainer))  # the fit itself is traced
    try:
        fit.begin(FitPlan(), {}, own_length=own)
        fit.guard.fit_end()
        return fit.guard.common_length
    finally:
        fit.guard.close()


class LightningFit:
    """A fit, or an evaluation outside of one.

    Args:
        trainer: Lightning's Trainer.
        settings: The user's choices.

    Attributes:
        guard: The guard.
        epochs: The train epochs.
        evaluations: The evaluations.
        last_record: This rank's record at the end of the training, however it has ended; None until then.
    """

    def __init__(self, trainer: Any, settings: Settings) -> None:
        self._trainer = trainer
        self._settings = settings
        # Until the mesh is made, FSDPStrategy returns a shape here and ModelParallelStrategy raises.
        own = _own_rank(trainer, mesh_of(trainer.strategy))
        self._fit = Fit(
            settings,
            MESSAGES,
            own,
            steps_before=trainer.global_step,
            optimizers=lambda: trainer.optimizers,
            schedulers=lambda: [config.scheduler for config in trainer.lr_scheduler_configs],
            models=lambda: [trainer.strategy.model],
        )
        self.guard = self._fit.guard
        self.epochs = TrainEpochs(trainer, self._fit)
        self.evaluations = Evaluations(trainer, self._fit)
        self._hooks = contextlib.ExitStack()
        self._trains = False
        self._run: tuple[Any, ...] | None = None
        self._position = 0
        self._first_epoch = True
        self.last_record: dict[str, Any] | None = None

    def begin(self, record: Any) -> None:
        """Begins the fit. Collective: every rank must call it.

        Args:
            record: The record of the checkpoint from which it resumes; None if there is none.
        """
        trainer, fit, even = self._trainer, self._fit, makes_even(self._trainer, self._settings)
        facts = train_facts(trainer)
        fit.totals = totals = Totals(facts, dp_degree=fit.own.dp_degree)
        fit.watch_schedules(schedules(trainer, run_length(totals.plan, processes=fit.own.dp_degree)))
        proven = totals.plan.batches_per_epoch
        if even and not _holds_all_fit(trainer, proven):
            proven = None
        plan = plan_of(trainer, facts, proven, fit.own)
        self._begin(plan, own_length=plan.batches_per_epoch if even else None, loaders=loaders_of(trainer))
        if even:
            self._hooks.callback(self.epochs.make_even())
        fit.warn(self._with_remedy(fit.wrong_length()), fit.schedules.begin(trainer.global_step))
        self._trains = True
        self._hooks.callback(count_sharded_passes(fit))
        self._run, self._position = run_of(trainer), begun_batches(trainer)
        self._hooks.callback(self.epochs.keep_batches())
        if self._shows:
            self._hooks.callback(self.epochs.show_totals())
        if record is not None:
            restore(trainer, self.guard, record)
            self._hooks.callback(self.epochs.open_when_resumed())
        self._log_totals()
        self.epochs.set_limits()

    def begin_evaluation(self) -> None:
        """Begins an evaluation outside of a fit. Collective: every rank must call it."""
        self._begin(FitPlan())

    def end_epoch(self) -> None:
        """Closes a train epoch, and learns its length."""
        self._note_end()
        whole, self._first_epoch = not self._first_epoch or self._begins_whole(), False
        if self.guard.open_span is None:
            return
        even = self.guard.makes_even
        exhausted = self.epochs.leave()
        notice = self._with_remedy(self._fit.learn_length()) if exhausted and (even or whole) else None
        if exhausted and self._settings.totals != "off":
            self.epochs.show_total(self.guard.train_batches, ended=True)
        self.guard.train_end("exhausted" if exhausted else "stopped", notice=notice)
        if even:
            self._log()
        elif exhausted:
            self._log_totals()

    def record(self, *, in_batch: bool = False) -> dict[str, Any] | None:
        """Returns this rank's record for a checkpoint; None if no training goes on.

        Args:
            in_batch: Whether a batch is being trained on.
        """
        batch = self.epochs.batch if in_batch else None
        return record_of(self._trainer, self.guard, batch) if self._trains else None

    def end(self) -> None:
        """Ends the fit."""
        self.last_record = self.record()
        self._stop()
        if self._run is not None and self._run == run_of(self._trainer) and ended_by_epochs(self._trainer):
            limit = self._trainer.max_steps
            self._fit.run_ended(steps=self._trainer.global_step, max_steps=None if limit < 0 else math.ceil(limit))
        self._log()
        self.guard.fit_end()

    def leave_by(self, error: BaseException) -> Any:
        """Tells the other ranks of an exception that ends the fit; returns what is to be removed.

        Args:
            error: The exception.
        """
        left = LeftFit(self.guard, error, self.guard.close)
        self.last_record = self.record()
        self._stop()
        return UntilTeardown(self._trainer, left)

    def close(self) -> None:
        """Takes back what was put on Lightning's objects, and closes the guard."""
        self._stop()
        self.guard.close()

    def _begin(
        self, plan: FitPlan, *, own_length: int | None = None, loaders: Mapping[str | None, Any] = NO_LOADERS
    ) -> None:
        self._hooks.callback(on_optimizer_step(self.guard.step).remove)
        self._hooks.callback(announce_requests(self.guard, self._trainer.fit_loop.epoch_loop))
        self._hooks.callback(self._fit.reads.release)
        self._fit.expects(loaders.get(None))
        self._fit.begin(plan, versions(*_PACKAGES), own_length=own_length, loaders=loaders)

    def _note_end(self) -> None:
        """Takes note of the end of a train epoch, also of one that has given no batch after a resume, and no hook."""
        trainer, position = self._trainer, self._position
        self._position = 0
        if not (self._trains and seen_exhausted(trainer.fit_loop)):
            self._fit.epoch_left()
        elif not trainer.reload_dataloaders_every_n_epochs:
            begun = begun_batches(trainer)
            if begun < position:  # of a checkpoint at the last batch of an epoch: Lightning has gone on to the next one
                position = 0
            self._fit.epoch_ended(trainer.current_epoch, begun, trainer.train_dataloader, position=position)

    def _begins_whole(self) -> bool:
        """Whether the first epoch of this fit had all of its batches, and not what was left after a resume."""
        if self._fit.steps_before:
            return False
        with contextlib.suppress(Exception):  # of the user's own objects, or of names outside Lightning's public API
            loaders = self._trainer.fit_loop._data_fetcher.combined_loader.flattened
            torchs = [each for each in loaders if isinstance(each, DataLoader)]
            return not any(map(saves_state, loaders)) and not any(map(may_begin_inside, torchs))
        return False

    @property
    def _shows(self) -> bool:
        """Whether the true length of an epoch may be shown: that of the loader before tells nothing about another."""
        return self._settings.totals != "off" and not self._trainer.reload_dataloaders_every_n_epochs

    def _log_totals(self) -> None:
        """Logs the totals as known by now, and corrects a wrong length where the true one is proven."""
        self._log()
        totals = self._fit.totals
        length = None if totals is None else totals.shorter_than_reported
        if totals and length and self._settings.totals == "fix" and set_length(self._trainer, length):
            totals.corrected(length)
            self._log()

    def _log(self) -> None:
        log(self._trainer, known_of_steps(self._trainer, self._fit.news()))
        log(self._trainer, self._fit.unused(), constant=False)

    def _with_remedy(self, wrong: Verdict | None) -> Verdict | None:
        if wrong is None or self._fit.totals is None:
            return wrong
        return with_remedy(wrong, self._fit.totals.plan, fixes=self._settings.totals == "fix")

    def _stop(self) -> None:
        self._trains = False
        self.epochs.leave()
        self.epochs.leave_pass()
        self.evaluations.leave()
        self._hooks.close()


class UntilTeardown:
    """A fit that an exception has left, until Lightning has taken its loop down, or begins another fit without that."""

    def __init__(self, trainer: Any, left: LeftFit) -> None:
        self._left: LeftFit | None = left
        self._hook = after_teardown(trainer, self.remove)
        if self._hook is None:
            self.remove()

    def remove(self) -> None:
        """Leaves the fit. Does nothing when called again."""
        if self._hook is not None:
            self._hook.remove()
        left, self._left = self._left, None
        if left is not None:
            left.leave()


def _own_rank(trainer: Any, mesh: Any = None) -> OwnRank:
    rank, world_size = trainer.global_rank, trainer.world_size
    return OwnRank(rank, world_size, *data_position(mesh, rank=rank, world_size=world_size))


def _holds_all_fit(trainer: Any, batches: int | None) -> bool:
    """Whether the number of batches that is proven now is that of every epoch, and Lightning counts on it too."""
    fixed = batches == trainer.num_training_batches and not trainer.reload_dataloaders_every_n_epochs
    return fixed and not saves_state(trainer.train_dataloader)  # a pass that resumes in mid-epoch has less

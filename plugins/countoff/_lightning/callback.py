"""Translates the hooks of both Lightning packages to guard calls. Imports neither package.

Before every train batch Lightning broadcasts from rank 0, so ranks that differ pair wrong collectives or hang in the
next one. The last fetched batch is therefore announced before it is trained on, and batches that the fetcher has
fetched ahead count as fetched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from countoff._adapter.even_loaders import saves_state
from countoff._adapter.guards import new_guard
from countoff._adapter.hooks import MethodHook
from countoff._adapter.left_fit import LeftFit
from countoff._adapter.mesh_position import data_position
from countoff._adapter.options import Options
from countoff._adapter.schedule_watch import ScheduleWatch, run_length
from countoff._adapter.torch_facts import on_optimizer_step, versions
from countoff._lightning.even_fetches import CommonEstimate, EvenFetches, EvenLimits, EvenLoaders
from countoff._lightning.fetchers import FetchTimer, count, countable_fetcher, fetcher_of, seen_exhausted
from countoff._lightning.resume import KEY, KeptBatch, record_of, restore
from countoff._lightning.trainer import (
    after_teardown,
    announce_requests,
    eval_loop,
    fingerprint_before_transfer,
    has_loaders_in_a_row,
    last_step,
    log,
    metrics_of_evaluation,
    plan_of,
    schedules,
    set_length,
    train_facts,
)
from countoff._lightning.words import WORDS, with_remedy
from countoff.core import FitPlan, Guard, Verdict
from countoff.core.checks.horizon import RunLength
from countoff.core.checks.learning_rates import SchedulePlan
from countoff.core.totals import Totals

__all__ = ["CountoffCallback"]


class CountoffCallback(Options):
    """Checks that all ranks count the same batches and steps, and logs the true totals.

    Every rank's Trainer must have it. The options, and the error for a bad one, are those of `Options`.

    A pickle or a copy of the callback, as of the Trainer that has it, holds the options only, also during a fit.
    """

    # What belongs to a fit. `__getstate__` leaves these names out.
    _guard: Guard | None = None
    _hooks: tuple[Any, ...] = ()
    _epoch_hooks: tuple[Any, ...] = ()
    _totals: Totals | None = None
    _schedules: ScheduleWatch | None = None
    _logged: Mapping[str, float] = {}
    _active = False
    _epoch_begins = True
    _fetcher: Any = None
    _estimate: CommonEstimate | None = None
    _limits: EvenLimits | None = None
    _train_pass: EvenFetches | None = None
    _eval_pass: EvenFetches | EvenLoaders | None = None
    _eval_from_start = True
    _last_step: int | None = None
    _steps_before = 0
    _kept: KeptBatch | None = None
    _loaded: Any = None
    _last_record: Mapping[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in vars(CountoffCallback)}

    @property
    def guard(self) -> Guard | None:
        """The guard of the current fit, or of the last one."""
        return self._guard

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stays inactive if the Trainer already has this callback, from the entry point, say."""
        self.teardown(trainer, pl_module, stage)  # Lightning skips it after an exception that the program survives
        first = next(each for each in trainer.callbacks if isinstance(each, CountoffCallback))
        self._active = self.settings.enabled and first is self
        self._loaded = None
        if self._active and stage == "fit" and self._makes_even(trainer):
            self._estimate = CommonEstimate(trainer, lambda own: self._common_length(trainer, own))

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Puts a record of how far the fit has come into the checkpoint."""
        if self._kept is not None and self._guard is not None:
            checkpoint[KEY] = record_of(trainer, self._guard, self._kept.batch)
        elif self._last_record is not None:
            checkpoint[KEY] = dict(self._last_record)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Keeps the record of the checkpoint for the fit that resumes from it."""
        if self._active and trainer.state.fn == "fit":
            self._loaded = checkpoint.get(KEY)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begins the fit: this is the first hook with final lengths and restored counters."""
        self._last_record = None
        if not self._active:
            return
        self._forget_estimate()
        facts = train_facts(trainer)
        # Until the mesh is made, FSDPStrategy returns a shape here and ModelParallelStrategy raises.
        mesh = getattr(trainer.strategy, "device_mesh", None)
        dp_rank, dp_degree = data_position(mesh, rank=trainer.global_rank, world_size=trainer.world_size)
        self._totals = Totals(facts, dp_degree=dp_degree, framework="Lightning")
        proven = self._totals.plan.batches_per_epoch
        makes_even = self._makes_even(trainer)
        if makes_even and not _holds_all_fit(trainer, proven):
            proven = None
        watch = _schedule_watch(trainer, self._totals, dp_degree)
        planned = watch.plans(trainer.global_step)
        self._begin(trainer, plan_of(trainer, facts, proven, (dp_rank, dp_degree)), planned)
        if makes_even and self._guard is not None:
            self._limits = EvenLimits(trainer, self.settings.uneven_train == "repeat", self._guard.common_batches)
            hook = MethodHook(trainer.fit_loop.epoch_loop, "on_run_start", after=lambda *_: self._begin_even(trainer))
            self._hooks = (*self._hooks, hook, self._limits)
        wrong = self._wrong_length(self._totals)
        if wrong is not None and self._guard is not None:
            self._guard.warn(wrong)
        if self._guard is not None and not self._guard.own_length_holds:
            common = self._guard.common_batches
            self._totals.take_common(common, proven=common is not None)
        self._watch_schedules(trainer, watch)
        if self._guard is not None:
            self._keep_records(trainer, self._guard)
        self._report(trainer)
        self._set_limits()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Opens the epoch's span."""
        if self._guard is not None:
            self._epoch_begins = True
            self._set_limits()  # Lightning may have loaded the train loader again
            self._guard.train_start(trainer.current_epoch)
            self._compare_schedules(trainer)
            self._hook_into_epoch(fingerprint_before_transfer(trainer, self._guard.data))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Counts the batch, with those that the fetcher has fetched ahead of it."""
        guard = self._guard
        if guard is None:
            return
        if self._kept is not None:
            self._kept.batch = batch
        if self._epoch_begins:  # the lookups that do not change within an epoch
            self._epoch_begins = False
            if guard.open_span is None:  # resumed in mid-epoch: on_train_epoch_start does not fire
                ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
                guard.train_start(trainer.current_epoch, ready - 1)
            if self._train_pass is None:
                self._hook_into_epoch(FetchTimer(trainer.fit_loop, guard.waited))
            self._fetcher, self._last_step = countable_fetcher(trainer.fit_loop), last_step(trainer)
        if (fetcher := self._fetcher) is None:
            guard.batch()
        else:
            over = self._last_step is not None and trainer.global_step >= self._last_step
            guard.batch(0 if over else fetcher.fetched, last=fetcher.done)
        if not (batch_idx + 1) % self.settings.tick_batches and self._totals is not None:
            done = self._totals.progress(guard.batches)
            log(trainer, {} if done is None else {"countoff/epoch_progress": done})

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Counts the micro-batch. Lightning calls it for automatic and for manual optimization."""
        if self._guard is not None:
            self._guard.micro_batch()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Closes the epoch's span, if one is open (none is after a resume at the last batch), and learns its length."""
        guard = self._guard
        if guard is None or guard.open_span is None:
            return
        self._leave_epoch()
        exhausted, makes_even = bool(fetcher_of(trainer.fit_loop, "done")), guard.makes_even
        notice = self._learn_length(guard) if exhausted else None
        guard.train_end("exhausted" if exhausted else "stopped", notice=notice)
        if makes_even and self._totals is not None:
            self._log_news(trainer, self._totals.plan.metrics(), guard.metrics)
        elif exhausted:
            self._report(trainer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Opens an evaluation, in a fit or alone."""
        if not self._active or trainer.sanity_checking:
            return
        if self._guard is None:
            self._begin(trainer, FitPlan())
        guard = self._guard
        if guard is not None:
            self._begin_evaluation(trainer, guard)

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Counts an evaluation's batch."""
        guard = self._guard
        if guard is None or trainer.sanity_checking:
            return
        if isinstance(self._eval_pass, EvenLoaders):
            guard.batch()
            return
        if dataloader_idx:
            guard.eval_loader(dataloader_idx)
        count(guard, eval_loop(trainer))

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Closes the evaluation."""
        guard = self._guard
        if guard is None or trainer.sanity_checking:
            return
        done = fetcher_of(eval_loop(trainer), "done")
        found = metrics_of_evaluation(trainer, eval_loop(trainer)) if done and self._eval_from_start else {}
        self._leave_evaluation()
        guard.eval_end("exhausted" if done else "stopped")
        log(trainer, found)
        if trainer.state.fn != "fit":
            guard.fit_end()

    on_test_start = on_validation_start
    on_test_batch_start = on_validation_batch_start
    on_test_epoch_end = on_validation_epoch_end

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Ends the fit."""
        if self._guard is not None:
            self._last_record = record_of(trainer, self._guard, None)
            self._stop_counting()
            self._log_news(trainer, {}, self._guard.metrics)
            self._guard.fit_end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Tells the other ranks of the exception.

        The guard stays active until Lightning has taken its loop down: what it does before that may block in a
        collective, as a checkpoint that is saved on an exception. Then `teardown` is not called.
        """
        guard = self._guard
        if guard is None:
            return
        left = LeftFit(guard, exception, guard.close)
        if self._kept is not None:
            self._last_record = record_of(trainer, guard, None)
        self._stop_counting()
        self._guard = self._schedules = None

        def leave() -> None:
            self._stop_counting()
            left.leave()

        self._hooks = _placed(after_teardown(trainer, leave))
        if not self._hooks:
            leave()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Closes the guard."""
        self._close()

    def _begin(self, trainer: Any, plan: FitPlan, schedules: Sequence[SchedulePlan] = ()) -> None:
        self._close()
        self._epoch_begins, self._logged = True, {}
        self._guard = guard = new_guard(
            self.settings,
            WORDS,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            optimizers=lambda: trainer.optimizers,
            models=lambda: [trainer.strategy.model],
            schedulers=lambda: [config.scheduler for config in trainer.lr_scheduler_configs],
        )
        self._hooks = _placed(on_optimizer_step(guard.step), announce_requests(guard, trainer.fit_loop.epoch_loop))
        guard.trace_totals(lambda: self._totals.plan.metrics() if self._totals is not None else {}, self._steps_left)
        length = plan.batches_per_epoch if self._makes_even(trainer) else None
        guard.fit_start(plan, versions("lightning", "pytorch-lightning"), schedules, own_length=length)

    def _watch_schedules(self, trainer: Any, watch: ScheduleWatch) -> None:
        """Compares where learning-rate schedules end with where the run ends, as far as that is known by now."""
        self._steps_before, self._schedules = trainer.global_step, watch
        found = self._schedules.begin(trainer.global_step)
        if found is not None and self._guard is not None:
            self._guard.warn(found)

    def _compare_schedules(self, trainer: Any) -> None:
        """Compares the schedules again, where an epoch begins."""
        if self._schedules is None or self._guard is None:
            return
        found = self._schedules.epoch_begins(f"train epoch {trainer.current_epoch}", trainer.global_step)
        if found is not None:
            self._guard.warn(found)

    def _steps_left(self) -> int | None:
        """The steps of this fit after which the learning-rate schedule ends."""
        end = None if self._schedules is None else self._schedules.end_step
        return None if end is None else max(0, end - self._steps_before)

    def _keep_records(self, trainer: Any, guard: Guard) -> None:
        """Makes ready for the checkpoints of the fit, and compares the one from which it resumes."""
        self._kept, epoch_loop = KeptBatch(), trainer.fit_loop.epoch_loop
        self._hooks = (*self._hooks, MethodHook(epoch_loop, "on_advance_end", before=self._kept.drop))
        record, self._loaded = self._loaded, None
        if record is not None:
            restore(trainer, guard, record)
            hook = MethodHook(epoch_loop, "on_run_start", after=lambda *_: self._open_resumed(trainer))
            self._hooks = (*self._hooks, hook)

    def _open_resumed(self, trainer: Any) -> None:
        """Opens a train epoch in whose middle the fit resumes, before its first batch is read."""
        guard, epoch_loop = self._guard, trainer.fit_loop.epoch_loop
        # Lightning may end an epoch once more that ended before the checkpoint, and begins no batch in it then.
        over = epoch_loop.done or getattr(epoch_loop, "_is_training_done", False)
        if guard is not None and guard.open_span is None and not over:
            guard.train_start(trainer.current_epoch, epoch_loop.batch_progress.current.ready)
            self._hook_into_epoch(fingerprint_before_transfer(trainer, guard.data))

    def _common_length(self, trainer: Any, own: int | None) -> int | None:
        """Returns the batches of an epoch on every rank, from those of this rank's loader. Collective."""
        world_size = trainer.world_size
        settings = replace(self.settings, trace_dir=None)  # the fit itself is traced
        guard = new_guard(settings, WORDS, rank=trainer.global_rank, world_size=world_size)
        try:
            guard.fit_start(FitPlan(), own_length=own)
            guard.fit_end()
            return guard.common_length
        finally:
            guard.close()

    def _forget_estimate(self) -> None:
        if self._estimate is not None:
            self._estimate.remove()
            self._estimate = None

    def _makes_even(self, trainer: Any) -> bool:
        """Whether every rank's train epochs are to have the same number of batches."""
        return self.settings.uneven_train != "raise" and trainer.world_size > 1

    def _learn_length(self, guard: Guard) -> Verdict | None:
        """Updates the totals by the epoch that its loader's end has ended; returns a warning about its length."""
        if self._totals is None:
            return None
        if guard.makes_even:  # the epoch may have had the length of another rank's loader
            if not guard.own_length_holds and guard.common_batches is None:
                self._totals.take_common(guard.batches)
            return None
        self._totals.observe(guard.batches)
        return self._wrong_length(self._totals)

    def _wrong_length(self, totals: Totals) -> Verdict | None:
        wrong = totals.wrong_length()
        return wrong and with_remedy(wrong, totals.plan, fixes=self.settings.totals == "fix")

    def _set_limits(self) -> None:
        if self._limits is not None:
            self._limits.set()

    def _begin_even(self, trainer: Any) -> None:
        """Makes the train epoch even that is about to begin: Lightning has made its iterator, and used no batch."""
        guard, epoch_loop = self._guard, trainer.fit_loop.epoch_loop
        if guard is None or epoch_loop.done:
            return
        self._open_resumed(trainer)
        if guard.makes_even:
            self._leave_train_pass()
            proven = guard.common_batches is not None
            fetcher, common = trainer.fit_loop._data_fetcher, guard.common_length
            if trainer.reload_dataloaders_every_n_epochs:  # a loader may have another length than when the fit began
                common = None
            self._train_pass = EvenFetches(guard, fetcher, proven=proven, saved=True, common=common)

    def _begin_evaluation(self, trainer: Any, guard: Guard) -> None:
        """Opens an evaluation's span, or that of its first loader, and makes it even where ranks are to end alike."""
        loop, name = eval_loop(trainer), "test" if trainer.testing else "validation"
        inside = guard.open_span is not None
        self._eval_from_start = not loop.batch_progress.current.ready  # else Lightning counts those before a checkpoint

        def start(name: str) -> None:
            guard.eval_start(name, train_exhausted=inside and seen_exhausted(trainer.fit_loop))

        def next_loader(index: int) -> None:
            guard.eval_end("exhausted")
            start(f"{name} loader {index}")

        several = self.settings.uneven_eval == "stop" and trainer.world_size > 1 and has_loaders_in_a_row(loop)
        start(f"{name} loader 0" if several else name)
        if guard.makes_even:
            if several:
                self._eval_pass = EvenLoaders(guard, loop, next_loader)
            else:
                self._eval_pass = EvenFetches(guard, loop._data_fetcher, evaluation=loop)

    def _leave_evaluation(self) -> None:
        if self._eval_pass is not None:
            self._eval_pass.remove()
            self._eval_pass = None

    def _leave_train_pass(self) -> None:
        if self._train_pass is not None:
            self._train_pass.remove()
            self._train_pass = None

    def _close(self) -> None:
        self._stop_counting()
        if self._guard is not None:
            self._guard.close()
            self._guard = self._schedules = None

    def _hook_into_epoch(self, hook: Any) -> None:
        self._epoch_hooks = (*self._epoch_hooks, *_placed(hook))

    def _leave_epoch(self) -> None:
        """Takes back what stands on Lightning's objects for one epoch, which Lightning sets anew in the next."""
        for hook in self._epoch_hooks:
            hook.remove()
        self._epoch_hooks, self._fetcher = (), None
        if self._kept is not None:
            self._kept.drop()

    def _stop_counting(self) -> None:
        self._leave_epoch()
        self._leave_evaluation()
        self._leave_train_pass()
        self._forget_estimate()
        self._limits = self._kept = None
        for hook in self._hooks:
            hook.remove()
        self._hooks = ()

    def _report(self, trainer: Any) -> None:
        """Logs the totals as known by now, and corrects a wrong length where the true one is proven."""
        guard, totals = self._guard, self._totals
        if guard is None or totals is None:
            return
        self._log_news(trainer, totals.plan.metrics(), guard.metrics)
        length = totals.shorter_than_reported
        if self.settings.totals == "fix" and length and set_length(trainer, length):
            totals.corrected(length)
            self._log_news(trainer, totals.plan.metrics(), {})

    def _log_news(self, trainer: Any, totals: Mapping[str, float], measured: Mapping[str, float]) -> None:
        """Logs the totals that have changed, and all that was measured if any of that has."""
        news = {name: value for name, value in totals.items() if self._logged.get(name) != value}
        if any(self._logged.get(name) != value for name, value in measured.items()):
            news |= measured
        self._logged = {**self._logged, **news}
        log(trainer, news)


def _schedule_watch(trainer: Any, totals: Totals, dp_degree: int) -> ScheduleWatch:
    """Returns what compares the schedules of a fit with the length of its run."""

    def run(_: int | None = None) -> RunLength:
        return run_length(totals.plan, processes=dp_degree)

    return ScheduleWatch(schedules(trainer, run()), run, stepping=WORDS.stepping)


def _holds_all_fit(trainer: Any, batches: int | None) -> bool:
    """Whether the number of batches that is proven now is that of every epoch, and Lightning counts on it too."""
    fixed = batches == trainer.num_training_batches and not trainer.reload_dataloaders_every_n_epochs
    return fixed and not saves_state(trainer.train_dataloader)  # a pass that resumes in mid-epoch has less


def _placed(*hooks: Any) -> tuple[Any, ...]:
    """Returns the hooks that could be placed."""
    return tuple(hook for hook in hooks if hook is not None)

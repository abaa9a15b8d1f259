"""What both Lightning packages share: their hooks translated to guard calls. Imports neither of them.

Before every train batch Lightning broadcasts from rank 0, so ranks that differ pair wrong collectives or hang in the
next one; the last batch in hand is therefore announced before it is trained on, and what its fetcher has taken ahead
counts as in hand.
"""

from __future__ import annotations

import math
from typing import Any, Literal, Optional, Union

from countoff._observe import learning_rates, loader_facts, on_optimizer_step, versions
from countoff.core import Guard, LoaderFacts, Settings
from countoff.core.totals import Totals

REMEDIES = {
    "UnevenBatches": (
        "give every rank as many batches: a map-style dataset (Lightning adds a DistributedSampler), an iterable that "
        "cuts all ranks at the shortest, or Trainer(limit_train_batches=N) with N batches that every rank has; "
        "evaluations that may differ: Countoff(uneven_eval='allow')."
    ),
    "PlanMismatch": "build the loader and the Trainer from the same configuration on every rank.",
    "StepMismatch": "step on the same batches everywhere: no condition of one rank around optimizer.step().",
    "LearningRateMismatch": "give the scheduler the same horizon on every rank, and step it on every rank.",
    "LostRank": "read that rank's own output first; the others only lost their peer.",
    "WrongLength": "make len(loader) one rank's number of batches, or let Countoff(totals='fix') set what is proven.",
}


class CountoffCallback:
    """Asserts that all ranks count the same batches and steps, and logs the true totals.

    Every rank's Trainer must have it. Options not given come from ``COUNTOFF_<NAME>``, then from the default.

    Args:
        enabled: Whether to do anything at all; `COUNTOFF=0` turns it off too.
        on_divergence: `raise` ends the job with the verdict, `warn` says it once and trains on.
        totals: `log` logs the true totals, `fix` also sets Lightning's own where the truth is proven to be shorter.
        uneven_eval: What evaluations of different lengths are: `warn`, `raise` or `allow`.
        eval_ranks: The ranks that evaluate, if not all of them do; evaluations are not compared then.
        stall_seconds: Seconds without progress of any rank after which their stacks are reported.
        grace_seconds: Seconds that a main thread blocked in a collective has before its process is ended.
        deadline_seconds: Seconds that the start of a fit waits for the other ranks to count off.
        tick_batches: Batches between two comparisons of steps and learning rates within an epoch.

    Raises:
        SettingsError: If an option or a ``COUNTOFF_*`` variable has a bad value.
    """

    def __init__(
        self,
        enabled: Optional[bool] = None,
        on_divergence: Optional[Literal["raise", "warn"]] = None,
        totals: Optional[Literal["log", "fix"]] = None,
        uneven_eval: Optional[Literal["warn", "raise", "allow"]] = None,
        eval_ranks: Optional[list[int]] = None,
        stall_seconds: Optional[float] = None,
        grace_seconds: Optional[float] = None,
        deadline_seconds: Optional[float] = None,
        tick_batches: Optional[int] = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self.settings = Settings.resolve(**given)
        self._guard: Guard | None = None
        self._steps: Any = None
        self._totals: Totals | None = None
        self._active = self.settings.enabled

    @property
    def guard(self) -> Guard | None:
        """The guard of the fit under way, or of the last one."""
        return self._guard

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Steps aside if the Trainer already has this callback (from the entry point, say)."""
        first = next(each for each in trainer.callbacks if isinstance(each, CountoffCallback))
        self._active = self.settings.enabled and first is self

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Counts off: the first hook with final lengths and restored counters."""
        if not self._active:
            return
        facts = _train_facts(trainer)
        self._totals = Totals(facts, dp_degree=trainer.world_size, framework="Lightning")
        loop = trainer.fit_loop
        plan = {
            "batches_per_epoch": _finite(trainer.num_training_batches),
            "proven_batches_per_epoch": self._totals.plan.batches_per_epoch,
            "batch_size": facts.batch_size,
            "gradient_accumulation_steps": facts.gradient_accumulation_steps,
            "max_epochs": facts.max_epochs,
            "max_steps": facts.max_steps,
            "position": [trainer.current_epoch, loop.epoch_loop.batch_progress.current.ready, trainer.global_step],
        }
        self._begin(trainer, plan)
        self._report(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Opens the epoch's span."""
        if self._guard is not None:
            self._guard.train_start(trainer.current_epoch)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Counts the batch, with what the fetcher holds besides it."""
        guard = self._guard
        if guard is None:
            return
        loop = trainer.fit_loop
        if guard.open_span is None:  # resumed in mid-epoch: on_train_epoch_start does not fire
            guard.train_start(trainer.current_epoch, loop.epoch_loop.batch_progress.current.ready - 1)
        _count(guard, loop)
        if not guard.batches % self.settings.tick_batches and self._totals is not None:
            _log(trainer, {"countoff/epoch_progress": self._totals.progress(guard.batches)})

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Closes the epoch's span and learns its length."""
        guard = self._guard
        if guard is None:
            return
        how = "exhausted" if _fetcher(trainer.fit_loop, "done") else "stopped"
        guard.train_end(how)
        if how == "exhausted" and self._totals is not None:
            self._totals.observe(guard.batches)
            self._report(trainer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Opens an evaluation, in a fit or alone."""
        self._eval_start(trainer, "validation")

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Counts an evaluation's batch."""
        self._eval_batch(trainer, dataloader_idx)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Closes the evaluation."""
        self._eval_end(trainer)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Opens a test."""
        self._eval_start(trainer, "test")

    def on_test_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Counts a test's batch."""
        self._eval_batch(trainer, dataloader_idx)

    def on_test_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Closes the test."""
        self._eval_end(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Ends the fit."""
        if self._guard is not None:
            _log(trainer, self._guard.metrics)
            self._guard.fit_end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Tells the other ranks why this one goes; the guard stays armed on the way out."""
        if self._guard is not None:
            self._guard.failed(exception)
            self._stop_counting()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leaves."""
        self._stop_counting()
        if self._guard is not None:
            self._guard.close()
            self._guard = None

    def _begin(self, trainer: Any, plan: dict[str, Any]) -> None:
        self._stop_counting()
        if self._guard is not None:
            self._guard.close()
        self._guard = guard = Guard(
            self.settings,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            remedies=REMEDIES,
            learning_rates=lambda: learning_rates(trainer.optimizers),
        )
        self._steps = on_optimizer_step(guard.step)
        guard.fit_start(plan, versions("lightning", "pytorch-lightning"))

    def _stop_counting(self) -> None:
        if self._steps is not None:
            self._steps.remove()
            self._steps = None

    def _eval_start(self, trainer: Any, name: str) -> None:
        if not self._active or trainer.sanity_checking:
            return
        if self._guard is None:
            self._begin(trainer, {})
        guard = self._guard
        if guard is not None:
            inside = guard.open_span is not None
            guard.eval_start(name, train_exhausted=inside and _exhausted_by_looking(trainer.fit_loop))

    def _eval_batch(self, trainer: Any, dataloader_idx: int) -> None:
        if self._guard is not None and not trainer.sanity_checking:
            if dataloader_idx:
                self._guard.eval_loader(dataloader_idx)
            _count(self._guard, _eval_loop(trainer))

    def _eval_end(self, trainer: Any) -> None:
        guard = self._guard
        if guard is None or trainer.sanity_checking:
            return
        guard.eval_end("exhausted" if _fetcher(_eval_loop(trainer), "done") else "stopped")
        if trainer.state.fn != "fit":
            guard.fit_end()

    def _report(self, trainer: Any) -> None:
        """Logs the totals as known by now; warns of, and mends, a wrong length."""
        guard, totals = self._guard, self._totals
        if guard is None or totals is None:
            return
        _log(trainer, totals.plan.metrics() | guard.metrics)
        wrong = totals.wrong_length()
        if wrong is not None:
            guard.warn(wrong)
        length = totals.shorter_than_reported
        if self.settings.totals == "fix" and length and _set_length(trainer, length):
            totals.corrected(length)
            _log(trainer, totals.plan.metrics())


def _finite(number: Union[int, float]) -> int | None:
    return None if math.isinf(number) else int(number)


def _train_facts(trainer: Any) -> LoaderFacts:
    loader = trainer.train_dataloader
    limit = trainer.limit_train_batches
    known = {
        "gradient_accumulation_steps": trainer.accumulate_grad_batches,
        "max_epochs": trainer.max_epochs,
        "max_steps": trainer.max_steps,
        "limit_batches": None if limit == 1.0 and isinstance(limit, float) else limit,
    }
    return loader_facts(loader, **known)


def _fetcher(loop: Any, name: str) -> Any:
    """An attribute of the loop's data fetcher; None where another version of Lightning has it no more."""
    return getattr(getattr(loop, "_data_fetcher", None), name, None)


def _hands_out_its_iterator(loop: Any) -> bool:
    # With training_step(dataloader_iter) the module fetches by itself, and what was fetched says nothing.
    return _fetcher(loop, "iterator_wrapper") is not None


def _exhausted_by_looking(loop: Any) -> bool:
    return bool(_fetcher(loop, "done")) and not _hands_out_its_iterator(loop)


def _count(guard: Guard, loop: Any) -> None:
    fetcher = getattr(loop, "_data_fetcher", None)
    if fetcher is None or hasattr(fetcher, "iterator_wrapper"):
        guard.batch()
    else:
        guard.batch(fetcher.fetched, last=fetcher.done)


def _eval_loop(trainer: Any) -> Any:
    return {"fit": trainer.fit_loop.epoch_loop.val_loop, "validate": trainer.validate_loop}.get(
        trainer.state.fn, trainer.test_loop
    )


def _log(trainer: Any, metrics: dict[str, Any]) -> None:
    if not trainer.is_global_zero:
        return
    known = {name: value for name, value in metrics.items() if value is not None}
    step = getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", trainer.global_step)
    for logger in trainer.loggers:
        logger.log_metrics(known, step=step)


def _set_length(trainer: Any, batches: int) -> bool:
    """Sets the epoch's length that Lightning counts on; it is also a cap, so never below the truth."""
    loop = trainer.fit_loop
    if getattr(loop, "max_batches", 0) <= batches:
        return False
    loop.max_batches = batches
    interval = trainer.val_check_interval
    if isinstance(interval, float) and getattr(trainer, "val_check_batch", None) is not None:
        trainer.val_check_batch = max(1, int(batches * interval))
    return True

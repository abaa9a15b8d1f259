"""A training loop whose passes and steps are counted, from the begin of its fit to its end."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from countoff._adapter.averaged_gradients import watch_averaging
from countoff._adapter.dealt_streams import streamed_twice
from countoff._adapter.epoch_steps import EpochSteps
from countoff._adapter.evaluation_totals import EvaluationTotals
from countoff._adapter.fit import NO_LOADERS, Fit
from countoff._adapter.leaving import ExitHooks, LeftFit
from countoff._adapter.passes import Passes
from countoff._adapter.sharded_passes import count_sharded_passes
from countoff._adapter.torch_facts import on_optimizer_step
from countoff.core import DivergenceError, FitPlan, Guard, Verdict
from countoff.core.at_exit import exception_at_exit
from countoff.core.checks.resume import Restored
from countoff.core.ending import shutdown
from countoff.core.protocol.fit_records import SchedulePlan
from countoff.core.protocol.resume_record import UNREADABLE, ResumeRecord
from countoff.core.session.threads.guard_status import wait_for_closers

__all__ = ["CountedLoop", "active_loops"]

_active: list[CountedLoop] = []
"""The loops of this process whose fit has begun and has not ended, in the order of their begin."""


class CountedLoop:
    """One fit of a loop: what adapters tell of it, while its passes and its steps are counted.

    It outlives the loop until the process ends or another fit begins, and so holds nothing of the user's strongly.

    Args:
        fit: The fit.
        epoch: Number of the first train epoch.
        steps_of: Returns whether a step of an optimizer belongs to this loop; None: every step does.
        own: Whether a person writes the loop, and so decides by himself which ranks evaluate.

    Attributes:
        fit: The fit.
        passes: The passes over the loaders.
        evaluations: How much the evaluations have read; None where nothing tells it.
        own_length: What `len` of this rank's train loader gives, where all know of each pass by it; None otherwise.
        length_now: Returns the length that the train loader reports after a pass; None where nothing tells it.
        may_resume: Whether a pass over the train loader may begin in the middle of an epoch without a word of it, so
            that a single pass tells no length.
        train_loader: Returns the train loader whose epochs are compared with its length; None where none is.
        epoch_steps: Counts the optimizer steps of the epoch; None where nothing proves how many it must have.
        trainer_ends: Whether the epochs, and the position after a resume, are those of a trainer, which also says by
            itself why it has ended.
    """

    def __init__(
        self,
        fit: Fit,
        *,
        epoch: int = 0,
        steps_of: Callable[[Any], bool] | None = None,
        own: bool = False,
    ) -> None:
        self.fit = fit
        self.passes = Passes(fit.guard, epoch=epoch, exhausted=self._learn_length, diverged=self._give_back_if_diverged)
        self.passes.began = self._epoch_begins
        self.passes.abandoned = fit.epoch_left
        self.passes.reads = fit.epoch_reads
        self.evaluations: EvaluationTotals | None = None
        self.own_length: int | None = None
        self.length_now: Callable[[], int | None] = _unknown
        self.may_resume = False
        self.train_loader: Callable[[], Any] | None = None
        self.epoch_steps: EpochSteps | None = None
        self.trainer_ends = False
        self._last_length: int | None = None
        self._position = 0
        self._start_step = 0
        self._plan, self._versions = FitPlan(), dict[str, str]()
        self._steps_of = steps_of
        self._own = own
        self._release = contextlib.ExitStack()
        self._exit_hooks: ExitHooks | None = None
        self._left: LeftFit | None = None
        self._ended = True
        self._failed = False

    @property
    def guard(self) -> Guard:
        """The guard of the fit."""
        return self.fit.guard

    @property
    def ended(self) -> bool:
        """Whether no fit goes on."""
        return self._ended

    def until_end(self, release: Callable[[], None]) -> None:
        """Has a function called when the fit ends, in whatever way: one that takes back what was put on an object."""
        self._release.callback(release)

    def tell_evaluations(self, totals: EvaluationTotals) -> None:
        """Lets `progress` tell how much each evaluation has read."""
        self.evaluations, self.passes.evaluated = totals, totals.ended

    def begin(
        self,
        plan: FitPlan,
        versions: Mapping[str, str],
        *notices: Verdict | None,
        record: object = None,
        compare: bool = True,
        loaders: Mapping[str | None, Any] = NO_LOADERS,
    ) -> None:
        """Begins the fit. Collective: every rank must call it; it waits at most `deadline_seconds`.

        Args:
            plan: What the ranks must agree on.
            versions: Versions whose differences get a warning.
            notices: Warnings to give at once.
            record: The record of the checkpoint that every rank has loaded before; empty or None if there is none.
            compare: Whether the fit goes on where that checkpoint was written, as in `Resumes.restore`.
            loaders: As for `Fit.begin`.
        """
        fit = self.fit
        for earlier in active_loops():  # its program has gone on to this one, and has said no word of its end
            if earlier.fit.own.part == fit.own.part:
                with _known_verdicts(earlier.guard):
                    earlier.end()
        self._ended = False
        told = fit.steps_before or None
        if record:
            position, self.passes.epoch, steps = self._place_of(record)
            plan, fit.steps_before = replace(plan, position=position), told or steps
        self._plan, self._versions, self._start_step = plan, dict(versions), fit.steps_before
        if plan.batches_per_epoch == fit.epoch_batches:  # else `len` is wrong
            self.own_length = plan.batches_per_epoch
        _active.append(self)
        self.until_end(lambda: _active.remove(self))
        self.until_end(fit.schedules.forget)
        self.until_end(fit.reads.release)
        fit.expects(loaders.get(None))
        self.until_end(self._forget_loader)
        self.until_end(count_sharded_passes(fit))
        self.until_end(on_optimizer_step(self.step, self._steps_of).remove)
        self.until_end(watch_averaging(fit))  # behind what counts the steps
        self._exit_hooks = ExitHooks(self._fail_uncaught, self._at_exit)
        try:
            planned = fit.schedules.plans(fit.steps_before)
            wrong_schedule = fit.schedules.begin(fit.steps_before)  # by the length of this rank's loader
            self._begin_fit(plan, planned, loaders)
        except BaseException as error:
            self._release_all()  # so that nothing of it goes on
            if not isinstance(error, DivergenceError):  # a verdict has the guard end the process
                self.guard.close()
            raise
        if record:
            self.guard.resumes.restore(record, Restored(steps=told), compare=compare)
        fit.warn(*notices, fit.wrong_length(), self._streamed_twice(loaders), wrong_schedule)

    def micro_batch(self) -> None:
        """Counts a micro-batch, unless passes are not compared now."""
        if self.passes.comparing:
            self.passes.guard.micro_batch()

    def compare(self, comparing: bool) -> None:
        """Says whether passes that begin from here on, micro-batches and weights are compared with other ranks'."""
        self.passes.settle()
        self.passes.comparing, self.fit.trains_apart = comparing, not comparing

    def progress(self) -> dict[str, float]:
        """Returns the true totals as known by now, and this rank's progress, under the names of the logged metrics."""
        self.passes.settle()
        values = self.fit.metrics
        values |= {} if self.evaluations is None else self.evaluations.metrics
        done = self.fit.progress()
        return values if done is None else values | {"countoff/epoch_progress": done}

    @property
    def totals(self) -> str:
        """What is known of the run, in words."""
        self.passes.settle()
        return self.fit.in_words()

    def observed_length(self, loader: Any, name: str | None) -> int | None:
        """Returns the batches that every pass over a loader has had, where nothing proves them; None if unknown.

        Args:
            loader: The loader; of a train loader, the one that was trained on last.
            name: The evaluation's name; None for a train epoch.
        """
        if self.fit.settings.totals == "off":
            return None
        if name is None:
            return None if self.fit.totals is None else self.fit.totals.observed_batches
        return None if self.evaluations is None else self.evaluations.observed_length(name, loader)

    def record(self) -> dict[str, Any]:
        """Returns how far this rank has come, for a checkpoint."""
        self.passes.settle()
        left = self.fit.batches_left(self.fit.epoch_batches)
        return self.guard.resumes.record(self.passes.batch, left=left, steps=self.fit.steps_done)

    def resume_from(self, record: object) -> None:
        """Begins another fit from a checkpoint that every rank has loaded. Collective: every rank must call it.

        Optimizer steps before the checkpoint are those that the user gave when the fit began; else the record's.

        Args:
            record: What `record` has returned when it was written; an empty mapping if it has none.
        """
        steps = self._start_step or None
        has_trained = self.guard.steps > 0
        position, epoch, known_steps = self._place_of(record)
        if self._ended:
            return
        self._end_guard()
        self.fit.renew(known_steps if steps is None else steps)
        self.passes.guard = self.guard
        self.passes.epoch = epoch
        self._begin_fit(replace(self._plan, position=position))
        if record:
            self.guard.resumes.restore(record, Restored(steps=steps), compare=not has_trained)

    def end(self) -> None:
        """Ends the fit and gives the loaders back as they were. Does nothing when called again.

        Raises:
            DivergenceError: If another rank goes on, or has diverged before.
        """
        if self._release_all():
            self._end_guard(in_order=True)

    def abandon(self) -> None:
        """Gives the loaders back as they were, without the sync point of the fit's end. A second call does nothing."""
        if self._release_all():
            self.guard.close()

    def leave(self) -> None:
        """Gives the loaders back where an exception has ended the loop; a verdict still decides how the program ends.

        The exception may be what a collective raised because of that verdict, and the program may survive it.
        """
        self._release.close()
        self.guard.close()  # waits for a verdict that is on its way
        if self.guard.verdict is None:
            self.abandon()

    def leave_by(self, error: BaseException) -> None:
        """Tells the other ranks of an exception that has left the loop, and gives the loaders back at once.

        The guard stays until the program has caught the exception, begins another fit, or ends.

        Args:
            error: The exception; a `SystemExit` without a code ends the fit in order.
        """
        if isinstance(error, SystemExit) and not error.code:
            self.end()
        elif not self._ended:
            self._failed = True
            self._left = LeftFit(self.guard, error, self.abandon)
            self._release.close()
            self._left.leave()

    def _begin_fit(
        self,
        plan: FitPlan,
        schedules: Sequence[SchedulePlan] | None = None,
        loaders: Mapping[str | None, Any] = NO_LOADERS,
    ) -> None:
        self.guard.evidence.optimizers_told = self._steps_of is not None
        self.guard.evidence.own_loop = self._own
        self.fit.begin(plan, self._versions, schedules, own_length=self.own_length, loaders=loaders)
        if self._exit_hooks is not None:
            self._exit_hooks.register_at_exit()

    def _streamed_twice(self, loaders: Mapping[str | None, Any]) -> Verdict | None:
        compared = self.fit.settings.compare_data and self.fit.own.world_size > 1
        return streamed_twice(loaders.get(None), self.guard.data, self.passes.epoch) if compared else None

    def _place_of(self, record: object) -> tuple[list[int] | None, int, int]:
        """The position at which a checkpoint was written, None if that is not known, its epoch and its steps."""
        try:
            found = ResumeRecord.from_json(record)
        except UNREADABLE:
            return None, self.passes.epoch, 0
        return [found.epoch, found.batches or 0, found.steps], found.epoch, found.steps

    def step(self, optimizer: Any) -> None:
        """Counts an optimizer step of this loop."""
        self.passes.settle()  # a pass that was left before this step does not have it
        self.guard.step(id(optimizer))
        if self.epoch_steps is not None:
            self.epoch_steps.step(id(optimizer), self.guard.train_batches)
        self.fit.stepped()

    def _epoch_begins(self, epoch: int) -> None:
        self._position = self.guard.train_batches
        if self.epoch_steps is not None:
            self.epoch_steps.begin()
        self.fit.epoch_begins(epoch)

    def _learn_length(self) -> Verdict | None:
        """Learns from a train epoch that ends because its loader is exhausted; returns a warning, if there is one."""
        self._note_end()
        self._judge_steps()
        if self.guard.makes_even:
            return self.fit.learn_length()
        if not self.guard.resumes.begins_epoch:  # its loader may have been restored in the middle of the epoch
            return None
        before, self._last_length = self._last_length, self.guard.batches
        if self.may_resume and before != self._last_length:  # likewise, by a state of its own
            return None
        if self.fit.totals is not None:
            self.fit.totals.report_again(self.length_now())
        return self.fit.learn_length()

    def _judge_steps(self) -> None:
        """Warns if the train epoch has had more optimizer steps than its gradient accumulation makes."""
        guard, span = self.guard, self.guard.span
        if self.epoch_steps is None or not (guard.state.leads and span.compared and guard.evidence.steps_by_batch):
            return
        batches, passes = guard.batches - self._position, span.micro_batches
        self.fit.warn(self.epoch_steps.judge(span.name, batches=batches, passes=passes))

    def _note_end(self) -> None:
        """Takes note of the end of a train epoch that the end of its loader has ended."""
        loader = None if self.train_loader is None else self.train_loader()
        if loader is None:
            return
        epoch, batches, position = self.passes.epoch - 1, self.guard.batches, self._position
        if not (self.trainer_ends or position or self.fit.epochs_ended):
            position = self._told_position(epoch)
            batches += position or 0
        self.fit.epoch_ended(epoch, batches, loader, position=position)

    def _told_position(self, epoch: int) -> int | None:
        """Batches of the fit's first epoch before it began, by its number and the steps before; None if these differ.

        Where a loop resumes with the last epoch of its checkpoint, at its end, the rest of that epoch is rightly empty.
        """
        plan = None if self.fit.totals is None else self.fit.totals.plan
        if plan is None or plan.reported_batches_per_epoch is None:
            return None
        whole = plan.reported_batches_per_epoch
        position = self.fit.steps_before * plan.facts.gradient_accumulation_steps - epoch * whole
        return position if 0 <= position <= whole else None

    def _judge_run(self) -> None:
        """Warns if the loop has made all of its epochs, and some have given nothing.

        Whoever takes the first pass after a resume for a rest, and begins its epoch anew, makes one pass more.
        """
        fit = self.fit
        run = None if fit.totals is None else fit.totals.plan.facts
        if self.trainer_ends or run is None or fit.left or fit.short.gave_some or self.passes.epoch != run.max_epochs:
            return
        fit.run_ended(steps=fit.steps_done, max_steps=run.max_steps)

    def _forget_loader(self) -> None:
        self.length_now, self.train_loader = _unknown, None  # they may hold the loader

    def _give_back_if_diverged(self) -> None:
        """Gives back the loaders where a verdict leaves the loop; the fit stays until the program ends with it."""
        if self.guard.verdict is not None:
            self._release.close()

    def _release_all(self) -> bool:
        """Gives back what was put on objects; returns False if the fit has ended before."""
        if self._ended:
            return False
        self._ended = True
        if self._exit_hooks is not None:
            self._exit_hooks.cancel()
        if self._left is not None:
            self._left.close()
        self._release.close()
        return True

    def _end_guard(self, *, in_order: bool = False) -> None:
        try:
            self.passes.close_stale(everything=True)
            if in_order:
                self._judge_run()
            self.guard.fit_end()
        finally:
            self.guard.close()

    def _fail_uncaught(self, error: BaseException) -> None:
        """Reports the exception that ends the program, if it has ended this loop and not another one."""
        if _left_by_exception() is self:
            self.guard.failed(error)
        self._failed = True
        self._release.close()

    def _at_exit(self) -> None:
        error = exception_at_exit()
        if error is not None:
            self._fail_uncaught(error)
        raises = self.fit.settings.on_divergence == "raise"
        raised = self._failed or getattr(sys, "last_value", None) is not None or self.guard.verdict_is_caught
        if not self._failed and (self.guard.verdict is None or not raises):
            with contextlib.suppress(DivergenceError):
                self.end()
        late = self.guard.verdict is not None and not raised and raises
        self.guard.close()  # waits until a verdict is printed
        wait_for_closers()
        if late:
            # The verdict came after the program's last line: only an exit code can report it.
            shutdown.exit_now()


@contextlib.contextmanager
def _known_verdicts(guard: Guard) -> Iterator[None]:
    """A context in which a guard may raise again the verdict that it has now, which the program has caught."""
    known = guard.verdict is not None
    try:
        yield
    except DivergenceError:
        if not known:
            raise


def active_loops() -> list[CountedLoop]:
    """Returns the loops of this process whose fit has begun and has not ended, in the order of their begin."""
    return list(_active)


def _left_by_exception() -> CountedLoop | None:
    """Returns the loop that an exception has left: the latest with an open span, or else the latest."""
    inside = [each for each in _active if each.guard.open_span is not None]
    return next(reversed(inside or _active), None)


def _unknown() -> int | None:
    """The length of a loader of which nothing is known."""
    return None

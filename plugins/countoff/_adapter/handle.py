"""The handle that every `attach` returns: a training loop that is observed from outside, from its begin to its end.

A loop has no hook for an exception that leaves it and none for the program's end, so the handle registers exit hooks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, cast

from countoff._adapter.class_swap import handle_of, swap_class
from countoff._adapter.evaluation_totals import EvaluationTotals
from countoff._adapter.even_loaders import STATE_METHODS, cover_state, even_pass, forget_state, saves_state
from countoff._adapter.exit_hooks import ExitHooks, exception_at_exit
from countoff._adapter.forward_passes import count_forward_passes
from countoff._adapter.left_fit import LeftFit
from countoff._adapter.loader_passes import LoaderPasses
from countoff._adapter.schedule_watch import Schedule, ScheduleWatch, run_length
from countoff._adapter.torch_facts import on_optimizer_step
from countoff.core import DivergenceError, FitPlan, Guard, Settings, Verdict
from countoff.core.checks.horizon import RunLength, Stepping
from countoff.core.checks.learning_rates import SchedulePlan
from countoff.core.checks.resume import UNREADABLE, Restored, ResumeRecord
from countoff.core.ending import shutdown
from countoff.core.totals import Totals

__all__ = ["Attached", "any_active", "argument_of", "evaluation_loaders"]

_active: list[Attached] = []
"""The handles of this process whose fit has begun and has not ended, in the order of their begin."""
_COUNTED = (
    "; for a generator, an iterator, a list or a function, leave out train= and take the batches from "
    "handle.counted(source)"
)


class Attached:
    """What `attach` returns.

    Args:
        make_guard: Makes the guard of a fit; called again when a checkpoint is loaded.
        totals: The totals of an epoch.
        settings: The user's choices.
        epoch: Number of the first train epoch.
        steps_of: Returns whether a step of an optimizer belongs to this loop; None: every step does.

    Attributes:
        totals: The totals of an epoch.
        steps_before: Optimizer steps that were applied before the checkpoint from which this fit has begun.
        length_now: Returns the length that the train loader reports after a pass; None where nothing tells it.
        may_resume: Whether a pass over the train loader may begin in the middle of an epoch without a word of it, so
            that a single pass tells no length.
        batches_before: Batches of the first train epoch that a counted function has returned before that checkpoint.
        passes: The passes over the loaders.
        evaluations: How much the evaluations have read; None where nothing tells it.
        schedules: The learning-rate schedules that are compared with the run.
    """

    def __init__(
        self,
        make_guard: Callable[[], Guard],
        totals: Totals,
        settings: Settings,
        *,
        epoch: int,
        steps_of: Callable[[Any], bool] | None = None,
    ) -> None:
        self.totals = totals
        self.steps_before = 0
        self.batches_before = 0
        self.length_now: Callable[[], int | None] = _unknown
        self.may_resume = False
        self._last_length: int | None = None
        self.evaluations: EvaluationTotals | None = None
        self.schedules = ScheduleWatch((), lambda _: RunLength())
        self._start_epoch, self._start_step = epoch, 0
        self._plan, self._versions = FitPlan(), dict[str, str]()
        self._make_guard = make_guard
        self._settings = settings
        self._steps_of = steps_of
        self._release = contextlib.ExitStack()
        self._exit_hooks: ExitHooks | None = None
        self._left: LeftFit | None = None
        self._detached = True
        self._failed = False
        self._covered: list[Any] = []
        self._loop_steps: set[int] = set()  # by the id of each optimizer that has stepped in a train epoch
        self._own_length: int | None = None
        self.passes = LoaderPasses(
            make_guard(), epoch=epoch, exhausted=self._learn_length, diverged=self._give_back_if_diverged
        )

    @property
    def guard(self) -> Guard:
        """The guard of the fit."""
        return self.passes.guard

    def progress(self) -> dict[str, float]:
        """Returns the true totals as known by now, and this rank's progress, under the names of the logged metrics.

        After an evaluation, it also has the samples that all ranks have read there, where they are proven.
        """
        values: dict[str, float] = {**self.totals.plan.metrics(), **self.guard.metrics}
        values |= {} if self.evaluations is None else self.evaluations.metrics
        done = self.totals.progress(self.guard.train_batches)
        return values if done is None else values | {"countoff/epoch_progress": done}

    def watch_schedules(
        self,
        schedules: Iterable[Schedule],
        *,
        processes: int,
        steps: int | None = None,
        source_batches: int | None = None,
        why: str = "",
        stepping: Stepping | None = None,
    ) -> None:
        """Compares where learning-rate schedules end with where the run ends; to be called before `begin`.

        Args:
            schedules: The schedules.
            processes: Ranks that read data of their own.
            steps: Optimizer steps of the whole run, where the framework tells them; None: those of the totals.
            source_batches: Batches per epoch of the loader from which a user computes a schedule; None if unknown.
            why: Why schedules are stepped several times per optimizer step, as a sentence for the message.
            stepping: How the framework's user lets a scheduler be stepped; None: by calling its `step`.
        """
        self.schedules = ScheduleWatch(
            schedules,
            lambda per_step: run_length(
                self.totals.plan, per_step, processes=processes, steps=steps, source_batches=source_batches
            ),
            why=why,
            stepping=stepping,
        )
        self.passes.began = self._compare_schedules

    def tell_evaluations(self, totals: EvaluationTotals) -> None:
        """Lets `progress` tell how much each evaluation has read."""
        self.evaluations, self.passes.evaluated = totals, totals.ended

    def counted(self, source: Any) -> Any:
        """Returns a source of train batches that counts them as it hands them out, for a loop without a loader.

        Args:
            source: An iterable, each pass over which is a train epoch; an iterator, which is one train epoch; or a
                function without arguments that returns the next batch, all calls of which are one train epoch.

        Returns:
            An iterable, an iterator or a function, as the source is; the source itself where countoff is off.

        Raises:
            TypeError: If the source is none of these.
        """
        if not (isinstance(source, Iterable) or callable(source)):
            raise TypeError(
                f"counted() takes an iterable or a function that returns the next batch, got a {type(source).__name__}"
            )
        if not self._settings.enabled:
            return source
        self.cover_state(source)
        if isinstance(source, Iterator):
            batches = cast("Iterator[Any]", source)
            return self.passes.follow(batches, None, even=functools.partial(even_pass, loader=source, again=_nothing))
        if isinstance(source, Iterable):
            return _CountedPasses(self.passes, source)
        calls = _Calls(source)
        even = functools.partial(even_pass, loader=calls, again=_nothing)
        return self.passes.follow(calls, None, position=self.batches_before, even=even).__next__

    def state_dict(self) -> dict[str, Any]:
        """Returns how far this rank has come, for a checkpoint: plain types, which load without countoff.

        It takes no part in what the run computes. `load_state_dict` compares it with where the resumed run goes on.
        """
        if not self._settings.enabled:
            return {}
        length = self.totals.plan.batches_per_epoch
        left = None if length is None else max(0, length - self.guard.train_batches)
        return self.guard.resumes.record(self.passes.batch, left=left)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begins the fit again where a checkpoint was written. Collective: every rank must call it, before its loop.

        It restores nothing of the run: the epoch and the batch at which the loop goes on are up to the loop. From its
        first batches and steps, countoff warns if it repeats or skips data, or if its learning rate jumps.

        Args:
            state: What `state_dict` has returned, on any rank; an empty mapping where the checkpoint was written
                without countoff. With that, nothing is compared.
        """
        self.resume_from(state, epoch=self._start_epoch or None, steps=self._start_step or None)

    def resume_from(self, record: object, *, epoch: int | None = None, steps: int | None = None) -> None:
        """Begins another fit from a checkpoint that every rank has loaded. Collective: every rank must call it.

        Args:
            record: What `state_dict` has returned when it was written; an empty mapping if it has none.
            epoch: Number of the next train epoch, where the framework or the user says it; None: the record's.
            steps: Optimizer steps that were applied before the checkpoint, likewise.
        """
        has_trained = self.guard.steps > 0
        position, known_epoch, known_steps = self._place_of(record)
        self.begin_again(
            position=position,
            epoch=known_epoch if epoch is None else epoch,
            steps=known_steps if steps is None else steps,
        )
        if record and not self._detached:
            self.guard.resumes.restore(record, Restored(steps=steps), compare=not has_trained)

    def cover_state(self, loader: Any) -> None:
        """Lets a loader that can save its state report the one where the loop is, until the handle ends.

        It matters where ranks take the same number of batches, because they fetch ahead then.
        """
        if self._settings.keeps_even and saves_state(loader) and all(each is not loader for each in self._covered):
            self._covered.append(loader)
            self._release.callback(cover_state(loader))

    def share_length(self, loader: Any) -> None:
        """Lets `len` of a loader give the batches of a train epoch on every rank, once known, until the handle ends.

        It does nothing where ranks are not made even, and for a loader whose class cannot be exchanged.
        """
        if methods := self._length_methods():
            with contextlib.suppress(TypeError):
                self._release.callback(swap_class(loader, lambda _, batches: batches, methods=methods))

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """A context in which passes are not compared, for what may be uneven on purpose, such as `Join`."""
        self.passes.comparing = False
        try:
            yield
        finally:
            self.passes.comparing = True

    def detach(self) -> None:
        """Ends the fit and gives the loaders back as they were. Does nothing when called again.

        Raises:
            DivergenceError: If another rank goes on, or has diverged before.
        """
        if self._release_all():
            self._end_guard()

    def abandon(self) -> None:
        """Gives the loaders back as they were, without a mark that the fit ended. Does nothing when called again."""
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
            self.detach()
        elif not self._detached:
            self._failed = True
            self._left = LeftFit(self.guard, error, self.abandon)
            self._release.close()
            self._left.leave()

    def micro_batch(self) -> None:
        """Counts a micro-batch, unless passes are not compared now."""
        if self.passes.comparing:
            self.passes.guard.micro_batch()

    def observe_loaders(self, loaders: Mapping[str | None, Any], models: Sequence[Any] = ()) -> Callable[[], None]:
        """Counts the passes over loaders from here on; returns a function that gives their own classes back.

        Another handle that still observes one of them is abandoned: the loop starts again, in a notebook, say, or after
        an exception.

        Args:
            loaders: By the evaluation's name; None for the train loader.
            models: The modules whose forward passes for training are counted.

        Raises:
            TypeError: If a loader or a module cannot be observed; then none of them is.
        """
        for loader in loaders.values():
            if (earlier := handle_of(loader)) is not None:
                earlier.abandon()
        with contextlib.ExitStack() as stack:
            for name, loader in loaders.items():
                methods = STATE_METHODS if name is not None else {**STATE_METHODS, **self._length_methods()}
                try:
                    stack.callback(
                        swap_class(loader, functools.partial(self._follow, name), handle=self, methods=methods)
                    )
                    forget_state(loader)
                except TypeError as error:
                    instead = _COUNTED if name is None else ""
                    raise TypeError(f"attach({argument_of(name)}=…) {error}{instead}") from None
            stack.callback(count_forward_passes(models, self.micro_batch))
            return stack.pop_all().close

    def begin(
        self,
        plan: FitPlan,
        versions: Mapping[str, str],
        release: Callable[[], None],
        *notices: Verdict | None,
        record: object = None,
        compare: bool = True,
    ) -> None:
        """Begins the fit. Collective: every rank must call it; it waits at most `deadline_seconds`.

        Args:
            plan: What the ranks must agree on.
            versions: Versions whose differences get a warning.
            release: Gives the loaders back as they were.
            notices: Warnings to give at once.
            record: The record of the checkpoint that every rank has loaded before; empty or None if there is none.
            compare: Whether the fit goes on where that checkpoint was written, as in `Resumes.restore`.
        """
        self._detached = False
        if record:
            position, self.passes.epoch, self.steps_before = self._place_of(record)
            plan = dataclasses.replace(plan, position=position)
        self._plan, self._versions, self._start_step = plan, dict(versions), self.steps_before
        if plan.batches_per_epoch == self.totals.plan.batches_per_epoch:  # else `len` is wrong
            self._own_length = plan.batches_per_epoch
        _active.append(self)
        self._release.callback(_active.remove, self)
        self._release.callback(release)
        self._release.callback(self.schedules.forget)
        self._release.callback(setattr, self, "length_now", _unknown)  # it holds the loader
        self._release.callback(on_optimizer_step(self._step, self._steps_of).remove)
        self._exit_hooks = ExitHooks(self._fail_uncaught, self._at_exit)
        planned = self.schedules.plans(self.steps_before)
        wrong_schedule = self.schedules.begin(self.steps_before)  # before the guard, whose trace tells where it ends
        try:
            self._start_guard(plan, versions, planned)
        except BaseException:
            self._release_all()  # the caller gets no handle, and so could not detach
            raise
        if record:
            self.guard.resumes.restore(record, compare=compare)
        for notice in (*notices, self.totals.wrong_length(), self._sharded_twice(), wrong_schedule):
            if notice is not None:
                self.guard.warn(notice)

    def begin_again(self, *, position: Sequence[int] | None, epoch: int, steps: int) -> None:
        """Begins another fit from a checkpoint that every rank has loaded. Collective: every rank must call it.

        Args:
            position: The checkpoint's position, in which ranks must not differ; None if that is not known.
            epoch: Number of the next train epoch.
            steps: Optimizer steps that were applied before the checkpoint.
        """
        if self._detached:
            return
        self._end_guard()
        self.steps_before = steps
        self.passes.epoch = epoch
        self.passes.guard = self._make_guard()
        planned = self.schedules.plans(steps)
        self._start_guard(dataclasses.replace(self._plan, position=position), self._versions, planned)

    def __enter__(self) -> Attached:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.detach()
        else:
            self.leave_by(error)

    def _follow(self, name: str | None, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        even = functools.partial(even_pass, loader=loader, proven=name is None)
        return self.passes.follow(batches, name, loader=loader, even=even)

    def _length_methods(self) -> Mapping[str, Callable[..., Any]]:
        return {"__len__": self._length_of} if self._settings.uneven_train != "raise" else {}

    def _length_of(self, loader: Any, own: Callable[[], int]) -> int:
        """What `len` gives, of which schedules are made and by which loops find their last batch."""
        length, common = own(), self.guard.common_length
        return length if common is None or length != self._own_length else common

    def _give_back_if_diverged(self) -> None:
        """Gives back the loaders where a verdict leaves the loop; the handle stays until the program ends with it."""
        if self.guard.verdict is not None:
            self._release.close()

    def _release_all(self) -> bool:
        """Gives back what the handle holds; returns False if that has been done before."""
        if self._detached:
            return False
        self._detached = True
        if self._exit_hooks is not None:
            self._exit_hooks.cancel()
        if self._left is not None:
            self._left.close()
        self._release.close()
        return True

    def _place_of(self, record: object) -> tuple[list[int] | None, int, int]:
        """The position at which a checkpoint was written, None if that is not known, its epoch and its steps."""
        try:
            found = ResumeRecord.from_json(record)
        except UNREADABLE:
            return None, self.passes.epoch, 0
        self.batches_before = found.batches or 0
        return [found.epoch, self.batches_before, found.steps], found.epoch, found.steps

    def _start_guard(self, plan: FitPlan, versions: Mapping[str, str], schedules: Sequence[SchedulePlan] = ()) -> None:
        self.guard.trace_totals(lambda: self.totals.plan.metrics(), self._steps_left)
        self.guard.evidence.optimizers_told = self._steps_of is not None
        self.guard.fit_start(plan, versions, schedules, own_length=self._own_length)
        self._learn_common_length(None)
        if self._exit_hooks is not None:
            self._exit_hooks.register_at_exit()

    def _steps_left(self) -> int | None:
        """The steps of this fit after which the schedule ends."""
        end = self.schedules.end_step
        return None if end is None else max(0, end - self.steps_before)

    def _end_guard(self) -> None:
        try:
            self.passes.close_stale(everything=True)
            self.guard.fit_end()
        finally:
            self.guard.close()

    def _step(self, optimizer: Any) -> None:
        guard, steps = self.guard, self.guard.steps
        guard.step(id(optimizer))
        if guard.steps != steps:
            self._loop_steps.add(id(optimizer))
        if (found := self.schedules.stepped(self._steps_done, self.guard.train_batches)) is not None:
            self.guard.warn(found)
        if self.passes.expects_train or (self.passes.expects_more and id(optimizer) in self._loop_steps):
            self.passes.stepped()

    @property
    def _steps_done(self) -> int:
        """The optimizer steps of the whole run until now."""
        return self.steps_before + self.guard.steps

    def _compare_schedules(self, epoch: int) -> None:
        """Compares the schedules again, where an epoch begins."""
        if (found := self.schedules.epoch_begins(f"train epoch {epoch}", self._steps_done)) is not None:
            self.guard.warn(found)

    def _learn_length(self) -> Verdict | None:
        if self.guard.makes_even:  # the epoch may have had the length of another rank's loader
            self._learn_common_length(self.guard.batches)
            return None
        if not self.guard.resumes.begins_epoch:  # its loader may have been restored in the middle of the epoch
            return None
        before, self._last_length = self._last_length, self.guard.batches
        if self.may_resume and before != self._last_length:  # likewise, by a state of its own
            return None
        self.totals.report_again(self.length_now())
        self.totals.observe(self.guard.batches)
        return self.totals.wrong_length() or self._sharded_twice()

    def _sharded_twice(self) -> Verdict | None:
        return self.totals.sharded_twice() if self._settings.fingerprint_batches else None  # 0: no data is compared

    def _learn_common_length(self, batches: int | None) -> None:
        """Updates the totals where ranks take the same number of batches.

        Args:
            batches: What the last epoch has shown; None if there is none.
        """
        if not self.guard.own_length_holds:
            proven = self.guard.common_batches
            self.totals.take_common(batches if proven is None else proven, proven=proven is not None)

    def _fail_uncaught(self, error: BaseException) -> None:
        """Reports the exception that ends the program, if it has ended the loop of this handle and not of another."""
        if _left_by_exception() is self:
            self.guard.failed(error)
        self._failed = True
        self._release.close()

    def _at_exit(self) -> None:
        error = exception_at_exit()
        if error is not None:
            self._fail_uncaught(error)
        goes_on = self.guard.verdict is None or self._settings.on_divergence == "warn"
        if goes_on and not self._failed:
            with contextlib.suppress(DivergenceError):
                self.detach()
        raised = self._failed or getattr(sys, "last_value", None) is not None
        late = self.guard.verdict is not None and not raised and self._settings.on_divergence == "raise"
        self.guard.close()  # waits until a verdict is printed
        if late:
            shutdown.exit_now()  # the verdict came after the program's last line: only an exit code can report it


def _unknown() -> int | None:
    """The length of a loader of which nothing is known."""
    return None


def _nothing() -> Iterator[Any]:
    """What an iterator gives that is begun again."""
    return iter(())


class _Calls:
    """An iterator over what a function returns."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._function()


class _CountedPasses:
    """An iterable that counts every pass over another one."""

    def __init__(self, passes: LoaderPasses, source: Any) -> None:
        self._passes = passes
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        even = functools.partial(even_pass, loader=self._source)
        return self._passes.follow(iter(self._source), None, loader=self._source, even=even)

    def __len__(self) -> int:
        return len(self._source)


def any_active() -> bool:
    """Whether a fit of a handle of this process has begun and has not ended."""
    return bool(_active)


def evaluation_loaders(given: Any) -> Mapping[str, Any]:
    """Returns the evaluation loaders by name, as the argument `eval` of an `attach` gives them.

    Args:
        given: One loader, a mapping from names to loaders, or None.
    """
    if isinstance(given, Mapping):
        return given
    return {} if given is None else {"evaluation": given}


def argument_of(name: str | None) -> str:
    """Returns the argument of `attach` that gave a loader, by the evaluation's name; None for the train loader."""
    return "train" if name is None else "eval"


def _left_by_exception() -> Attached | None:
    """Returns the handle whose loop an exception has left: the latest with an open span, or else the latest."""
    inside = [each for each in _active if each.guard.open_span is not None]
    return next(reversed(inside or _active), None)

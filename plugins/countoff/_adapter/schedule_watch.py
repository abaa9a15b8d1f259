"""Compares where learning-rate schedules end with where the run ends, once, as soon as both can be told."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from countoff._adapter.declared_schedules import UnknownCalls, calls_of, declared_ending
from countoff._adapter.weakly import weakly
from countoff.core import BatchPlan, Verdict
from countoff.core.arithmetic.schedules import Ending
from countoff.core.checks.horizon import Horizon, RunLength, Stepping, run_out, wrong_horizon
from countoff.core.protocol.fit_records import SchedulePlan

__all__ = ["Schedule", "ScheduleWatch", "run_length"]

_MOST_PLANS = 2
_FEWEST_STEPS, _MOST_STEPS = 3, 8
"""Optimizer steps in which the pace of a scheduler is observed."""


@dataclass(eq=False)
class Schedule:
    """One schedule that is compared with the run.

    Attributes:
        name: The scheduler's class.
        ending: Returns where it ends, in calls; None if that is not declared. A checkpoint may change it.
        calls: Returns how often it was stepped until now.
        pace: Calls per optimizer step, above 0; None: it is observed.
        reasons: Why it may be stepped several times per step, by how often, in few words: ``{4: "once per process"}``.
        of_framework: Whether the framework made it for the run by itself; then only its warm-up is compared.
    """

    name: str
    ending: Callable[[], Ending | None]
    calls: Callable[[], int]
    pace: Fraction | None = None
    reasons: Mapping[int, str] = field(default_factory=dict[int, str])
    of_framework: bool = False

    @classmethod
    def of(cls, scheduler: Any, pace: Fraction | None = None, reasons: Mapping[int, str] | None = None) -> Schedule:
        """Returns the schedule of a scheduler.

        Args:
            scheduler: The scheduler, unwrapped. It is held weakly.
            pace: Calls per optimizer step, if they are known.
            reasons: Why it may be stepped several times per step.
        """
        name, held = type(scheduler).__name__, weakly((scheduler,))

        def present() -> Any:
            return next(iter(held()), None)

        return cls(name, lambda: declared_ending(present()), lambda: calls_of(present()), pace, reasons or {})

    def horizon(self, run: RunLength, begin: tuple[int, int]) -> Horizon | None:
        """Returns where the schedule ends, by its present pace; None if that is not known.

        Args:
            run: How long the run is.
            begin: Optimizer steps of the whole run, and the calls that belong to them.
        """
        ending = self.ending()
        if self.pace is None or ending is None:
            return None
        by_batch = {run.gradient_accumulation_steps: "once per batch"}
        return Horizon(self.name, ending, self.pace, {**by_batch, **self.reasons}.get(self._often(run), ""), begin)

    def plan(self, run: RunLength, steps: int) -> SchedulePlan | None:
        """Returns what the schedule will do in the run, for the roll call; None if its end is not known.

        Where its pace is not known, it is stepped once per epoch at least.

        Args:
            run: How long the run is.
            steps: Optimizer steps of the whole run until now.
        """
        if (ending := self.ending()) is None:
            return None
        left = (run.steps or run.steps_per_epoch or 1) - (steps if run.steps else 0)
        sure = run.epochs or 1 if self.pace is None else math.floor(max(0, left - 1) * self.pace) + 1
        return SchedulePlan.of(self.name, ending, begin=self.calls(), calls=sure)

    def explained(self, run: RunLength) -> bool:
        """Whether one of the reasons tells why it is stepped as often as it does."""
        return self._often(run) in self.reasons

    def _often(self, run: RunLength) -> int:
        """How often it is stepped at once, at a step or at an epoch's end; 0 if that is once, or not known."""
        pace = self.pace or Fraction(0)
        often = pace if pace > 1 else pace * (run.steps_per_epoch or 0)
        return int(often) if often > 1 else 0


def _contained(compare: Callable[..., Verdict | None]) -> Callable[..., Verdict | None]:
    """Ends the check of a scheduler that does not show how often it was stepped."""

    @functools.wraps(compare)
    def contained(watch: ScheduleWatch, *arguments: Any) -> Verdict | None:
        try:
            return compare(watch, *arguments)
        except UnknownCalls:
            watch.forget()
            return None

    return contained


class ScheduleWatch:
    """The schedules of one fit, until each has been compared with the length of the run. One of them is warned of.

    Args:
        schedules: The schedules.
        run: Returns how long the run is, as far as that is known. It is called with the batches per optimizer step that
            were observed; None: the framework's number holds.
        why: Why schedules are stepped several times per optimizer step, as a sentence for the message.
        stepping: How the framework's user lets a scheduler be stepped; None: by calling its `step`.

    Attributes:
        end_step: Optimizer steps of the whole run after which the first of the schedules ends; None until it is known.
    """

    def __init__(
        self,
        schedules: Iterable[Schedule],
        run: Callable[[int | None], RunLength],
        *,
        why: str = "",
        stepping: Stepping | None = None,
    ) -> None:
        self.end_step: int | None = None
        self._schedules = [each for each in schedules if each.ending() is not None]
        self._run_of = run
        self._why = why
        self._stepping = stepping or Stepping()
        self._batches: list[int] = []
        self._batches_per_step: int | None = None
        self._wanted: int | None = None
        self._told_steps = False
        self._observed = [_Pace(each) for each in self._schedules if each.pace is None]

    def plans(self, steps: int) -> list[SchedulePlan]:
        """Returns what the first schedules will do in the run, for the roll call; nothing if that cannot be told.

        Args:
            steps: Optimizer steps of the whole run until now.
        """
        try:
            found = [each.plan(self._run(), steps) for each in self._schedules[:_MOST_PLANS]]
        except UnknownCalls:
            return []
        return [plan for plan in found if plan is not None]

    @_contained
    def begin(self, steps: int) -> Verdict | None:
        """Compares what is known before the first step.

        Args:
            steps: Optimizer steps of the whole run until now.
        """
        self._told_steps = steps > 0
        return self._compare(steps)

    @_contained
    def stepped(self, steps: int, batches: int) -> Verdict | None:
        """Observes how often schedulers are stepped; to be called after each optimizer step, before theirs.

        Args:
            steps: Optimizer steps of the whole run until now.
            batches: Batches of the epoch until now.
        """
        if not self._observed:
            return None
        if self._wanted is None:
            total = self._run().steps
            self._wanted = _MOST_STEPS if total is None else max(_FEWEST_STEPS, min(_MOST_STEPS, total // 10))
        if len(self._batches) < self._wanted:
            self._batches.append(batches)
        for pace in self._observed:
            pace.stepped(self._wanted)
        return self._compare_observed(steps - 1)  # the calls of this step are still to come

    @_contained
    def epoch_begins(self, span: str, steps: int) -> Verdict | None:
        """Observes how often schedulers are stepped per epoch; compares where the run's length was not known before.

        Args:
            span: The name of the train epoch.
            steps: Optimizer steps of the whole run until now.
        """
        self._observe_accumulation()
        run = self._run()
        for pace in self._observed:
            pace.epoch_begins(steps, run.steps_per_epoch)
        found = self._compare_observed(steps) or self._compare(steps)
        if found is not None or run.steps is not None:
            return found
        for schedule in self._schedules:
            horizon = schedule.horizon(run, (steps, schedule.calls()))
            if horizon is None:
                continue
            found = run_out(horizon, run, calls=schedule.calls(), span=span, why=self._why_of(schedule))
            if found is not None:
                return self._said(found)
        return None

    def forget(self) -> None:
        """Compares nothing any more, and lets go of the schedulers."""
        self._schedules, self._observed = [], []

    def _compare_observed(self, steps: int) -> Verdict | None:
        """Compares the schedules whose pace has become known, and lets go of those that have none."""
        over = [each for each in self._observed if not each.waits]
        if not over:
            return None
        self._observed = [each for each in self._observed if each.waits]
        self._observe_accumulation()
        irregular = [each.schedule for each in over if each.schedule.pace is None]
        self._schedules = [each for each in self._schedules if each not in irregular]
        return self._compare(steps)

    def _compare(self, steps: int) -> Verdict | None:
        """Compares the schedules whose pace is known with the run, if its length is."""
        run = self._run()
        if run.steps is None:  # an epoch that begins with a learning rate of 0 may still tell
            return None
        for schedule in [each for each in self._schedules if each.pace is not None]:
            horizons = [schedule.horizon(run, begin) for begin in self._begins_of(schedule, steps)]
            found = [each for each in horizons if each is not None]
            wrong = [self._wrong(schedule, horizon, run) for horizon in found]
            self._schedules.remove(schedule)
            if not wrong:
                continue
            fits = wrong.index(None) if None in wrong else 0
            self.end_step = found[fits].end_step if self.end_step is None else self.end_step
            if (verdict := wrong[fits]) is not None:
                return self._said(verdict)
        return None

    def _wrong(self, schedule: Schedule, horizon: Horizon, run: RunLength) -> Verdict | None:
        """Returns what is wrong with where a schedule ends."""
        if schedule.of_framework and horizon.warmup_end_step <= (run.steps or 0):
            return None
        return wrong_horizon(horizon, run, why=self._why_of(schedule), stepping=self._stepping)

    def _begins_of(self, schedule: Schedule, steps: int) -> list[tuple[int, int]]:
        """Returns optimizer steps and calls that belong together, for each way in which the schedule may be meant."""
        calls, pace = schedule.calls(), schedule.pace or Fraction(1)
        if pace > 1:  # within a step, it may have been stepped for some of the step's batches
            calls = int(calls // pace * pace)
        # Where nothing says how many steps came before, a scheduler that was stepped may go on with its run, or have
        # been stepped in another one.
        unknown = not self._told_steps and calls > steps * pace + max(1, pace)
        return [(0, 0), (steps, calls)] if unknown else [(steps, calls)]

    def _run(self) -> RunLength:
        return self._run_of(self._batches_per_step)

    def _observe_accumulation(self) -> None:
        """Learns how many batches there are per optimizer step, where the loop has told another number, or none."""
        known = self._run_of(None).gradient_accumulation_steps
        between = Counter(after - before for before, after in itertools.pairwise(self._batches) if after > before)
        if between and 2 * between[known] < between.total():  # but for the short end of an epoch, and skipped steps
            self._batches_per_step = between.most_common(1)[0][0]

    def _why_of(self, schedule: Schedule) -> str:
        return self._why if schedule.explained(self._run()) else ""

    def _said(self, verdict: Verdict) -> Verdict:
        self.forget()
        return verdict


class _Pace:
    """How often a scheduler is stepped, from its first steps or from its first epoch.

    Args:
        schedule: The schedule. It gets its pace where one has been observed.

    Attributes:
        schedule: The schedule.
        waits: Whether nothing is known yet.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.waits = True
        self._seen: list[int] = []
        self._last: int | None = None
        self._complete = False
        self._epoch: tuple[int, int] | None = None

    def stepped(self, wanted: int) -> None:
        """Takes note of the calls after an optimizer step.

        Args:
            wanted: Steps that are enough.
        """
        self._last = self.schedule.calls()
        if self._complete:
            return  # the scheduler is not stepped within the epoch, or only later in it
        self._seen.append(self._last)
        self._complete = len(self._seen) == wanted
        if not self._complete:
            return
        calls = {after - before for before, after in itertools.pairwise(self._seen)}
        if calls == {0}:
            return
        self.waits = False
        if len(calls) == 1:
            self.schedule.pace = Fraction(calls.pop())

    def epoch_begins(self, steps: int, steps_per_epoch: int | None) -> None:
        """Takes note of the calls at an epoch's begin.

        Args:
            steps: Optimizer steps until now.
            steps_per_epoch: Optimizer steps per epoch, if known.
        """
        before, self._epoch = self._epoch, (steps, self.schedule.calls())
        if before is None:
            return
        steps_between, calls = self._epoch[0] - before[0], self._epoch[1] - before[1]
        within_epoch = self._last is not None and self._last > before[1]
        if within_epoch and not self._complete:
            return  # the first steps tell more
        self.waits = False
        if calls > 0 and not within_epoch and steps_between > 1:
            self.schedule.pace = Fraction(calls, steps_per_epoch or steps_between)


def run_length(
    plan: BatchPlan,
    batches_per_step: int | None = None,
    *,
    processes: int,
    steps: int | None = None,
    limited: bool = False,
    source_batches: int | None = None,
) -> RunLength:
    """Returns how long a run is, as far as its plan is known.

    Args:
        plan: The plan of the train loader.
        batches_per_step: Batches of one rank per optimizer step that were observed; None: the plan's number holds.
        processes: Ranks that read data of their own.
        steps: Optimizer steps of the whole run, where the framework tells them; None: those of the plan.
        limited: Whether the run may be a part of a longer one, whatever its plan says.
        source_batches: Batches per epoch of the loader before it was divided among processes; None if unknown.
    """
    if batches_per_step is not None:
        plan = BatchPlan.of(replace(plan.facts, gradient_accumulation_steps=batches_per_step), dp_degree=plan.dp_degree)
    facts, steps, own = plan.facts, steps or plan.total_steps or None, plan.batches_per_epoch
    before = {source_batches or 0, 0 if own in (None, source_batches) else own * processes} - {0}
    epochs, max_steps = (None if each in (None, -1) else each for each in (facts.max_epochs, facts.max_steps))
    return RunLength(
        steps,
        steps_per_epoch=plan.steps_per_epoch or None,
        epochs=epochs or None,
        gradient_accumulation_steps=facts.gradient_accumulation_steps,
        processes=processes,
        limited=limited or facts.limit_batches is not None or (steps is not None and steps == max_steps),
        epoch_batches=tuple(sorted(before)) if source_batches else (),
    )

"""One fit, as every adapter has it: its guard, the true totals, and the learning-rate schedules."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from countoff._adapter.held_datasets import dealt_rows, sampler_arguments
from countoff._adapter.held_parameters import holders
from countoff._adapter.messages import Messages
from countoff._adapter.reads import Reads
from countoff._adapter.schedule_watch import Schedule, ScheduleWatch, run_length
from countoff._adapter.split_sample import split_sample
from countoff._adapter.torch_facts import learning_rates, schedule_positions
from countoff._adapter.weight_hashes import PendingReplicas, shared_models
from countoff._adapter.whole_epochs import may_begin_inside, whole_epoch
from countoff.core import FitPlan, Guard, LoaderFacts, Settings, Verdict
from countoff.core.arithmetic.totals import LOGGED, Totals, in_words
from countoff.core.checks.framework import judge_length
from countoff.core.checks.horizon import RunLength
from countoff.core.checks.short import EpochEnd, ShortEpochs, judge_run
from countoff.core.data.plain import ABSENT, attribute_of
from countoff.core.protocol.fit_records import SchedulePlan, SharedModel, SplitSample
from countoff.core.session.subgroup import Subgroup

__all__ = ["Fit", "OwnRank", "plan_of"]

_log = logging.getLogger("countoff")

NO_LOADERS: Mapping[str | None, Any] = {}
"""Where no datasets are compared."""


@dataclass(frozen=True)
class OwnRank:
    """This rank, among those that are compared, and the share of the data that it reads.

    Attributes:
        rank: This rank.
        world_size: Ranks that are compared.
        dp_rank: The dp_rank of this rank.
        dp_degree: Shares into which the data is cut, at least 1.
        part: Which ranks these are, if they are a part of the job.
        stage: Its stage of a pipeline, from 0.
    """

    rank: int
    world_size: int
    dp_rank: int
    dp_degree: int
    part: Subgroup | None = None
    stage: int = 0


def plan_of(facts: LoaderFacts, own: OwnRank, **more: Any) -> FitPlan:
    """Returns what all ranks must agree on, by the facts of the train loader.

    Args:
        facts: The facts.
        own: This rank.
        more: Values of the plan that do not follow from these, or that replace them.
    """
    known = {
        "batch_size": facts.batch_size,
        "gradient_accumulation_steps": facts.gradient_accumulation_steps,
        "max_epochs": facts.max_epochs,
        "max_steps": facts.max_steps,
        "dp_rank": own.dp_rank,
        "dp_degree": own.dp_degree,
    }
    return FitPlan(**(known | more))


class Fit:
    """One fit, or one evaluation outside of a fit.

    Args:
        settings: The user's choices.
        messages: The adapter's messages.
        own: This rank.
        totals: The totals of an epoch; None for an evaluation outside of a fit, and as long as they are not known.
        steps_before: Optimizer steps of the run that were applied before the fit.
        optimizers: Returns the optimizers whose learning rates are compared; called every 64 batches.
        schedulers: Returns the learning-rate schedulers, as far as they are known; a resumed run compares where they
            stand with its checkpoint.
        calls_per_step: How often a scheduler is stepped at each optimizer step, at most.
        models: Returns the modules that are compared, as the framework wraps them; called when the fit begins and every
            `weights_every` optimizer steps. None: none are compared.

    Attributes:
        settings: The user's choices.
        own: This rank.
        totals: As above.
        steps_before: As above.
        guard: The guard.
        schedules: The learning-rate schedules that are compared with the run.
        reads: Records which samples the train loader reads.
        trains_apart: Whether ranks train apart on purpose now, so that their weights are not compared.
        short: The train epochs that have ended too early, of this guard.
        left: Whether the loop has left a train epoch of this guard before its loader has ended.
        epochs_ended: Train epochs of this guard that have not been left.
    """

    def __init__(
        self,
        settings: Settings,
        messages: Messages,
        own: OwnRank,
        totals: Totals | None = None,
        *,
        steps_before: int = 0,
        optimizers: Callable[[], Iterable[Any]] = tuple,
        schedulers: Callable[[], Iterable[Any]] = tuple,
        calls_per_step: int = 1,
        models: Callable[[], Iterable[Any]] | None = None,
    ) -> None:
        self.settings = settings
        self.own = own
        self.totals = totals
        self.steps_before = steps_before
        self.schedules = ScheduleWatch((), lambda _: RunLength())
        self.trains_apart = False
        self.reads = Reads(own.dp_rank, own.dp_degree)
        self._told: dict[str, float] = {}
        self._messages = messages
        self._optimizers = optimizers
        self._schedulers = schedulers
        self._calls_per_step = calls_per_step
        self._models = models
        self.short = ShortEpochs()
        self.left = False
        self.epochs_ended = 0
        self._has_evaluated = False
        self._trains_as_planned = True
        self.guard = self._new_guard()

    def watch_schedules(
        self,
        schedules: Iterable[Schedule],
        *,
        steps: int | None = None,
        limited: bool = False,
        source_batches: int | None = None,
        why: str = "",
    ) -> None:
        """Compares where learning-rate schedules end with where the run ends, from here on.

        Args:
            schedules: The schedules.
            steps: Optimizer steps of the whole run, where the framework tells them; None: those of the totals.
            limited: Whether the run may be a part of a longer one, whatever its plan says.
            source_batches: Batches per epoch of the loader from which a user computes a schedule; None if unknown.
            why: Why schedules are stepped several times per optimizer step, as a sentence for the message.
        """

        def run(batches_per_step: int | None) -> RunLength:
            if self.totals is None:
                return RunLength()
            return run_length(
                self.totals.plan,
                batches_per_step,
                processes=self.own.dp_degree,
                steps=steps,
                limited=limited,
                source_batches=source_batches,
            )

        self.schedules = ScheduleWatch(schedules, run, why=why, stepping=self._messages.stepping)

    def begin(
        self,
        plan: FitPlan,
        versions: Mapping[str, str],
        schedules: Sequence[SchedulePlan] | None = None,
        *,
        own_length: int | None = None,
        loaders: Mapping[str | None, Any] = NO_LOADERS,
    ) -> None:
        """Begins the fit. Collective: every rank must call it; it waits at most `deadline_seconds`.

        Args:
            plan: What the ranks must agree on.
            versions: Versions whose differences get a warning.
            schedules: What the schedules will do in the run, where they have been compared with it already; None: asks
                them now.
            own_length: As for `Guard.fit_start`.
            loaders: The loaders whose datasets are compared, by the evaluation's name; None for the train loader.

        Raises:
            DivergenceError: If ranks begin with different plans, schedules or shares of the data.
        """
        planned = self.schedules.plans(self.steps_before) if schedules is None else schedules
        self.guard.trace_totals(self._totals_known, self._steps_left)
        self.reads.soon = lambda job: self.guard.soon(job)
        self.guard.fit_start(
            self._whole(plan, loaders.get(None)),
            versions,
            planned,
            own_length=own_length,
            models=self._shared_models(),
            split=self._split(loaders),
            holders=() if self.own.world_size == 1 else holders(self.models(), self._optimizers()),
            stage=self.own.stage,
        )
        self._take_common_length(None)

    def expects(self, loader: Any) -> None:
        """Records which samples a train loader reads, from its next pass on; to be called before it is iterated.

        Args:
            loader: The loader, or one of Accelerate's that has prepared it.
        """
        if self.settings.enabled and self.settings.compare_data:
            own = attribute_of(loader, "base_dataloader")
            self.reads.expect(loader if own is ABSENT else own)

    def epoch_reads(self, iterator: Any = None, *, spun: bool = False) -> None:
        """Compares what the train epoch reads whose first batch has come.

        Args:
            iterator: The loader's own iterator; None where only the framework has it.
            spun: As for `Reads.begin`.
        """
        self.reads.begin(self.guard, None if self.totals is None else self.totals.plan, iterator, spun=spun)

    def renew(self, steps_before: int) -> None:
        """Gives the fit another guard, which has not begun, where the run goes on at another position.

        Args:
            steps_before: Optimizer steps of the run that were applied before that position.
        """
        self.steps_before = steps_before
        self.short, self.left, self.epochs_ended = ShortEpochs(), False, 0
        self.guard = self._new_guard()

    def warn(self, *verdicts: Verdict | None) -> None:
        """Warns of what was found; None stands for nothing."""
        for verdict in verdicts:
            if verdict is not None:
                self.guard.warn(verdict)

    def changes_loader(self, *, planned: bool) -> None:
        """Takes note that the totals are those of another train loader from here on.

        Args:
            planned: Whether it is the one whose length the ranks have compared when the fit began.
        """
        self._trains_as_planned = planned
        self._take_common_length(None)

    def evaluates(self, train: Any, loader: Any) -> None:
        """Compares how ranks have split their data, where a framework shows no loader of an evaluation before that.

        Args:
            train: The train loader.
            loader: The loader of an evaluation, which is certain to be one; the first of the fit is compared.
        """
        if not (self._has_evaluated or self.trains_apart):
            self._has_evaluated = True
            split = self._split({None: train, "evaluation": loader})
            if split is not None:
                self.guard.evaluates(split)

    def epoch_begins(self, epoch: int, *, steps: int | None = None) -> None:
        """Compares the schedules again, where a train epoch begins with its first batch.

        Args:
            epoch: Its number.
            steps: Optimizer steps of the whole run until now, as the framework counts them; None: as the guard does.
        """
        self.warn(self.schedules.epoch_begins(f"train epoch {epoch}", self.steps_done if steps is None else steps))

    def stepped(self) -> None:
        """Observes how often schedulers are stepped; to be called after each step that the guard has counted."""
        self.warn(self.schedules.stepped(self.steps_done, self.guard.train_batches))

    def epoch_ended(self, epoch: int, batches: int, loader: Any, *, position: int | None = 0) -> None:
        """Takes note of a train epoch that the end of its loader has ended; to be called for each of them.

        Args:
            epoch: Its number.
            batches: Batches of this rank in it, those before a checkpoint included.
            loader: The train loader.
            position: Those of them that were trained on before this fit; None if that is not known.
        """
        first, self.epochs_ended = not self.epochs_ended and not self.left, self.epochs_ended + 1
        plan = None if self.totals is None else self.totals.plan
        if plan is None or plan.reported_batches_per_epoch is None or batches >= plan.reported_batches_per_epoch:
            return  # as almost always
        whole, inside = None, False
        with contextlib.suppress(Exception):  # of the user's own objects
            whole, inside = whole_epoch(loader, plan), first and may_begin_inside(loader)
        if whole is None or position is None or self._ends_with_others:
            return
        given, resumed = batches - position, first and self.steps_before > 0
        # The first pass of a loader that was restored has less, and who has restored it may know that.
        if first and (given or (inside and not resumed)):
            return
        if not self.short.number:
            applied = plan.facts.partial_step in ("applied", "at_reported_end")
            self.short = ShortEpochs(plan.facts.gradient_accumulation_steps, partial_applied=applied)
        self.short.add(EpochEnd(epoch, given, whole, position, resumed, restored=resumed and inside))

    def epoch_left(self) -> None:
        """Takes note of a train epoch that the loop has left before its loader has ended."""
        self.left = True

    def run_ended(self, *, steps: int, planned: int | None = None, max_steps: int | None = None) -> None:
        """Warns if a run that has ended by itself, and not by anyone's choice, is shorter than planned.

        To be called before the guard's `fit_end`. Says nothing where no train epoch has ended too early.

        Args:
            steps: Optimizer steps of the whole run.
            planned: Those of its plan; None: with those that its short epochs have not had.
            max_steps: The limit of steps, if there is one.
        """
        if not self.short.number or not self.guard.state.leads:
            return
        planned = steps + self.short.missing_steps if planned is None else planned
        self.warn(judge_run(self.short, steps=steps, planned=planned if max_steps is None else min(planned, max_steps)))

    @property
    def _ends_with_others(self) -> bool:
        return self.settings.uneven_train != "raise" and self.own.world_size > 1

    @property
    def steps_done(self) -> int:
        """The optimizer steps of the whole run until now."""
        return self.steps_before + self.guard.steps

    def progress(self) -> float | None:
        """Returns the fraction of the train epoch that this rank has done, 0 to 1; None while that is unknown."""
        return None if self.totals is None else self.totals.progress(self.guard.train_batches)

    def wrong_length(self) -> Verdict | None:
        """Returns a warning if the train loader has another number of batches than the framework counts on."""
        return None if self.totals is None else judge_length(self.totals.own, counted_by=self._messages.length_of)

    def learn_length(self) -> Verdict | None:
        """Updates the totals by the train epoch that the end of its loader is about to end.

        Returns:
            A warning if that shows a wrong length; else None.
        """
        if self.totals is None:
            return None
        if self.guard.makes_even:  # the epoch may have had the length of another rank's loader
            self._take_common_length(self.guard.batches)
            return None
        self.totals.observe(self.guard.batches)
        return self.wrong_length()

    @property
    def epoch_batches(self) -> int | None:
        """The true batches of a train epoch on this rank; None while they are not known."""
        return None if self.totals is None else self.totals.plan.batches_per_epoch

    def batches_left(self, length: int | None) -> int | None:
        """Returns how many of a train epoch's batches this rank has yet to begin; None if that is not known.

        Args:
            length: The batches of the epoch on every rank; None if they are not known.
        """
        return None if length is None else max(0, length - self.guard.train_batches)

    @property
    def metrics(self) -> dict[str, float]:
        """The true totals as known by now, and what the roll calls have measured, under the names of the metrics."""
        return {**self._totals_known(), **self.guard.metrics}

    def in_words(self) -> str:
        """Returns what is known of the run as sentences, a line for each."""
        if (totals := self.totals) is None:
            return in_words(self._totals_known())
        # Where steps end the run, and the data reports no end, nobody counts in epochs.
        endless = totals.plan.facts.max_steps is not None and totals.plan.reported_batches is None
        alone = self.own.world_size > 1 and totals.observed_batches is not None and not self._ends_with_others
        of = "this rank" if alone else "each rank"
        return in_words(self._totals_known(), "" if endless else totals.unknown_because, of=of)

    def log_in_words(self) -> None:
        """Writes the same into the program's log, in one line, on the first rank."""
        if self.settings.totals != "off" and self.own.rank == 0:
            _log.info(self.in_words().replace("\n", " "))

    def news(self) -> dict[str, float]:
        """Returns the totals for the framework's loggers that are not as they were at the last call."""
        totals = self._totals_known()
        known = {name: totals[f"countoff/{name}"] for name in LOGGED if f"countoff/{name}" in totals}
        return self.changed(
            {f"countoff/{self._messages.names.get(name, name)}": value for name, value in known.items()}
        )

    def unused(self) -> dict[str, float]:
        """Returns how many batches of uneven ranks were left, if that is not as at the last call."""
        measured = self.guard.metrics
        return self.changed({name: value for name, value in measured.items() if name.startswith("countoff/batches_")})

    def changed(self, found: Mapping[str, float]) -> dict[str, float]:
        """Returns those of the numbers for the framework's loggers that they do not have; none with `totals="off"`."""
        if self.settings.totals == "off":
            return {}
        news = {name: value for name, value in found.items() if self._told.get(name) != value}
        self._told |= news
        return news

    def models(self) -> Iterable[Any]:
        """Returns the modules that the ranks train, as far as they are known."""
        return () if self._models is None else self._models()

    def _new_guard(self) -> Guard:
        models = self._models
        return Guard(
            self.settings,
            rank=self.own.rank,
            world_size=self.own.world_size,
            subgroup=self.own.part,
            remedies=self._messages.remedies,
            learning_rates=lambda: learning_rates(self._optimizers()),
            schedules=lambda: schedule_positions(self._optimizers(), self._schedulers()),
            calls_per_step=self._calls_per_step,
            weights=None if models is None else lambda: PendingReplicas(() if self.trains_apart else models()),
            framework=self._messages.framework,
        )

    def _shared_models(self) -> Sequence[SharedModel]:
        if self._models is None or self.own.world_size == 1 or self.trains_apart:
            return ()
        with contextlib.suppress(Exception):  # as without a process group any more: nothing is proved then
            return shared_models(self._models())
        return ()

    def _whole(self, plan: FitPlan, loader: Any) -> FitPlan:
        """Returns a plan with what is known of the data, and without what is not compared."""
        if self.settings.uneven_eval == "off":
            plan = replace(plan, evaluation_intervals=None)
        if not self._compares_data:
            return plan
        known = None if self.totals is None else self.totals.dataset_rows
        share = {"dp_rank": self.own.dp_rank, "dp_degree": self.own.dp_degree}
        rows = dealt_rows(loader, known=known, **share)
        return replace(plan, dataset_rows=rows, sampler=sampler_arguments(loader, **share))

    def _split(self, loaders: Mapping[str | None, Any]) -> SplitSample | None:
        if not self._compares_data or self.settings.levels.get("SplitLeak") == "off":
            return None
        return split_sample(loaders, dp_rank=self.own.dp_rank, dp_degree=self.own.dp_degree)

    @property
    def _compares_data(self) -> bool:
        return self.own.world_size > 1 and self.settings.compare_data

    def _totals_known(self) -> Mapping[str, float]:
        """The totals; of samples, which are those of all ranks, none where the ranks' loaders are known to differ."""
        known = {} if self.totals is None else self.totals.plan.metrics()
        agreed = self.guard.agreed
        if not agreed or {"batches_per_epoch", "own_batches_per_epoch"} & agreed or self._ends_with_others:
            return known
        return {name: value for name, value in known.items() if not name.startswith("countoff/samples_")}

    def _steps_left(self) -> int | None:
        """The steps of this fit after which the learning-rate schedule ends."""
        end = self.schedules.end_step
        return None if end is None else max(0, end - self.steps_before)

    def _take_common_length(self, batches: int | None) -> None:
        """Updates the totals where ranks take the same number of batches, which need not be that of their own loaders.

        Args:
            batches: What the last epoch has shown; None if there is none.
        """
        planned = self._trains_as_planned
        own_holds = self.guard.own_length_holds if planned else self.settings.uneven_train == "raise"
        if self.totals is not None and self.guard.registration is not None and not own_holds:
            proven = self.guard.common_batches if planned else None
            self.totals.take_common(batches if proven is None else proven, proven=proven is not None)

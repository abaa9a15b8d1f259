"""The guard: what an adapter calls. It needs nothing else of countoff.

The way of a batch reads from top to bottom: a public method counts, `_look` or `_pass` hands the counters to the
protocol's `State`, the state puts what must be written or printed into its outbox, and the runtime carries that out on
threads of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from countoff.core import constants
from countoff.core.alerts.termination_log import TerminationLog
from countoff.core.checks import Checks
from countoff.core.checks.check import Check, FitStart, Listener
from countoff.core.checks.data import DataIdentity
from countoff.core.checks.once import Once
from countoff.core.checks.resume import Resumes
from countoff.core.ending import shutdown, sigterm, verdict_file
from countoff.core.messages import clip
from countoff.core.protocol.actions import PrintWarning
from countoff.core.protocol.counters import SpanCounters, TickPlace, UnusedBatches
from countoff.core.protocol.credits import Credits
from countoff.core.protocol.evidence import Evidence
from countoff.core.protocol.fit_records import SchedulePlan
from countoff.core.protocol.records import FitPlan, Reason, SyncKind, sync_entry
from countoff.core.protocol.resume_record import ScheduleState
from countoff.core.session.liveness.processes import began_at
from countoff.core.session.state import NEVER, State
from countoff.core.session.store.agreement import Agreement
from countoff.core.session.subgroup import Subgroup
from countoff.core.session.threads import first_fit
from countoff.core.session.threads.other_ranks import OtherRanks, find_at_once
from countoff.core.session.threads.roll_call import RollCall
from countoff.core.session.threads.writer import SYNC_SECONDS
from countoff.core.settings import Settings
from countoff.core.verdict import DivergenceError, Remedies, Verdict
from countoff.core.waiting import until

if TYPE_CHECKING:
    from countoff.core.checks.weights import PendingHashes
    from countoff.core.protocol.fit_records import SharedModel, SplitSample
    from countoff.core.session.store.channel import Channel
    from countoff.core.session.threads.registration import Registration
    from countoff.core.session.threads.writer import Writer

_HOLD_SECONDS = 0.005
_WORKER_SECONDS = 0.5
_numbers: defaultdict[tuple[Any, ...], Iterator[int]] = defaultdict(itertools.count)
"""For traces, by the key of a part, and () for the whole job. Ranks that have begun the same fits count alike."""
_alone = itertools.count(1 << 20)
"""Likewise for guards of one rank."""


class Guard:
    """Counts one rank's batches and steps, and compares them with those of all other ranks.

    An adapter makes one guard per fit (and one per evaluation outside of a fit) on **every** rank, in the same order,
    and translates its framework's hooks::

        guard = Guard(settings, rank=rank, world_size=world_size)
        guard.fit_start(FitPlan(batches_per_epoch=len(loader), batch_size=32))   # every rank; waits for the others
        for epoch in range(epochs):
            guard.train_start(epoch)
            for batch in loader:
                guard.batch()                     # before the batch is trained on
                ...
                guard.step()                      # after an optimizer step was applied
            guard.train_end("exhausted")          # or "stopped": a limit, a break, early stopping
            guard.eval_start("validation")
            for batch in eval_loader:
                guard.batch()
            guard.eval_end("exhausted")
        guard.fit_end()
        guard.close()

    An exception that leaves the loop goes through `failed` first, so that the other ranks are told; where the program
    may still catch it, through `failing`. Any method may raise `DivergenceError` (one of its leaves) while the guard is
    watching. In a healthy job `fit_start` waits for other ranks, at most `deadline_seconds`. The end of a span waits
    until all ranks are there, at most 5 ms, and `fit_end` at most 50 ms; every other method waits at most 50 ms, for
    its own threads. Once there is a verdict, a method waits until that is printed, a few seconds at most, and `close`
    completes the last roll calls, what is told of samples that were read, and the last comparison of weights, each for
    at most 5 s. Where ranks are kept even, `close` also waits until what this rank has to tell is written, at most
    `lost_seconds`, and with `trace_dir` 1.5 s at most until the trace is written. No method calls the store. With one
    rank nothing is ever raised, and nothing is started but the thread that writes the trace, and those that tell of a
    warning.

    Args:
        settings: The user's choices.
        rank: This rank.
        world_size: Ranks that are compared: those of the job, or of the subgroup.
        subgroup: These ranks, if they are a part of the job; every rank of it makes the guard, and no other one.
        remedies: What to do about each kind of verdict, in the framework's own words; see `Remedies`.
        learning_rates: Returns the learning rates in force; called every 64 batches, at the sync points of a train
            epoch, at the first two optimizer steps of a fit, and when a checkpoint is written; with `trace_dir` also by
            a thread of its own.
        schedules: Returns the base rates of the learning-rate schedules, and how often each scheduler was stepped; as
            far as they are known.
        calls_per_step: How often a scheduler is stepped at each optimizer step, at most.
        weights: Begins to compute hashes of what this rank's model must hold in common with other ranks; called every
            `weights_every` optimizer steps. None: weights are not compared.
        framework: The framework's name, for the trace.

    Attributes:
        state: This rank's state, which its threads share.
        span: The counters of the innermost span; before the first one, counters that nobody compares.
        registration: What talks to the other ranks, for this guard; None before `fit_start`, and where there is no
            other rank.
        data: Compares what the ranks read. Give it the train batches while `guard.data.fingerprints_due` is not 0.
        once: Compares which samples the ranks have read in a train epoch, where an adapter tells.
        resumes: Makes the record for a checkpoint, and takes the one of the checkpoint from which a fit resumes.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        rank: int,
        world_size: int,
        subgroup: Subgroup | None = None,
        remedies: Remedies | None = None,
        learning_rates: Callable[[], Sequence[float]] | None = None,
        schedules: Callable[[], tuple[Sequence[float], Sequence[int]]] | None = None,
        calls_per_step: int = 1,
        weights: Callable[[], PendingHashes] | None = None,
        framework: str = "",
    ) -> None:
        self._settings = settings
        self._learning_rates = learning_rates
        self._schedules = schedules
        self._calls_per_step = calls_per_step
        self.registration: Registration | None = None
        self._roll_call: RollCall | None = None
        self._framework = framework
        self._totals: Callable[[], Mapping[str, float]] = dict[str, float]
        self._horizon: Callable[[], int | None] = lambda: None
        self._comparing = True
        self._closed = self._left = self._exhausted = False
        self._own_batches: int | None = None
        self._last_credits: dict[bool, Credits] = {}  # those of the last even pass, by whether it was an evaluation
        self.span = self._train = SpanCounters("before the first span", compared=False)
        self.state = State(rank, world_size, settings, remedies or {}, ranks=() if subgroup is None else subgroup.ranks)
        self._subgroup = subgroup
        self._checks = checks = Checks.of(
            self.state, learning_rates_in_force=learning_rates, schedule=self._schedule, hash_weights=weights
        )
        self._listeners: tuple[Listener, ...] = checks
        self._watch_steps = [each for each in checks if type(each).stepped is not Listener.stepped]
        self._compare_ticks = [each for each in checks if type(each).tick is not Check.tick]
        self.data: DataIdentity = checks.data
        self.once: Once = checks.once
        self.resumes: Resumes = checks.resumes
        if world_size == 1:
            self.state.outbox.tell(self._print_alone)

    def fit_start(
        self,
        plan: FitPlan,
        versions: Mapping[str, str] | None = None,
        schedules: Sequence[SchedulePlan] = (),
        *,
        own_length: int | None = None,
        models: Sequence[SharedModel] = (),
        split: SplitSample | None = None,
        holders: Sequence[int] = (),
        stage: int = 0,
    ) -> None:
        """Begins a fit. Collective: every rank must call it; it waits for the others, at most `deadline_seconds`.

        Args:
            plan: What all ranks must agree on.
            versions: Versions of what computes, by package; a difference is a warning.
            schedules: The learning-rate schedules of this rank, as far as they are known.
            own_length: What `len` of this rank's train loader gives now, where a pass that begins now has so many
                batches or the framework takes no more; None if that is not known. `common_length` follows from it.
            models: The parameters that this rank must hold alike with others; a difference is a warning.
            split: How this rank has split a dataset for training and evaluation; likewise. None if that is not known.
            holders: The ranks that are proven to hold the very parameters that this rank's optimizers change, this one
                included. Only among these, learning rates and schedules must be equal.
            stage: This rank's stage of a pipeline, from 0. Ranks of one dp_rank and stage must read the same data.

        Raises:
            TypeError: If the plan is not a `FitPlan`; nothing is started then.
            SettingsError: If `verdict_file` cannot be written there; nothing is started then.
            PlanMismatch: If ranks differ in one of the plan's values.
            LearningRateMismatch: If their schedules have different learning rates within the run.
            RankMapError: If their dp_ranks leave data unread, or make ranks read each other's data.
        """
        if not isinstance(plan, FitPlan):  # pyright: ignore[reportUnnecessaryIsInstance]  # a dict, as of version 0.1
            raise TypeError(f"expected a FitPlan, got a {type(plan).__name__}: fit_start(FitPlan(batch_size=…))")
        part = () if self._subgroup is None else self._subgroup.ranks
        verdict_file.clear(self._settings, self.state.rank, part)
        TerminationLog(constants.TERMINATION_LOG).clear(began_at())
        first_fit.begin()
        number = next(
            _alone if self.state.world_size == 1 else _numbers[() if self._subgroup is None else self._subgroup.key]
        )
        self.state.evidence.home = threading.get_ident()
        self._trace(number)
        start = of_this_rank = FitStart(
            plan,
            versions or {},
            schedules,
            own_length=own_length,
            models=models,
            split=split,
            holders=tuple(holders),
            stage=stage,
        )
        if self.state.world_size == 1:
            self._tell(lambda each: each.fit_started(start, None))
        else:
            # Imports torch: only where there is another rank.
            from countoff.core.session.threads.registration import Registration

            if self._settings.uneven_train != "raise":  # ranks may differ in their lengths
                self._own_batches = plan.proven_batches_per_epoch
                if plan.why_equal_lengths is None:
                    plan = replace(plan, batches_per_epoch=None, proven_batches_per_epoch=None)
                start = replace(start, plan=plan, own_batches=self._own_batches)
            registration = Registration(self.state, self._subgroup)
            call = self.meet(registration, start, of_this_rank)
            registration.start()
            self._count_off(start, registration, call)
        self.started()

    def meet(self, registration: Registration, start: FitStart, of_this_rank: FitStart | None = None) -> RollCall:
        """Takes part in a job. Sends nothing; a part of `fit_start`, and of simulations.

        Args:
            registration: This guard among those that share the threads, or what stands in for it.
            start: What this rank tells the others.
            of_this_rank: What it tells its own trace, where that is not the same.

        Returns:
            The roll calls of this rank.
        """
        self.registration = registration
        self._roll_call = call = RollCall(self.state, registration.writer, self._checks)
        if self.state.observer is not None:
            self.state.observer.met(registration.writer)
        others, recorder, own = (
            OtherRanks(self.state, registration.writer, call),
            self.state.observer,
            of_this_rank or start,
        )
        self._tell(lambda each: each.fit_started(own if each is recorder else start, others))
        return call

    def started(self) -> None:
        """Passes the sync point of the fit's start, after the roll call; a part of `fit_start`, and of simulations.

        Raises:
            DivergenceError: If ranks are known to be out of step.
        """
        self._pass("fit_start", "the fit")

    def trace_totals(
        self, metrics: Callable[[], Mapping[str, float]], horizon: Callable[[], int | None] = lambda: None
    ) -> None:
        """Lets the trace tell the true totals and the reported ones; to be called before `fit_start`.

        Args:
            metrics: Returns them as known by now, by the names with which adapters log them; called on a thread of the
                trace.
            horizon: Returns the optimizer steps of the fit after which the learning-rate schedule ends, likewise; None
                while that is not known.
        """
        self._totals, self._horizon = metrics, horizon

    def train_start(self, epoch: int, position: int = 0) -> None:
        """Opens a train epoch.

        Args:
            epoch: Its number, from 0.
            position: Batches of it that were trained on before the checkpoint from which this rank resumes.
        """
        name = f"train epoch {epoch}"
        self._train = SpanCounters(name, started=position, prefetched=position, compared=self._comparing)
        self._open("train_start", self._train, epoch=epoch)

    def batch(self, fetched: int = 0, *, last: bool = False) -> None:
        """Counts a batch that is about to be used, in the innermost open span.

        Args:
            fetched: Batches of this span that were certainly taken from this rank's loader, this one included, where
                the framework fetches ahead; 0 where it does not.
            last: Whether this batch is known to be the last one, because the loader was seen to hold no more or the
                framework will take no more; never because of `len()`.

        Raises:
            DivergenceError: If ranks are known to be out of step.
        """
        span = self.span
        span.started = started = span.started + 1
        if fetched:
            span.prefetched = fetched
        if last or started >= self.state.next_check_at:
            self._look(last)

    def look(self) -> None:
        """Does what is due at the current batch, once its number has reached the `next_check_at` of `state`.

        For an adapter that is itself called for every batch, so that a call of `batch` would be most of its cost. It
        adds 1 to the `started` of `span`, and calls this if that is then at least `next_check_at`.

        Raises:
            DivergenceError: If ranks are known to be out of step.
        """
        self._look(False)

    def last_batch(self) -> None:
        """Marks the current batch as the last one; for callers that learn it only after `batch()`.

        Raises:
            DivergenceError: If ranks are known to be out of step.
        """
        self._look(True)

    def batch_requested(self) -> None:
        """Reports that this rank is about to request another batch of the train epoch, whether or not one arrives.

        For a framework in which ranks meet in a collective before each batch. A rank that stopped alone is missing
        there, and the others never reach `batch`.

        Raises:
            DivergenceError: If ranks are known to be out of step.
        """
        span = self.span
        if span.evaluation:
            return
        span.requested = span.started + 1
        if not self.state.next_check_at:
            self.state.look()
            self._raise_if_diverged(coming=1)

    def even(
        self,
        batches: Iterator[Any],
        *,
        samples: Callable[[Any], int | None] = lambda batch: None,
        snapshot: Callable[[], Any] | None = None,
        ahead: bool = False,
        prefetches: bool = False,
        proven: bool = False,
        length: int | None = None,
    ) -> Iterator[Any]:
        """Returns an iterator with which the innermost open span has the same number of batches on every rank.

        Collective: every rank must iterate it at the same place. It waits for a rank whose loader is slower, as the
        next collective would, and a verdict ends that wait.

        Args:
            batches: This rank's iterator over its loader.
            samples: Returns the samples of this rank in a batch; None if that is not known.
            snapshot: Returns the loader's state, from which a run can resume; called after each batch that is fetched.
            ahead: Whether the caller fetches one batch ahead of the one that its loop trains on.
            prefetches: Whether the loader fetches ahead by itself, in processes of its own, so that nobody sees whether
                a batch is taken from it sooner. Only then does this rank hold batches ahead.
            proven: Whether this is the loader whose length the fit's plan proves.
            length: Batches of the whole span that this rank's loader has, where the caller's framework goes by that.

        Returns:
            An `EvenPass`, or `batches` itself where ranks are not to be made even.
        """
        span, registration = self.span, self.registration
        if not self.makes_even or registration is None or self._roll_call is None or span.credits is not None:
            return batches  # as it is; where the span has credits, another pass has it already
        from countoff.core.session.threads.even_pass import EvenPass  # only where it is asked for

        total = self.common_batches if proven and not span.evaluation else None
        own = None if length is None else length - span.started
        if total is not None and self._own_batches is not None:
            own = self._own_batches - span.started
            credits = Credits.known(span.opened, max(0, total - span.started))
        else:
            last = self._last_credits.get(span.evaluation)
            credits = Credits(
                span.opened,
                constants.LOOKAHEAD,
                ahead=prefetches,
                size=0 if last is None else last.size,  # what made blocks grow still does
                ranks=self.state.world_size,
            )
            self._last_credits[span.evaluation] = credits
        self.state.begin_credits(span, credits)
        return EvenPass(
            self.state,
            span,
            credits,
            batches,
            samples=samples,
            snapshot=snapshot,
            ahead=ahead,
            own=own,
            read_log=registration.writer.read_log,
        )

    def step(self, optimizer: object = None) -> None:
        """Counts an optimizer step that was applied; several optimizers in one batch are one step.

        Args:
            optimizer: Which optimizer it was, hashable; needed only where a loop may apply its steps on another thread
                than the one that takes the batches.
        """
        state = self.state
        before = state.steps
        state.evidence.steps(state.evidence.current())
        state.step(optimizer)
        if state.steps != before:
            for check in self._watch_steps:
                if check.watches_steps:
                    self._tell_step(check)

    def micro_batch(self) -> None:
        """Counts a micro-batch: one forward and backward pass for training, in the innermost open span.

        Ranks that ran different numbers of them for one optimizer step are warned of at the next tick or sync point.
        Call it on every rank, or on none; and not where ranks may run unequally many.
        """
        self.span.micro_batches += 1

    def forward_pass_begins(self) -> None:
        """Reports that a forward pass of a model begins, whose shards all ranks hold; see `forward_pass_ended`."""
        log = self.state.micro_batches
        log.sharded = log.running = True

    def forward_pass_ended(self, *, counts: bool) -> None:
        """Reports the end of that pass. It counts in the innermost open span, in place of micro-batches.

        Args:
            counts: Whether it was a collective: whether it has gathered shards.
        """
        self.state.micro_batches.running = False
        self.span.passes += counts

    def report_unused(self, unused: UnusedBatches) -> None:
        """Reports what this rank's loader had beyond the batches used, just before the innermost span is closed."""
        self.span.unused = unused

    def waited(self, seconds: float) -> None:
        """Adds time that the training thread waited for its loader in the innermost open span."""
        self.span.loader_seconds += seconds

    def eval_start(self, name: str, *, train_exhausted: bool = False) -> None:
        """Opens an evaluation, alone or in the middle of a train epoch.

        Args:
            name: Its name, equal on all ranks: ``validation``.
            train_exhausted: Whether the train loader around it was seen to hold no more.
        """
        # Where not every rank evaluates, evaluations have no sync points.
        compared = self._settings.uneven_eval != "off" and self._comparing
        span = SpanCounters(clip(name, 60), evaluation=True, opened=-1, compared=compared)
        self._open("eval_start", span, reason="exhausted" if train_exhausted else "")

    def eval_loader(self, index: int) -> None:
        """Reports that the next batches of this evaluation come from its loader number `index`, from 0."""
        counts = self.span.counts
        while len(counts) < index:  # close the loaders before: each holds what the others have not
            counts.append(self.span.started - sum(counts))

    def eval_end(self, reason: Literal["exhausted", "stopped"], *, may_raise: bool = True) -> None:
        """Closes the evaluation.

        Args:
            reason: Whether its loader was exhausted, or the pass stopped before that.
            may_raise: False where an exception would be lost, as in a generator's end; the next call raises it then.

        Raises:
            UnevenBatches: If ranks had different numbers of batches and `uneven_eval` is `raise`.
        """
        self._close_span("eval_end", reason, may_raise)

    def evaluated_apart(self, name: str, batches: int) -> None:
        """Reports an evaluation that has no place among the spans: it ran beside the training, on another thread.

        Its batches are compared with those of the same evaluation on other ranks, as `uneven_eval` says. Never waits.

        Args:
            name: Its name, equal on all ranks.
            batches: Batches of this rank, all that its loader has.
        """
        if not self._closed:
            self._checks.uneven.evaluated_apart(name, batches)

    def evaluates(self, split: SplitSample) -> None:
        """Compares how ranks have split a dataset, where that is known with the fit's first evaluation only.

        To be called at most once in a fit; a difference is a warning. Never waits.

        Args:
            split: How this rank has split the dataset for training and evaluation.
        """
        if not self._closed:
            self._checks.splits.evaluates(split)

    def suspect_weights(self, unaveraged: int, moment: str, begin: Callable[[], PendingHashes]) -> None:
        """Compares weights now, where an optimizer has stepped by gradients that were not averaged. It does not wait.

        Args:
            unaveraged: The number of that step since the fit began, from 1.
            moment: What tells this comparison from every other one of the same batch, in the same words on all ranks.
            begin: Begins to compute the hashes of the weights that ranks must hold alike.
        """
        weights = self._checks.weights
        weights.suspect(self.span, unaveraged, moment, begin)
        if weights.wants_batch:
            with self.state.lock:
                self._set_next_check(self.span)

    def train_end(
        self, reason: Literal["exhausted", "stopped"], *, notice: Verdict | None = None, may_raise: bool = True
    ) -> None:
        """Closes the train epoch.

        Args:
            reason: Whether its loader was exhausted, or the pass stopped before that.
            notice: A warning that holds if all ranks have closed the epoch alike; it is given once they have.
            may_raise: As for `eval_end`.

        Raises:
            DivergenceError: If ranks are known to be out of step.
        """
        self._close_span("train_end", reason, may_raise, notice)

    def fit_end(self) -> None:
        """Ends the fit; from here on a lost store or a lost rank is no fault.

        Raises:
            DivergenceError: If another rank goes on.
        """
        self._tell(lambda each: each.fit_ending())
        self._pass("fit_end", "the fit", hold=SYNC_SECONDS - _HOLD_SECONDS)
        self.state.finished = True
        self._tell(lambda each: each.fit_ended())

    def failed(self, error: BaseException) -> None:
        """Tells the others that this rank is about to die of an exception; never raises.

        A rank that fails because it lost a peer waits half a second for the better cause first, longer if the store is
        slow or there are several hosts. The guard goes on watching: if the way out blocks in a collective, the process
        ends after 3 s.

        One guard of a process reports an exception; the verdict of another guard is no failure of this one.
        A `SystemExit` is no failure by itself, as all ranks may leave alike: it is reported as by `failing`.

        Args:
            error: The exception.
        """
        self._report(error, may_be_caught=isinstance(error, SystemExit))

    def failing(self, error: BaseException) -> None:
        """Tells the others of an exception that has left the loop or the loader, and may still be caught; never raises.

        It ends no rank by itself. The others are ended by it once they need this rank: one of them waits in a
        collective for `lost_seconds`, or its collective fails, or it begins batches that this rank has not come to. It
        waits for nothing; only where the exception comes from a lost peer, it waits as `failed` does.

        Args:
            error: The exception.
        """
        self._report(error, may_be_caught=True)

    def soon(self, job: Callable[[Any], object]) -> bool:
        """Has a function called on the guard's thread; it may be asked for at any moment, as by a finalizer.

        Args:
            job: Called with the guard's channel.

        Returns:
            Whether it will be: not where there is no other rank, before the fit and after it.
        """
        if self.registration is None or self._closed:
            return False
        self.state.outbox.put(job)
        return True

    def recovered(self) -> None:
        """Takes back what `failing` has told, where the loop goes on after its exception. Does nothing otherwise."""
        self.state.recover()

    def leave(self, is_over: Callable[[], bool], close: Callable[[], None]) -> None:
        """Stops counting where an exception has left the loop. Once that is over, or another fit begins, it is closed.

        Until then the guard can still report that nothing has caught the exception.

        Args:
            is_over: Whether the exception is over, because the program has caught it. Called on a thread.
            close: Closes the guard. Called once, on a thread of its own.
        """
        self._left = True
        if self.registration is None:
            close()
        else:
            self.registration.status.leave(is_over, close)

    def close(self) -> None:
        """Ends this guard's threads. A second call does nothing.

        Rank 0 first completes the last roll calls, and the others stay until it has judged what they have read in the
        last epoch. Each rank stays until all have compared the weights that it has.
        """
        if (
            self.registration is not None
            and self._roll_call is not None
            and not (self._closed or self.registration.failure)
        ):
            self._roll_call.settle()  # first: with the last report of a rank, all that it has asked is there
            self._tell(lambda each: each.settle())
        self._closed = True
        if self.registration is not None:
            sigterm.wait_if_received()
            self.registration.close()
        self.state.alerts.close()
        self.state.end_credits()
        self._tell(lambda each: each.closed())

    @property
    def evidence(self) -> Evidence:
        """What the threads of a loop let this rank prove."""
        return self.state.evidence

    @property
    def makes_even(self) -> bool:
        """Whether ranks take the same number of batches in the innermost open span, whatever their loaders hold."""
        chosen = self._settings.uneven_eval if self.span.evaluation else self._settings.uneven_train
        alone = self.registration is None or self._closed or not self.span.compared
        return chosen == "stop" and not alone

    @property
    def common_batches(self) -> int | None:
        """Batches of a train epoch on every rank, where `uneven_train` makes them equal; None if that is not proven."""
        return self._common(min(self._checks.even.lengths, default=None))

    @property
    def common_length(self) -> int | None:
        """What `len` of the train loader should give on every rank, where `uneven_train` makes epochs equal.

        It follows from the lengths when the fit began. A loader whose own length has changed since then has another.
        None: the length of some rank's loader was not known.
        """
        return self._common(self._checks.even.shortest_now)

    @property
    def own_length_holds(self) -> bool:
        """Whether a train epoch has as many batches as this rank's own loader; with `uneven_train` it may not have."""
        if self.registration is None or self._settings.uneven_train == "raise":
            return True
        return len(set(self._checks.even.lengths)) == 1

    @property
    def metrics(self) -> dict[str, float]:
        """What the roll calls have measured, for the framework's loggers: ``countoff/spread_seconds``, …; on rank 0."""
        return dict(self._roll_call.metrics) if self._roll_call is not None else {}

    @property
    def agreed(self) -> frozenset[str]:
        """Names of the plan's values that are equal on all ranks, unknown ones too; none while a rank is missing."""
        return self._roll_call.agreed if self._roll_call is not None else frozenset()

    @property
    def verdict(self) -> Verdict | None:
        """The verdict that ended this guard, if there is one."""
        return self.state.end

    @property
    def verdict_is_caught(self) -> bool:
        """Whether the program has caught the verdict that was raised last, and has forgotten it."""
        return self.state.is_caught()

    @property
    def notices(self) -> tuple[Verdict, ...]:
        """The warnings of all ranks."""
        return tuple(self.state.notices)

    @property
    def open_span(self) -> str | None:
        """Name of the innermost open span."""
        return self.state.spans[-1].name if self.state.spans else None

    @property
    def steps(self) -> int:
        """Optimizer steps of this rank applied since the fit began."""
        return self.state.steps

    @property
    def batches(self) -> int:
        """Batches of this rank started in the innermost open span, or in the last one."""
        return self.span.started

    @property
    def train_batches(self) -> int:
        """Batches of this rank started in the open train epoch, or in the last one."""
        return self._train.started

    def warn(self, verdict: Verdict) -> None:
        """Warns of something that ends nothing: rank 0 prints it, once for each kind and subject."""
        self.state.note(verdict)

    def _common(self, shortest: int | None) -> int | None:
        return None if self._settings.uneven_train == "raise" else shortest

    def compare_spans(self, comparing: bool) -> None:
        """Sets whether spans opened from here on are compared; off inside `torch.distributed.algorithms.Join`.

        Collective: every rank must call it at the same place. It does not wait.
        """
        self._comparing = comparing

    def _trace(self, number: int) -> None:
        """Begins this guard's part of the trace, if the user wants one."""
        if (directory := self._settings.trace_dir) is not None:
            from countoff.core.trace.recorder import Recorder  # only where it is asked for

            made_of = self._learning_rates, self._totals, self._horizon, self._framework
            self.state.observer = recorder = Recorder(self.state, number, directory, *made_of)
            self._listeners = (recorder, *self._listeners)

    def _tell(self, what: Callable[[Listener], None]) -> None:
        for each in self._listeners:
            what(each)

    def _tell_step(self, check: Listener) -> None:
        state = self.state
        check.stepped(self._train, state.steps)
        if check.wants_batch:
            with state.lock:
                self._set_next_check(self.span)

    def _count_off(self, start: FitStart, registration: Registration, call: RollCall) -> None:
        """Does the roll call of the fit's start; without a store this rank trains on by itself."""
        try:
            registration.wait_for_roll_call(call.count_off(start))
        except SystemExit as error:  # of a signal's handler: no hook tells the adapter of it here
            self.failed(error)
            raise
        self._tell(lambda each: each.counted_off())
        self._raise_if_diverged(coming=0)
        self._leave_if_stopped()

    def _open(self, kind: SyncKind, span: SpanCounters, reason: Reason = "", epoch: int | None = None) -> None:
        self._tell(lambda each: each.span_opening(span))
        if span.evaluation and not span.compared:
            self.state.spans.append(span)
        else:
            self._pass(kind, span.name, reason=reason, opens=span)
        self._enter(span)
        self._tell(lambda each: each.span_opened(span, epoch))

    def _close_span(self, kind: SyncKind, reason: Reason, may_raise: bool, notice: Verdict | None = None) -> None:
        if self._left:  # what the loop has held ends with its exception
            return
        state, span = self.state, self.span
        self._exhausted = reason == "exhausted"  # an exception that leaves a loop may close its span, as `stopped`
        if span.counts:
            span.counts.append(span.started - sum(span.counts))
        closed, span.notice = time.time(), notice
        self._tell(lambda each: each.span_closing(span, reason, orderly=may_raise))
        if span.evaluation and not span.compared:
            state.close_span(reason)
        else:
            # A pass that was dropped is closed on the guard's own thread, which cannot wait for itself.
            hold = _HOLD_SECONDS if may_raise else 0.0
            self._pass(kind, span.name, reason=reason, hold=hold, may_raise=may_raise)
        self._enter(state.spans[-1] if state.spans else span)
        if self.registration is not None and self._roll_call is not None and span.compared:
            self._roll_call.span_closed(span, closed)
        elif notice is not None and state.world_size == 1:
            self.warn(notice)

    def _report(self, error: BaseException, *, may_be_caught: bool) -> None:
        state = self.state
        if os.getpid() != state.pid:
            return
        if self.registration is None:
            self._tell(lambda each: each.failed_alone(error))
        if self.registration is None or self._closed:
            return
        if "DataLoader worker" in shutdown.in_words(error):  # a signal of the launcher's may reach the worker first
            until(sigterm.received, time.monotonic() + _WORKER_SECONDS)
        sigterm.wait_if_received()
        if isinstance(error, SystemExit) and not error.code:
            self._exit_early("exited")
            return
        # An operator may stop other ranks later, or not at all. Ranks that are kept even would wait for this one.
        if isinstance(error, KeyboardInterrupt) and not self._settings.keeps_even:
            self._exit_early("interrupted")
            return
        if isinstance(error, SystemExit) and error.code == 128 + signal.SIGTERM:  # as by a handler in Python
            self.registration.watchdog.explain_sigterm(self.registration.conclude)
        if not (isinstance(error, DivergenceError) and state.end is None):
            session = self.registration.writer.session
            # Nobody on this host sees a rank of another one die. In the first moments, its own ranks are not known yet.
            slow = session.slow or bool(session.heartbeats.hosts) or not session.heartbeats.neighbours
            gone = self.registration.watchdog.gone_neighbour
            where = self.where()
            shutdown.report_failure(state, error, where, may_be_caught=may_be_caught, slow=slow, gone=gone)
            if state.failure is not None and state.end is None:
                self.registration.post_row()

    def _exit_early(self, reason: Reason) -> None:
        """Ends the fit where it is, as `sys.exit()` within it does. The sync points tell the ranks that go on."""
        while self.state.spans:
            self._close_span("eval_end" if self.state.spans[-1].evaluation else "train_end", reason, False)
        self._pass("fit_end", "the fit", reason=reason, may_raise=False)
        self.state.finished = True

    def where(self) -> str:
        """The batch of this rank, in words."""
        span, inside = self.span, bool(self.state.spans)
        if span.started and (inside or not self._exhausted):
            return f"in batch {span.started} of {span.name}"
        if span.started:
            return f"after {span.name}"
        return f"before the first batch of {span.name}" if inside else "before its first batch"

    def _enter(self, span: SpanCounters) -> None:
        """Makes a span the one in which batches are counted."""
        with self.state.lock:
            self.span = span
            self._set_next_check(span)

    def _pass(
        self,
        kind: SyncKind,
        span: str,
        *,
        reason: Reason = "",
        hold: float = 0.0,
        opens: SpanCounters | None = None,
        may_raise: bool = True,
    ) -> None:
        """Passes a sync point. The first rank there waits up to `hold` seconds, until all have passed or one objects.

        An objection that arrives in that time finds this rank in Python, and not yet in its next collective. That
        collective would wait for the other ranks too, so a wait for them takes no time from a healthy job.
        """
        self._leave_if_stopped()
        state = self.state
        # A pass that the garbage collector closes ends at no moment of the program.
        rates = self._checks.learning_rates.rates_at(kind, opens) if may_raise else ()
        sync_point = state.sync_point(kind, span, reason, self.span, opens, rates)
        index = state.reach(sync_point, opens)
        if self.registration is not None and state.end is None:
            writer = self.registration.writer
            agreement = Agreement(state, f"passed/{index}") if hold and self.agreed else None
            if not state.log.is_logged(index):
                writer.write(sync_entry(index, sync_point), lambda: state.need_not_write(index), hold, agreement)
            elif agreement is not None:
                writer.submit(agreement.count)
        if may_raise:
            self._raise_if_diverged(coming=None if opens is None else 0)

    def _look(self, last: bool) -> None:
        """The slow path of `batch`: others are ahead, a tick is due, this batch is the last, or there is a verdict."""
        self._leave_if_stopped()
        state, span = self.state, self.span
        if self.registration is None:
            return
        writer, announces = self.registration.writer, last and span.compared and not span.ends
        if not last and state.only_ticks(span):
            self._tick(span, writer)
            return
        state.look(last)
        if announces:
            self._announce(span, writer)
        if span.compared and not span.evaluation and span.started % constants.TICK_BATCHES == 0:
            self._tick(span, writer)
        if not span.evaluation:
            self._tell(lambda each: each.looked(span))
        self._raise_if_diverged(coming=0)
        with state.lock:
            self._set_next_check(span)

    def _set_next_check(self, span: SpanCounters) -> None:
        """Sets `next_check_at`. Call it under the state's lock."""
        state, watched = self.state, self.registration is not None
        state.set_next_check(span, watched=watched)
        if watched and state.end is None and not span.evaluation and any(each.wants_batch for each in self._checks):
            state.next_check_at = 0

    def _announce(self, span: SpanCounters, writer: Writer) -> None:
        """Announces the batch that closes a span, before this rank trains on it; waits as `_pass` does."""
        log, opened, last = self.state.log, span.opened, span.started
        agreement = None
        if self.agreed:
            agreement = Agreement(self.state, f"announced/{opened}", lambda: log.announced(opened) == last)
        if log.announced(opened) is None:
            entry = self.state.announcement(span)
            writer.write(entry, lambda: log.announced(opened) is not None, _HOLD_SECONDS, agreement)
        elif agreement is not None:
            writer.submit(agreement.count)

    def _tick(self, span: SpanCounters, writer: Writer) -> None:
        """Has what the checks have at this batch compared, in the background; nobody waits.

        The first rank to reach the batch writes its record under the batch's own key, later ones compare with it.
        """
        state = self.state
        if not state.evidence.steps_by_batch:
            return
        at = TickPlace(span.opened, span.started, span.name)
        values = [check.tick(span) for check in self._compare_ticks]

        def compare(channel: Channel) -> None:  # makes the record too, which costs the training thread nothing then
            parts = [part for make in values if make is not None and (part := make(at)) is not None]
            record: dict[str, Any] = {"rank": state.rank, "span": at.span}
            for part in parts:
                record |= part.record
            logged = channel.compare_and_set(at.key, record)
            ranks = int(logged["rank"]), state.rank
            if logged["rank"] == state.rank:  # once per batch compared: in an epoch of weeks, keys must not add up
                channel.delete(at.before(constants.KEPT_TICKS).key)
            if logged["span"] != at.span:
                return  # this rank has yet to read, in the log, the sync point at which the two have parted
            found = (part.compare(logged, ranks) for part in parts)
            if (verdict := next(filter(None, found), None)) is not None:
                find_at_once(state, writer, channel, verdict)

        writer.submit(compare)

    def _schedule(self) -> ScheduleState:
        """The learning rates in force, and where their schedules stand."""
        rates = self._learning_rates() if self._learning_rates is not None else ()
        base_rates, calls = self._schedules() if self._schedules is not None else ((), ())
        return ScheduleState(rates, base_rates, calls, self._calls_per_step)

    def _raise_if_diverged(self, *, coming: int | None = None) -> None:
        """Raises the verdict if there is one, unless this rank may be about to raise what another one has raised.

        Args:
            coming: Batches that this rank is about to begin, and has not counted yet; None where it ends something.
        """
        state = self.state
        if state.proposed is None and state.end is None:
            return
        if coming is None or not state.may_fail_alike(coming):
            shutdown.raise_verdict(state)

    def _leave_if_stopped(self) -> None:
        """Lets go of the threads once this rank has stopped comparing."""
        if self.registration is not None and self.registration.failure:
            self.registration.close_in_background()
            self.registration, self.state.next_check_at = None, NEVER

    def _print_alone(self) -> None:
        """Prints this rank's warnings where there is no other rank, and so no thread that empties the outbox."""
        state = self.state
        with contextlib.suppress(queue.Empty):
            while state.world_size == 1:
                action = state.outbox.get_nowait()
                if isinstance(action, PrintWarning):
                    shutdown.print_warning(state, action.verdict)

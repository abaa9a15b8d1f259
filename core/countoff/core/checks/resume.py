"""Does a run that begins from a checkpoint go on where that checkpoint was written? `ResumeMismatch`.

After a resume all ranks may agree with one another and all be wrong: the epoch begins again with its first batch, a
part of the data is skipped, or the learning rate jumps. No comparison between ranks finds that. So an adapter puts a
small record into the framework's own checkpoint, and compares it with what the resumed run does. That needs no other
rank, so it works with one rank too.

A warning follows from one of these proofs only, and nothing else:

- the position that the framework has restored is not that of the record;
- an optimizer step was applied to batches that the record has as trained on, shown by their fingerprints;
- the loader's sampler issues other rows at the place of the checkpoint, or until there, than it did before, of the same
  dataset;
- the learning-rate schedule stands at another step, or begins again with the rates of the run's first steps.

Ranks resume alike, or the roll call has named the difference before. So only rank 0 compares with its record.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from countoff.core.checks.check import Check, FitStart, Others, RankState
from countoff.core.checks.data import DataIdentity
from countoff.core.checks.once import EpochReads, Once, judge_skipped
from countoff.core.data.fingerprint import Fingerprint, PendingFingerprint, begin_fingerprint
from countoff.core.messages import clip, count_of, number_of
from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.records import FitPlan, Reason
from countoff.core.protocol.resume_record import UNREADABLE, Place, ResumeRecord, ScheduleState
from countoff.core.verdict import Cause, Verdict, VerdictKind

__all__ = [
    "Observed",
    "Restored",
    "Resumes",
    "judge_resumed_data",
    "judge_resumed_order",
    "judge_resumed_position",
    "judge_resumed_rates",
    "judge_resumed_rows",
    "judge_resumed_seed",
    "judge_resumed_steps",
    "unreadable",
]

POSITION, STEPS, AGAIN, ISSUED, RATE = "position", "steps", "data", "other order", "rate"
CHANGED, RECORD = "changed rate", "record"
"""Subjects: the restored position or number of steps is another one, batches are trained on again, the epoch goes on in
another order, a schedule stands elsewhere, a learning rate has changed, the record cannot be read."""

RESUME_MISMATCH = VerdictKind(
    "ResumeMismatch",
    "a run that resumes from a checkpoint repeats or skips data, or its learning rate jumps",
    causes={
        POSITION: Cause(
            "The position that was restored is not the one at which the checkpoint was written.",
            "let the loop go on with the epoch and the batch of the checkpoint.\n"
            "if you have moved it on purpose, ignore this.",
        ),
        STEPS: Cause(
            "What counts the steps was not restored, or was restored from another checkpoint. Limits and intervals in "
            "steps are reached at other batches.",
            "restore the number of steps from the same checkpoint as the weights.",
        ),
        AGAIN: Cause(
            "The loop does not skip what was trained on, or the loader's position was not restored. The loss looks "
            "normal.",
            "skip the batches that were trained on before the checkpoint, and give the sampler its epoch.\n"
            "restore the loader's own state, where it has one.",
        ),
        ISSUED: Cause(
            "The order of the epoch was not restored: it comes from a random state, or from a seed or an epoch of the "
            "sampler. So some samples of the epoch are read twice, and others never.",
            "let the sampler shuffle by a seed and an epoch, and set both as before the checkpoint.\n"
            "resume at the beginning of an epoch.\n"
            "if you have chosen a new order on purpose, ignore this.",
        ),
        RATE: Cause(
            "The scheduler was not restored, so its schedule begins again.",
            "save the scheduler's state_dict() with every checkpoint, and load it before the first step.\n"
            "if you have begun a new schedule on purpose, ignore this.",
        ),
        CHANGED: Cause(
            "It is not the schedule: that goes on where it was, or there is none.",
            "nothing, if you have changed it for this run.\nload the optimizer's state_dict() too.",
        ),
        RECORD: Cause(remedy="nothing: only countoff reads this record, and the next checkpoint gets a new one."),
    },
)
"""**Cause.** The loop does not skip what was trained on, another epoch or batch or no scheduler was restored, or the
number of ranks has changed.

**Fix.** Restore [the position, the sampler's epoch and the
scheduler](data-identity.md#a-resume-that-repeats-skips-or-jumps). If the change is meant, ignore the warning.
"""
_FROM_EPOCH_0 = "The run has begun with epoch 0 again, or nothing has set the sampler's epoch since the resume."
_STEPS = 2
"""Optimizer steps of a resumed run at which learning rates are compared.

Where only the optimizer is restored, the first step has the checkpoint's rate, and the second one that of a schedule
which begins again.
"""
_MOST_GROUPS = 8
_LAST_SECONDS = 0.05


class Restored(NamedTuple):
    """What the framework says that it has restored.

    Attributes:
        steps: Optimizer steps of the whole run; None where it keeps none.
        exact: Whether a pass that skips nothing is sure to begin with the epoch's first batch. It is not where the
            loader itself may have been restored.
        samples: Samples of the epoch, of all ranks, that the pass skips; None: those of the batches that it skips. It
            counts where the number of data ranks or the batch size has changed.
    """

    steps: int | None = None
    exact: bool = False
    samples: int | None = None


class Observed(NamedTuple):
    """What a resumed run has read and trained on first.

    Attributes:
        prints: Fingerprints of the first batches that its loader gave.
        informative: Whether these hold enough for their equality to be no coincidence.
        batches: Batches that the loader had given when the first optimizer step was applied.
        dp_rank: This rank's dp_rank.
        dp_degree: The number of dp_ranks.
    """

    prints: tuple[str, ...]
    informative: bool
    batches: int
    dp_rank: int = 0
    dp_degree: int = 1


class Resumes(Check):
    """Writes the records of one guard, and compares the record of a checkpoint with what the resumed run does.

    Args:
        state: This rank's state.
        data: What this rank reads.
        once: What the loader's sampler issues.
        schedule: Returns the learning rates in force and where their schedules stand.
    """

    def __init__(self, state: RankState, data: DataIdentity, once: Once, schedule: Callable[[], ScheduleState]) -> None:
        self.watches_steps = False
        self._state = state
        self._data = data
        self._once = once
        self._schedule = schedule
        self._plan = FitPlan()
        self._loaded: ResumeRecord | None = None
        self._record: ResumeRecord | None = None
        self._restored = Restored()
        self._steps_before = 0
        self._start_rates: list[tuple[float, ...]] = []
        self._after: list[ScheduleState] = []
        self._span: SpanCounters | None = None
        self._epoch = self._skipped = 0
        self._handed: int | None = None
        self._resumed = False  # whether a train epoch has begun
        self._opened: int | None = None  # the train epoch that was opened last
        self._resumes_here = False  # whether the open train epoch is the first one since the checkpoint
        self._was_left = False  # whether the loop has left that epoch before its end, and begun no other one
        self._judged = False  # whether its data has been compared
        self._reads: EpochReads | None = None  # what the open train epoch reads
        self._rest: tuple[int, Any] | None = None  # batches before the checkpoint, and what was read behind it
        self._said = False

    def fit_started(self, start: FitStart, others: Others | None) -> None:  # noqa: D102
        del others  # this rank alone compares
        self._plan = replace(start.plan, dp_degree=self._data.dp_degree)  # a plan may leave it out
        self.watches_steps = True

    def restore(self, record: object, restored: Restored | None = None, *, compare: bool = True) -> None:
        """Takes the record of the checkpoint from which a fit resumes, once it has begun and before its first epoch.

        Args:
            record: What `record` has returned when the checkpoint was written. One that cannot be read gets a line.
            restored: What the framework says that it has restored.
            compare: Whether the run goes on where the checkpoint was written. It need not where a run that has trained
                goes back to an earlier checkpoint of its own.
        """
        try:
            found = ResumeRecord.from_json(record)
        except UNREADABLE as error:
            self._say(unreadable(error))
            return
        if compare:
            self._record, self._restored, self.watches_steps = found, restored or Restored(), True
        self._loaded, self._steps_before, self._epoch = found, found.steps, found.epoch
        self._start_rates = list(found.start_rates)

    def span_opened(self, span: SpanCounters, epoch: int | None) -> None:  # noqa: D102
        if epoch is None:
            return
        before, self._opened = self._opened, epoch
        self._epoch, self._span, self._skipped, self._handed = epoch, span, span.started, None
        self._was_left = False
        if self._skips_again(span, epoch) and epoch != before:
            self._say(judge_skipped(span.name, span.started))
        self._resumes_here, self._resumed = self._record is not None and not self._resumed, True
        if self._resumes_here and self._record is not None:
            alike = self._record.epoch == epoch and _cut_alike(self._record, self._plan, self._data.dp_rank)
            if alike and self._record.order is not None:  # a rank may have loaded the record of another one
                self._data.begun_as = self._record.order, self._record.prints
            found = judge_resumed_position(self._record, self._plan, epoch, span.started, self._restored)
            self._judged = found is not None  # what is read and trained on follows from it
            self._say(found or judge_resumed_steps(self._record, self._restored))

    def _skips_again(self, span: SpanCounters, epoch: int) -> bool:
        """Whether a later epoch skips as many batches as were trained on in the epoch of the checkpoint."""
        record = self._record
        if record is None or not self._resumed or not span.compared or epoch <= record.epoch:
            return False
        return 0 < span.started == record.batches

    def stepped(self, span: SpanCounters, steps: int) -> None:  # noqa: D102
        self._look_at_step()

    def _look_at_step(self) -> None:
        span, record = self._span, self._record
        if span is None or self._was_left:
            return
        if self._handed is None:
            self._handed = span.started - self._skipped
        if len(self._start_rates) < _STEPS or (record is not None and len(self._after) < _STEPS):
            self._look_at_rates()
        if self._resumes_here and not self._judged and self._data.complete and self._goes_beyond(span):
            self._judge_data()
        rates_due = len(self._start_rates) < _STEPS or (record is not None and len(self._after) < _STEPS)
        rates_due |= self._state.steps < _STEPS
        self.watches_steps = rates_due or (self._resumes_here and not self._judged)

    def span_closing(self, span: SpanCounters, reason: Reason, *, orderly: bool) -> None:  # noqa: D102
        if span is self._span:  # `DataIdentity` has been told before
            if self._resumes_here and not self._judged and self._goes_beyond(span):
                self._judge_data()
            self._look_at_rest(span, reason)
            self._was_left = self._state.evidence.own_loop and reason == "stopped" and not span.ends
            if not self._was_left:
                self._span, self._resumes_here, self._epoch = None, False, self._epoch + 1

    @property
    def begins_epoch(self) -> bool:
        """Whether the open pass is sure to begin with its epoch's first batch; else its length is not the epoch's."""
        return self._span is None or self._was_left or self._place(self._span)[1]

    @property
    def goes_on(self) -> bool:
        """Whether the open train epoch is the one of the checkpoint, of which some had been read by then."""
        before = self._record
        return before is not None and self._resumes_here and before.epoch == self._epoch and before.batches != 0

    def record(self, batch: Any = None, *, left: int | None = None, steps: int | None = None) -> dict[str, Any]:
        """Returns this rank's record for a checkpoint that is being written.

        Where the loop has left an epoch before its end, that is its place until it begins another one: a run that was
        stopped goes on there, and one whose epochs end so goes on with the next one.

        Args:
            batch: The batch that was begun last, as the loader returned it; None where it is not at hand.
            left: Batches of the open epoch that this rank has yet to begin; None if that is not known.
            steps: Optimizer steps of the whole run as the framework counts them, which it says again as
                `Restored.steps`; None where it keeps none.
        """
        if self._loaded is not None and not self._resumed:  # the run has not moved since it was loaded
            return self._loaded.to_json()
        span, data, before = self._span, self._data, self._record
        batches, begins = (0, False) if span is None else self._place(span)
        prints, informative = (data.prints, data.informative) if begins else ((), False)
        since = data.prints if span is not None and not begins and self._resumes_here and data.informative else ()
        if before is not None and self._resumes_here and not begins and before.epoch == self._epoch:
            prints, informative = before.prints, before.informative
        return ResumeRecord(
            epoch=self._epoch,
            batches=batches,
            stepped=0 if span is None else self._stepped(span, batches),
            left=0 if span is not None and span.ends else None if self._was_left else left,
            steps=self._steps_before + self._state.steps if steps is None else steps,
            dp_rank=data.dp_rank,
            dp_degree=data.dp_degree,
            batch_size=self._plan.batch_size,
            accumulation=self._plan.gradient_accumulation_steps,
            schedule=self._now(),
            start_rates=tuple(self._start_rates),
            prints=prints,
            informative=informative,
            last="" if span is None else _print_of(batch),
            order=data.order,
            since=since,
            since_batches=span.started - self._skipped if since and span is not None else 0,
            issued=None if span is None or not batches else self._issued(batches),
        ).to_json()

    def _issued(self, batches: int) -> Place | None:
        reads = self._once.reads
        with contextlib.suppress(Exception):  # a checkpoint must not fail by it
            return None if reads is None else reads.place(batches)
        return None

    def look_at_order(self) -> None:
        """Looks at what the loader issues first in a train epoch; to be called at its first batch."""
        record, reads = self._record, self._once.reads
        self._reads = reads
        if record is None or record.issued is None or reads is None or not self._resumes_here or self._judged:
            return
        position = self._once.position or reads.skipped  # the loader may have been restored itself
        alike = record.epoch == self._epoch and _reads_alike(record, self._plan, self._data.dp_rank)
        if alike and position and reads.goes_on(record.issued, position) is False:
            self._judged = True
            self._say(judge_resumed_rows(record, position))

    def _look_at_rest(self, span: SpanCounters, reason: Reason) -> None:
        """Tells whether the epoch behind the one of the checkpoint has only what was the rest of that one."""
        record, reads, self._reads = self._record, self._reads, None
        if record is None or reads is None or reason != "exhausted":
            return
        read = span.started - self._skipped, reads.first, self._data.prints
        if self._resumes_here:
            position, before = self._once.position or reads.skipped, record.issued
            alike = record.epoch == self._epoch and _cut_alike(record, self._plan, self._data.dp_rank)
            goes_on = before is not None and before.first not in ("", reads.first)
            if alike and position and goes_on and self._data.prints and not self._said:
                self._rest = position, read
        elif self._rest is not None and record.epoch < self._epoch:
            (position, rest), self._rest = self._rest, None
            if not reads.skipped and read == rest:
                self._say(judge_skipped(span.name, position))

    def _stepped(self, span: SpanCounters, batches: int | None) -> int:
        """Batches of the epoch that were begun when this rank took its last optimizer step."""
        if batches is None:
            return 0
        opened, started = self._state.last_step
        return batches - span.started + (started if opened == span.opened else self._skipped)

    def _place(self, span: SpanCounters) -> tuple[int | None, bool]:
        """Batches of the epoch that were begun, None if that is not certain, and whether the pass begins the epoch.

        The pass of a resumed run may begin in the middle of the epoch without a word of it, as that of a loader that
        was restored itself. Then the fingerprints tell.
        """
        before = self._record
        if before is None or not self._resumes_here or before.epoch != self._epoch or before.batches == 0:
            return span.started, not self._skipped
        if self._skipped or self._restored.exact:
            return span.started, not self._skipped
        if before.batches is None or not _comparable(before, self._observed(), self._plan):
            return None, False
        if _begins_epoch(before, self._observed()):
            return span.started, True
        return before.batches + span.started, False

    def _look_at_rates(self) -> None:
        now = self._now()
        if len(self._start_rates) < _STEPS:
            self._start_rates.append(tuple(now.rates))
        if self._record is not None:
            self._after.append(now)
            if len(self._after) == _STEPS:
                self._say(judge_resumed_rates(self._record, self._after))

    def _goes_beyond(self, span: SpanCounters) -> bool:
        """Whether the record is known to stand in the middle of the epoch.

        A checkpoint may be written in the loop's body at the last batch, which nothing has to know then. So where the
        epoch's length is not known, the pass must have had more batches than the record; with other sizes, more samples
        before its last batch, which may hold repeats.
        """
        record = self._record
        if record is None or record.left is not None or not record.batches:
            return True
        if record.since and self._data.prints[: len(record.since)] == record.since:  # no epoch begins with these
            return True
        if self._once.reads is not None and self._once.reads.skipped:  # of an epoch at its end, there is no rest
            return True
        begun, size, degree = span.started - self._skipped, self._plan.batch_size, self._plan.dp_degree
        if record.samples is None or size is None or degree is None or (size, degree) == record.sizes:
            return begun > record.batches
        return (begun - 1) * size * degree > record.samples

    def _judge_data(self) -> None:
        self._judged = True
        record, observed = self._record, self._observed()
        if record is None or record.epoch != self._epoch or self._handed is None:
            return
        if record.left != 0 and _comparable(record, observed, self._plan):
            self._say(judge_resumed_data(record, observed, self._plan.gradient_accumulation_steps or 1))
        order = self._data.order
        self._say(
            judge_resumed_order(record, order)
            or judge_resumed_seed(record, order, self._passed_over())
            or self._passed_others()
        )

    def _passed_others(self) -> Verdict | None:
        """Tells whether the loop has passed over as many batches as were trained on, and they were other ones."""
        record, reads, accumulation = self._record, self._once.reads, self._plan.gradient_accumulation_steps or 1
        if record is None or record.issued is None or reads is None or not record.batches or record.left == 0:
            return None
        passed = (self._handed or 0) - accumulation
        if self._skipped or passed != record.batches or not _reads_alike(record, self._plan, self._data.dp_rank):
            return None
        return judge_resumed_rows(record, passed) if reads.goes_on(record.issued, passed, again=True) is False else None

    def _passed_over(self) -> int:
        """Samples of the epoch, of all ranks, that this run is sure to have passed over before its first step."""
        handed = (self._handed or 0) - (self._plan.gradient_accumulation_steps or 1)
        batches = self._skipped + max(0, handed)
        return batches * (self._plan.batch_size or 0) * (self._plan.dp_degree or 0)

    def _observed(self) -> Observed:
        handed = self._handed if self._handed is not None else 0
        return Observed(self._data.prints, self._data.informative, handed, self._data.dp_rank, self._data.dp_degree)

    def _say(self, verdict: Verdict | None) -> None:
        """Gives a warning, on the first rank: the roll call has named before where ranks resume at different places."""
        if verdict is not None:
            self._said = True
            if self._state.leads:
                self._state.find(verdict)

    def _now(self) -> ScheduleState:
        now = self._schedule()
        rates, base = (tuple(float(rate) for rate in each[:_MOST_GROUPS]) for each in now[:2])
        calls = tuple(int(calls) for calls in now.calls[:_MOST_GROUPS])
        return ScheduleState(rates, base, calls, now.calls_per_step)


def judge_resumed_steps(record: ResumeRecord, restored: Restored) -> Verdict | None:
    """Compares the optimizer steps that the framework has restored with those of the record."""
    if restored.steps is None or restored.steps == record.steps:
        return None
    return _mismatch(
        f"the run goes on after {count_of(restored.steps, 'optimizer step')}, and the checkpoint was written after "
        f"{record.steps}.",
        STEPS,
    )


def judge_resumed_position(
    record: ResumeRecord, plan: FitPlan, epoch: int, skipped: int, restored: Restored
) -> Verdict | None:
    """Compares the position at which a resumed run begins its first train epoch with that of the record.

    Args:
        record: The record of the checkpoint.
        plan: The plan of the resumed fit.
        epoch: Number of the train epoch, from 0.
        skipped: Batches of one rank that the framework skips in it.
        restored: What the framework says that it has restored.
    """
    written = record.epoch
    if epoch != written:
        effect = _effect_of_epochs(record, epoch)
        if effect is None:
            return None
        sentence = f"the run goes on with train epoch {epoch}, and the checkpoint was written in train epoch {written}"
        return _mismatch(f"{sentence}: {effect}.", POSITION)
    if record.batches is None or (not skipped and not restored.exact and restored.samples is None):
        return None  # the loader may have been restored itself: its data tells
    if plan.batch_size is None or plan.dp_degree is None or record.batch_size is None:
        return None
    if (plan.batch_size, plan.dp_degree) == (record.batch_size, record.dp_degree):
        if record.trained <= skipped <= record.batches:
            return None
        effect = _effect(skipped - (record.trained if skipped < record.trained else record.batches), "batch")
        where = f"after {count_of(skipped, 'batch')}" if skipped else "with its first batch"
        sentence = f"train epoch {epoch} goes on {where}, and the checkpoint was written after {record.batches}"
        return _mismatch(f"{sentence}: {effect}.", POSITION)
    samples = skipped * plan.batch_size * plan.dp_degree if restored.samples is None else restored.samples
    if record.samples is None or record.trained * record.batch_size * record.dp_degree <= samples <= record.samples:
        return None
    now = _samples(samples, skipped, plan.batch_size, plan.dp_degree)
    if restored.samples is not None:  # they need not be whole batches
        now = count_of(samples, "sample")
    sentence = (
        f"train epoch {epoch} goes on after {now}, and the "
        f"checkpoint was written after {_samples(record.samples, record.batches, record.batch_size, record.dp_degree)}"
    )
    effect = _effect(samples - record.samples, "sample")
    return _mismatch(f"{sentence}: {effect}.", POSITION, _SIZES_WHY)


def judge_resumed_data(record: ResumeRecord, observed: Observed, accumulation: int) -> Verdict | None:
    """Tells from fingerprints whether a resumed run trains again on batches that the record has as trained on.

    Args:
        record: The record of the checkpoint.
        observed: What the resumed run has read and trained on first.
        accumulation: Batches of one rank per optimizer step. The loop has skipped those that were handed out before the
            first step's.
    """
    # The batches of the first step are the last ones before it; where it has several, only the last is certain.
    passed_over = max(0, observed.batches - accumulation)
    if record.batches and _begins_epoch(record, observed):
        again = record.trained - passed_over if observed.batches <= record.trained else 0
        sentence = (
            f"train epoch {record.epoch} begins again with its first batch, and the checkpoint was written after "
            f"{count_of(record.trained, 'batch')} of it"
        )
    elif record.since and record.since == observed.prints[: len(record.since)] and record.batches is not None:
        again = record.since_batches - (record.batches - record.trained) - passed_over
        sentence = f"train epoch {record.epoch} goes on with the same batches as after the resume before this one"
    elif record.last in observed.prints and record.trained == record.batches:
        place = observed.prints.index(record.last) + 1
        again = place - passed_over if observed.batches <= place else 0
        which = "first batch of the resumed run is the last one"
        if again != 1:
            which = f"first {again} batches of the resumed run are the last ones"
        sentence = f"the {which} before the checkpoint, in train epoch {record.epoch}"
    else:
        return None
    if again < 1:
        return None
    return _mismatch(f"{sentence}: {_effect(-again, 'batch')}.", AGAIN)


def judge_resumed_order(record: ResumeRecord, order: tuple[int, int, int, int] | None) -> Verdict | None:
    """Tells whether the sampler of a resumed run shuffles by an epoch that is not the next one.

    Args:
        record: The record of the checkpoint.
        order: As in the record, now.
    """
    if record.order is None or order is None or record.order[0] != record.order[1]:
        return None
    by, epoch, *what = order
    if what != list(record.order[2:]):  # other data or another seed: an order that the run has not had
        return None
    if epoch <= by <= epoch + 1:  # a loop may take a checkpoint that was written at the last batch for the next epoch's
        return None
    again = "an order that the run has had before" if by < epoch else "the order of a later epoch"
    return _mismatch(
        f"the sampler shuffles train epoch {epoch} by epoch {by}, {again}. Before the checkpoint, it shuffled train "
        f"epoch {record.order[1]} by epoch {record.order[0]}.",
        AGAIN,
        "The sampler's epoch was not restored, and nothing has set it since." if by else _FROM_EPOCH_0,
    )


def judge_resumed_seed(record: ResumeRecord, order: tuple[int, int, int, int] | None, passed: int) -> Verdict | None:
    """Tells whether the sampler of a run that goes on in the middle of an epoch shuffles it by another seed.

    Args:
        record: The record of the checkpoint.
        order: As in the record, now.
        passed: Samples of the epoch, of all ranks, that the run has passed over: it goes on where the checkpoint was
            written.
    """
    if record.order is None or order is None or record.samples is None or not record.batches or record.left == 0:
        return None
    trained = record.samples // record.batches * record.trained
    if order[:3] != record.order[:3] or order[3] == record.order[3] or not 0 < trained <= passed <= record.samples:
        return None
    return _mismatch(
        f"train epoch {record.epoch} goes on after {count_of(passed, 'sample')} in another order than it had before "
        f"the checkpoint: the sampler shuffles by seed {order[3]}, and did by {record.order[3]}.",
        ISSUED,
    )


def judge_resumed_rows(record: ResumeRecord, position: int) -> Verdict:
    """Returns the verdict about a run that goes on in another order than its epoch had before the checkpoint.

    Args:
        record: The record of the checkpoint.
        position: Batches of the epoch that are not trained on again.
    """
    sentence = (
        f"train epoch {record.epoch} goes on after {count_of(position, 'batch')} in another order than it had before "
        "the checkpoint: the sampler issues other rows there, and the dataset has as many rows as before."
    )
    return _mismatch(sentence, ISSUED)


def judge_resumed_rates(record: ResumeRecord, after: Sequence[ScheduleState]) -> Verdict | None:
    """Compares the learning rates of the first optimizer steps after a resume with the record.

    Args:
        record: The record of the checkpoint.
        after: Rates and schedules when the first two steps after the resume were applied.
    """
    then, first, second = record.schedule, after[0], after[1]
    if not then.rates or len(then.rates) != len(first.rates) or len(first.rates) != len(second.rates):
        return None
    changed = not _close(first.rates, then.rates)
    if then.base_rates and first.base_rates and not _close(then.base_rates, first.base_rates):
        return _changed(then.rates, first.rates) if changed else None
    constant = all(_close(rates, then.rates) for rates in (first.rates, second.rates, *record.start_rates))
    if then.calls and len(then.calls) == len(first.calls):
        slack = first.calls_per_step  # a checkpoint may be written between an optimizer step and the schedule's
        calls = next(
            ((was, now) for was, now in zip(then.calls, first.calls, strict=True) if abs(now - was) > slack), None
        )
        if calls is not None:
            return None if constant else _other_place(*calls, then.rates, second.rates)
        return _changed(then.rates, first.rates) if changed and then.calls == first.calls else None
    # A schedule that comes back to its first rate by itself may go on from there as the run began.
    starts = () if record.start_rates and _close(record.start_rates[0], then.rates, 0.01) else record.start_rates
    for number, (rates, start) in enumerate(zip((first.rates, second.rates), starts, strict=False), 1):
        if _close(rates, start) and not _close(rates, then.rates, 0.01):
            return _begun_again(number, then.rates, rates)
    return _changed(then.rates, first.rates) if changed and not then.base_rates else None


_SIZES_WHY = "The number of data ranks or the batch size has changed, so as many batches are another number of samples."


def _mismatch(sentence: str, subject: str, why: str | None = None) -> Verdict:
    return RESUME_MISMATCH.found(sentence, subject=subject, why=why)


def unreadable(error: Exception) -> Verdict:
    """The line about a record that cannot be read, for this reason."""
    reason = f"{type(error).__name__}: {clip(str(error), 80)}"
    sentence = f"countoff's record in the checkpoint cannot be read ({reason}). Where the run goes on is not compared."
    return _mismatch(sentence, RECORD)


def _changed(then: Sequence[float], now: Sequence[float]) -> Verdict:
    was, rate = _first_difference(then, now)
    sentence = f"the learning rate of the first step after the resume is {rate}, and the checkpoint had {was}."
    return _mismatch(sentence, CHANGED)


def _other_place(was: int, now: int, then: Sequence[float], rates: Sequence[float]) -> Verdict:
    before, rate = _first_difference(then, rates)
    sentence = (
        f"the learning-rate schedule has counted {count_of(now, 'step')} in the first step after the resume, and had "
        f"counted {was} when the checkpoint was written: the learning rate was {before}, and is {rate} in the second "
        "step."
    )
    twice = "The scheduler was restored, and stepped again for what was trained before, or is stepped twice."
    return _mismatch(sentence, RATE, twice if now > was else None)


def _begun_again(number: int, then: Sequence[float], rates: Sequence[float]) -> Verdict:
    was, rate = _first_difference(then, rates)
    sentence = (
        f"the learning rate of step {number} after the resume is {rate}, that of step {number} of the whole run; the "
        f"checkpoint had {was}."
    )
    return _mismatch(sentence, RATE)


def _first_difference(then: Sequence[float], now: Sequence[float]) -> tuple[str, str]:
    """Two learning rates of one parameter group, the first one in which they differ, with digits that show it."""
    was, is_ = next(((a, b) for a, b in zip(then, now, strict=True) if not _close([a], [b])), (then[0], now[0]))
    digits = next((digits for digits in range(3, 17) if number_of(was, digits) != number_of(is_, digits)), 3)
    return number_of(was, digits), number_of(is_, digits)


def _close(one: Sequence[float], other: Sequence[float], tolerance: float = 1e-6) -> bool:
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(math.isclose(a, b, rel_tol=tolerance, abs_tol=1e-12) for a, b in pairs)


def _comparable(record: ResumeRecord, observed: Observed, plan: FitPlan) -> bool:
    """Whether equal batches before and after the checkpoint would be no coincidence."""
    return (
        record.informative
        and observed.informative
        and (record.dp_rank, record.dp_degree) == (observed.dp_rank, observed.dp_degree)
        and record.batch_size == plan.batch_size
        and len(set(observed.prints)) == len(observed.prints) > 1
        and len(set(record.prints)) == len(record.prints) > 1
    )


def _reads_alike(record: ResumeRecord, plan: FitPlan, dp_rank: int) -> bool:
    """Whether this rank cuts its share into the same batches as before the checkpoint."""
    return record.batch_size is not None and _cut_alike(record, plan, dp_rank)


def _cut_alike(record: ResumeRecord, plan: FitPlan, dp_rank: int) -> bool:
    """Whether this rank's share, and the size of its batches as far as it is known, are as before the checkpoint."""
    return (record.dp_rank, record.dp_degree, record.batch_size) == (dp_rank, plan.dp_degree, plan.batch_size)


def _begins_epoch(record: ResumeRecord, observed: Observed) -> bool:
    """Whether the first batches that were read are those with which the record's epoch began."""
    shared = min(len(record.prints), len(observed.prints))
    return shared > 1 and record.prints[:shared] == observed.prints[:shared]


def _effect_of_epochs(record: ResumeRecord, epoch: int) -> str | None:
    """What a run does twice or not at all that goes on in another train epoch; None if that is not certain."""
    written = record.epoch
    if epoch < written:
        last = written if record.batches else written - 1
        return f"{_epochs(epoch, last)} trained on again"
    first = written if record.batches == 0 else written + 1
    if first < epoch:
        return f"{_epochs(first, epoch - 1)} skipped"
    if record.left:
        verb = "is" if record.left == 1 else "are"
        return f"{count_of(record.left, 'batch')} of train epoch {written} {verb} skipped"
    return None


def _epochs(first: int, last: int) -> str:
    return f"train epoch {first} is" if first == last else f"train epochs {first} to {last} are"


def _effect(ahead: int, noun: str) -> str:
    """What it means that a run goes on so many batches or samples ahead of its checkpoint, or behind it."""
    verb = "is" if abs(ahead) == 1 else "are"
    return f"{count_of(abs(ahead), noun)} {verb} {'skipped' if ahead > 0 else 'trained on again'}"


def _samples(samples: int, batches: int | None, batch_size: int | None, dp_degree: int | None) -> str:
    ranks = "1 data rank" if dp_degree == 1 else f"{dp_degree} data ranks"
    return f"{count_of(samples, 'sample')} ({count_of(batches or 0, 'batch')} of {batch_size} on {ranks})"


def _print_of(batch: Any) -> str:
    """The fingerprint of a batch; empty if it has none, or if that takes longer than a moment on its device."""
    found = None if batch is None else begin_fingerprint(batch)
    deadline = time.monotonic() + _LAST_SECONDS
    while isinstance(found, PendingFingerprint) and time.monotonic() < deadline:
        time.sleep(0.001)
        found = found.collect()
    return found.digest if isinstance(found, Fingerprint) else ""

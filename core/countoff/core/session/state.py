"""What one rank knows of its own fit: events come in as method calls, actions go out through the outbox.

The training thread and the three threads of the runtime share it. The training thread reads one attribute per batch,
`next_check_at`: the number of started batches at which it must look up. Everything else is touched at sync points only,
under one lock that is never held across I/O. Nothing here does I/O: what must be written or printed is put into
`outbox`, which the writer thread empties in order.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from countoff.core import constants
from countoff.core.alerts.alerts import Alerts
from countoff.core.checks import judge, shows_other_counts
from countoff.core.checks.lost import absence_by_exit
from countoff.core.checks.plan import behind_its_warning
from countoff.core.checks.uneven import WHO_EVALUATES
from countoff.core.levels import effect
from countoff.core.protocol.actions import Action, AddOne, Outbox, PrintWarning, WriteEntry
from countoff.core.protocol.counters import SpanCounters, folded, hash_step
from countoff.core.protocol.credits import Credits
from countoff.core.protocol.evidence import Evidence
from countoff.core.protocol.failures import Failure
from countoff.core.protocol.log import LogView
from countoff.core.protocol.micro_batches import MicroBatchLog
from countoff.core.protocol.observer import Observer
from countoff.core.protocol.rates import RateLog, point_of
from countoff.core.protocol.records import (
    NO_MICRO_COUNTS,
    RECORD_BYTES,
    Absence,
    Reason,
    SyncKind,
    SyncPoint,
    absence_entry,
    absence_from_entry,
    announcement_entry,
    parse_count,
    parse_rank,
    record_text,
    return_entry,
    verdict_entry,
    verdict_from_json,
)
from countoff.core.protocol.rows import row
from countoff.core.protocol.rule import Divergence
from countoff.core.protocol.step_log import StepLog
from countoff.core.settings import Settings
from countoff.core.verdict import Remedies, Verdict, remedy_for

NEVER = sys.maxsize
_ROW_BYTES = RECORD_BYTES - 224
"""What a row of the table may take, so that the name of a host fits in beside it."""
_EARLY_SPANS = 64
"""Entries about spans that this rank has not opened are kept for so many sync points ahead."""
_CLOSED: dict[str, str] = {"exhausted": "ran out", "exited": "exited"}
"""What a rank's row in the table says once its span is closed, by the reason; any other one is `stopped`."""
FAIL_SECONDS = 0.8
"""Where a rank has raised an exception, others have so long to raise theirs before the verdict is printed."""
_TOLD_FAILURES = 16
"""Exceptions of which a rank tells the others. A loop that has caught so many will catch the next one too."""


@dataclass(slots=True)
class State:
    """The shared state of one guard.

    Attributes:
        rank: This rank.
        world_size: Ranks that are compared.
        settings: The user's choices.
        remedies: What to do about each kind of verdict, in the adapter's words.
        outbox: Actions to be carried out, oldest first. The runtime puts its own jobs into the same queue, so that
            the order of everything this rank writes is kept.
        log: This rank's view of the shared log.
        lock: Held while anything below changes.
        changed: Notified, under the lock, of every event that a training thread may wait for.
        spans: Open spans, outermost first.
        steps: Optimizer steps applied since the fit began.
        step_hash: Hash of the batches after which they were applied.
        last_step: The sync point that opened the span of the last one, and the batches started in it then.
        step_log: After which batches the last of them were applied.
        micro_batches: How many micro-batches each of these steps had.
        rates: The learning rates where they were compared last.
        next_check_at: Batches started in the innermost span at which the training thread must look up.
        proposed: The verdict that this rank has proved, whether or not it becomes that of the job.
        end: The verdict that ended the fit.
        ended: Set once `end` is known here.
        printed: Set once the verdict has been printed here, with its table.
        answered: Set once the training thread has received the verdict (or has failed by itself).
        is_caught: Whether the program has caught the verdict that was raised last, and has forgotten it.
        interrupted: Whether another rank was stopped by its operator: this one may lose it, and nobody is at fault.
        comparing: Whether what this rank finds still goes into the log; False once it has stopped comparing.
        ranks: Which ranks these are, ascending; given only if they are a part of the job.
        present: The ranks that have counted off; the others owe nothing. Known on the first rank.
        complete: Whether all ranks are known to have counted off.
        failure: What this rank's own exception was, if it has failed by itself.
        absences: The other ranks that have said that they may take part no more, by rank.
        collective_failed: Whether an exception of this rank shows that it has lost another one.
        finished: Whether the fit's end was passed here or read in the log; from then on the store may go away.
        printing: Whether some thread has begun to print the verdict.
        known_at: When `end` became known here, in seconds since the epoch.
        known_since: The same, by `time.monotonic()`.
        notices: Warnings of all ranks, which ended nothing.
        host_left_at: When the first rank, which may host the store, has said goodbye, by `time.monotonic()`.
        left: The first rank known to have closed its guard before its fit had ended; None if there is none.
        readers: What reads an entry of the log that a check has written, by its type. It returns what the entry does,
            and raises KeyError, TypeError or ValueError if it is none.
        evidence: What the threads of this rank's loop let it prove.
        observer: Told of what happens, for the trace; None where there is none.
        alerts: Tells of findings where the user looks besides the output.
        began: When this state was made, by `time.monotonic()`.
        pid: The process that this rank is. A process forked off it must report nothing.
    """

    rank: int
    world_size: int
    settings: Settings
    remedies: Remedies
    outbox: Outbox = field(default_factory=Outbox)
    log: LogView = field(default_factory=LogView)
    lock: Any = field(default_factory=threading.RLock)
    changed: threading.Condition = field(init=False)
    spans: list[SpanCounters] = field(default_factory=list[SpanCounters])
    steps: int = 0
    step_hash: int = 0
    micro_batches: MicroBatchLog = field(default_factory=MicroBatchLog)
    step_log: StepLog = field(default_factory=StepLog)
    rates: RateLog = field(default_factory=RateLog)
    next_check_at: int = NEVER
    proposed: Verdict | None = None
    end: Verdict | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    printed: threading.Event = field(default_factory=threading.Event)
    answered: threading.Event = field(default_factory=threading.Event)
    is_caught: Callable[[], bool] = lambda: False
    interrupted: bool = False
    comparing: bool = True
    ranks: Sequence[int] = ()
    present: list[int] = field(default_factory=list[int])
    complete: bool = False
    failure: Failure | None = None
    absences: dict[int, Absence] = field(default_factory=dict[int, Absence])
    collective_failed: bool = False
    finished: bool = False
    printing: bool = False
    known_at: float = 0.0
    known_since: float = 0.0
    host_left_at: float = 0.0
    notices: list[Verdict] = field(default_factory=list[Verdict])
    left: int | None = None
    readers: dict[str, Callable[[Mapping[str, Any]], Callable[[], None]]] = field(default_factory=dict[str, Any])
    evidence: Evidence = field(default_factory=Evidence)
    observer: Observer | None = None
    alerts: Alerts = field(init=False)
    began: float = field(default_factory=time.monotonic)
    pid: int = field(default_factory=os.getpid)
    last_step: tuple[int, int] = (-1, -1)
    _begun: int = 0
    _told_failures: int = 0
    _is_absent: bool = False
    _noted: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    _last_row: dict[str, Any] = field(default_factory=dict[str, Any])
    _early: dict[int, list[Mapping[str, Any]]] = field(default_factory=dict[int, Any])

    def __post_init__(self) -> None:
        self.changed = threading.Condition(self.lock)
        self.alerts = Alerts(self.settings)
        self.ranks = self.ranks or range(self.world_size)

    @property
    def part(self) -> tuple[int, ...]:
        """The ranks that are compared, if they are a part of the job."""
        return () if isinstance(self.ranks, range) else tuple(self.ranks)

    @property
    def leads(self) -> bool:
        """Whether this is the first rank: it compares, and prints what all ranks would."""
        return self.rank == self.ranks[0]

    # Events of the training thread.

    def sync_point(
        self,
        kind: SyncKind,
        span: str,
        reason: Reason,
        counters: SpanCounters,
        opens: SpanCounters | None = None,
        rates: tuple[float, ...] = (),
    ) -> SyncPoint:
        """The sync point that this rank passes now.

        Args:
            kind: What the sync point is.
            span: Name of the span that it opens or closes.
            reason: Why that span closes; it means nothing outside of the spans that are compared.
            counters: The innermost open span, or the last one.
            opens: The span that the sync point opens, if it does. A train epoch may be resumed in its middle.
            rates: The learning rates in force, where they are compared.
        """
        inside = bool(self.spans) and counters.compared
        if not inside and kind != "fit_end":
            reason = ""
        at = counters.started if inside else 0
        if kind == "train_start" and opens is not None and opens.compared:
            at = opens.started
        counts = folded(counters.counts) if kind == "eval_end" else ()
        micro = NO_MICRO_COUNTS if kind == "eval_end" else self.micro_batches.take()
        in_epoch = kind == "train_end" or self.train_span() is not None
        known = self.evidence.knows_steps(in_epoch=in_epoch)
        return SyncPoint(
            kind,
            span,
            at,
            reason,
            self.steps,
            self.step_hash if self.evidence.steps_by_batch else 0,
            counts,
            self.rank,
            time.time(),
            micro,
            rates if known else (),
            steps_known=known,
            at_known=reason != "stopped" or self.evidence.steps_by_batch,
        )

    def reach(self, sync_point: SyncPoint, opens: SpanCounters | None = None) -> int:
        """Passes this rank's next sync point, with the span that it opens or closes, in one step for all threads.

        What is wrong with it is proposed as the verdict, or becomes a warning.

        Returns:
            The sync point's index.
        """
        with self.lock:
            index, divergence = self.log.reach(sync_point)
            if sync_point.rates:
                self.rates.keep(point_of(index), sync_point.rates)
            self._consider(divergence)
            if sync_point.kind in ("train_end", "eval_end"):
                self.close_span(sync_point.reason)
            elif opens is not None:
                opens.opened = index
                self.spans.append(opens)
                if not opens.evaluation:
                    self.micro_batches.begin(opens)
                    self.step_log.begin(opens)
            return index

    def need_not_write(self, index: int) -> bool:
        """Whether a sync point of this rank need not go into the log.

        It need not where the log holds one of this index. It must not after this rank has proved a divergence: sync
        points after that are consequences and would hide the cause.
        """
        with self.lock:  # an entry that another thread is receiving has then had its effects
            return self.proposed is not None or self.log.is_logged(index)

    def close_span(self, reason: Reason) -> None:
        """Closes the innermost span, and keeps its counts for the table of a later verdict."""
        with self.lock:
            span = self.spans.pop()
            if span.compared and not span.evaluation:
                self._begun += span.started
            self._last_row = row(self.rank, span, self.steps, _CLOSED.get(reason, "stopped"))
            span.credits = None
            self.changed.notify_all()
        for opened in [each for each in self._early if each <= span.opened]:
            del self._early[opened]

    def train_span(self) -> SpanCounters | None:
        """Returns the open train epoch; None if there is none."""
        return next((span for span in reversed(self.spans) if not span.evaluation), None)

    def step(self, optimizer: object = None) -> None:
        """Counts an optimizer step that was applied; several optimizers in one batch are one step.

        Args:
            optimizer: Which optimizer it was, hashable; equal for the steps of one. It matters where steps and batches
                are on different threads.
        """
        train = self.train_span()
        if not self.evidence.steps_by_batch:
            self.steps += self.evidence.begins_round(optimizer, in_epoch=train is not None)
            return
        if train is None or not train.compared:
            return
        if (moment := (train.opened, train.started)) == self.last_step:
            self.micro_batches.step_again(train)
            return
        self.micro_batches.step(train)
        self.last_step = moment
        self.steps += 1
        self.step_hash = hash_step(self.step_hash, train.started)
        self.step_log.step(train)

    def look(self, last: bool = False) -> None:
        """Applies the rule to this rank's counters as they are.

        Args:
            last: Whether the loader of the innermost span is known to hold no more.
        """
        with self.lock:
            if last and self.spans:
                self.spans[-1].ends = True
            self._consider(self.log.prove(self.spans))

    @property
    def begun(self) -> int:
        """Train batches that this rank has begun in this fit, with those before the place where it was resumed."""
        return self._begun + sum(span.started for span in self.spans if span.compared and not span.evaluation)

    def fail(self, failure: Failure) -> None:
        """Tells the others that an exception has left this rank's loop, which its program may still catch.

        Args:
            failure: The exception.
        """
        with self.lock:
            if self.failure == failure:
                return
            self.failure = failure
            if self._told_failures < _TOLD_FAILURES:
                self._told_failures += 1
                self.outbox.put(WriteEntry(absence_entry(Absence(self.rank, failure.event, begun=self.begun))))

    def recover(self) -> None:
        """Takes back what `fail` has told: the loop goes on."""
        with self.lock:
            self.collective_failed = False
            if self.end is not None or self.proposed is not None:
                return
            self.answered.clear()
            if self.failure is not None:
                self.failure = None
                self.outbox.put(WriteEntry(return_entry(self.rank)))

    def begin_credits(self, span: SpanCounters, credits: Credits) -> None:
        """Gives an open span its credits, and lets them receive what the log has held for them already."""
        with self.lock:
            span.credits, span.resumed_at = credits, span.started
            for entry in self._early.pop(span.opened, ()):
                self._act(credits.receive(entry))

    def end_credits(self) -> None:
        """Lets passes that are still open go on alone: from here on, nobody hears of the other ranks."""
        with self.lock:
            for span in self.spans:
                span.credits = None
            self.changed.notify_all()

    def fetched(self, credits: Credits) -> None:
        """This rank's loader has delivered another batch of a span that has credits."""
        with self.lock:
            self._act(credits.fetched(time.monotonic()))

    def loader_ended(self, credits: Credits) -> None:
        """This rank's loader has ended for the first time in a span that has credits."""
        with self.lock:
            self._act(credits.ended())

    def announcement(self, counters: SpanCounters) -> dict[str, Any]:
        """The log's entry that announces with which batch this rank will close a span."""
        kind: SyncKind = "eval_end" if counters.evaluation else "train_end"
        closing = SyncPoint(kind, counters.name, counters.started, "exhausted", rank=self.rank, time=time.time())
        return announcement_entry(counters.opened, closing)

    def set_next_check(self, counters: SpanCounters, *, watched: bool) -> None:
        """Sets `next_check_at` for the next batch at which the training thread must look up. Call it under the lock.

        Args:
            counters: The innermost open span, or the last one.
            watched: Whether there is any other rank to compare with.
        """
        if not watched or (self.end is not None and self.settings.on_divergence == "warn"):
            self.next_check_at = NEVER
        elif self.end is not None or self.proposed is not None or self.log.is_behind(self.spans):
            self.next_check_at = 0
        elif counters.evaluation:
            self.next_check_at = NEVER
        else:
            every = constants.TICK_BATCHES
            self.next_check_at = (counters.started // every + 1) * every

    def only_ticks(self, counters: SpanCounters) -> bool:
        """Whether nothing but a tick is due at the batch that has begun; if so, `next_check_at` is set to the next one.

        Args:
            counters: The innermost open span, which other threads do not change.
        """
        with self.lock:
            if self.next_check_at != counters.started or not counters.compared:
                return False
            self.next_check_at += constants.TICK_BATCHES
            return True

    # Events from other ranks.

    def receive(self, entry: Mapping[str, Any]) -> None:
        """Receives the next entry of the log; after a verdict it changes nothing.

        Args:
            entry: The entry.

        Raises:
            KeyError, TypeError, ValueError: If it is not an entry that countoff writes.
        """
        with self.lock:
            if self.end is not None:
                return
            apply = self._parse(entry)
            # Before anything is compared: a batch begun in that moment is either compared here or sees `next_check_at`.
            before, self.next_check_at = self.next_check_at, 0
            apply()
            if not (self.log.is_behind(self.spans) or self.proposed or self.end):
                self.next_check_at = before
            self.changed.notify_all()

    def added(self, action: AddOne, seconds: float) -> None:
        """This rank has added 1 to a counter.

        Args:
            action: The action that asked for it.
            seconds: How long the store took to answer.
        """
        with self.lock:
            for span in self.spans:
                if span.opened == action.opened and span.credits is not None:
                    span.credits.added(seconds)

    def _parse(self, entry: Mapping[str, Any]) -> Callable[[], None]:
        """Checks an entry whole before any of it takes effect, and returns what it does."""
        match entry["type"]:
            case "sync_point":
                sync_point, index = self._parse_sync_point(entry), parse_count(entry["index"])
                return lambda: self._receive_sync_point(index, sync_point)
            case "announcement":
                closing, opened = self._parse_sync_point(entry), parse_count(entry["opened"])
                return lambda: self._consider(self.log.receive_announcement(opened, closing, self.spans))
            case "end":
                verdict = self._parse_verdict(entry)
                return lambda: self.adopt(verdict)
            case "notice":
                notice = self._parse_verdict(entry)
                return lambda: self._receive_notice(notice)
            case "grant" | "ends" | "stop":
                opened = parse_count(entry["opened"])
                return lambda: self._receive_credits(opened, entry)
            case "absence":
                absence = absence_from_entry(entry, self.ranks)
                return lambda: self._receive_absence(absence)
            case "return":
                returned = parse_rank(entry["rank"], self.ranks)
                return lambda: self._receive_return(returned)
            case str(kind) if kind in self.readers:
                return self.readers[kind](entry)
            case "goodbye" if entry["rank"] in self.ranks:
                return lambda: self._receive_goodbye(entry["rank"], ended=entry.get("ended") is True)
            case _:
                return lambda: None

    def _parse_sync_point(self, entry: Mapping[str, Any]) -> SyncPoint:
        sync_point = SyncPoint.from_json(entry["sync_point"])
        parse_rank(sync_point.rank, self.ranks)
        return sync_point

    def _parse_verdict(self, entry: Mapping[str, Any]) -> Verdict:
        verdict = verdict_from_json(entry["verdict"])
        return replace(verdict, remedy=remedy_for(verdict, self.remedies))

    def _receive_sync_point(self, index: int, sync_point: SyncPoint) -> None:
        if sync_point.kind == "fit_end":
            self.finished = True
            self.interrupted |= sync_point.reason == "interrupted"
            if sync_point.reason == "exited" and sync_point.rank != self.rank:
                self.absences[sync_point.rank] = absence_by_exit(sync_point.rank)
        self._consider(self.log.receive_sync_point(index, sync_point, self.spans))

    def _receive_credits(self, opened: int, entry: Mapping[str, Any]) -> None:
        span = next((span for span in self.spans if span.opened == opened), None)
        if span is not None and span.credits is not None:
            self._act(span.credits.receive(entry))
        elif span is not None or self.log.next <= opened < self.log.next + _EARLY_SPANS:
            self._early.setdefault(opened, []).append(entry)

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            self.outbox.put(action)

    def _receive_notice(self, notice: Verdict) -> None:
        self._noted.add((notice.kind, notice.subject))
        if shows_other_counts(notice):
            self.log.mute()  # another rank has accepted it, and what follows from it is in its later sync points
        if not self._is_known(notice.kind, notice.subject):
            self.notices.append(notice)
            if self.leads:
                self.outbox.put(PrintWarning(notice))

    def _receive_goodbye(self, rank: int, *, ended: bool) -> None:
        if self.left is None and not ended:
            self.left = rank
        if rank == self.ranks[0]:  # it may host the store
            self.host_left_at = time.monotonic()
            self.finished = True

    def _receive_absence(self, absence: Absence) -> None:
        if absence.rank == self.rank:
            self._is_absent = True
        else:
            self.absences[absence.rank] = absence

    def _receive_return(self, rank: int) -> None:
        if rank == self.rank:
            self._is_absent = False
        else:
            self.absences.pop(rank, None)

    # What follows from an event.

    def _consider(self, divergence: Divergence | None) -> None:
        """Proposes a verdict, or warns, or accepts it, as the divergence and the user's settings demand."""
        if divergence is None or self.end is not None:
            return
        verdict = judge(divergence, self.rank)
        if divergence.micro_batches:
            self.find(verdict)
            return
        policy = self.settings.uneven_eval
        if verdict.subject == WHO_EVALUATES and self.evidence.own_loop and policy not in ("raise", "stop"):
            self.log.mute()  # what follows from it must not be found again
            self.note(verdict)
            return
        # With `stop`, a rank that leaves an evaluation alone would leave the others waiting for its credits.
        if not divergence.evaluation or policy in ("raise", "stop"):
            self.propose(verdict)
            if self.proposed is not None or divergence.kind == "LearningRateMismatch":
                return  # counts do not follow from rates: later sync points are compared
            if not divergence.evaluation:
                self.log.mute()  # it has been accepted, and what follows from it must not be found again
        self.log.accept_uneven(self.spans)
        if divergence.evaluation and policy == "warn":
            self.note(verdict)

    def find(self, verdict: Verdict) -> None:
        """Takes a finding: it ends the job, becomes a warning, or nothing, as `levels.effect` decides.

        The first verdict written wins; all ranks report it. A warning is given once for each kind and subject.

        Args:
            verdict: The finding.
        """
        level = effect(verdict, self.settings.levels)
        if level == "raise" and (self.world_size > 1 or verdict.harmful):
            self._propose(verdict)
        elif level != "off":
            self._note(verdict)

    def note(self, verdict: Verdict) -> None:
        """Takes a finding that does no harm by itself."""
        self.find(replace(verdict, harmful=False))

    def propose(self, verdict: Verdict) -> None:
        """Takes a finding after which training on would do harm; see `find`."""
        self.find(replace(verdict, harmful=True))

    def _note(self, verdict: Verdict) -> None:
        """Warns, once in the whole job for each kind and subject."""
        with self.lock:
            if (verdict.kind, verdict.subject) in self._noted:
                return
            self._noted.add((verdict.kind, verdict.subject))
        if self.world_size == 1:
            self.outbox.put(PrintWarning(replace(verdict, remedy=remedy_for(verdict, self.remedies))))
        else:
            self.outbox.put(WriteEntry(verdict_entry("notice", verdict)))

    def _propose(self, verdict: Verdict) -> None:
        with self.lock:
            if self.proposed is None and self.end is None:
                verdict = behind_its_warning(verdict, self.notices)
                self.proposed = replace(verdict, remedy=remedy_for(verdict, self.remedies))
                self.next_check_at = 0
                self.outbox.put(WriteEntry(verdict_entry("end", verdict)))  # other ranks have the same adapter
                self.changed.notify_all()

    def adopt(self, verdict: Verdict) -> None:
        """Accepts a verdict as the one that ended the fit; later ones change nothing."""
        with self.lock:
            if self.end is None:
                own = self.proposed
                if own is not None and (own.kind, own.time) == ("Stalled", verdict.time):
                    verdict = replace(verdict, why=own.why)  # all ranks' stacks, more than an entry of the log can hold
                self.end = verdict
                self.known_at, self.known_since = time.time(), time.monotonic()
                self.next_check_at = 0
                self.ended.set()
                self.changed.notify_all()

    # What the runtime reads.

    def is_written(self, entry: Mapping[str, Any]) -> bool:
        """Whether the log is known to hold the content of an entry.

        That is a warning of the same kind and subject, or what makes an entry about a loader's end needless. What this
        rank has to say of itself is also known where it holds no more, or was never said.
        """
        if entry["type"] == "absence":
            return entry["rank"] in self.absences or (entry["rank"] == self.rank and self.failure is None)
        if entry["type"] == "return":
            return not self._is_absent
        if entry["type"] == "ends":
            found = next((span.credits for span in self.spans if span.opened == entry["opened"]), None)
            return found is not None and found.has_end(entry["at"])
        return entry["type"] == "notice" and self._is_known(entry["verdict"]["kind"], entry["verdict"]["subject"])

    def _is_known(self, kind: str, subject: str) -> bool:
        return any((known.kind, known.subject) == (kind, subject) for known in self.notices)

    def own_row(self) -> dict[str, Any]:
        """This rank's line in the table of a verdict."""
        with self.lock:
            if self.spans:
                span = self.spans[-1]
                return row(self.rank, span, self.steps, f"in batch {span.started}")
            last = self._last_row or row(self.rank, None, self.steps, "between spans")
            if last["state"] != "stopped":
                return last
            # An exception that leaves a loop closes its span first, as a break does.
            raised = "lost a peer" if self.collective_failed else "raised an error" if self.failure else "stopped"
            return {**last, "state": raised}

    def final_row(self) -> dict[str, Any]:
        """This rank's line in the table of the verdict, with what rank 0 needs to tell who is out of step."""
        with self.lock:
            end = self.end
            side = None if end is None else self.log.side(self.rank, end.sync_index, end.announced, self.spans)
            more: dict[str, Any] = {}
            if end is not None and end.point:
                more["rates"] = self.rates.at(end.point)
            failure = None if self.failure is None else self.failure.to_json()
            line = {**self.own_row(), "known": self.known_at, "failure": failure, "side": side, **more}
            if end is not None and end.kind == "StepMismatch" and not end.subject:
                whole = {**line, "stepped": self.step_log.to_json(self.spans)}
                return whole if len(record_text(whole)) <= _ROW_BYTES else line
            return line

    def may_fail_alike(self, coming: int = 0) -> bool:
        """Whether this rank may yet raise what another one has raised: it has not got beyond the batch of that one.

        Then it goes on until it has raised too, is about to begin a later batch, or the verdict is printed. The other
        one has been in all collectives of the batches before, so this one waits for it in that batch, or nowhere.

        Args:
            coming: Batches that it is about to begin, and has not counted yet.
        """
        end = self.end
        if end is None or end.begun is None or self.proposed is not None or self.printed.is_set():
            return False
        return self.begun + coming <= end.begun and time.monotonic() - self.known_since < FAIL_SECONDS

    def progress(self) -> tuple[int, int, int]:
        """A value that changes whenever this rank makes progress; the watchdog compares it."""
        with contextlib.suppress(IndexError):  # a span may close on the training thread in between
            return self.log.next, self.spans[-1].started, self.steps
        return self.log.next, -1, self.steps

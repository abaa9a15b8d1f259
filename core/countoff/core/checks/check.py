"""What a check is: it answers one question, and a guard tells it what happens.

A check is told of the moments of a fit, and never of a single batch. What ranks compare it puts into the records that
they exchange anyway: the report of the roll call, the ticks, the report of a closed span. What it finds it returns or
hands to `Others`; whether that ends the job is decided elsewhere (`State.find`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from countoff.core.protocol.counters import SpanCounters, TickPlace
from countoff.core.protocol.evidence import Evidence
from countoff.core.protocol.fit_records import SchedulePlan, SharedModel, SplitSample
from countoff.core.protocol.micro_batches import MicroBatchLog
from countoff.core.protocol.observer import Observer
from countoff.core.protocol.rates import RateLog
from countoff.core.protocol.records import FitPlan, Reason, Records
from countoff.core.verdict import Level, Verdict

__all__ = ["Check", "Choices", "FitStart", "Listener", "Others", "RankState", "TickPart"]


class Choices(Protocol):
    """What the user has chosen, as far as checks depend on it: a part of `countoff.core.settings.Settings`."""

    @property
    def levels(self) -> Mapping[str, Level]: ...  # noqa: D102
    @property
    def compare_data(self) -> bool: ...  # noqa: D102
    @property
    def weights_every(self) -> int: ...  # noqa: D102
    @property
    def uneven_train(self) -> Literal["raise", "stop"]: ...  # noqa: D102
    @property
    def uneven_eval(self) -> Literal["warn", "raise", "allow", "off", "stop"]: ...  # noqa: D102
    @property
    def keeps_even(self) -> bool: ...  # noqa: D102
    @property
    def lost_seconds(self) -> float: ...  # noqa: D102


class RankState(Protocol):
    """What a check sees of its own rank: a part of `countoff.core.session.state.State`."""

    @property
    def rank(self) -> int: ...  # noqa: D102
    @property
    def world_size(self) -> int: ...  # noqa: D102
    @property
    def ranks(self) -> Sequence[int]: ...  # noqa: D102
    @property
    def leads(self) -> bool: ...  # noqa: D102
    @property
    def settings(self) -> Choices: ...  # noqa: D102
    @property
    def end(self) -> Verdict | None: ...  # noqa: D102
    @property
    def steps(self) -> int: ...  # noqa: D102
    @property
    def step_hash(self) -> int: ...  # noqa: D102
    @property
    def last_step(self) -> tuple[int, int]: ...  # noqa: D102
    @property
    def evidence(self) -> Evidence: ...  # noqa: D102
    @property
    def micro_batches(self) -> MicroBatchLog: ...  # noqa: D102
    @property
    def rates(self) -> RateLog: ...  # noqa: D102
    @property
    def observer(self) -> Observer | None: ...  # noqa: D102
    def train_span(self) -> SpanCounters | None: ...  # noqa: D102
    def find(self, verdict: Verdict) -> object: ...  # noqa: D102


@dataclass(frozen=True)
class FitStart:
    """What one rank begins a fit with.

    Attributes:
        plan: What all ranks must agree on.
        versions: Versions of what computes, by package.
        schedules: This rank's learning-rate schedules, as far as they are known.
        own_batches: Batches per epoch that are proven of this rank's loader, where ranks may differ in them.
        own_length: What `len` of that loader gives now, where that is right now.
        models: The parameters that this rank must hold alike with others.
        holders: The ranks that hold the very parameters that this rank's optimizers change.
        stage: This rank's stage of a pipeline. The first stage may read inputs where the last one reads labels.
        split: How this rank has split a dataset for training and evaluation; None if that is not known.
    """

    plan: FitPlan
    versions: Mapping[str, str]
    schedules: Sequence[SchedulePlan] = ()
    own_batches: int | None = None
    own_length: int | None = None
    models: Sequence[SharedModel] = ()
    holders: tuple[int, ...] = ()
    stage: int = 0
    split: SplitSample | None = None


class TickPart(NamedTuple):
    """What one check compares at a tick.

    Attributes:
        record: This rank's part of the record, as JSON types.
        compare: Takes the whole record of the rank that wrote first, and the ranks: that one and this one. Returns what
            is wrong. Called on the writer thread.
    """

    record: Mapping[str, Any]
    compare: Callable[[Mapping[str, Any], tuple[int, int]], Verdict | None]


class Others(Protocol):
    """The other ranks, as a check reaches them. Nothing here waits but `settle_report` and `settle_question`."""

    def compare(
        self,
        key: str,
        record: Callable[[], Mapping[str, Any]],
        judge: Callable[[Mapping[str, Any]], Verdict | None],
        *,
        ranks: int = 0,
    ) -> None:
        """Compares a record with that of the rank that wrote first under the same key.

        Args:
            key: The key, equal on all ranks.
            record: Returns this rank's record. Called on the writer thread, as the next one.
            judge: Takes the record of the rank that wrote first; returns what is wrong.
            ranks: After how many ranks have compared the key is deleted; 0: it stays.
        """
        ...

    def ask(
        self, kind: str, question: Mapping[str, Any], group: Sequence[int], judge: Callable[[Records], Verdict | None]
    ) -> None:
        """Asks ranks for a record each, once in a fit for each kind: the first question counts, whoever asks.

        Args:
            kind: The kind of verdict that may follow; a check of each rank has registered an answer for it, which may
                be longer than other records.
            question: What is asked: numbers and short texts.
            group: The ranks whose answers are waited for.
            judge: Takes the answers that have come, by rank; returns what is wrong. Called on the writer thread.
        """
        ...

    def answer(self, kind: str, answer: Callable[[Mapping[str, Any]], Mapping[str, Any] | None]) -> None:
        """Registers what answers the question of a kind, whichever rank asks.

        Args:
            kind: The kind.
            answer: Takes the question; returns this rank's record, or None as long as there is none: it is asked again.
                Called on the writer thread.
        """
        ...

    def settle_question(self, kind: str, comparisons: Sequence[str] = ()) -> None:
        """Waits until the question of a kind, if one is open, is judged and all ranks know the verdict; 5 s at most.

        Args:
            kind: The kind.
            comparisons: Keys of the comparisons from which the question may come. It first waits until all of their
                ranks have made them, or one of these ranks has ended.
        """
        ...

    def entries_read(self) -> int:
        """Returns how many entries of the log this rank needs no more."""
        ...

    def all_have_read(self, entries: int) -> None:
        """Tells that no rank needs the first entries of the log any more."""
        ...

    def report(
        self,
        name: str,
        record: Callable[[], Mapping[str, Any]],
        judge: Callable[[Records], Iterable[Verdict | None]],
        *,
        owed: bool = True,
        after: Sequence[str] = (),
    ) -> None:
        """Reports a record to the first rank, which judges all that have come.

        Args:
            name: What is reported; equal on all ranks, and used once.
            record: Returns this rank's record, which may be longer than other records. Called on the writer thread.
            judge: Takes the records by rank; returns what is wrong. Called on the first rank's writer thread.
            owed: Whether the end of the fit waits for it. False for what not every rank need report.
            after: The names of earlier reports that are judged first.
        """
        ...

    def settle_report(self, name: str) -> None:
        """Waits until the first rank has judged what was reported under a name, and all that follows is in the log.

        It waits for 5 s at most, and not for a store that is slow, or a first rank that has said goodbye.
        """
        ...


class Listener:
    """What a guard tells. Each call is made on the training thread and returns at once; all do nothing here."""

    watches_steps = False
    """Whether `stepped` is to be called now."""
    wants_batch = False
    """Whether `looked` is to be called before the next train batch."""

    def fit_started(self, start: FitStart, others: Others | None) -> None:
        """The fit begins; the plans are not compared yet.

        Args:
            start: What this rank begins with.
            others: The other ranks; None where there is no other one.
        """

    def counted_off(self) -> None:
        """The roll call is over; there are other ranks."""

    def span_opening(self, span: SpanCounters) -> None:
        """A span is about to be opened: its sync point is not passed yet."""

    def span_opened(self, span: SpanCounters, epoch: int | None) -> None:
        """A span was opened.

        Args:
            span: Its counters.
            epoch: The number of the train epoch, from 0; None for an evaluation.
        """

    def looked(self, span: SpanCounters) -> None:
        """A train batch is about to be used, and the guard looks up for another reason than a tick alone."""

    def stepped(self, span: SpanCounters, steps: int) -> None:
        """An optimizer step was applied.

        Args:
            span: The train epoch, or the last one.
            steps: Optimizer steps since the fit began.
        """

    def span_closing(self, span: SpanCounters, reason: Reason, *, orderly: bool) -> None:
        """A span is about to be closed: its sync point is not passed yet.

        Args:
            span: Its counters.
            reason: Why it closes.
            orderly: Whether the loop itself closes it. Otherwise an exception may have left it anywhere.
        """

    def fit_ending(self) -> None:
        """The fit is about to end: its sync point is not passed yet."""

    def fit_ended(self) -> None:
        """The fit has ended."""

    def failed_alone(self, error: BaseException) -> None:
        """An exception has left the loop, and there is no other rank that is told of it."""
        del error

    def settle(self) -> None:
        """The guard is about to close, and ranks still compare. May wait for some seconds."""

    def closed(self) -> None:
        """The guard has closed. Called once or more often."""


class Check(Listener):
    """One question about the ranks of a job."""

    takes_the_rest = False
    """Whether its report may fill what room the others leave in the record."""

    def report(self, start: FitStart, room: int) -> Mapping[str, Any]:
        """Returns what this rank reports at the roll call, as JSON types.

        Args:
            start: What this rank begins with.
            room: Bytes that are left in the record.
        """
        del start, room
        return {}

    def compare_reports(self, reports: Records, *, complete: bool, refused: bool) -> Iterable[Verdict | None]:
        """Returns what is wrong with the reports of the roll call. Called on the first rank's writer thread.

        Args:
            reports: The reports that have come, by rank.
            complete: Whether these are the reports of all ranks.
            refused: Whether an earlier check has found something, whatever becomes of it: more would follow from it.
        """
        del reports, complete, refused
        return ()

    def answer(self, reports: Records) -> Mapping[str, Any]:
        """Returns what all ranks need to know of the reports. Called on the first rank's writer thread."""
        del reports
        return {}

    def answered(self, answer: Mapping[str, Any]) -> None:
        """Takes that from the first rank. Called on a thread of the guard."""

    def tick(self, span: SpanCounters) -> Callable[[TickPlace], TickPart | None] | None:
        """Takes the values that are to be compared after the batch at which a train span stands.

        Called on the training thread, so it takes the values as they are. A guard asks only the checks that have a
        method of their own, and only where it is known after which batch each step was applied.

        Returns:
            What makes of them what is compared, or None; it is called on the writer thread, with the place. None
            where nothing is known.
        """
        del span

    def span_report(self, span: SpanCounters) -> Mapping[str, Any]:
        """Returns what this rank reports of a closed span. Called when the report is written, on the writer thread."""
        del span
        return {}

    def compare_spans(self, span: SpanCounters, reports: Records) -> Iterable[Verdict | None]:
        """Returns what is wrong with a span that all ranks have closed. Called on the first rank's writer thread.

        Args:
            span: The counters of the first rank.
            reports: The reports of all ranks, by rank.
        """
        del span, reports
        return ()

    def metrics(self, span: SpanCounters, reports: Records) -> Mapping[str, float]:
        """Returns what a span that all ranks have closed has shown, for the framework's loggers; likewise."""
        del span, reports
        return {}

    def left_keys(self, span: SpanCounters) -> Iterable[str]:
        """Returns the keys in the store that nobody needs once all ranks have closed a span; likewise."""
        del span
        return ()

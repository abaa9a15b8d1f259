"""What is known of Composer's loaders: read before the first batch, and learned from the epochs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from countoff._adapter.fit import OwnRank
from countoff._adapter.loader_observer import ObservedPass, samples_in
from countoff._adapter.torch_facts import loader_facts, reported_length
from countoff._composer.messages import (
    MESSAGES,
    consequences,
    consequences_in_evaluation,
    remedy_of_length,
    uneven_by_design,
    with_correction,
)
from countoff._composer.streaming import has_known_iterator, streaming_dataset, streaming_facts
from countoff._composer.streaming_facts import StreamingFacts
from countoff._composer.streaming_pass import streaming_pass
from countoff.core import LoaderFacts, Verdict
from countoff.core.arithmetic.plan import BatchPlan, LoaderPass
from countoff.core.arithmetic.totals import Totals
from countoff.core.checks.framework import judge_length
from countoff.core.protocol.counters import UnusedBatches

__all__ = ["LoaderReport", "batches_when_resumed", "read_loader", "unused_batches"]


@dataclass(frozen=True)
class LoaderReport:
    """What is known of one loader.

    Attributes:
        facts: The facts, of a pass that ends on every rank where the shortest rank's loader does.
        totals: What follows from the facts and from the epochs so far.
        own_batches: Batches of a whole pass over this rank's loader without any limit; None if that is not proven.
        streaming: The facts of its StreamingDataset; None if it has none.
        uneven: Fewest and most batches of a rank in one pass, where they differ by design and no limit
            ends the pass before; else None.
        limit: The argument of Composer's that limits the batches of a pass, with ``N`` for their number.
        fixes: Whether countoff sets the length where it is proven.
        counted_by: Who goes by the length, for messages.
        consequences: Returns what a wrong length of a loader with such a plan does, as sentences.
    """

    facts: LoaderFacts
    totals: Totals
    own_batches: int | None
    streaming: StreamingFacts | None
    uneven: tuple[int, int] | None
    limit: str
    fixes: bool
    counted_by: str
    consequences: Callable[[BatchPlan], str]

    @property
    def proven(self) -> int | None:
        """Batches of one pass on every rank, with all limits; None if they are not proven."""
        return self.totals.plan.batches_per_epoch if self.totals.plan.proven else None

    @property
    def corrected_length(self) -> int | None:
        """The length that Composer should use; None if it does already, or if the true length is not proven."""
        proven, believed = self.proven, self.totals.plan.reported_batches_per_epoch
        return proven if proven and (believed is None or proven < believed) else None

    def wrong_length(self) -> Verdict | None:
        """Returns a `WrongLength` warning if Composer uses another number of batches than there are."""
        plan = self.totals.plan
        if self.facts.limit_batches is not None and plan.batches_per_epoch == plan.reported_batches_per_epoch:
            return None  # the user's limit ends the pass, whatever the loader reports
        plan = self.totals.own
        return judge_length(plan, counted_by=self.counted_by, consequences=self.consequences(plan))

    def notice(self, length: int | None, since: str = "before the first batch") -> Verdict | None:
        """Returns the warning of a wrong length, with what was done about it or what to do; None if it is right.

        Args:
            length: The length that countoff sets; None for none.
            since: When that takes effect.
        """
        wrong = self.wrong_length()
        if wrong is None:
            return None
        if length is not None:
            return with_correction(wrong, length, since)
        return replace(wrong, remedy=remedy_of_length(self.totals.plan, limit=self.limit, fixes=self.fixes))

    def warnings(self, length: int | None) -> list[Verdict]:
        """Returns the warnings about the train loader before its first batch.

        Args:
            length: The length that countoff is about to set; None for none.
        """
        wrong = self.notice(length)
        found = [] if wrong is None else [wrong]
        if self.uneven is not None and self.streaming is not None:
            found.append(uneven_by_design(self.streaming.batching_method, self.uneven))
        return found

    def set_length(self, state: Any, length: int) -> None:
        """Sets Composer's own length of an epoch."""
        state.dataloader_len = length
        self.totals.corrected(length)
        self.totals.observe(length)

    def learn(self, state: Any, batches: int, *, may_set: bool) -> tuple[Verdict | None, int | None]:
        """Learns from an epoch that ended, on every rank, because the shortest rank's loader was exhausted.

        Args:
            state: Composer's State.
            batches: Batches of the epoch.
            may_set: Whether to set Composer's length if the epoch proves it: all ranks must have agreed on the old one,
                and this fit must have had the whole epoch.

        Returns:
            The warning of a wrong length and the length that was set, each None if there is none.
        """
        self.totals.observe(batches)
        length = self.totals.shorter_than_reported if may_set else None
        wrong = self.notice(length, "from the next epoch on")
        if length is not None:
            self.set_length(state, length)
        return wrong, length


def read_loader(
    loader: Any,
    *,
    length: int | None,
    own: OwnRank,
    fixes: bool,
    evaluator: str = "",
    duration: Any = None,
) -> LoaderReport:
    """Returns the report of one loader, read before it is observed.

    Args:
        loader: What the Trainer iterates.
        length: `state.dataloader_len` for it.
        own: This rank; a loader of streaming tells by itself which share of the data it reads.
        fixes: Whether countoff sets the length where it is proven.
        evaluator: The evaluator's label; empty for the train loader.
        duration: `state.max_duration`, for a train loader.
    """
    reported = reported_length(loader)
    epochs = _duration(duration, "ep")
    known: dict[str, Any] = {
        "limit_batches": length if length is not None and (reported is None or length < reported) else None,
        "max_epochs": epochs,
        "max_steps": _duration(duration, "ba"),
        "partial_step": "applied",  # Composer accumulates within a batch, over micro-batches
    }
    if not has_known_iterator(loader):
        known["samples_per_rank"] = None
    facts, one_pass, uneven, dp_degree = loader_facts(loader, **known), None, None, own.dp_degree
    streaming = streaming_facts(loader)
    if streaming is not None:
        one_pass = streaming_pass(streaming, rank=own.rank)
        dp_degree, uneven = streaming.dp_degree, one_pass.uneven_batches
        facts = replace(facts, one_pass=_shortest(one_pass), dataset_size=int(streaming_dataset(loader).num_samples))
    totals = Totals(facts, dp_degree=dp_degree)
    limits = [each for each in (facts.limit_batches, facts.max_steps) if each is not None]
    if uneven is not None and limits and min(limits) <= uneven[0]:
        uneven = None
    batches = one_pass.batches if one_pass is not None else totals.plan.loader_batches if totals.plan.proven else None
    limit = "Evaluator(subset_num_batches=N)" if evaluator else "Trainer(train_subset_num_batches=N)"
    if evaluator:
        counted_by, effect = f"Composer's evaluator {evaluator!r}", consequences_in_evaluation
    else:
        counted_by, effect = MESSAGES.framework, partial(consequences, epochs=epochs)
    return LoaderReport(facts, totals, batches, streaming, uneven, limit, fixes, counted_by, effect)


def batches_when_resumed(state: Any, report: LoaderReport, rank: int) -> int | None:
    """Returns the batches of the epoch in which this run resumes, those before the checkpoint included.

    None if they are unknown.
    """
    if report.streaming is None or "train" not in state.dataset_resumption:
        return report.totals.plan.batches_per_epoch
    rest = replace(report.streaming, drop_first=int(state.timestamp.sample_in_epoch))
    batches = streaming_pass(rest, rank=rank).fewest_batches
    return None if batches is None else int(state.timestamp.batch_in_epoch) + batches


def unused_batches(
    report: LoaderReport, observed: ObservedPass | None, used: int, *, before: int | None, length: int | None
) -> UnusedBatches | None:
    """Returns what this rank's loader had beyond the batches used in a pass that ended by itself; None if unknown.

    Args:
        report: The report of the loader.
        observed: The pass as observed; None if the loader cannot be observed.
        used: Batches of this pass that were used.
        before: Batches of the pass before those, as after a resume; None if unknown.
        length: `state.dataloader_len` of the pass.
    """
    if observed is not None and observed.exhausted:
        return UnusedBatches(0)
    own = report.own_batches if before is not None else None
    if own is not None:
        own = min(own, own if length is None else length) - (before or 0)
    if own is None and observed is None:
        return None
    fetched = 0 if observed is None else max(0, observed.batches - observed.skipped - used)
    batches = fetched if own is None else max(0, own - used)
    samples = None
    if observed is not None and batches == fetched == 1:
        samples = samples_in(observed.last)
    elif batches and report.facts.drop_last and report.facts.batch_size is not None:
        samples = batches * report.facts.batch_size
    return UnusedBatches(batches, samples, exact=own is not None or not batches)


def _shortest(own: LoaderPass) -> LoaderPass:
    """Returns the pass as every rank has it: Composer stops all of them at the shortest."""
    fewest = own.fewest_batches
    if fewest is None or not own.uneven:
        return own
    return LoaderPass(fewest, fewest, fewest, min(own.full_batches, fewest))


def _duration(duration: Any, unit: str) -> int | None:
    return int(duration.value) if duration is not None and duration.unit.value == unit else None

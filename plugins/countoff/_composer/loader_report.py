"""Composer's loaders, read, and what is known of them by now."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from countoff._adapter.loader_observer import ObservedPass, samples_in
from countoff._adapter.torch_facts import loader_facts, reported_length
from countoff._composer.messages import consequences, consequences_in_evaluation, mended, uneven_by_design
from countoff._composer.streaming import iterates_as_it_came, streaming_dataset, streaming_facts
from countoff.core import LoaderFacts, Verdict
from countoff.core.plan import LoaderPass, StreamingFacts, streaming_pass
from countoff.core.protocol.truncation import UnusedBatches
from countoff.core.totals import Totals


@dataclass(frozen=True)
class LoaderReport:
    """What was read off one loader.

    Attributes:
        facts: The facts, of a pass that ends on every rank where the shortest rank's loader does.
        totals: What follows from them, and from the epochs seen.
        own_batches: Batches of a whole pass over this rank's loader, no limit applied; None if that is not proven.
        streaming: What was read off its StreamingDataset; None if it has none.
        uneven: Fewest and most batches of a rank in one pass, where they differ by design and no limit hides it.
    """

    facts: LoaderFacts
    totals: Totals
    own_batches: int | None
    streaming: StreamingFacts | None
    uneven: tuple[int, int] | None

    @property
    def proven(self) -> int | None:
        """Batches of one pass on every rank, every limit applied; None if they are not proven."""
        return self.totals.plan.batches_per_epoch if self.totals.plan.proven else None

    @property
    def mended_length(self) -> int | None:
        """The length that Composer should count on; None if it does already, or if the truth is not proven."""
        proven, believed = self.proven, self.totals.plan.reported_batches_per_epoch
        return proven if proven and (believed is None or proven < believed) else None

    def wrong_length(self) -> Verdict | None:
        """A `WrongLength` warning, if Composer counts on another number of batches than there are."""
        plan = self.totals.plan
        if self.facts.limit_batches is not None and plan.batches_per_epoch == plan.reported_batches_per_epoch:
            return None  # the user's limit is reached, whatever the loader reports
        return self.totals.wrong_length()

    def warnings(self, length: int | None) -> list[Verdict]:
        """What is wrong with the train loader before its first batch.

        Args:
            length: The length that is about to be set; None if none is.
        """
        wrong = self.wrong_length()
        found = [] if wrong is None else [mended(wrong, length)]
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
            may_set: Whether to set Composer's length if the epoch explains it: all ranks must have agreed on the old
                one, and must all have seen the whole epoch.

        Returns:
            The warning of a wrong length, and the length that is set; None for what there is not.
        """
        self.totals.observe(batches)
        wrong, length = self.wrong_length(), self.totals.shorter_than_reported if may_set else None
        if wrong is not None:
            wrong = mended(wrong, length, "from the next epoch on")
        if length is not None:
            self.set_length(state, length)
        return wrong, length


def read_loader(
    loader: Any, *, length: int | None, rank: int, dp_degree: int, evaluator: str = "", duration: Any = None
) -> LoaderReport:
    """Reads one loader, before it is observed.

    Args:
        loader: What the Trainer iterates.
        length: `state.dataloader_len` for it.
        rank: This rank.
        dp_degree: Shares into which the data is cut, where the loader does not say so.
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
    if not iterates_as_it_came(loader):
        known["samples_per_rank"] = None
    facts, own, uneven = loader_facts(loader, **known), None, None
    streaming = streaming_facts(loader)
    if streaming is not None:
        own = streaming_pass(streaming, rank=rank)
        dp_degree, uneven = streaming.dp_degree, own.uneven_batches
        facts = replace(facts, one_pass=_shortest(own), dataset_size=int(streaming_dataset(loader).num_samples))
    totals = Totals(
        facts,
        dp_degree=dp_degree,
        framework=f"Composer's evaluator {evaluator!r}" if evaluator else "Composer",
        consequences=consequences_in_evaluation if evaluator else partial(consequences, epochs=epochs),
    )
    limits = [each for each in (facts.limit_batches, facts.max_steps) if each is not None]
    if uneven is not None and limits and min(limits) <= uneven[0]:
        uneven = None
    if own is not None:
        return LoaderReport(facts, totals, own.batches, streaming, uneven)
    return LoaderReport(facts, totals, totals.plan.loader_batches if totals.plan.proven else None, None, None)


def batches_when_resumed(state: Any, read: LoaderReport, rank: int) -> int | None:
    """Batches of the epoch in whose middle this run resumes, with those before the checkpoint; None if unknown."""
    if read.streaming is None or "train" not in state.dataset_resumption:
        return read.totals.plan.batches_per_epoch
    rest = replace(read.streaming, drop_first=int(state.timestamp.sample_in_epoch))
    batches = streaming_pass(rest, rank=rank).fewest_batches
    return None if batches is None else int(state.timestamp.batch_in_epoch) + batches


def report_unused(
    read: LoaderReport, fetched: ObservedPass | None, used: int, *, before: int | None, length: int | None
) -> UnusedBatches | None:
    """What this rank's loader had beyond the batches used in a pass that ended by itself; None if nobody knows.

    Args:
        read: What was read off the loader.
        fetched: What it was seen to hand out; None if it cannot be observed.
        used: Batches of this pass that were used.
        before: Batches of it that came before those, as after a resume; None if that is not known.
        length: `state.dataloader_len` of the pass.
    """
    if fetched is not None and fetched.exhausted:
        return UnusedBatches(0)
    own = read.own_batches if before is not None else None
    if own is not None:
        own = min(own, own if length is None else length) - (before or 0)
    if own is None and fetched is None:
        return None
    seen = 0 if fetched is None else max(0, fetched.batches - fetched.skipped - used)
    batches = seen if own is None else max(0, own - used)
    samples = None
    if fetched is not None and batches == seen == 1:
        samples = samples_in(fetched.last)
    elif batches and read.facts.drop_last and read.facts.batch_size is not None:
        samples = batches * read.facts.batch_size
    return UnusedBatches(batches, samples, exact=own is not None or not batches)


def _shortest(own: LoaderPass) -> LoaderPass:
    """The pass as it goes on every rank, since Composer stops all of them at the shortest."""
    fewest = own.fewest_batches
    if fewest is None or not own.uneven:
        return own
    return LoaderPass(fewest, fewest, fewest, min(own.full_batches, fewest))


def _duration(duration: Any, unit: str) -> int | None:
    return int(duration.value) if duration is not None and duration.unit.value == unit else None

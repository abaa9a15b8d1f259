"""Composer's own objects, read: the State, the loaders in it, and what is known of them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from countoff._composer_words import consequences
from countoff._fetches import Pass
from countoff._observe import loader_facts, reported_length
from countoff._streaming import iterates_as_it_came, streaming_dataset, streaming_facts
from countoff.core import LoaderFacts
from countoff.core.plan import LoaderPass, StreamingFacts, streaming_pass
from countoff.core.totals import Totals
from countoff.core.truncation import LeftOver


@dataclass(frozen=True)
class Read:
    """What was read off one loader.

    Attributes:
        facts: The facts, of a pass that ends on every rank where the shortest rank's loader does.
        totals: What follows from them, and from the epochs seen.
        own_batches: Batches of a whole pass over this rank's loader, no limit applied; None if that is not proven.
        streaming: What was read off its StreamingDataset; None if it has none.
        uneven: Fewest and most batches of a rank in one pass, where they differ by design.
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


def length_of(state: Any) -> int | None:
    """Batches after which Composer leaves the pass over the loader that is in place; None for no limit."""
    return None if state.dataloader_len is None else int(state.dataloader_len)


def read_loader(
    loader: Any, *, length: int | None, rank: int, world_size: int, framework: str = "Composer", duration: Any = None
) -> Read:
    """Reads one loader, before it is observed.

    Args:
        loader: What the Trainer iterates.
        length: `state.dataloader_len` for it.
        rank: This rank.
        world_size: Ranks in the job.
        framework: Whose report its length is, for the message.
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
    facts, dp_degree, own = loader_facts(loader, **known), world_size, None
    streaming = streaming_facts(loader)
    if streaming is not None:
        own = streaming_pass(streaming, rank=rank)
        dp_degree = streaming.dp_degree
        facts = replace(facts, one_pass=_shortest(own), dataset_size=int(streaming_dataset(loader).num_samples))
    totals = Totals(facts, dp_degree=dp_degree, framework=framework, consequences=partial(consequences, epochs=epochs))
    if own is not None:
        return Read(facts, totals, own.batches, streaming, own.uneven_batches)
    return Read(facts, totals, totals.plan.loader_batches if totals.plan.proven else None, None, None)


def plan_of(state: Any, train: Read | None, evaluations: Mapping[str, Read]) -> dict[str, Any]:
    """What all ranks must agree on at the start of a fit, or of an evaluation that stands alone."""
    proven = sorted((label, read.proven) for label, read in evaluations.items())
    plan: dict[str, Any] = {"evaluations": zlib.crc32(repr(proven).encode())}
    if train is None:
        return plan
    timestamp = state.timestamp
    return plan | {
        "batches_per_epoch": train.totals.plan.reported_batches_per_epoch,
        "proven_batches_per_epoch": train.proven,
        "batch_size": train.facts.batch_size,
        "max_epochs": train.facts.max_epochs,
        "max_steps": train.facts.max_steps,
        "position": [int(timestamp.epoch), int(timestamp.batch_in_epoch), int(timestamp.batch)],
    }


def batches_when_resumed(state: Any, read: Read, rank: int) -> int | None:
    """Batches of the epoch in whose middle this run resumes, with those before the checkpoint; None if unknown."""
    if read.streaming is None or "train" not in state.dataset_resumption:
        return read.totals.plan.batches_per_epoch
    rest = replace(read.streaming, drop_first=int(state.timestamp.sample_in_epoch))
    batches = streaming_pass(rest, rank=rank).fewest_batches
    return None if batches is None else int(state.timestamp.batch_in_epoch) + batches


def left_over(
    read: Read, fetched: Pass | None, used: int, *, before: int | None, length: int | None
) -> LeftOver | None:
    """What this rank's loader had beyond the batches used in a pass that ended by itself; None if nobody knows.

    Args:
        read: What was read off the loader.
        fetched: What it was seen to hand out; None if it cannot be observed.
        used: Batches of this pass that were used.
        before: Batches of it that came before those, as after a resume; None if that is not known.
        length: `state.dataloader_len` of the pass.
    """
    if fetched is not None and fetched.exhausted:
        return LeftOver(0)
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
    return LeftOver(batches, samples, exact=own is not None or not batches)


def samples_in(batch: Any) -> int | None:
    """Samples in a batch: the length of its first tensor; None for a batch of another kind."""
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)) and batch:
        return samples_in(batch[0])
    return len(batch) if getattr(batch, "ndim", 0) else None


def _shortest(own: LoaderPass) -> LoaderPass:
    """The pass as it goes on every rank, since Composer stops all of them at the shortest."""
    fewest = own.fewest_batches
    if fewest is None or not own.uneven:
        return own
    return LoaderPass(fewest, fewest, fewest, min(own.full_batches, fewest))


def _duration(duration: Any, unit: str) -> int | None:
    return int(duration.value) if duration is not None and duration.unit.value == unit else None

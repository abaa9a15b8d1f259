"""What an epoch and a run really hold, worked out from what an adapter reads off one loader.

An adapter fills in ``LoaderFacts`` and does no arithmetic; ``BatchPlan.of`` does it all, on plain integers, so that the
command line can do the same without torch. A number that cannot be known is None, never a guess, and the plan says
why. All numbers hold if every dp_rank has a loader like this one, which is what the roll call checks.
"""

from __future__ import annotations

from dataclasses import dataclass

from countoff.core._accelerate import PreparedFacts, accumulated_steps, prepared_pass
from countoff.core._batches import (
    batches_of_samples,
    distributed_samples_per_rank,
    iterable_batches,
    limited_batches,
    size_for_length,
    strided_share,
    whole,
)
from countoff.core._facts import LoaderFacts, LoaderPass
from countoff.core._steps import batches_until_step, estimated_stepping_batches, steps_in_epoch
from countoff.core._streaming import streaming_pass
from countoff.core._streaming_facts import StreamFacts, StreamingFacts
from countoff.core._trainer_totals import TrainerTotals, trainer_totals

__all__ = [
    "BatchPlan",
    "LoaderFacts",
    "LoaderPass",
    "PreparedFacts",
    "StreamFacts",
    "StreamingFacts",
    "TrainerTotals",
    "accumulated_steps",
    "batches_of_samples",
    "batches_until_step",
    "distributed_samples_per_rank",
    "estimated_stepping_batches",
    "iterable_batches",
    "limited_batches",
    "prepared_pass",
    "size_for_length",
    "steps_in_epoch",
    "streaming_pass",
    "strided_share",
    "trainer_totals",
]


@dataclass(frozen=True)
class BatchPlan:
    """The true numbers of an epoch and of a run; None where a number cannot be known yet.

    Attributes:
        dp_degree: Shares into which the data is cut.
        loader_batches: Batches of one pass over the loader on one rank, no limit applied.
        batches_per_epoch: Batches that an epoch takes on one rank, with every limit that the framework enforces.
        reported_batches: What ``len(loader)`` says, no limit applied.
        reported_batches_per_epoch: What the framework believes that an epoch takes on one rank.
        steps_per_epoch: Optimizer steps of an epoch; None also where they differ from epoch to epoch.
        total_steps: Optimizer steps of the run.
        total_batches: Batches of the run on one rank.
        global_batch_size: Samples of one full optimizer step over all dp_ranks.
        samples_per_epoch: Samples processed in an epoch over all dp_ranks, repeats included.
        samples_unique: Different samples among them.
        samples_repeated: Samples processed again within the epoch.
        samples_dropped: Samples of the dataset that the epoch does not process.
        tokens_per_step: Tokens of one full optimizer step over all dp_ranks.
        proven: Whether batches_per_epoch follows from the sampler and the loader alone, and holds on every rank.
        unknown_because: Why batches_per_epoch is None; empty if it is not.
        uneven_batches: Fewest and most batches of one pass over all dp_ranks, no limit applied, where the loader is
            known to give ranks different numbers; None otherwise. loader_batches is this rank's number.
    """

    dp_degree: int
    loader_batches: int | None
    batches_per_epoch: int | None
    reported_batches: int | None
    reported_batches_per_epoch: int | None
    steps_per_epoch: int | None
    total_steps: int | None
    total_batches: int | None
    global_batch_size: int | None
    samples_per_epoch: int | None
    samples_unique: int | None
    samples_repeated: int | None
    samples_dropped: int | None
    tokens_per_step: int | None
    proven: bool
    unknown_because: str
    uneven_batches: tuple[int, int] | None = None

    @classmethod
    def of(cls, facts: LoaderFacts, *, dp_degree: int) -> BatchPlan:
        """Returns the plan that follows from the facts of one loader.

        Args:
            facts: What was read off the loader on this rank.
            dp_degree: Shares into which the data is cut, at least 1.

        Raises:
            ValueError: If dp_degree is not an integer of at least 1, or the limit is a fraction that Lightning refuses.

        Example:
            >>> facts = LoaderFacts(reported_batches=16, batch_size=4, drop_last=False, samples_per_rank=32,
            ...     dataset_size=63, sampling="distributed", gradient_accumulation_steps=3, max_epochs=2)
            >>> plan = BatchPlan.of(facts, dp_degree=2)
            >>> plan.batches_per_epoch, plan.reported_batches_per_epoch, plan.samples_repeated
            (8, 16, 1)
            >>> plan.wrong_length_factor, plan.size_taken_for_length
            (2.0, True)
        """
        whole("dp_degree", dp_degree, minimum=1)
        true_batches, unknown_because = _true_batches(facts)
        reported = limited_batches(facts.reported_batches, facts.limit_batches)
        batches, steps = _epoch(facts, true_batches, reported)
        total_steps = _total_steps(facts, batches, steps)
        global_batch = _product(facts.batch_size, facts.gradient_accumulation_steps, dp_degree)
        used = _samples_used(facts, batches)
        processed = _product(used, dp_degree)
        unique = _samples_unique(facts, used, dp_degree)
        one_pass = facts.one_pass
        if one_pass is not None:
            processed, unique = _samples_of_pass(one_pass, batches, global_batch=_product(facts.batch_size, dp_degree))
        return cls(
            dp_degree=dp_degree,
            loader_batches=true_batches,
            batches_per_epoch=batches,
            reported_batches=facts.reported_batches,
            reported_batches_per_epoch=reported,
            steps_per_epoch=steps,
            total_steps=total_steps,
            total_batches=_total_batches(facts, batches, steps, total_steps),
            global_batch_size=global_batch,
            samples_per_epoch=processed,
            samples_unique=unique,
            samples_repeated=None if processed is None or unique is None else processed - unique,
            samples_dropped=None if facts.dataset_size is None or unique is None else facts.dataset_size - unique,
            tokens_per_step=_product(global_batch, facts.sequence_length),
            proven=_is_proven(facts),
            uneven_batches=None if one_pass is None else one_pass.uneven_batches,
            unknown_because=unknown_because,
        )

    @property
    def wrong_length_factor(self) -> float | None:
        """How many times too long the reported length is, no limit applied; None if it is right or cannot be judged."""
        if self.reported_batches is None or not self.loader_batches or self.reported_batches == self.loader_batches:
            return None
        return self.reported_batches / self.loader_batches

    @property
    def size_taken_for_length(self) -> bool:
        """Whether the reported length can be that of all dp_ranks together; see ``size_for_length``."""
        if self.reported_batches is None or self.loader_batches is None:
            return False
        return size_for_length(self.reported_batches, true_batches=self.loader_batches, dp_degree=self.dp_degree)

    def metrics(self) -> dict[str, int]:
        """Returns the numbers of the plan that are known, under the names by which every adapter logs them.

        Example:
            >>> facts = LoaderFacts(reported_batches=None, batch_size=4, drop_last=False, samples_per_rank=None)
            >>> BatchPlan.of(facts, dp_degree=2).metrics()
            {'countoff/global_batch_size': 8, 'countoff/dp_degree': 2}
        """
        values: dict[str, int | None] = {name: getattr(self, name) for name in _METRICS}
        return {f"countoff/{name}": value for name, value in values.items() if value is not None}


_METRICS = (
    "batches_per_epoch",
    "reported_batches_per_epoch",
    "steps_per_epoch",
    "total_steps",
    "global_batch_size",
    "samples_per_epoch",
    "samples_repeated",
    "samples_dropped",
    "tokens_per_step",
    "dp_degree",
)


def _product(first: int | None, *others: int | None) -> int | None:
    """Returns the product, or None if a factor is unknown."""
    product = first
    for factor in others:
        product = None if product is None or factor is None else product * factor
    return product


def _true_batches(facts: LoaderFacts) -> tuple[int | None, str]:
    """Returns the batches of one pass over the loader, or None and the reason."""
    if facts.one_pass is not None and (facts.one_pass.batches is not None or facts.known_batches is None):
        return facts.one_pass.batches, facts.one_pass.unknown_because
    if facts.samples_per_rank is not None and facts.batch_size is not None:
        samples, batch_size = facts.samples_per_rank, facts.batch_size
        return batches_of_samples(samples, batch_size=batch_size, drop_last=facts.drop_last), ""
    if facts.known_batches is not None:
        return facts.known_batches, ""
    if facts.samples_per_rank is None:
        return None, "the samples per rank are not known (iterable dataset, or a sampler of the user's own)"
    return None, "the batch size is not known (a batch sampler of the user's own)"


def _is_proven(facts: LoaderFacts) -> bool:
    """Returns whether the arithmetic gives the batches, and as many on every rank."""
    if facts.one_pass is not None:
        return facts.one_pass.batches is not None and not facts.one_pass.uneven
    return facts.samples_per_rank is not None and facts.batch_size is not None


def _epoch(facts: LoaderFacts, true_batches: int | None, reported: int | None) -> tuple[int | None, int | None]:
    """Returns the batches and the optimizer steps of an epoch on one rank."""
    # A fraction is taken of the reported length, right or wrong; a number of batches needs no length.
    believed = facts.reported_is_cap or isinstance(facts.limit_batches, float)
    cap = reported if believed else limited_batches(None, facts.limit_batches)
    if true_batches is None:
        return None, None
    batches = true_batches if cap is None else min(true_batches, cap)
    if facts.partial_step == "carried" and batches % facts.gradient_accumulation_steps:
        return batches, None
    steps = steps_in_epoch(
        batches,
        gradient_accumulation_steps=facts.gradient_accumulation_steps,
        partial_applied=facts.partial_step == "applied"
        or (facts.partial_step == "at_reported_end" and reported in (None, batches)),
    )
    return batches, steps


def _limit(value: int | None) -> int | None:
    """Returns a number of epochs or steps, None if it is unlimited."""
    return None if value == -1 else value


def _total_steps(facts: LoaderFacts, batches_per_epoch: int | None, steps_per_epoch: int | None) -> int | None:
    """Returns the optimizer steps of the run, None if nothing known ends it."""
    epochs, max_steps = _limit(facts.max_epochs), _limit(facts.max_steps)
    if steps_per_epoch == 0 or max_steps == 0:
        return 0
    if epochs is None:
        return max_steps
    steps = _product(epochs, steps_per_epoch)
    if facts.partial_step == "carried" and batches_per_epoch is not None:
        steps = epochs * batches_per_epoch // facts.gradient_accumulation_steps
    if steps is None:
        return None
    return steps if max_steps is None else min(steps, max_steps)


def _total_batches(
    facts: LoaderFacts, batches_per_epoch: int | None, steps_per_epoch: int | None, total_steps: int | None
) -> int | None:
    """Returns the batches of the run on one rank, None if nothing known ends it."""
    if facts.max_steps == 0:
        return 0
    if facts.partial_step == "carried" and total_steps is not None and total_steps == _limit(facts.max_steps):
        return None if batches_per_epoch is None else total_steps * facts.gradient_accumulation_steps
    if facts.partial_step == "carried":
        return _product(_limit(facts.max_epochs), batches_per_epoch)
    if batches_per_epoch is None or steps_per_epoch is None:
        return None
    if total_steps is not None and steps_per_epoch and total_steps == _limit(facts.max_steps):
        return batches_until_step(
            total_steps,
            batches_per_epoch=batches_per_epoch,
            steps_per_epoch=steps_per_epoch,
            gradient_accumulation_steps=facts.gradient_accumulation_steps,
        )
    return _product(_limit(facts.max_epochs), batches_per_epoch)


def _samples_of_pass(
    one_pass: LoaderPass, batches: int | None, *, global_batch: int | None
) -> tuple[int | None, int | None]:
    """Returns the samples, and the different ones among them, that all dp_ranks process in an epoch of a known kind."""
    if batches is None or batches == one_pass.batches:
        return one_pass.samples, one_pass.unique
    # A limit ends the epoch early: how many repeats are among what it leaves is not known, unless nothing repeats.
    samples = _product(batches, global_batch) if batches <= one_pass.full_batches else None
    return samples, samples if one_pass.samples is not None and one_pass.samples == one_pass.unique else None


def _samples_used(facts: LoaderFacts, batches: int | None) -> int | None:
    """Returns the samples that one dp_rank processes in an epoch."""
    if batches is None or facts.batch_size is None:
        return None
    if facts.samples_per_rank is not None:
        return min(batches * facts.batch_size, facts.samples_per_rank)
    # Any worker of an iterable dataset may end with a short batch, unless those are thrown away.
    return batches * facts.batch_size if facts.drop_last else None


def _samples_unique(facts: LoaderFacts, used: int | None, dp_degree: int) -> int | None:
    """Returns the different samples that all dp_ranks process in an epoch.

    Turns are taken sample by sample, so what all have used is a beginning of the common order, and a repeat can only
    stand after the whole dataset.
    """
    if used is None or facts.dataset_size is None:
        return None
    if facts.sampling == "distributed":
        return min(used * dp_degree, facts.dataset_size)
    if facts.sampling == "replicated" and (dp_degree == 1 or used >= facts.dataset_size):
        return min(used, facts.dataset_size)
    return None

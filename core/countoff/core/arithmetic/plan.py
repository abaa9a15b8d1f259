"""The true numbers of an epoch and of a run, computed from what an adapter reads off one loader.

An adapter fills in ``LoaderFacts`` and does no arithmetic. ``BatchPlan.of`` does all of it on plain integers, so that
the command line can use it without torch. A number that cannot be known is None, never a guess, and the plan holds the
reason. All numbers assume that every dp_rank has a loader like this one; the roll call checks that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from countoff.core.arithmetic.batches import batches_of_samples, check_count, limited_batches, size_for_length
from countoff.core.arithmetic.facts import LoaderFacts, LoaderPass
from countoff.core.arithmetic.samples import (
    product,
    resumed_batches,
    samples_of_epoch,
    samples_per_rank,
    total_samples,
)
from countoff.core.arithmetic.steps import batches_until_step, steps_in_epoch

__all__ = ["BatchPlan", "LoaderFacts", "LoaderPass"]


@dataclass(frozen=True)
class BatchPlan:
    """The true numbers of an epoch and of a run; None where a number cannot be known yet.

    Attributes:
        dp_degree: Shares into which the data is cut.
        loader_batches: Batches of one pass over the loader on one rank, before any limit.
        batches_per_epoch: Batches per epoch on one rank, after every limit that the framework enforces.
        reported_batches: ``len(loader)``, before any limit.
        reported_batches_per_epoch: Batches per epoch on one rank that the framework expects.
        steps_per_epoch: Optimizer steps per epoch; None also if epochs differ.
        total_steps: Optimizer steps of the run.
        total_batches: Batches of the run on one rank.
        global_batch_size: Samples per full optimizer step over all dp_ranks.
        samples_per_epoch: Samples processed per epoch over all dp_ranks, repeats included.
        samples_unique: Different samples among them.
        samples_repeated: Samples processed again within the epoch.
        samples_dropped: Samples of the dataset that the epoch does not process.
        tokens_per_step: Tokens per full optimizer step over all dp_ranks.
        proven: Whether batches_per_epoch follows from the sampler and the loader alone, and holds on every rank.
        unknown_because: The reason why batches_per_epoch is None; empty if it is not.
        uneven_batches: Fewest and most batches of one pass over all dp_ranks, before any limit, if the loader is known
            to give ranks different numbers; else None. loader_batches is this rank's number.
        samples_per_rank: Fewest and most samples that one dp_rank processes per epoch, repeats included.
        total_samples: Samples of the run over all dp_ranks, repeats included.
        facts: The facts from which all numbers follow.
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
    uneven_batches: tuple[int, int] | None
    samples_per_rank: tuple[int, int] | None
    total_samples: int | None
    facts: LoaderFacts = field(repr=False)

    @classmethod
    def of(cls, facts: LoaderFacts, *, dp_degree: int) -> BatchPlan:
        """Returns the plan that follows from the facts of one loader.

        Args:
            facts: What the adapter read off the loader of this rank.
            dp_degree: Shares into which the data is cut, at least 1.

        Raises:
            ValueError: If dp_degree is not an integer of at least 1, or the limit is a fraction that is refused.

        Example:
            >>> facts = LoaderFacts(reported_batches=16, batch_size=4, drop_last=False, samples_per_rank=32,
            ...     dataset_size=63, sampling="distributed", gradient_accumulation_steps=3, max_epochs=2)
            >>> plan = BatchPlan.of(facts, dp_degree=2)
            >>> plan.batches_per_epoch, plan.reported_batches_per_epoch, plan.samples_repeated
            (8, 16, 1)
            >>> plan.wrong_length_factor, plan.size_taken_for_length
            (2.0, True)
        """
        check_count("dp_degree", dp_degree, minimum=1)
        true_batches, unknown_because = _true_batches(facts)
        reported = limited_batches(facts.reported_batches, facts.limit_batches)
        batches, steps = _epoch(facts, true_batches, reported)
        total_steps = _total_steps(facts, batches, steps)
        global_batch = product(facts.batch_size, facts.gradient_accumulation_steps, dp_degree)
        processed, unique = samples_of_epoch(facts, batches, dp_degree=dp_degree)
        total_batches = _total_batches(facts, batches, steps, total_steps)
        return cls(
            dp_degree=dp_degree,
            loader_batches=true_batches,
            batches_per_epoch=batches,
            reported_batches=facts.reported_batches,
            reported_batches_per_epoch=reported,
            steps_per_epoch=steps,
            total_steps=total_steps,
            total_batches=total_batches,
            global_batch_size=global_batch,
            samples_per_epoch=processed,
            samples_unique=unique,
            samples_repeated=None if processed is None or unique is None else processed - unique,
            samples_dropped=None if facts.dataset_size is None or unique is None else facts.dataset_size - unique,
            tokens_per_step=product(global_batch, facts.sequence_length),
            proven=_is_proven(facts),
            uneven_batches=None if facts.one_pass is None else facts.one_pass.uneven_batches,
            unknown_because=unknown_because,
            samples_per_rank=samples_per_rank(facts, batches),
            total_samples=total_samples(
                facts,
                total_batches=total_batches,
                total_steps=total_steps,
                batches_per_epoch=batches,
                samples_per_epoch=processed,
                dp_degree=dp_degree,
            ),
            facts=facts,
        )

    @property
    def wrong_length_factor(self) -> float | None:
        """The reported length divided by the true one, before any limit; None if they are equal or one is unknown."""
        if self.reported_batches is None or not self.loader_batches or self.reported_batches == self.loader_batches:
            return None
        return self.reported_batches / self.loader_batches

    @property
    def size_taken_for_length(self) -> bool:
        """Whether the reported length can be that of all dp_ranks together; see ``size_for_length``."""
        if self.reported_batches is None or self.loader_batches is None:
            return False
        return size_for_length(self.reported_batches, true_batches=self.loader_batches, dp_degree=self.dp_degree)

    @property
    def tokens_per_epoch(self) -> int | None:
        """Tokens of an epoch over all dp_ranks; None if they cannot be known."""
        return product(self.samples_per_epoch, self.facts.sequence_length)

    @property
    def total_tokens(self) -> int | None:
        """Tokens of the run over all dp_ranks; None if they cannot be known."""
        return product(self.total_samples, self.facts.sequence_length)

    def resumed_batches(self, samples: int) -> int:
        """Returns the batches that each dp_rank has done when a run resumes after the given number of samples.

        Args:
            samples: Samples seen over all dp_ranks, at least 0: in the current epoch, or, if epochs have no end, since
                the start of training. The run may have seen them at another dp_degree or batch size.

        Raises:
            ValueError: If the batch size is not known, samples is not an integer of at least 0, it lies in the middle
                of a batch, or the epoch has fewer samples.

        Example:
            >>> facts = LoaderFacts(reported_batches=None, batch_size=4, drop_last=True, samples_per_rank=None)
            >>> BatchPlan.of(facts, dp_degree=16).resumed_batches(3200)
            50
        """
        if self.facts.batch_size is None:
            raise ValueError("the batches of a resumed run cannot be counted without the batch size")
        epoch = self.samples_per_epoch
        if epoch is not None and samples >= epoch:
            if samples == epoch and self.batches_per_epoch is not None:
                return self.batches_per_epoch
            raise ValueError(f"an epoch has {epoch} samples, got {samples}: count samples from its start")
        return resumed_batches(samples, batch_size=self.facts.batch_size, dp_degree=self.dp_degree)

    def metrics(self) -> dict[str, int]:
        """Returns the known numbers of the plan under the names with which every adapter logs them.

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
    "total_tokens",
    "dp_degree",
)


def _true_batches(facts: LoaderFacts) -> tuple[int | None, str]:
    """Returns the batches of one pass over the loader and an empty text, or None and the reason."""
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
    """Returns whether the arithmetic gives the batches, and the same number on every rank."""
    if facts.one_pass is not None:
        return facts.one_pass.batches is not None and not facts.one_pass.uneven
    return facts.samples_per_rank is not None and facts.batch_size is not None


def _epoch(facts: LoaderFacts, true_batches: int | None, reported: int | None) -> tuple[int | None, int | None]:
    """Returns the batches and the optimizer steps of an epoch on one rank."""
    # A fraction is one of the reported length, right or wrong; a number of batches needs no length.
    uses_reported = facts.reported_is_cap or isinstance(facts.limit_batches, float)
    cap = reported if uses_reported else limited_batches(None, facts.limit_batches)
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
    """Returns a limit on epochs or steps; None if there is none."""
    return None if value == -1 else value


def _total_steps(facts: LoaderFacts, batches_per_epoch: int | None, steps_per_epoch: int | None) -> int | None:
    """Returns the optimizer steps of the run; None if nothing known ends it."""
    epochs, max_steps = _limit(facts.max_epochs), _limit(facts.max_steps)
    if steps_per_epoch == 0 or max_steps == 0:
        return 0
    if epochs is None:
        return max_steps
    steps = product(epochs, steps_per_epoch)
    if facts.partial_step == "carried" and batches_per_epoch is not None:
        steps = epochs * batches_per_epoch // facts.gradient_accumulation_steps
    if steps is None:
        return None
    return steps if max_steps is None else min(steps, max_steps)


def _total_batches(
    facts: LoaderFacts, batches_per_epoch: int | None, steps_per_epoch: int | None, total_steps: int | None
) -> int | None:
    """Returns the batches of the run on one rank; None if nothing known ends it."""
    if facts.max_steps == 0:
        return 0
    if facts.partial_step == "carried" and total_steps is not None and total_steps == _limit(facts.max_steps):
        return None if batches_per_epoch is None else total_steps * facts.gradient_accumulation_steps
    if facts.partial_step == "carried":
        return product(_limit(facts.max_epochs), batches_per_epoch)
    if batches_per_epoch is None or steps_per_epoch is None:
        return None
    if total_steps is not None and steps_per_epoch and total_steps == _limit(facts.max_steps):
        return batches_until_step(
            total_steps,
            batches_per_epoch=batches_per_epoch,
            steps_per_epoch=steps_per_epoch,
            gradient_accumulation_steps=facts.gradient_accumulation_steps,
        )
    return product(_limit(facts.max_epochs), batches_per_epoch)

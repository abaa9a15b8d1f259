"""What an adapter reads off one loader: the only input of ``countoff.core.arithmetic.plan``.

An adapter copies attributes of its framework's objects and computes nothing. A number that it cannot read, or cannot
trust, is None: ``len()`` of a loader may be wrong, and a number here may be used as a proof.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from countoff.core.arithmetic.batches import check_count, checked_limit

__all__ = ["LoaderFacts", "LoaderPass"]

# The smallest value of each fact that may also be None.
_MINIMA = {
    "reported_batches": 0,
    "batch_size": 1,
    "samples_per_rank": 0,
    "dataset_size": 0,
    "max_epochs": -1,
    "max_steps": -1,
    "sequence_length": 1,
    "known_batches": 0,
}


@dataclass(frozen=True)
class LoaderPass:
    """One whole pass over a loader of a known kind, as the arithmetic of that kind proves it, before any limit.

    Attributes:
        batches: Batches on this rank, at least 0; None if they cannot be known.
        fewest_batches: The smallest number over all dp_ranks, at least 0; None if it cannot be known.
        most_batches: The largest number over all dp_ranks, at least fewest_batches; None if it cannot be known.
        full_batches: Number of batches at the start of the pass that are full on every dp_rank, at least 0.
        samples: Samples that all dp_ranks process, repeats included, at least 0; None if they cannot be known.
        unique: Different samples among them, at most samples; None if they cannot be known.
        unknown_because: The reason why batches is None; empty if it is not.
        fewest_samples: The smallest number of samples of a dp_rank, at least 0; None if it is not known.
        most_samples: The largest number of samples of a dp_rank, at least fewest_samples; None if it is not known.

    Raises:
        ValueError: If a number is outside its domain, or batches is None and no reason is given.

    Example:
        >>> LoaderPass(batches=4, fewest_batches=3, most_batches=4).uneven
        True
    """

    batches: int | None
    fewest_batches: int | None = None
    most_batches: int | None = None
    full_batches: int = 0
    samples: int | None = None
    unique: int | None = None
    unknown_because: str = ""
    fewest_samples: int | None = None
    most_samples: int | None = None

    def __post_init__(self) -> None:
        names = ("batches", "fewest_batches", "most_batches", "full_batches", "samples", "unique")
        for name in (*names, "fewest_samples", "most_samples"):
            value: object = getattr(self, name)
            if value is not None:
                check_count(name, value, minimum=0)
        if (self.batches is None) != bool(self.unknown_because):
            raise ValueError(
                f"unknown_because must say why batches is None and be empty otherwise, got {self.unknown_because!r} "
                f"with batches {self.batches}"
            )

    @property
    def uneven(self) -> bool:
        """Whether ranks are known to have different numbers of batches."""
        return self.uneven_batches is not None

    @property
    def uneven_batches(self) -> tuple[int, int] | None:
        """The fewest and the most batches of a rank, if they are known to differ; else None."""
        if self.fewest_batches is None or self.most_batches is None or self.fewest_batches == self.most_batches:
            return None
        return self.fewest_batches, self.most_batches


@dataclass(frozen=True)
class LoaderFacts:
    """What can be read off one loader, on this rank, before its first batch.

    Attributes:
        reported_batches: ``len(loader)`` before any limit, at least 0; None if the loader has no length, or an infinite
            one.
        batch_size: Samples per dp_rank and batch, at least 1; None if the loader has a custom batch sampler.
        drop_last: Whether the loader drops a last batch that is not full.
        samples_per_rank: Samples that this rank's sampler yields per epoch, repeats included, at least 0. None for an
            iterable dataset, and for a sampler whose length cannot be trusted, because this number is used as a proof.
        dataset_size: Distinct samples over all ranks, at least 0; None if unknown.
        sampling: How the dataset is sharded among the dp_ranks. ``distributed``: in turns from one common order, filled
            up from its beginning (DistributedSampler). ``replicated``: each reads the whole dataset. ``unknown``:
            anything else, such as drawing with replacement.
        gradient_accumulation_steps: Batches per optimizer step, at least 1.
        limit_batches: The user's limit on an epoch: batches (int), a fraction of the reported length (float), or None.
        max_epochs: Epochs of the run, at least 0; None or -1 for no limit.
        max_steps: Optimizer steps of the run, at least 0; None or -1 for no limit.
        sequence_length: Tokens per sample, at least 1; None if samples are not sequences of one length.
        known_batches: Batches of one pass over this loader, before any limit, as the roll call or the last epoch has
            shown them. Used where the arithmetic has no answer; this is no proof.
        one_pass: The pass that the arithmetic of this kind of loader proves (``streaming_pass``, ``prepared_pass``); it
            takes precedence over samples_per_rank. None for a plain sampler with a batch size.
        reported_is_cap: Whether the framework ends the epoch at the reported length, as Lightning and Composer do; a
            plain loop reads on.
        partial_step: What happens to a last accumulation that is not complete: ``applied`` (Accelerate), ``dropped``,
            ``carried`` into the next epoch (Accelerate without ``sync_with_dataloader``), or ``at_reported_end``:
            applied only if the epoch ends at the reported length or none is reported (Lightning).

    Raises:
        ValueError: If a number is outside its domain.

    Example:
        >>> LoaderFacts(reported_batches=8, batch_size=4, drop_last=True, samples_per_rank=35).limit_batches is None
        True
    """

    reported_batches: int | None
    batch_size: int | None
    drop_last: bool
    samples_per_rank: int | None
    dataset_size: int | None = None
    sampling: Literal["distributed", "replicated", "unknown"] = "unknown"
    gradient_accumulation_steps: int = 1
    limit_batches: int | float | None = None
    max_epochs: int | None = None
    max_steps: int | None = None
    sequence_length: int | None = None
    known_batches: int | None = None
    one_pass: LoaderPass | None = None
    reported_is_cap: bool = True
    partial_step: Literal["applied", "at_reported_end", "carried", "dropped"] = "at_reported_end"

    def __post_init__(self) -> None:
        checked_limit(self.limit_batches)
        check_count("gradient_accumulation_steps", self.gradient_accumulation_steps, minimum=1)
        for name, minimum in _MINIMA.items():
            value: object = getattr(self, name)
            if value is not None:
                check_count(name, value, minimum=minimum)

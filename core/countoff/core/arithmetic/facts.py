"""What an adapter reads off one loader: the only input of ``countoff.core.plan``.

Facts, not conclusions: an adapter copies attributes of its framework's objects and counts nothing itself. Whatever it
cannot read, or cannot trust, is None, because ``len()`` of a loader may be wrong and a number here may count as proof.
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
    """One whole pass over a loader of a known kind, as the arithmetic of that kind proves it, no limit applied.

    Attributes:
        batches: Batches on this rank, at least 0; None if they cannot be known.
        fewest_batches: The smallest number over all dp_ranks, at least 0; None if it cannot be known.
        most_batches: The largest number over all dp_ranks, at least fewest_batches; None if it cannot be known.
        full_batches: How many batches every dp_rank begins with that are full, at least 0.
        samples: Samples that all dp_ranks process, repeats included, at least 0; None if they cannot be known.
        unique: Different samples among them, at most samples; None if they cannot be known.
        unknown_because: Why batches is None, in words; empty if it is not.
        fewest_samples: The smallest number of samples of a dp_rank, at least 0; None if it is not known.
        most_samples: The largest number, at least fewest_samples; None if it is not known.

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
        """The fewest and the most batches of a rank, where these are known to differ; None otherwise."""
        if self.fewest_batches is None or self.most_batches is None or self.fewest_batches == self.most_batches:
            return None
        return self.fewest_batches, self.most_batches


@dataclass(frozen=True)
class LoaderFacts:
    """What can be read off one loader, on this rank, before its first batch.

    Attributes:
        reported_batches: What ``len(loader)`` says before any limit, at least 0; None if it has no length or infinity.
        batch_size: Samples per dp_rank and batch, at least 1; None if the loader was given batches of its own making.
        drop_last: Whether the loader throws away a last batch that is not full.
        samples_per_rank: Samples that this rank's sampler yields per epoch, repeats included, at least 0. None for an
            iterable dataset, and for a sampler whose length cannot be trusted: what is given here counts as proof.
        dataset_size: Distinct samples over all ranks, at least 0; None if unknown.
        sampling: How the dp_ranks share the dataset. ``distributed``: in turns out of one common order, which starts
            again at its beginning when it has to be filled up (DistributedSampler). ``replicated``: each reads the
            whole of it. ``unknown``: anything else, such as drawing with replacement.
        gradient_accumulation_steps: Batches per optimizer step, at least 1.
        limit_batches: The user's limit on an epoch: batches (int), a fraction of what is reported (float), or None.
        max_epochs: Epochs of the run, at least 0; None or -1 for no limit.
        max_steps: Optimizer steps of the run, at least 0; None or -1 for no limit.
        sequence_length: Tokens per sample, at least 1; None if samples are not sequences of one length.
        known_batches: Batches that one pass over this loader has, limit not included, as the roll call or the last
            epoch has shown; used where the arithmetic has no answer, and no proof.
        one_pass: What the arithmetic of this kind of loader proves, where it is no plain sampler with a batch size
            (``streaming_pass``, ``prepared_pass``); it goes before samples_per_rank. None for every other loader.
        reported_is_cap: Whether the framework leaves the epoch when the reported length is reached, as Lightning and
            Composer do; a plain loop goes on.
        partial_step: What becomes of a last accumulation that is short: ``applied`` (Accelerate), ``dropped``,
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

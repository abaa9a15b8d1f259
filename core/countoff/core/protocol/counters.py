"""Counters of one rank in one span. They hold plain integers, because two of them grow with every batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple

from countoff.core import constants
from countoff.core.messages import count_of
from countoff.core.protocol.credits import Credits
from countoff.core.verdict import Verdict

_HASH_PRIME = 1_000_003
_HASH_MASK = (1 << 48) - 1


class UnusedBatches(NamedTuple):
    """What one rank's loader had beyond the batches that were used in a span.

    Attributes:
        batches: Batches of this rank that were not used, at least 0.
        samples: Samples in them, at least 0; None if that is not known.
        exact: Whether there was no more than that; False if only the next batch was looked at.
    """

    batches: int
    samples: int | None = None
    exact: bool = True

    def __str__(self) -> str:
        samples = "" if self.samples is None else f" ({count_of(self.samples, 'sample')})"
        return f"{'' if self.exact else 'at least '}{count_of(self.batches, 'batch')}{samples}"


@dataclass(slots=True)
class SpanCounters:
    """What one rank has counted in one span, that is in one pass over one loader.

    Attributes:
        name: The span's name, equal on every rank: ``train epoch 3``.
        evaluation: Whether the span is an evaluation (evaluations may legitimately be uneven).
        opened: Index of the sync point that opened the span; equal on every rank.
        started: Batches that this rank has handed to training.
        prefetched: Batches that this rank's loader is known to have delivered, those started included, where the
            framework fetches ahead; 0 where it does not.
        micro_batches: Forward and backward passes for training; 0 where the adapter does not count them.
        passes: Forward passes that gathered a model's shards, which all ranks hold; 0 where there is no such model.
        ends: Whether the batch started last is known to be this rank's last.
        requested: Batches that this rank has received or requested, also if the last request brings no batch; 0 where
            the adapter does not report requests.
        counts: Batches per loader, where one span reads several loaders in turn.
        loader_seconds: Seconds that this rank's training thread has waited for its loader.
        compared: Whether the span is compared with that of other ranks, and so has sync points in the log.
        unused: What this rank's loader had beyond the batches used, when the span closed; None where nobody looked.
        credits: Its credits while it is open, where ranks that differ take the same number of batches.
        closed_credits: The same once it is closing.
        notice: A warning that holds if all ranks have closed the span alike.
        resumed_at: Batches started before the pass to which the credits belong, where a run resumes in the span.
    """

    name: str
    evaluation: bool = False
    opened: int = 0
    started: int = 0
    prefetched: int = 0
    micro_batches: int = 0
    passes: int = 0
    ends: bool = False
    requested: int = 0
    counts: list[int] = field(default_factory=list[int])
    loader_seconds: float = 0.0
    compared: bool = True
    unused: UnusedBatches | None = None
    credits: Credits | None = None
    closed_credits: Credits | None = None
    notice: Verdict | None = None
    resumed_at: int = 0

    @property
    def fetched(self) -> int:
        """Batches that this rank has certainly taken from its loader: those started, and those fetched ahead.

        >>> SpanCounters("train epoch 0", started=4, prefetched=5).fetched
        5
        """
        return max(self.started, self.prefetched)

    @property
    def delivered(self) -> int:
        """Batches that this rank's loader has delivered, those in the look-ahead included.

        No rule compares it: ranks that take the same number of batches may differ in what they have fetched ahead.

        >>> span = SpanCounters("train epoch 0", started=4, credits=Credits(0, 4))
        >>> span.credits.ready = 6
        >>> span.fetched, span.delivered
        (4, 6)
        """
        return max(self.fetched, self.resumed_at + self.credits.ready if self.credits is not None else 0)


class TickPlace(NamedTuple):
    """Where ranks compare what is known after one batch of a train epoch; equal on all of them.

    Attributes:
        opened: Index of the sync point that opened the epoch.
        batch: The batch of that epoch.
        span: Name of the epoch.
    """

    opened: int
    batch: int
    span: str

    @property
    def key(self) -> str:
        """The key of the record.

        >>> TickPlace(3, 64, "train epoch 1").key
        'tick/3/64'
        """
        return f"tick/{self.opened}/{self.batch}"

    def before(self, ticks: int) -> TickPlace:
        """The place so many comparisons before this one."""
        return self._replace(batch=self.batch - ticks * constants.TICK_BATCHES)

    @property
    def in_words(self) -> str:
        """The batch, in words.

        >>> TickPlace(3, 64, "train epoch 1").in_words
        'batch 64 of train epoch 1'
        """
        return f"batch {self.batch} of {self.span}"


def hash_step(previous: int, batch: int) -> int:
    """Extends the hash of all batches after which an optimizer step was applied.

    Two ranks with the same number of steps after different batches have averaged gradients that do not belong
    together. Their sums are equal, their hashes are not.

    Args:
        previous: The hash so far; 0 at the start of a fit.
        batch: Batches of this rank started in the span when the step was applied.

    >>> hash_step(hash_step(0, 2), 4) == hash_step(hash_step(0, 3), 4)
    False
    """
    return (previous * _HASH_PRIME + batch + 1) & _HASH_MASK


def folded(counts: Sequence[int]) -> tuple[int, ...]:
    """Batches per loader, with those after the 32nd as one hash, because a sync point must fit into a record.

    >>> folded([2, 3]), len(folded(range(100)))
    ((2, 3), 33)
    """
    return (*counts[:32], reduce(hash_step, counts[32:], 0)) if len(counts) > 32 else tuple(counts)

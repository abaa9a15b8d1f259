"""Counters of one rank in one span: integers only, because two of them grow on every batch of the training thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce

_CHAIN_PRIME = 1_000_003
_CHAIN_MASK = (1 << 48) - 1


@dataclass(slots=True)
class SpanCounters:
    """What one rank has counted in one pass over one loader.

    Attributes:
        name: The span in words that mean the same on every rank, as ``train epoch 3``.
        evaluation: Whether the span is an evaluation (its unevenness may be legitimate).
        opened: Number of the ledger's mark that opened the span; equal on every rank.
        started: Batches handed to training by this rank.
        fetched: Batches this rank is known to have taken from its loader; 0 where nobody looks ahead.
        ends: Whether the batch started last is known to be this rank's last.
        asked: Batches this rank has had or asked for, whether it gets the last of them or not; 0 where nobody says so.
        counts: Batches per loader where one span reads several loaders in turn.
        loader_seconds: Time this rank's training thread waited for its loader.
        silent: Whether the span is kept out of the ledger (ranks may legitimately differ in it).
        left: Batches that this rank's loader had beyond those used when the span was closed, the samples in them (None:
            not known), and whether that is all; None where nobody looked.
    """

    name: str
    evaluation: bool = False
    opened: int = 0
    started: int = 0
    prefetched: int = 0
    ends: bool = False
    requested: int = 0
    counts: list[int] = field(default_factory=list[int])
    loader_seconds: float = 0.0
    silent: bool = False
    left: tuple[int, int | None, bool] | None = None

    @property
    def fetched(self) -> int:
        """Batches that this rank has certainly got: started, or fetched ahead of that.

        >>> SpanCounters("train epoch 0", started=4, prefetched=5).fetched
        5
        """
        return max(self.started, self.prefetched)


def chain(previous: int, batch: int) -> int:
    """Extends the hash of all batches after which an optimizer step was applied.

    Two ranks with as many steps at other batches have averaged the wrong gradients together: the sums agree,
    the chains do not.

    Args:
        previous: The chain so far, 0 at the start of a fit.
        batch: Batches started in the span when the step was applied, of this rank.

    >>> chain(chain(0, 2), 4) == chain(chain(0, 3), 4)
    False
    """
    return (previous * _CHAIN_PRIME + batch + 1) & _CHAIN_MASK


def folded(counts: Sequence[int]) -> tuple[int, ...]:
    """Batches per loader, those after the 32nd as one hash: a mark has to fit into a record.

    >>> folded([2, 3]), len(folded(range(100)))
    ((2, 3), 33)
    """
    return (*counts[:32], reduce(chain, counts[32:], 0)) if len(counts) > 32 else tuple(counts)

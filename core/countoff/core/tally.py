"""Counters of one rank in one span: integers only, because two of them grow on every batch of the training thread."""

from __future__ import annotations

from dataclasses import dataclass, field

_CHAIN_PRIME = 1_000_003
_CHAIN_MASK = (1 << 48) - 1


@dataclass(slots=True)
class Tally:
    """What one rank has counted in one pass over one loader.

    Attributes:
        name: The span in words that mean the same on every rank, as ``train epoch 3``.
        evaluation: Whether the span is an evaluation (its unevenness may be legitimate).
        opened: Number of the ledger's mark that opened the span; equal on every rank.
        started: Batches handed to training by this rank.
        fetched: Batches this rank is known to have taken from its loader; 0 where nobody looks ahead.
        counts: Batches per loader where one span reads several loaders in turn.
        loader_seconds: Time this rank's training thread waited for its loader.
        silent: Whether the span is kept out of the ledger (ranks may legitimately differ in it).
    """

    name: str
    evaluation: bool = False
    opened: int = 0
    started: int = 0
    fetched: int = 0
    counts: list[int] = field(default_factory=list[int])
    loader_seconds: float = 0.0
    silent: bool = False

    @property
    def in_hand(self) -> int:
        """Batches that this rank has certainly got: started, or fetched ahead of that.

        >>> Tally("train epoch 0", started=4, fetched=5).in_hand
        5
        """
        return max(self.started, self.fetched)


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

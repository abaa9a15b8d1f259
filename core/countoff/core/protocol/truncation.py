"""Epochs that the framework ended on every rank at the shortest one: what the loaders of the others still had."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

from countoff.core.verdict import Verdict, count_of, names_of

__all__ = ["UnusedBatches", "truncated"]


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


def truncated(span: str, used: int, unused: Mapping[int, UnusedBatches]) -> Verdict | None:
    """Returns a `Truncated` warning if some ranks' loaders had more when the span was ended on all of them.

    Args:
        span: The span's name.
        used: Batches that every rank used in it.
        unused: What each rank's loader had beyond that.

    Returns:
        The warning; None if no loader had more, or all of them had, because then a limit ended the span.

    Example:
        >>> found = truncated("train epoch 0", 7, {0: UnusedBatches(1, 4), 1: UnusedBatches(0)})
        >>> print(found.sentence.partition(": ")[2])
        rank 0 lost 1 batch (4 samples).
    """
    short = [rank for rank in sorted(unused) if not unused[rank].batches]
    longer = [rank for rank in sorted(unused) if unused[rank].batches]
    if not short or not longer:
        return None
    losses: dict[UnusedBatches, list[int]] = {}
    for rank in longer:
        losses.setdefault(unused[rank], []).append(rank)
    shown = list(losses.items())[:4]
    lost = "; ".join(f"{names_of(ranks)} lost {loss}{' each' if len(ranks) > 1 else ''}" for loss, ranks in shown)
    more = "; …" if len(losses) > len(shown) else ""
    sentence = f"{span} ended on every rank after {count_of(used, 'batch')}, where {names_of(short)} ran out of data"
    return Verdict(
        "Truncated",
        f"{sentence}: {lost}{more}.",
        tuple(short),
        why=(
            "The ranks' loaders differ in length, and the framework stops all of them at the shortest without a "
            "message."
        ),
        time=time.time(),
        subject="evaluation" if not span.startswith("train") else "train",
    )

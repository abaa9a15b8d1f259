"""Epochs that the framework ended at the shortest rank, so that the others' loaders had more: what each rank lost."""

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


def truncated(span: str, used: int, left: Mapping[int, UnusedBatches]) -> Verdict | None:
    """A `Truncated` warning, if some ranks' loaders had more when the span was ended for all of them.

    Args:
        span: The span in words.
        used: Batches that every rank used in it.
        left: What each rank had left over.

    Returns:
        The warning; None if no rank had anything left, or all of them had: then a limit ended the span.

    Example:
        >>> print(truncated("train epoch 0", 7, {0: UnusedBatches(1, 4), 1: UnusedBatches(0)}))  # doctest: +ELLIPSIS
        Verdict(kind='Truncated', sentence='train epoch 0 ended on every rank after 7 batches, where rank 1 ran out...
    """
    short = [rank for rank in sorted(left) if not left[rank].batches]
    longer = [rank for rank in sorted(left) if left[rank].batches]
    if not short or not longer:
        return None
    group_ranks_by_value: dict[UnusedBatches, list[int]] = {}
    for rank in longer:
        group_ranks_by_value.setdefault(left[rank], []).append(rank)
    shown = list(group_ranks_by_value.items())[:4]
    lost = "; ".join(f"{names_of(ranks)} lost {share}{' each' if len(ranks) > 1 else ''}" for share, ranks in shown)
    more = "; …" if len(group_ranks_by_value) > len(shown) else ""
    sentence = f"{span} ended on every rank after {count_of(used, 'batch')}, where {names_of(short)} ran out of data"
    return Verdict(
        "Truncated",
        f"{sentence}: {lost}{more}.",
        tuple(short),
        why="The ranks' loaders differ in length, and the framework stops all of them at the shortest without a word.",
        time=time.time(),
        subject="evaluation" if not span.startswith("train") else "train",
    )

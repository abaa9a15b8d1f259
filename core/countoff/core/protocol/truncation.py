"""The warnings about spans of uneven ranks that ended with the shortest rank, or went on to the longest one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

from countoff.core.verdict import Verdict, count_of, names_of

__all__ = ["UnusedBatches", "repeated", "truncated"]


_BY_FRAMEWORK = (
    "The ranks' loaders differ in length, and the framework stops all of them at the shortest without a message."
)
_BY_COUNTOFF = "The ranks' loaders differ in length, and {}='stop' ends the loop on every rank with the shortest one."
_REPEATED = (
    "The ranks' loaders differ in length, and with uneven_train='repeat' a short one begins again until the longest "
    "one has ended. The samples of repeated batches count more than once in this epoch."
)
_OPTIONS = {"train": "uneven_train", "evaluation": "uneven_eval"}
_ACCEPTED = "nothing, if you accept that these batches are not used."
_METRIC = "This is printed once; the metric {} has the number of each epoch."


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


def truncated(
    span: str, used: int, unused: Mapping[int, UnusedBatches], *, by_countoff: bool = False
) -> Verdict | None:
    """Returns a `Truncated` warning if some ranks' loaders had more when the span was ended on all of them.

    Args:
        span: The span's name.
        used: Batches that every rank used in it.
        unused: What each rank's loader had beyond that.
        by_countoff: Whether countoff has ended it, as it was told to, and not the framework.

    Returns:
        The warning; None if no loader had more, or all of them had, because then a limit ended the span.

    Example:
        >>> found = truncated("train epoch 0", 7, {0: UnusedBatches(1, 4), 1: UnusedBatches(0)})
        >>> print(found.sentence.partition(": ")[2])
        rank 0 lost 1 batch (4 samples).
    """
    short = [rank for rank in sorted(unused) if not unused[rank].batches and unused[rank].exact]
    longer = [rank for rank in sorted(unused) if unused[rank].batches]
    if not short or not longer:
        return None
    losses: dict[UnusedBatches, list[int]] = {}
    for rank in longer:
        losses.setdefault(unused[rank], []).append(rank)
    shown = list(losses.items())[:4]
    subject = "train" if span.startswith("train") else "evaluation"
    verb, ended = ("left", "stopped") if by_countoff else ("lost", "ended")
    lost = "; ".join(f"{names_of(ranks)} {verb} {loss}{' each' if len(ranks) > 1 else ''}" for loss, ranks in shown)
    more = "; …" if len(losses) > len(shown) else ""
    sentence = f"{span} {ended} on every rank after {count_of(used, 'batch')}, where {names_of(short)} ran out of data"
    return Verdict(
        "Truncated",
        f"{sentence}: {lost}{more}.",
        tuple(short),
        why=_BY_COUNTOFF.format(_OPTIONS[subject]) if by_countoff else _BY_FRAMEWORK,
        remedy=_remedy(subject, used) if by_countoff else "",
        time=time.time(),
        subject=subject if used else f"empty {subject}",  # reported also after one that was only cut
    )


def repeated(span: str, used: int, batches: Mapping[int, int]) -> Verdict | None:
    """Returns a `Repeated` warning if some ranks gave batches more than once, so that all ranks took the same number.

    Args:
        span: The span's name.
        used: Batches that every rank used in it.
        batches: Batches that each rank repeated, at least 0.

    Returns:
        The warning; None if no rank repeated any.

    >>> print(repeated("train epoch 0", 9, {0: 0, 1: 2, 2: 2}).sentence)
    train epoch 0 went on to 9 batches on every rank: ranks 1, 2 repeated 2 batches each.
    """
    groups: dict[int, list[int]] = {}
    for rank, count in sorted(batches.items()):
        if count:
            groups.setdefault(count, []).append(rank)
    if not groups:
        return None
    shown = list(groups.items())[:4]
    said = "; ".join(
        f"{names_of(ranks)} repeated {count_of(count, 'batch')}{' each' if len(ranks) > 1 else ''}"
        for count, ranks in shown
    )
    more = "; …" if len(groups) > len(shown) else ""
    return Verdict(
        "Repeated",
        f"{span} went on to {count_of(used, 'batch')} on every rank: {said}{more}.",
        tuple(rank for ranks in groups.values() for rank in ranks),
        why=_REPEATED,
        remedy=(
            "nothing, if you accept the repetition. To count each sample once, give every rank as many batches. "
            + _METRIC.format("countoff/batches_repeated")
        ),
        time=time.time(),
        subject="train" if span.startswith("train") else "evaluation",
    )


def _remedy(subject: str, used: int) -> str:
    """What to do about batches that countoff has left on some ranks."""
    if not used:
        return "give every rank data for at least one batch: as long as one rank has none, no rank takes any batch."
    if subject != "train":
        return f"{_ACCEPTED} To use all data, give every rank as many evaluation batches."
    return (
        f"{_ACCEPTED} To use all data, give every rank as many batches; with uneven_train='repeat' short ranks "
        f"repeat batches instead. {_METRIC.format('countoff/batches_left')}"
    )

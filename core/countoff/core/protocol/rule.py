"""The one rule that proves a divergence without a time-out, and the comparison of two marks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.rates import rates_differ
from countoff.core.protocol.records import Mark


@dataclass(frozen=True)
class Divergence:
    """Two ranks that cannot both be right: the mark in the log, and what this rank has counted instead.

    Attributes:
        kind: `UnevenBatches`, `StepMismatch` or `LearningRateMismatch`; `PlanMismatch` where two ranks begin a train
            epoch at other batches.
        standing: The other rank's mark, or the closing that it has announced.
        count: Batches that this rank has fetched in that span; optimizer steps for a `StepMismatch`; for a
            `PlanMismatch`, batches of the epoch before the first one.
        own: This rank's own mark of the same index, if it has reached it.
        evaluation: Whether only the lengths of an evaluation differ, which may be legitimate.
        mark_index: Index of the mark in dispute; where a closing was only announced, of the mark that opened the span.
        announced: Whether the closing was only announced.
        requested: Whether the last batch of the count was requested, and may never arrive.
        micro_batches: Whether only the micro-batches of equal steps differ, which may be legitimate.
    """

    kind: Literal["UnevenBatches", "StepMismatch", "LearningRateMismatch", "PlanMismatch"]
    standing: Mark
    count: int
    own: Mark | None = None
    evaluation: bool = False
    mark_index: int = field(default=-1, compare=False)
    announced: bool = field(default=False, compare=False)
    requested: bool = False
    micro_batches: bool = False


def beyond_mark(mark: Mark, mark_index: int, counters: SpanCounters) -> Divergence | None:
    """Applies the rule: a rank that has yet to reach a mark must not be beyond the batch at which it stands.

    Where the other rank's loader was exhausted, this rank has diverged if it has fetched more batches than that. Where
    the other rank stopped, batches fetched ahead prove nothing, so this rank has diverged only if it has started or
    requested more.

    Args:
        mark: The mark, which another rank has passed and this rank has not.
        mark_index: Its index, the next one for this rank.
        counters: This rank's innermost compared span.
    """
    if mark.reason == "interrupted" or not mark.at_known:
        return None
    exhausted = mark.reason == "exhausted"
    count = counters.fetched if exhausted else max(counters.started, counters.requested)
    if count <= (0 if mark.kind == "train_start" else mark.at):  # `at` of a train epoch's start belongs to that epoch
        return None
    uneven = mark.kind == "eval_end" and mark.reason != "exited" and counters.evaluation
    requested = count > counters.fetched
    return Divergence(
        "UnevenBatches",
        mark,
        count,
        evaluation=uneven,
        mark_index=mark_index,
        requested=requested,
    )


def beyond_announcement(closing: Mark, counters: SpanCounters) -> Divergence | None:
    """Applies the rule to a closing that another rank has announced: nobody may have fetched more batches than that.

    Args:
        closing: The announced closing of an exhausted loader.
        counters: This rank's counters in that span.
    """
    if counters.fetched <= closing.at:
        return None
    return Divergence(
        "UnevenBatches",
        closing,
        counters.fetched,
        evaluation=counters.evaluation,
        mark_index=counters.opened,
        announced=True,
    )


def compare_marks(standing: Mark, own: Mark, mark_index: int = -1) -> Divergence | None:
    """Compares this rank's mark with the one of the same index in the log.

    Args:
        standing: The mark in the log.
        own: This rank's.
        mark_index: The index of both.

    >>> compare_marks(Mark("train_end", "train epoch 0", at=4), Mark("train_end", "train epoch 0", at=4)) is None
    True
    >>> compare_marks(Mark("train_end", "train epoch 0", at=4), Mark("train_end", "train epoch 0", at=5)).kind
    'UnevenBatches'
    """
    if standing.reason == own.reason == "exited" or "interrupted" in (standing.reason, own.reason):
        return None  # both exit, each wherever a signal has reached it; or an operator has stopped one
    if standing.kind != own.kind or standing.span != own.span:
        return Divergence("UnevenBatches", standing, own.at, own, mark_index=mark_index)
    if standing.kind == "train_start" and standing.at != own.at:
        return Divergence("PlanMismatch", standing, own.at, own, mark_index=mark_index)
    if (standing.at != own.at and standing.at_known and own.at_known) or standing.counts != own.counts:
        evaluation = own.kind == "eval_end" and "exited" not in (standing.reason, own.reason)
        return Divergence("UnevenBatches", standing, own.at, own, evaluation, mark_index)
    if not (standing.steps_known and own.steps_known):
        return None
    other_batches = bool(standing.step_hash and own.step_hash) and standing.step_hash != own.step_hash
    if standing.steps != own.steps or other_batches:
        return Divergence("StepMismatch", standing, own.steps, own, mark_index=mark_index)
    if rates_differ(standing.rates, own.rates):
        return Divergence("LearningRateMismatch", standing, own.steps, own, mark_index=mark_index)
    if standing.micro.differ(own.micro):
        return Divergence("StepMismatch", standing, own.steps, own, mark_index=mark_index, micro_batches=True)
    return None

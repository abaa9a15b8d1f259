"""The one rule that proves a divergence without a time-out, and the comparison of two sync points."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.rates import rates_differ
from countoff.core.protocol.records import SyncPoint


@dataclass(frozen=True)
class Divergence:
    """Two ranks that cannot both be right: the sync point in the log, and what this rank has counted instead.

    Attributes:
        kind: `UnevenBatches`, `StepMismatch` or `LearningRateMismatch`; `PlanMismatch` where two ranks begin a train
            epoch at other batches.
        logged: The other rank's sync point, or the closing that it has announced.
        count: Batches that this rank has fetched in that span; optimizer steps for a `StepMismatch`; for a
            `PlanMismatch`, batches of the epoch before the first one.
        own: This rank's own sync point of the same index, if it has reached it.
        evaluation: Whether only the lengths of an evaluation differ, which may be legitimate.
        sync_index: Index of the sync point in dispute; of an announced closing, that of the one that opened the span.
        announced: Whether the closing was only announced.
        requested: Whether the last batch of the count was requested, and may never arrive.
        micro_batches: Whether only the micro-batches of equal steps differ, which may be legitimate.
    """

    kind: Literal["UnevenBatches", "StepMismatch", "LearningRateMismatch", "PlanMismatch"]
    logged: SyncPoint
    count: int
    own: SyncPoint | None = None
    evaluation: bool = False
    sync_index: int = field(default=-1, compare=False)
    announced: bool = field(default=False, compare=False)
    requested: bool = False
    micro_batches: bool = False


def beyond_sync_point(sync_point: SyncPoint, sync_index: int, counters: SpanCounters) -> Divergence | None:
    """Applies the rule: a rank that has yet to reach a sync point must not be beyond the batch at which it stands.

    Where the other rank's loader was exhausted, this rank has diverged if it has fetched more batches than that. Where
    the other rank stopped, batches fetched ahead prove nothing, so this rank has diverged only if it has started or
    requested more.

    Args:
        sync_point: The sync point, which another rank has passed and this rank has not.
        sync_index: Its index, the next one for this rank.
        counters: This rank's innermost compared span.
    """
    if sync_point.reason == "interrupted" or not sync_point.at_known:
        return None
    exhausted = sync_point.reason == "exhausted"
    count = counters.fetched if exhausted else max(counters.started, counters.requested)
    at = 0 if sync_point.kind == "train_start" else sync_point.at  # that of a start is of the epoch that begins there
    if count <= at:
        return None
    uneven = sync_point.kind == "eval_end" and sync_point.reason != "exited" and counters.evaluation
    requested = count > counters.fetched
    return Divergence(
        "UnevenBatches",
        sync_point,
        count,
        evaluation=uneven,
        sync_index=sync_index,
        requested=requested,
    )


def beyond_announcement(closing: SyncPoint, counters: SpanCounters) -> Divergence | None:
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
        sync_index=counters.opened,
        announced=True,
    )


def compare_sync_points(logged: SyncPoint, own: SyncPoint, sync_index: int = -1) -> Divergence | None:
    """Compares this rank's sync point with the one of the same index in the log.

    Args:
        logged: The sync point in the log.
        own: This rank's.
        sync_index: The index of both.

    >>> four, five = (SyncPoint("train_end", "train epoch 0", at=batches) for batches in (4, 5))
    >>> compare_sync_points(four, four) is None
    True
    >>> compare_sync_points(four, five).kind
    'UnevenBatches'
    """
    if logged.reason == own.reason == "exited" or "interrupted" in (logged.reason, own.reason):
        return None  # both exit, each wherever a signal has reached it; or an operator has stopped one
    if logged.kind != own.kind or logged.span != own.span:
        return Divergence("UnevenBatches", logged, own.at, own, sync_index=sync_index)
    if logged.kind == "train_start" and logged.at != own.at:
        return Divergence("PlanMismatch", logged, own.at, own, sync_index=sync_index)
    if (logged.at != own.at and logged.at_known and own.at_known) or logged.counts != own.counts:
        evaluation = own.kind == "eval_end" and "exited" not in (logged.reason, own.reason)
        return Divergence("UnevenBatches", logged, own.at, own, evaluation, sync_index)
    if not (logged.steps_known and own.steps_known):
        return None
    other_batches = bool(logged.step_hash and own.step_hash) and logged.step_hash != own.step_hash
    if logged.steps != own.steps or other_batches:
        return Divergence("StepMismatch", logged, own.steps, own, sync_index=sync_index)
    if rates_differ(logged.rates, own.rates):
        return Divergence("LearningRateMismatch", logged, own.steps, own, sync_index=sync_index)
    if logged.micro.differ(own.micro):
        return Divergence("StepMismatch", logged, own.steps, own, sync_index=sync_index, micro_batches=True)
    return None

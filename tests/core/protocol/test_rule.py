"""The one rule that proves a divergence, and the comparison of two sync points."""

import dataclasses
from typing import Any, Literal

import pytest

from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.records import SyncPoint
from countoff.core.protocol.rule import Divergence, beyond_announcement, beyond_sync_point, compare_sync_points

EPOCH = "train epoch 0"


def closing(at: int, reason: Literal["exhausted", "stopped"] = "exhausted", **counts: Any) -> SyncPoint:
    """The sync point with which rank 1 has closed the train epoch."""
    return SyncPoint("train_end", EPOCH, at=at, reason=reason, rank=1, **counts)


def found(own: SpanCounters, sync_point: SyncPoint) -> Divergence | None:
    """What the rule finds on a rank with these counters, whose next sync point another rank has passed."""
    return beyond_sync_point(sync_point, 1, own)


def test_as_many_batches_as_the_closing_prove_nothing() -> None:
    """A rank that has started as many batches as the closing has not diverged."""
    assert found(SpanCounters(EPOCH, started=4), closing(4)) is None


def test_fewer_batches_than_the_closing_prove_nothing() -> None:
    """A rank that has yet to reach the closing has not diverged."""
    assert found(SpanCounters(EPOCH, started=1, prefetched=2), closing(4)) is None


def test_a_batch_started_beyond_the_closing_proves_it() -> None:
    """A rank that has started more batches than the closing has diverged."""
    assert found(SpanCounters(EPOCH, started=5), closing(4)) == Divergence("UnevenBatches", closing(4), 5)


def test_a_fetched_batch_beyond_an_exhausted_loader_proves_it() -> None:
    """A batch fetched beyond another rank's exhausted loader is a proof before it starts."""
    assert found(SpanCounters(EPOCH, started=4, prefetched=5), closing(4)) == Divergence("UnevenBatches", closing(4), 5)


def test_a_fetched_batch_beyond_a_stop_proves_nothing() -> None:
    """A batch fetched beyond the count at which another rank stopped proves nothing."""
    assert found(SpanCounters(EPOCH, started=4, prefetched=5), closing(4, "stopped")) is None


def test_a_requested_batch_beyond_a_stop_proves_it() -> None:
    """A batch requested beyond the count at which another rank stopped is a proof, before it arrives."""
    stopped = closing(4, "stopped")
    assert found(SpanCounters(EPOCH, started=4, requested=5), stopped) == Divergence(
        "UnevenBatches", stopped, 5, requested=True
    )


def test_a_requested_batch_beyond_exhaustion_proves_nothing() -> None:
    """A batch requested beyond an exhausted loader proves nothing: the exhausted rank has requested it too."""
    assert found(SpanCounters(EPOCH, started=4, requested=5), closing(4)) is None


def test_a_started_batch_beyond_a_stop_proves_it() -> None:
    """A batch started beyond the count at which another rank stopped is a proof."""
    own = SpanCounters(EPOCH, started=5, prefetched=6)
    assert found(own, closing(4, "stopped")) == Divergence("UnevenBatches", closing(4, "stopped"), 5)


def test_an_epoch_begun_at_another_batch_is_another_plan() -> None:
    """Two ranks that begin one epoch after different numbers of its batches have resumed at different places."""
    five, six = (SyncPoint("train_start", EPOCH, at=at, rank=rank) for rank, at in enumerate((5, 6)))
    assert compare_sync_points(five, six, 1) == Divergence("PlanMismatch", five, 6, six)
    assert compare_sync_points(five, dataclasses.replace(six, at=5)) is None


def test_batches_of_an_evaluation_are_beyond_a_resumed_epoch() -> None:
    """The batches before an epoch's first one are that epoch's: they allow none of another span."""
    resumed = SyncPoint("train_start", EPOCH, at=5, rank=1)
    assert found(SpanCounters("validation", evaluation=True, started=1), resumed) is not None


def test_the_next_batch_proves_an_earlier_evaluation() -> None:
    """The next batch that this rank starts, not one fetched ahead, proves that others began an evaluation earlier."""
    early = SyncPoint("eval_start", "validation", at=4, rank=1)
    assert found(SpanCounters(EPOCH, started=4, prefetched=5), early) is None
    assert found(SpanCounters(EPOCH, started=5), early) == Divergence("UnevenBatches", early, 5)


def test_a_fetched_batch_proves_an_evaluation_at_the_end() -> None:
    """A fetched batch proves that others began an evaluation when their train loader was exhausted."""
    early = SyncPoint("eval_start", "validation", at=4, reason="exhausted", rank=1)
    assert found(SpanCounters(EPOCH, started=4, prefetched=5), early) == Divergence("UnevenBatches", early, 5)


def test_a_fetched_batch_beyond_an_announced_end_proves_it() -> None:
    """A batch fetched beyond the count at which another rank has announced its end is a proof; as many are none."""
    own = SpanCounters(EPOCH, opened=7, started=4, prefetched=5)
    proof = beyond_announcement(closing(4), own)
    assert proof == Divergence("UnevenBatches", closing(4), 5)
    assert proof is not None
    assert (proof.sync_index, proof.announced) == (7, True)
    assert beyond_announcement(closing(5), own) is None


def test_rank_and_time_of_sync_points_are_not_compared() -> None:
    """Equal sync points agree, whichever ranks wrote them and when."""
    assert compare_sync_points(closing(4, time=1.0), dataclasses.replace(closing(4, time=2.0), rank=7)) is None


def test_stopped_and_exhausted_at_one_count_agree() -> None:
    """A loader that was stopped agrees with one that was exhausted at the same count."""
    assert compare_sync_points(closing(4, "stopped"), closing(4)) is None


@pytest.mark.parametrize("other", [SyncPoint("train_end", "train epoch 1", at=4), SyncPoint("eval_start", EPOCH, at=4)])
def test_another_sync_point_of_the_same_index_is_uneven(other: SyncPoint) -> None:
    """Another kind of sync point, or a sync point of another span, is uneven, also if its counts are equal."""
    assert compare_sync_points(closing(4), other) == Divergence("UnevenBatches", closing(4), 4, other)


def test_unequal_batches_come_before_unequal_steps() -> None:
    own = closing(5, steps=5, step_hash=8)
    assert compare_sync_points(closing(4, steps=4, step_hash=7), own) == Divergence(
        "UnevenBatches", closing(4, steps=4, step_hash=7), 5, own
    )


@pytest.mark.parametrize("own", [closing(4, steps=1, step_hash=7), closing(4, steps=2, step_hash=8)])
def test_other_steps_are_a_step_mismatch(own: SyncPoint) -> None:
    """Another number of steps, or as many after other batches, is a `StepMismatch`."""
    logged = closing(4, steps=2, step_hash=7)
    assert compare_sync_points(logged, own) == Divergence("StepMismatch", logged, own.steps, own)


def test_loaders_of_one_evaluation_are_compared_one_by_one() -> None:
    logged = SyncPoint("eval_end", "validation", at=5, counts=(3, 2))
    own = SyncPoint("eval_end", "validation", at=5, counts=(2, 3))
    assert compare_sync_points(logged, logged) is None
    assert compare_sync_points(logged, own) == Divergence("UnevenBatches", logged, 5, own, evaluation=True)


def test_ranks_that_exit_agree_wherever_each_of_them_is() -> None:
    assert (
        compare_sync_points(
            SyncPoint("train_end", EPOCH, at=3, reason="exited"), SyncPoint("fit_end", "the fit", reason="exited")
        )
        is None
    )


def test_an_exit_in_an_evaluation_is_no_uneven_evaluation() -> None:
    """A rank that exits in the middle of an evaluation is not taken for an uneven evaluation."""
    left, own = (
        SyncPoint("eval_end", "validation", at=2, reason="exited"),
        SyncPoint("eval_end", "validation", at=3, reason="exhausted"),
    )
    assert compare_sync_points(left, own) == Divergence("UnevenBatches", left, 3, own)

"""What the threads of a watched loop let countoff prove, and what it is compared with."""

from countoff.core import Settings
from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.evidence import Evidence
from countoff.core.protocol.records import SyncPoint
from countoff.core.protocol.rule import beyond_sync_point, compare_sync_points
from countoff.core.session.state import State

HOME, OTHER = 1, 2


def evidence(thread: int = HOME) -> Evidence:
    """What is known on a thread."""
    return Evidence(home=HOME, current=lambda: thread, optimizers_told=True)


def test_one_thread_proves_every_step() -> None:
    loop = evidence()
    loop.takes(HOME)
    loop.steps(HOME)
    assert loop.steps_by_batch
    assert loop.knows_steps(in_epoch=True)


def test_a_thread_that_prefetches_proves_no_step_before_the_epoch_is_over() -> None:
    """From the first batch on: it may be far ahead before the first step is applied."""
    on_home, on_other = evidence(), evidence(OTHER)
    for loop in (on_home, on_other):
        loop.takes(OTHER)
        assert not loop.steps_by_batch
        loop.steps(HOME)
        assert not loop.knows_steps(in_epoch=True)
    assert not on_other.knows_steps(in_epoch=False)
    assert on_home.knows_steps(in_epoch=False)


def test_a_loop_on_another_thread_than_the_start_of_the_fit_proves_its_steps_once_one_is_seen() -> None:
    loop = evidence()
    loop.takes(OTHER)
    loop.steps(OTHER)
    assert loop.steps_by_batch


def test_an_evaluation_has_its_place_on_the_thread_of_the_train_epochs() -> None:
    loop = evidence()
    assert loop.has_order(evaluation=True, thread=HOME)
    assert not loop.has_order(evaluation=True, thread=OTHER)
    loop.takes(OTHER)
    assert [loop.has_order(evaluation=True, thread=each) for each in (HOME, OTHER)] == [False, True]
    assert loop.has_order(evaluation=False, thread=HOME)


def test_without_batches_the_steps_of_a_probe_do_not_count() -> None:
    """Where nobody has named the optimizers, nothing is compared; where somebody has, all of their steps count."""
    loop = Evidence(home=HOME, current=lambda: HOME)
    assert loop.begins_round("model", in_epoch=True)
    assert not loop.begins_round("probe", in_epoch=False)
    assert loop.begins_round("model", in_epoch=False)
    loop.takes(OTHER)
    loop.steps(HOME)
    assert not loop.knows_steps(in_epoch=False)
    assert evidence().begins_round("model", in_epoch=False)


def test_steps_on_another_thread_are_counted_by_rounds_of_the_optimizers() -> None:
    """Two batches may be trained on between two that are taken: each optimizer steps once in a round."""
    state = State(0, 2, Settings(), {})
    state.evidence.takes(OTHER)
    state.evidence.steps(HOME)
    state.spans.append(SpanCounters("train epoch 0", started=1))
    for optimizer in ("critic", "actor", "critic", "actor"):
        state.step(optimizer)
    assert (state.steps, state.step_hash) == (2, 0)


def test_sync_points_whose_steps_are_not_known_compare_only_batches() -> None:
    known = SyncPoint("train_end", "train epoch 0", at=4, steps=4)
    unknown = SyncPoint("train_end", "train epoch 0", at=4, steps=3, rank=1, steps_known=False)
    assert compare_sync_points(known, unknown) is None
    assert compare_sync_points(SyncPoint.from_json(unknown.to_json()), known) is None
    fewer = compare_sync_points(known, SyncPoint("train_end", "train epoch 0", at=3, rank=1, steps_known=False))
    assert fewer is not None
    assert fewer.kind == "UnevenBatches"


def test_a_pass_that_is_stopped_while_a_thread_takes_batches_ahead_proves_no_count() -> None:
    """The loop has trained on as many batches on both ranks; one thread was further ahead."""
    state = State(0, 2, Settings(), {})
    state.evidence.takes(-1)
    span = SpanCounters("train epoch 0", started=25)
    state.reach(SyncPoint("train_start", "train epoch 0"), span)
    own = state.sync_point("train_end", "train epoch 0", "stopped", span)
    assert not own.at_known
    other = SyncPoint("train_end", "train epoch 0", at=21, reason="stopped", rank=1, at_known=False)
    assert SyncPoint.from_json(other.to_json()) == other
    assert compare_sync_points(other, own) is None
    assert compare_sync_points(SyncPoint("train_end", "train epoch 0", at=25, reason="exhausted"), other) is None
    assert beyond_sync_point(other, 0, span) is None
    assert state.sync_point("train_end", "train epoch 0", "exhausted", span).at_known

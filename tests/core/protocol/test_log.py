"""One rank's view of the shared log, one sync point after the other."""

import dataclasses
import pickle
from typing import Literal

import pytest

from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.log import LogView
from countoff.core.protocol.records import Reason, SyncPoint
from countoff.core.protocol.rule import Divergence

EPOCH = "train epoch 0"


def opened(*spans: SpanCounters, number: int = 0) -> LogView:
    """The view of a rank that has passed sync points 0 to `number`, the last of which opened the innermost span."""
    log = LogView()
    for passed in range(number + 1):
        sync_point = SyncPoint("train_start", spans[-1].name)
        log.reach(sync_point)
        assert log.receive_sync_point(passed, sync_point, ()) is None
    return log


def closing(at: int, reason: Literal["exhausted", "stopped"] = "exhausted") -> SyncPoint:
    """The sync point with which rank 1 has closed the train epoch."""
    return SyncPoint("train_end", EPOCH, at=at, reason=reason, rank=1)


def test_the_rule_is_applied_again_as_the_counters_grow() -> None:
    own = SpanCounters(EPOCH, started=4)
    log = opened(own)
    assert log.receive_sync_point(1, closing(4), [own]) is None
    own.started = 5
    assert log.prove([own]) == Divergence("UnevenBatches", closing(4), 5)


def test_the_next_batch_proves_an_evaluation_skipped_here() -> None:
    """The next batch of a rank that skips an evaluation is a proof."""
    own, evaluation = SpanCounters(EPOCH, started=2), SyncPoint("eval_start", "validation", at=2, rank=1)
    log = opened(own)
    assert log.receive_sync_point(1, evaluation, [own]) is None
    own.started = 3
    assert log.prove([own]) == Divergence("UnevenBatches", evaluation, 3)


def test_a_sync_point_proves_an_evaluation_skipped_elsewhere() -> None:
    """The sync point that another rank wrote in place of an evaluation is a proof."""
    own = SpanCounters(EPOCH, started=2)
    log = opened(own)
    assert log.receive_sync_point(1, closing(4), [own]) is None
    mine = SyncPoint("eval_start", "validation", at=2)
    assert log.reach(mine)[1] == Divergence("UnevenBatches", closing(4), 2, mine)


def test_a_sync_point_further_ahead_proves_nothing_yet() -> None:
    own = SpanCounters(EPOCH, started=5)
    assert opened(own).receive_sync_point(2, closing(4), [own]) is None


def test_evaluation_batches_do_not_count_for_training() -> None:
    """Batches of an evaluation are not compared with the closing of the train span around it."""
    spans = [SpanCounters(EPOCH, started=2), SpanCounters("validation", evaluation=True, opened=1, started=9)]
    log = opened(*spans, number=1)
    assert log.receive_sync_point(2, SyncPoint("eval_end", "validation", at=9, reason="exhausted"), spans) is None
    assert log.receive_sync_point(3, closing(2), spans) is None


def test_a_longer_evaluation_is_found_as_an_evaluation() -> None:
    spans = [SpanCounters(EPOCH, started=2), SpanCounters("validation", evaluation=True, opened=1, started=4)]
    shorter = SyncPoint("eval_end", "validation", at=3, reason="exhausted", rank=1)
    found = opened(*spans, number=1).receive_sync_point(2, shorter, spans)
    assert found == Divergence("UnevenBatches", shorter, 4, evaluation=True)


def test_an_uncompared_span_proves_nothing() -> None:
    """A span that is not compared proves nothing against sync points and announcements."""
    own = SpanCounters(EPOCH, started=50, prefetched=60, compared=False)
    log = opened(own)
    assert log.receive_sync_point(1, closing(4), [own]) is None
    assert log.receive_announcement(0, closing(4), [own]) is None


def test_training_is_compared_in_an_uncompared_evaluation() -> None:
    """A train span is compared while an evaluation that is not compared is open in it."""
    spans = [
        SpanCounters(EPOCH, started=5),
        SpanCounters("validation", evaluation=True, opened=-1, started=1, compared=False),
    ]
    assert opened(*spans).receive_sync_point(1, closing(4), spans) == Divergence("UnevenBatches", closing(4), 5)


def test_an_announced_train_end_holds_in_an_evaluation() -> None:
    """The announced end of a train span is compared also while an evaluation is open in it."""
    spans = [SpanCounters(EPOCH, started=5), SpanCounters("validation", evaluation=True, opened=1)]
    log = opened(*spans, number=1)
    assert log.receive_announcement(0, closing(4), spans) == Divergence("UnevenBatches", closing(4), 5)


def test_an_announcement_for_another_span_proves_nothing() -> None:
    own = SpanCounters("train epoch 1", opened=1, started=5, prefetched=6)
    assert opened(own, number=1).receive_announcement(0, closing(4), [own]) is None


def test_the_first_announcement_for_a_span_stands() -> None:
    own = SpanCounters(EPOCH, started=4)
    log = opened(own)
    log.receive_announcement(0, closing(4), [own])
    log.receive_announcement(0, closing(9), [own])
    own.started = 5
    assert log.prove([own]) == Divergence("UnevenBatches", closing(4), 5)


def test_an_early_stop_may_come_before_an_announced_end() -> None:
    """A span that all ranks stop before its announced end is no divergence."""
    own = SpanCounters(EPOCH, started=3, prefetched=4)
    log = opened(own)
    assert log.receive_announcement(0, closing(4), [own]) is None
    assert log.receive_sync_point(1, closing(3, "stopped"), [own]) is None
    assert log.reach(closing(3, "stopped"))[1] is None


def test_an_announced_end_makes_this_rank_behind() -> None:
    """An announced end makes every batch of that span a possible proof."""
    own = SpanCounters(EPOCH, started=1)
    log = opened(own)
    assert not log.is_behind([own])
    log.receive_announcement(0, closing(4), [own])
    assert log.announced(0) is not None
    assert log.is_behind([own])


@pytest.mark.parametrize("first", ["own", "logged"])
@pytest.mark.parametrize(("theirs", "proved"), [(closing(4), None), (closing(5), "UnevenBatches")])
def test_sync_points_are_compared_whichever_comes_first(first: str, theirs: SyncPoint, proved: str | None) -> None:
    own, log = SpanCounters(EPOCH, started=4), opened(SpanCounters(EPOCH))
    if first == "own":
        assert log.reach(closing(4))[1] is None
        found = log.receive_sync_point(1, theirs, [own])
    else:
        assert log.receive_sync_point(1, theirs, [own]) is None
        found = log.reach(closing(4))[1]
    assert (found.kind if found else None) == proved


def test_the_first_sync_point_of_an_index_counts() -> None:
    log = opened(SpanCounters(EPOCH))
    log.receive_sync_point(1, closing(4), ())
    log.receive_sync_point(1, closing(5), ())
    assert log.reach(closing(4))[1] is None


def test_a_sync_point_is_compared_once() -> None:
    log = opened(SpanCounters(EPOCH))
    log.receive_sync_point(1, closing(5), ())
    assert log.reach(closing(4))[1] is not None
    assert log.receive_sync_point(1, closing(5), ()) is None


def test_a_sync_point_is_logged_once_any_rank_has_written_it() -> None:
    log = LogView()
    log.reach(SyncPoint("fit_start", "the fit"))
    assert not log.is_logged(0)
    log.receive_sync_point(0, SyncPoint("fit_start", "the fit"), ())
    assert log.is_logged(0)
    log.reach(SyncPoint("train_start", EPOCH))
    assert log.is_logged(0)
    assert not log.is_logged(1)


def test_a_rank_is_behind_until_it_reaches_others_sync_point() -> None:
    """A rank is behind while the log holds its next sync point."""
    log = opened(SpanCounters(EPOCH))
    assert not log.is_behind(())
    log.receive_sync_point(1, closing(4), ())
    assert log.is_behind(())
    log.reach(closing(4))
    assert not log.is_behind(())


def test_a_long_job_keeps_no_sync_points_and_few_announcements() -> None:
    """A view that has compared 1000 sync points is as large as one that has compared 500."""
    log, sizes = LogView(), list[int]()
    for number in range(1000):
        sync_point = SyncPoint("train_start", EPOCH)
        log.reach(sync_point)
        log.receive_sync_point(number, sync_point, ())
        log.receive_announcement(number, closing(4), ())
        sizes.append(len(pickle.dumps(log)))
    assert sizes[-1] <= sizes[499]  # some of its numbers have more digits than before 256


def test_an_accepted_evaluation_is_found_once() -> None:
    """An uneven evaluation is not found again once it is accepted; the next one is."""
    first = SpanCounters("validation", evaluation=True, opened=0, started=4)
    log = opened(first)
    shorter = SyncPoint("eval_end", "validation", at=3, reason="exhausted", rank=1)
    assert log.receive_sync_point(1, shorter, [first]) is not None
    log.accept_uneven([first])
    assert log.prove([first]) is None
    assert log.receive_announcement(0, shorter, [first]) is None
    second = SpanCounters("validation", evaluation=True, opened=2, started=4)
    log.reach(dataclasses.replace(shorter, at=4))
    log.reach(SyncPoint("eval_start", "validation"))
    assert log.receive_sync_point(3, shorter, [second]) is not None


def test_accepting_leaves_train_spans_alone() -> None:
    """Accepting uneven evaluations does not accept an uneven train span."""
    own = SpanCounters(EPOCH, started=5)
    log = opened(own)
    log.accept_uneven([own])
    assert log.receive_sync_point(1, closing(4), [own]) is not None


def test_a_passed_sync_point_has_a_side() -> None:
    """A rank that has passed the disputed sync point agrees with it or not, by its own count."""
    for at, side in ((4, True), (5, False)):
        log = opened(SpanCounters(EPOCH))
        log.receive_sync_point(1, closing(4), ())
        log.reach(closing(at))
        log.reach(SyncPoint("train_start", "train epoch 1"))
        assert log.side(0, 1, False, [SpanCounters("train epoch 1", opened=2, started=1)]) is side


def test_a_sync_point_not_reached_has_a_side_once_counts_exceed_it() -> None:
    """A rank that has yet to reach the disputed sync point disagrees once it has more batches."""
    own = SpanCounters(EPOCH, started=4)
    log = opened(own)
    log.receive_sync_point(1, closing(4), [own])
    assert log.side(0, 1, False, [own]) is None
    own.started = 5
    assert log.side(0, 1, False, [own]) is False
    assert log.side(0, 7, False, [own]) is None


def test_an_announced_end_has_sides_too() -> None:
    """A disputed announcement has sides: a fetched batch beyond it disagrees, an equal closing agrees."""
    own = SpanCounters(EPOCH, started=4)
    log = opened(own)
    log.receive_announcement(0, closing(4), [own])
    assert log.side(0, 0, True, [own]) is None
    own.prefetched = 5
    assert log.side(0, 0, True, [own]) is False
    log.reach(closing(4))
    assert log.side(0, 0, True, []) is True


def test_a_rank_agrees_with_the_end_it_announced() -> None:
    """A rank agrees with the end that it has announced itself before it reaches it."""
    own = SpanCounters(EPOCH, started=4)
    log = opened(own)
    log.receive_announcement(0, closing(4), [own])
    assert log.side(1, 0, True, [own]) is True


def test_a_known_last_batch_has_a_side() -> None:
    """A rank that knows its last batch agrees with an announced end or not, by its count."""
    for started, side in ((4, True), (3, False)):
        own = SpanCounters(EPOCH, started=started, ends=True)
        log = opened(own)
        log.receive_announcement(0, closing(4), [own])
        assert log.side(0, 0, True, [own]) is side


def test_first_ahead_is_the_next_sync_point_of_another_rank() -> None:
    """The next sync point that only another rank has passed shows what that rank did before it died."""
    log, evaluation = opened(SpanCounters(EPOCH)), SyncPoint("eval_start", "evaluation", at=3, rank=1)
    assert log.first_ahead() is None
    log.receive_sync_point(1, evaluation, [SpanCounters(EPOCH, started=3)])
    assert log.first_ahead() == evaluation
    log.reach(evaluation)
    assert log.first_ahead() is None


@pytest.mark.parametrize(
    ("reason", "ender", "found"),
    [("stopped", 1, True), ("exhausted", 1, False), ("stopped", 2, False), ("stopped", 0, False)],
)
def test_exited_alone_is_a_stop_and_a_fit_end_of_one_rank(reason: Reason, ender: int, found: bool) -> None:
    """A rank that has stopped its epoch and then ended the fit, while this rank has not, has exited alone."""
    log = opened(own := SpanCounters(EPOCH, started=4))
    stop = SyncPoint("train_end", EPOCH, at=4, reason=reason, rank=1)
    log.receive_sync_point(1, stop, [own])
    if ender:
        log.receive_sync_point(2, SyncPoint("fit_end", "the fit", rank=ender), [own])
    assert log.exited_alone() == (stop if found else None)

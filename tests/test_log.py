"""The one rule, mark by mark; the whole protocol is in test_protocol.py."""

import dataclasses
import json
from typing import Any, Literal

import pytest

from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.log import LogView
from countoff.core.protocol.records import Mark, Reason
from countoff.core.protocol.rule import Divergence, compare_marks

EPOCH = "train epoch 0"


def opened(*spans: SpanCounters, number: int = 0) -> LogView:
    """A ledger that has passed marks 0 to `number`, the last of which opened the innermost of the spans."""
    log = LogView()
    for passed in range(number + 1):
        mark = Mark("train_start", spans[-1].name)
        log.reach(mark)
        assert log.receive_mark(passed, mark, ()) is None
    return log


def told(own: SpanCounters, mark: Mark) -> Divergence | None:
    """What a rank with these counts in an open span finds when it hears another rank's next mark."""
    return opened(own).receive_mark(1, mark, [own])


def closing(at: int, reason: Literal["exhausted", "stopped"] = "exhausted", **counts: Any) -> Mark:
    return Mark("train_end", EPOCH, at=at, reason=reason, rank=1, **counts)


# The one rule -----------------------------------------------------------------------------------------------------


def test_a_rank_that_has_as_many_batches_as_the_closing_has_not_diverged() -> None:
    assert told(SpanCounters(EPOCH, started=4), closing(4)) is None


def test_a_rank_that_is_still_on_its_way_to_the_closing_has_not_diverged() -> None:
    assert told(SpanCounters(EPOCH, started=1, prefetched=2), closing(4)) is None


def test_a_rank_that_has_started_more_than_the_closing_has_diverged() -> None:
    assert told(SpanCounters(EPOCH, started=5), closing(4)) == Divergence("UnevenBatches", closing(4), 5)


def test_a_batch_fetched_beyond_an_exhausted_loader_proves_it_before_it_starts() -> None:
    assert told(SpanCounters(EPOCH, started=4, prefetched=5), closing(4)) == Divergence("UnevenBatches", closing(4), 5)


def test_a_batch_fetched_beyond_a_pass_that_was_stopped_proves_nothing() -> None:
    assert told(SpanCounters(EPOCH, started=4, prefetched=5), closing(4, "stopped")) is None


def test_a_batch_asked_for_beyond_a_pass_that_was_stopped_proves_it() -> None:
    stopped = closing(4, "stopped")
    assert told(SpanCounters(EPOCH, started=4, requested=5), stopped) == Divergence(
        "UnevenBatches", stopped, 5, requested=True
    )


def test_a_batch_asked_for_beyond_an_exhausted_loader_proves_nothing() -> None:
    """The rank that was exhausted has asked for it as well."""
    assert told(SpanCounters(EPOCH, started=4, requested=5), closing(4)) is None


def test_a_batch_started_beyond_a_pass_that_was_stopped_proves_it() -> None:
    own = SpanCounters(EPOCH, started=5, prefetched=6)
    assert told(own, closing(4, "stopped")) == Divergence("UnevenBatches", closing(4, "stopped"), 5)


def test_the_rule_is_applied_again_as_the_counters_grow() -> None:
    own = SpanCounters(EPOCH, started=4)
    log = opened(own)
    assert log.receive_mark(1, closing(4), [own]) is None
    own.started = 5
    assert log.prove([own]) == Divergence("UnevenBatches", closing(4), 5)


def test_an_evaluation_that_others_began_earlier_is_proved_by_the_next_batch() -> None:
    early = Mark("eval_start", "validation", at=4, rank=1)
    assert told(SpanCounters(EPOCH, started=4, prefetched=5), early) is None
    assert told(SpanCounters(EPOCH, started=5), early) == Divergence("UnevenBatches", early, 5)


def test_an_evaluation_at_the_end_of_an_exhausted_loader_is_proved_by_a_batch_in_hand() -> None:
    early = Mark("eval_start", "validation", at=4, reason="exhausted", rank=1)
    assert told(SpanCounters(EPOCH, started=4, prefetched=5), early) == Divergence("UnevenBatches", early, 5)


def test_an_evaluation_that_this_rank_skips_is_proved_by_its_next_batch() -> None:
    own, evaluation = SpanCounters(EPOCH, started=2), Mark("eval_start", "validation", at=2, rank=1)
    log = opened(own)
    assert log.receive_mark(1, evaluation, [own]) is None
    own.started = 3
    assert log.prove([own]) == Divergence("UnevenBatches", evaluation, 3)


def test_an_evaluation_that_another_rank_skips_is_proved_by_the_mark_in_its_place() -> None:
    own = SpanCounters(EPOCH, started=2)
    log = opened(own)
    assert log.receive_mark(1, closing(4), [own]) is None
    mine = Mark("eval_start", "validation", at=2)
    assert log.reach(mine)[1] == Divergence("UnevenBatches", closing(4), 2, mine)


def test_a_mark_of_a_later_place_says_nothing_yet() -> None:
    own = SpanCounters(EPOCH, started=5)
    assert opened(own).receive_mark(2, closing(4), [own]) is None


def test_a_batch_of_the_evaluation_is_not_held_against_the_train_span_around_it() -> None:
    spans = [SpanCounters(EPOCH, started=2), SpanCounters("validation", evaluation=True, opened=1, started=9)]
    log = opened(*spans, number=1)
    assert log.receive_mark(2, Mark("eval_end", "validation", at=9, reason="exhausted"), spans) is None
    assert log.receive_mark(3, closing(2), spans) is None


def test_a_longer_evaluation_is_found_as_an_evaluation() -> None:
    spans = [SpanCounters(EPOCH, started=2), SpanCounters("validation", evaluation=True, opened=1, started=4)]
    shorter = Mark("eval_end", "validation", at=3, reason="exhausted", rank=1)
    found = opened(*spans, number=1).receive_mark(2, shorter, spans)
    assert found == Divergence("UnevenBatches", shorter, 4, evaluation=True)


def test_a_silent_span_is_never_held_against_anything() -> None:
    own = SpanCounters(EPOCH, started=50, prefetched=60, compared=False)
    log = opened(own)
    assert log.receive_mark(1, closing(4), [own]) is None
    assert log.receive_announcement(0, closing(4), [own]) is None


def test_a_train_span_is_compared_while_a_silent_evaluation_is_open_in_it() -> None:
    spans = [
        SpanCounters(EPOCH, started=5),
        SpanCounters("validation", evaluation=True, opened=-1, started=1, compared=False),
    ]
    assert opened(*spans).receive_mark(1, closing(4), spans) == Divergence("UnevenBatches", closing(4), 5)


# Announcements ----------------------------------------------------------------------------------------------------


def test_an_announced_end_is_proved_wrong_by_a_batch_in_hand() -> None:
    own = SpanCounters(EPOCH, started=4, prefetched=5)
    assert opened(own).receive_announcement(0, closing(4), [own]) == Divergence("UnevenBatches", closing(4), 5)


def test_an_announced_end_holds_for_the_train_span_while_an_evaluation_is_open_in_it() -> None:
    spans = [SpanCounters(EPOCH, started=5), SpanCounters("validation", evaluation=True, opened=1)]
    log = opened(*spans, number=1)
    assert log.receive_announcement(0, closing(4), spans) == Divergence("UnevenBatches", closing(4), 5)


def test_an_announcement_for_another_span_says_nothing() -> None:
    own = SpanCounters("train epoch 1", opened=1, started=5, prefetched=6)
    assert opened(own, number=1).receive_announcement(0, closing(4), [own]) is None


def test_the_first_announcement_for_a_span_stands() -> None:
    own = SpanCounters(EPOCH, started=4)
    log = opened(own)
    log.receive_announcement(0, closing(4), [own])
    log.receive_announcement(0, closing(9), [own])
    own.started = 5
    assert log.prove([own]) == Divergence("UnevenBatches", closing(4), 5)


def test_an_announcement_that_an_early_stop_overtakes_is_no_fault() -> None:
    own = SpanCounters(EPOCH, started=3, prefetched=4)
    log = opened(own)
    assert log.receive_announcement(0, closing(4), [own]) is None
    assert log.receive_mark(1, closing(3, "stopped"), [own]) is None
    assert log.reach(closing(3, "stopped"))[1] is None


def test_an_announced_end_makes_every_batch_of_that_span_a_possible_proof() -> None:
    own = SpanCounters(EPOCH, started=1)
    log = opened(own)
    assert not log.is_behind([own])
    log.receive_announcement(0, closing(4), [own])
    assert log.announced(0)
    assert log.is_behind([own])


# Marks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["own", "standing"])
@pytest.mark.parametrize(("theirs", "proved"), [(closing(4), None), (closing(5), "UnevenBatches")])
def test_marks_are_compared_whichever_comes_first(first: str, theirs: Mark, proved: str | None) -> None:
    own, log = SpanCounters(EPOCH, started=4), opened(SpanCounters(EPOCH))
    if first == "own":
        assert log.reach(closing(4))[1] is None
        found = log.receive_mark(1, theirs, [own])
    else:
        assert log.receive_mark(1, theirs, [own]) is None
        found = log.reach(closing(4))[1]
    assert (found.kind if found else None) == proved


def test_the_first_mark_in_a_place_stands() -> None:
    log = opened(SpanCounters(EPOCH))
    log.receive_mark(1, closing(4), ())
    log.receive_mark(1, closing(5), ())
    assert log.reach(closing(4))[1] is None


def test_a_mark_is_compared_once() -> None:
    log = opened(SpanCounters(EPOCH))
    log.receive_mark(1, closing(5), ())
    assert log.reach(closing(4))[1] is not None
    assert log.receive_mark(1, closing(5), ()) is None


def test_a_mark_stands_once_anybody_has_written_it() -> None:
    log = LogView()
    log.reach(Mark("fit_start", "the fit"))
    assert not log.stands(0)
    log.receive_mark(0, Mark("fit_start", "the fit"), ())
    assert log.stands(0)
    log.reach(Mark("train_start", EPOCH))
    assert log.stands(0)
    assert not log.stands(1)


def test_a_rank_is_behind_while_others_stand_at_its_next_mark() -> None:
    log = opened(SpanCounters(EPOCH))
    assert not log.is_behind(())
    log.receive_mark(1, closing(4), ())
    assert log.is_behind(())
    log.reach(closing(4))
    assert not log.is_behind(())


def test_a_long_job_keeps_no_marks_and_few_announcements() -> None:
    log = LogView()
    for number in range(1000):
        mark = Mark("train_start", EPOCH)
        log.reach(mark)
        log.receive_mark(number, mark, ())
        log.receive_announcement(number, closing(4), ())
    assert len(log._standing) + len(log._pending) + len(log._announced) < 16


def test_a_muted_evaluation_is_found_no_more_but_the_next_one_is() -> None:
    first = SpanCounters("validation", evaluation=True, opened=0, started=4)
    log = opened(first)
    shorter = Mark("eval_end", "validation", at=3, reason="exhausted", rank=1)
    assert log.receive_mark(1, shorter, [first]) is not None
    log.accept_uneven([first])
    assert log.prove([first]) is None
    assert log.receive_announcement(0, shorter, [first]) is None
    second = SpanCounters("validation", evaluation=True, opened=2, started=4)
    log.reach(dataclasses.replace(shorter, at=4))
    log.reach(Mark("eval_start", "validation"))
    assert log.receive_mark(3, shorter, [second]) is not None


def test_muting_leaves_train_spans_alone() -> None:
    own = SpanCounters(EPOCH, started=5)
    log = opened(own)
    log.accept_uneven([own])
    assert log.receive_mark(1, closing(4), [own]) is not None


def test_equal_marks_of_different_ranks_at_different_times_agree() -> None:
    assert compare_marks(closing(4, time=1.0), dataclasses.replace(closing(4, time=2.0), rank=7)) is None


def test_a_pass_that_was_stopped_where_another_was_exhausted_agrees() -> None:
    assert compare_marks(closing(4, "stopped"), closing(4)) is None


@pytest.mark.parametrize("other", [Mark("train_end", "train epoch 1", at=4), Mark("eval_start", EPOCH, at=4)])
def test_another_mark_in_the_same_place_is_uneven_whatever_its_counts(other: Mark) -> None:
    assert compare_marks(closing(4), other) == Divergence("UnevenBatches", closing(4), 4, other)


def test_unequal_batches_come_before_unequal_steps() -> None:
    own = closing(5, steps=5, step_hash=8)
    assert compare_marks(closing(4, steps=4, step_hash=7), own) == Divergence(
        "UnevenBatches", closing(4, steps=4, step_hash=7), 5, own
    )


@pytest.mark.parametrize("own", [closing(4, steps=1, step_hash=7), closing(4, steps=2, step_hash=8)])
def test_other_steps_or_steps_at_other_batches_are_a_step_mismatch(own: Mark) -> None:
    standing = closing(4, steps=2, step_hash=7)
    assert compare_marks(standing, own) == Divergence("StepMismatch", standing, own.steps, own)


def test_several_loaders_of_one_evaluation_are_compared_one_by_one() -> None:
    standing = Mark("eval_end", "validation", at=5, counts=(3, 2))
    own = Mark("eval_end", "validation", at=5, counts=(2, 3))
    assert compare_marks(standing, standing) is None
    assert compare_marks(standing, own) == Divergence("UnevenBatches", standing, 5, own, evaluation=True)


def test_ranks_that_leave_agree_wherever_each_of_them_was() -> None:
    assert (
        compare_marks(Mark("train_end", EPOCH, at=3, reason="exited"), Mark("fit_end", "the fit", reason="exited"))
        is None
    )


def test_a_rank_that_leaves_an_evaluation_is_no_uneven_evaluation() -> None:
    left, own = (
        Mark("eval_end", "validation", at=2, reason="exited"),
        Mark("eval_end", "validation", at=3, reason="exhausted"),
    )
    assert compare_marks(left, own) == Divergence("UnevenBatches", left, 3, own)


# Sides ------------------------------------------------------------------------------------------------------------


def test_a_rank_that_has_passed_the_mark_in_dispute_is_with_it_or_against_it() -> None:
    for at, side in ((4, True), (5, False)):
        log = opened(SpanCounters(EPOCH))
        log.receive_mark(1, closing(4), ())
        log.reach(closing(at))
        log.reach(Mark("train_start", "train epoch 1"))
        assert log.side(0, 1, False, [SpanCounters("train epoch 1", opened=2, started=1)]) is side


def test_a_rank_on_its_way_to_the_mark_in_dispute_is_against_it_once_it_has_more() -> None:
    own = SpanCounters(EPOCH, started=4)
    log = opened(own)
    log.receive_mark(1, closing(4), [own])
    assert log.side(0, 1, False, [own]) is None
    own.started = 5
    assert log.side(0, 1, False, [own]) is False
    assert log.side(0, 7, False, [own]) is None


def test_an_announced_end_has_sides_too() -> None:
    own = SpanCounters(EPOCH, started=4)
    log = opened(own)
    log.receive_announcement(0, closing(4), [own])
    assert log.side(0, 0, True, [own]) is None
    own.prefetched = 5
    assert log.side(0, 0, True, [own]) is False
    log.reach(closing(4))
    assert log.side(0, 0, True, []) is True


def test_a_rank_that_has_announced_its_end_is_with_it_before_it_comes_to_it() -> None:
    own = SpanCounters(EPOCH, started=4)
    log = opened(own)
    log.receive_announcement(0, closing(4), [own])
    assert log.side(1, 0, True, [own]) is True


def test_a_rank_that_knows_its_last_batch_is_with_the_announced_end_or_against_it() -> None:
    for started, side in ((4, True), (3, False)):
        own = SpanCounters(EPOCH, started=started, ends=True)
        log = opened(own)
        log.receive_announcement(0, closing(4), [own])
        assert log.side(0, 0, True, [own]) is side


def test_a_mark_survives_the_wire() -> None:
    mark = Mark("eval_end", "validation", 5, "stopped", 7, 2**48 - 1, (3, 2), 15, 1700000000.25)
    assert Mark.from_json(json.loads(json.dumps(mark.to_json()))) == mark


def test_a_mark_that_only_another_rank_has_passed_tells_what_it_did_before_it_died() -> None:
    log, evaluation = opened(SpanCounters(EPOCH)), Mark("eval_start", "evaluation", at=3, rank=1)
    assert log.first_ahead() is None
    log.receive_mark(1, evaluation, [SpanCounters(EPOCH, started=3)])
    assert log.first_ahead() == evaluation
    log.reach(evaluation)
    assert log.first_ahead() is None


@pytest.mark.parametrize(
    ("reason", "ender", "found"),
    [("stopped", 1, True), ("exhausted", 1, False), ("stopped", 2, False), ("stopped", 0, False)],
)
def test_who_has_stopped_an_epoch_and_ended_the_fit_alone_has_left(reason: Reason, ender: int, found: bool) -> None:
    log = opened(own := SpanCounters(EPOCH, started=4))
    stop = Mark("train_end", EPOCH, at=4, reason=reason, rank=1)
    log.receive_mark(1, stop, [own])
    if ender:
        log.receive_mark(2, Mark("fit_end", "the fit", rank=ender), [own])
    assert log.exited_alone() == (stop if found else None)

"""The state of one rank: what each event changes, and which actions it puts into the outbox."""

from typing import Any, Literal

import pytest

from countoff.core import Settings, Verdict, constants
from countoff.core.protocol.actions import PrintWarning, WriteEntry
from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.credits import Credits
from countoff.core.protocol.records import SyncPoint, sync_entry, verdict_entry
from countoff.core.session.state import FAIL_SECONDS, NEVER, State
from tests.outbox import drain, written

EPOCH = "train epoch 0"


def state_of(rank: int = 0, world_size: int = 2, **chosen: Any) -> State:
    return State(rank, world_size, Settings(**chosen), {"LostRank": "Mend it.", "WrongLength": "Set the length."})


def end_entry(sentence: str) -> dict[str, Any]:
    return verdict_entry("end", Verdict("LostRank", sentence))


def test_only_the_first_end_in_the_log_counts() -> None:
    state = state_of()
    state.receive(end_entry("first."))
    state.receive(end_entry("second."))
    assert state.end == Verdict("LostRank", "first.", remedy="Mend it.")
    assert state.ended.is_set()


def test_an_end_is_proposed_once() -> None:
    state = state_of()
    state.propose(Verdict("LostRank", "first."))
    state.propose(Verdict("LostRank", "second."))
    assert [entry["verdict"]["sentence"] for entry in written(state)] == ["first."]
    assert state.end is None


def test_an_entry_of_an_unknown_type_is_skipped() -> None:
    state = state_of()
    state.receive({"type": "of a later version"})
    assert state.end is None


@pytest.mark.parametrize(
    "entry", [{}, {"type": "sync_point"}, {"type": "sync_point", "index": "x"}, {"type": "end", "verdict": 3}]
)
def test_a_malformed_entry_is_refused(entry: dict[str, Any]) -> None:
    """A malformed entry raises, and has no effect."""
    state = state_of()
    with pytest.raises((KeyError, TypeError, ValueError)):
        state.receive(entry)
    assert (state.end, state.notices) == (None, [])


def test_the_next_check_is_zero_once_others_are_ahead() -> None:
    """Once another rank has passed this rank's next sync point, every batch is looked at."""
    state = state_of()
    start, closing = SyncPoint("train_start", EPOCH), SyncPoint("train_end", EPOCH, at=4, rank=1)
    state.reach(start, opens=SpanCounters(EPOCH))
    state.receive(sync_entry(0, start))
    assert state.next_check_at == NEVER
    state.receive(sync_entry(1, closing))
    assert state.next_check_at == 0


def test_a_tick_alone_sets_the_next_check_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no tick alone once another rank is ahead, and `next_check_at` stays at every batch then."""
    monkeypatch.setattr(constants, "TICK_BATCHES", 8)
    state, span = state_of(), SpanCounters(EPOCH, started=3)
    start = SyncPoint("train_start", EPOCH)
    state.reach(start, opens=span)
    state.receive(sync_entry(0, start))
    state.set_next_check(span, watched=True)
    assert (state.only_ticks(span), state.next_check_at) == (False, 8)
    span.started = 8
    assert (state.only_ticks(span), state.next_check_at) == (True, 16)
    span.started = 16
    state.receive(sync_entry(1, SyncPoint("train_end", EPOCH, at=20, rank=1)))
    assert (state.only_ticks(span), state.next_check_at) == (False, 0)


def test_a_fit_that_another_rank_has_ended_is_finished() -> None:
    state = state_of()
    state.receive(sync_entry(9, SyncPoint("fit_end", "the fit")))
    assert state.finished


def test_a_goodbye_of_rank_0_finishes_the_fit() -> None:
    """A goodbye of rank 0, which may host the store, finishes the fit on this rank; another rank's does not."""
    state = state_of()
    state.receive({"type": "goodbye", "rank": 1})
    assert not state.finished
    state.receive({"type": "goodbye", "rank": 0})
    assert state.finished


@pytest.mark.parametrize(
    ("policy", "sent"),
    [("raise", ["end"]), ("warn", ["notice"]), ("allow", list[str]())],
    ids=["raise", "warn", "allow"],
)
def test_uneven_eval_decides_on_an_uneven_evaluation(
    policy: Literal["raise", "warn", "allow"], sent: list[str]
) -> None:
    """An uneven evaluation ends the fit, is a notice or is nothing, by the setting `uneven_eval`."""
    state = state_of(uneven_eval=policy)
    evaluation = SpanCounters("validation", evaluation=True)
    state.reach(SyncPoint("eval_start", "validation"), opens=evaluation)
    evaluation.started = 4
    closing = SyncPoint("eval_end", "validation", at=3, reason="exhausted", rank=1)
    state.receive(sync_entry(1, closing))
    state.look()
    state.reach(SyncPoint("eval_end", "validation", at=4, reason="exhausted"))
    assert [entry["type"] for entry in written(state)] == sent


def test_between_spans_the_row_is_of_the_closed_span() -> None:
    """The row of a rank between spans is that of the span that it has closed last."""
    state = state_of()
    assert state.own_row()["state"] == "between spans"
    state.reach(SyncPoint("train_start", EPOCH), opens=(span := SpanCounters(EPOCH)))
    span.started = 4
    assert (state.own_row()["batches"], state.own_row()["state"]) == (4, "in batch 4")
    state.reach(SyncPoint("train_end", EPOCH, at=4, reason="exhausted"))
    assert (state.own_row()["batches"], state.own_row()["state"]) == (4, "ran out")


def test_the_row_counts_the_batches_in_the_look_ahead() -> None:
    """A rank that fetches ahead has fetched those batches too, also in a resumed pass and once it has left its loop."""
    state, span = state_of(uneven_train="stop"), SpanCounters(EPOCH, started=3, prefetched=3)
    state.reach(SyncPoint("train_start", EPOCH, at=3), opens=span)
    credits = Credits(span.opened, 4)
    state.begin_credits(span, credits)
    for _ in range(4):
        state.fetched(credits)
    span.started += 2
    assert (state.own_row()["batches"], state.own_row()["fetched"]) == (5, 7)
    state.close_span("stopped")
    assert (state.own_row()["batches"], state.own_row()["fetched"]) == (5, 7)


def test_progress_changes_with_every_batch_step_and_sync_point() -> None:
    state = state_of()
    seen = [state.progress()]
    state.reach(SyncPoint("train_start", EPOCH), opens=(span := SpanCounters(EPOCH)))
    seen.append(state.progress())
    span.started += 1
    seen.append(state.progress())
    state.steps += 1
    seen.append(state.progress())
    state.reach(SyncPoint("train_end", EPOCH, at=1))
    assert len({*seen, state.progress()}) == 5


WARNING = Verdict("WrongLength", "it is too long.", subject="train")


def test_propose_puts_one_entry_into_the_outbox() -> None:
    """A proposed verdict is one entry for the log, and nothing else; a second verdict is none."""
    state = state_of()
    verdict = Verdict("LostRank", "rank 1 is gone.", (1,))
    state.propose(verdict)
    state.propose(Verdict("LostRank", "rank 1 is gone again.", (1,)))
    assert drain(state) == [WriteEntry(verdict_entry("end", verdict))]
    assert (state.proposed, state.next_check_at) == (Verdict("LostRank", "rank 1 is gone.", (1,), remedy="Mend it."), 0)


def test_a_verdict_in_the_log_leaves_nothing_to_propose() -> None:
    """After a verdict in the log, a proposal puts nothing into the outbox."""
    state = state_of()
    state.receive(end_entry("first."))
    state.propose(Verdict("LostRank", "second."))
    assert (drain(state), state.proposed) == ([], None)


def test_a_warning_of_one_process_is_to_be_printed() -> None:
    """A process without other ranks prints its warning itself, with its remedy, once for each kind and subject."""
    state = state_of(world_size=1)
    state.note(WARNING)
    state.note(WARNING)
    printed = Verdict("WrongLength", "it is too long.", remedy="Set the length.", subject="train")
    assert drain(state) == [PrintWarning(printed)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_warning_of_one_of_many_ranks_goes_into_the_log(rank: int) -> None:
    """A warning of one of many ranks is one entry for the log, for each kind and subject; it is not printed yet."""
    state = state_of(rank)
    state.note(WARNING)
    state.note(WARNING)
    assert drain(state) == [WriteEntry(verdict_entry("notice", WARNING))]
    state.note(Verdict("WrongLength", "it is too long.", subject="evaluation"))
    assert [entry["verdict"]["subject"] for entry in written(state)] == ["evaluation"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_notice_from_the_log_is_printed_on_rank_0_only(rank: int) -> None:
    """All ranks know a notice from the log, with their own remedy; rank 0 alone prints it, and once."""
    state = state_of(rank)
    entry = verdict_entry("notice", WARNING)
    assert not state.is_written(entry)
    state.receive(entry)
    state.receive(entry)
    state.note(WARNING)
    notice = Verdict("WrongLength", "it is too long.", remedy="Set the length.", subject="train")
    assert state.notices == [notice]
    assert state.is_written(entry)
    assert drain(state) == ([PrintWarning(notice)] if rank == 0 else [])


@pytest.mark.parametrize(("subject", "found"), [("", []), ("evaluation", ["end"])])
def test_what_follows_from_a_difference_that_another_rank_has_accepted_is_not_found(
    subject: str, found: list[str]
) -> None:
    """Its entry comes before the later sync points of that rank. An evaluation says nothing about later sync points."""
    state = state_of()
    state.reach(SyncPoint("train_start", EPOCH), opens=(span := SpanCounters(EPOCH)))
    span.started = 4
    state.receive(verdict_entry("notice", Verdict("UnevenBatches", "rank 1 ran out.", subject=subject, sync_index=1)))
    drain(state)
    state.receive(sync_entry(1, SyncPoint("train_end", EPOCH, at=3, reason="exhausted", rank=1)))
    state.look()
    assert [entry["type"] for entry in written(state)] == found


def test_a_rank_that_has_left_a_loop_by_sys_exit_is_lost() -> None:
    """Where the others go on without it, the job ends."""
    state = state_of()
    state.reach(SyncPoint("train_start", EPOCH), opens=(span := SpanCounters(EPOCH)))
    span.started = 5
    drain(state)
    state.receive(sync_entry(1, SyncPoint("fit_end", "the fit", at=4, reason="exited", rank=1)))
    state.look()
    assert [(each["type"], each["verdict"]["kind"]) for each in written(state)] == [("end", "LostRank")]
    assert list(state.absences) == [1]  # so it is lost as soon as this rank waits for it


@pytest.mark.parametrize(
    ("begun", "coming", "started", "goes_on"),
    [(4, 0, 4, True), (4, 1, 3, True), (4, 1, 4, False), (4, 0, 5, False), (None, 0, 4, False)],
)
def test_a_rank_that_may_raise_the_same_goes_on(begun: int | None, coming: int, started: int, goes_on: bool) -> None:
    """It has not got beyond the batch in which another one has raised."""
    state = state_of()
    state.spans.append(SpanCounters("train epoch 0", started=started))
    state.adopt(Verdict("LostRank", "rank 1 raised ValueError.", (1,), begun=begun))
    assert state.may_fail_alike(coming) is goes_on
    state.printed.set()
    assert not state.may_fail_alike(coming)


def test_a_rank_that_has_proved_something_does_not_go_on() -> None:
    state = state_of()
    assert not state.may_fail_alike()
    state.propose(Verdict("UnevenBatches", "they differ."))
    state.adopt(Verdict("LostRank", "rank 1 raised ValueError.", (1,), begun=4))
    assert not state.may_fail_alike()


def test_a_rank_goes_on_only_for_a_moment() -> None:
    state = state_of()
    state.adopt(Verdict("LostRank", "rank 1 raised ValueError.", (1,), begun=4))
    state.known_since -= FAIL_SECONDS
    assert not state.may_fail_alike()

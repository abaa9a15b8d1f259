"""The guard of a single process, which starts nothing, and the pure judgements behind the guard of many."""

import importlib
import json
import subprocess
import sys
import threading
from typing import Any, Literal, cast

import numpy
import pytest

import countoff.core
from countoff.core import FitPlan, Guard, Settings, Verdict
from countoff.core.protocol.counters import SpanCounters, hash_step
from countoff.core.protocol.judgement import row
from countoff.core.protocol.plan_comparison import first_difference, group_ranks_by_value, judge_plans
from countoff.core.protocol.records import Mark, mark_entry, verdict_entry
from countoff.core.protocol.state import NEVER, State
from countoff.core.protocol.ticks import Tick
from countoff.core.runtime.gathering import Awaiting, Gathering
from countoff.core.runtime.stall import Stall, judge_stall
from tests.outbox import printed, written

EPOCH = "train epoch 0"


@pytest.fixture
def guard() -> Guard:
    guard = Guard(Settings(tick_batches=2), rank=0, world_size=1)
    guard.fit_start(FitPlan(batches_per_epoch=4))
    return guard


def train(guard: Guard, batches: int, *, epoch: int = 0, step_every: int = 1) -> None:
    guard.train_start(epoch)
    for batch in range(1, batches + 1):
        guard.batch(batch + 1, last=batch == batches)
        if batch % step_every == 0:
            guard.step()
    guard.train_end("exhausted")


def chained(*batches: int) -> int:
    value = 0
    for batch in batches:
        value = hash_step(value, batch)
    return value


# One process --------------------------------------------------------------------------------------------------------


def test_a_single_process_starts_no_thread_and_imports_no_torch() -> None:
    script = """
import sys, threading
from countoff.core import FitPlan, Guard, Settings
guard = Guard(Settings(), rank=0, world_size=1)
guard.fit_start(FitPlan())
guard.train_start(0)
guard.batch(last=True)
guard.step()
guard.train_end("exhausted")
guard.fit_end()
guard.close()
print(threading.active_count(), "torch" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert (run.stdout.split(), run.stderr) == (["1", "False"], "")


def test_importing_the_watch_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(countoff, "core", countoff.core)  # put back, as are the modules, after a second import
    for name in [name for name in sys.modules if name.startswith("countoff.core")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail(f"{thread.name} was started"))
    assert importlib.import_module("countoff.core.runtime.monitor") is not countoff.core


def test_making_a_guard_for_many_ranks_starts_no_thread() -> None:
    before = threading.active_count()
    Guard(Settings(), rank=0, world_size=8).close()
    assert threading.active_count() == before


def test_a_single_process_never_gets_a_verdict_whatever_it_does(guard: Guard) -> None:
    train(guard, 5)
    guard.eval_start("validation")
    guard.batch(3, last=True)
    guard.batch(2)
    guard.eval_end("stopped")
    train(guard, 4, epoch=1)
    guard.failed(ValueError("torn shard"))
    guard.fit_end()
    assert guard.verdict is None
    assert (guard.notices, guard.metrics) == ((), {})


def test_closing_twice_is_fine(guard: Guard) -> None:
    guard.close()
    guard.close()
    train(guard, 2)


def test_a_warning_of_a_single_process_is_printed(guard: Guard, capsys: pytest.CaptureFixture[str]) -> None:
    guard.warn(Verdict("WrongLength", "there are 4 batches."))
    assert capsys.readouterr().err == "\n[rank 0] countoff: WrongLength: there are 4 batches.\n"


# Counting -----------------------------------------------------------------------------------------------------------


def test_batches_and_steps_are_counted(guard: Guard) -> None:
    train(guard, 5, step_every=2)
    assert (guard.batches, guard.steps) == (5, 2)
    train(guard, 3, epoch=1, step_every=3)
    assert (guard.batches, guard.steps) == (3, 3)


def test_a_moment_is_one_step_however_many_optimizers_take_part(guard: Guard) -> None:
    guard.train_start(0)
    for _ in range(2):
        guard.batch()
        guard.step()
        guard.step()
    assert (guard.steps, guard._state.step_hash) == (2, chained(1, 2))


def test_the_same_batch_of_the_next_epoch_is_another_moment(guard: Guard) -> None:
    for epoch in range(2):
        train(guard, 1, epoch=epoch)
    assert guard.steps == 2


def test_a_step_within_an_evaluation_belongs_to_the_train_batch_before_it(guard: Guard) -> None:
    guard.train_start(0)
    guard.batch()
    guard.eval_start("validation")
    guard.batch()
    guard.batch()
    guard.step()
    assert guard._state.step_hash == chained(1)


def test_a_step_outside_any_train_span_is_none(guard: Guard) -> None:
    guard.step()
    guard.eval_start("validation")
    guard.batch()
    guard.step()
    assert guard.steps == 0


def test_the_chain_tells_equal_numbers_of_steps_at_other_batches_apart() -> None:
    assert chained(2, 4) != chained(1, 4)
    assert chained(2, 4) != chained(4, 2)
    assert 0 <= chained(*range(10_000)) < 2**48


def test_a_resumed_epoch_goes_on_at_its_position(guard: Guard) -> None:
    guard.train_start(3, position=7)
    assert guard.batches == 7
    guard.batch()
    assert (guard.open_span, guard.batches) == ("train epoch 3", 8)


def test_what_is_fetched_ahead_is_in_hand_and_not_started(guard: Guard) -> None:
    guard.train_start(0)
    guard.batch(2)
    assert (guard.batches, guard._span.fetched) == (1, 2)
    guard.batch()
    guard.batch()
    assert (guard.batches, guard._span.fetched) == (3, 3)


def test_batches_count_in_the_innermost_span_and_go_on_in_the_outer_one(guard: Guard) -> None:
    guard.train_start(0)
    guard.batch()
    guard.eval_start("validation")
    assert (guard.open_span, guard.batches) == ("validation", 0)
    guard.batch()
    guard.eval_end("exhausted")
    guard.batch()
    assert (guard.open_span, guard.batches) == (EPOCH, 2)
    guard.train_end("exhausted")
    assert guard.open_span is None


def test_asking_counts_in_a_train_epoch_and_not_in_an_evaluation(guard: Guard) -> None:
    guard.train_start(0)
    guard.batch()
    guard.batch_requested()
    guard.eval_start("validation")
    guard.batch_requested()
    assert [tally.requested for tally in guard._state.spans] == [2, 0]


def test_several_loaders_of_one_evaluation_are_counted_apart(guard: Guard) -> None:
    guard.eval_start("validation")
    tally = guard._span
    for loader, batches in enumerate((2, 0, 3)):
        guard.eval_loader(loader)
        for _ in range(batches):
            guard.batch()
            guard.eval_loader(loader)
    guard.eval_end("exhausted")
    assert (tally.started, tally.counts) == (5, [2, 0, 3])
    assert marks_of(guard)[-1].counts == (2, 0, 3)


def test_a_skipped_loader_is_an_empty_one(guard: Guard) -> None:
    guard.eval_start("validation")
    tally = guard._span
    guard.batch()
    guard.eval_loader(2)
    guard.batch()
    guard.eval_end("exhausted")
    assert tally.counts == [1, 0, 1]


def test_time_spent_waiting_adds_up_in_the_span(guard: Guard) -> None:
    guard.train_start(0)
    guard.waited(0.25)
    guard.waited(0.5)
    assert guard._span.loader_seconds == 0.75


def test_a_single_process_never_takes_the_slow_path(guard: Guard) -> None:
    train(guard, 9)
    assert guard._state.alarm == NEVER


def marks_of(guard: Guard) -> list[Mark]:
    return list(guard._state.log._pending.values())  # of a single process, nobody's mark is ever settled


def test_every_mark_carries_the_counts_of_the_span_in_which_it_stands(guard: Guard) -> None:
    guard.train_start(0)
    guard.batch()
    guard.step()
    guard.eval_start("validation", train_exhausted=True)
    guard.batch()
    guard.eval_end("stopped")
    guard.train_end("exhausted")
    said = [(mark.kind, mark.at, mark.reason, mark.steps) for mark in marks_of(guard)[2:]]
    assert said == [("eval_start", 1, "exhausted", 1), ("eval_end", 1, "stopped", 1), ("train_end", 1, "exhausted", 1)]


def test_spans_that_are_not_compared_leave_no_counts_and_no_steps(guard: Guard) -> None:
    guard.compare_spans(False)
    train(guard, 4)
    guard.eval_start("validation")
    guard.batch()
    guard.eval_end("exhausted")
    guard.compare_spans(True)
    train(guard, 2, epoch=1)
    said = [(mark.kind, mark.at, mark.steps) for mark in marks_of(guard)[1:]]
    assert said == [("train_start", 0, 0), ("train_end", 0, 0), ("train_start", 0, 0), ("train_end", 2, 2)]


def test_where_not_every_rank_evaluates_evaluations_leave_no_marks() -> None:
    guard = Guard(Settings(eval_ranks=(0,)), rank=0, world_size=1)
    guard.train_start(0)
    guard.eval_start("validation")
    guard.batch()
    guard.eval_end("exhausted")
    guard.train_end("exhausted")
    assert [mark.kind for mark in marks_of(guard)] == ["train_start", "train_end"]


# State: what any interleaving of its threads leaves ----------------------------------------------------------------


def state_of(**chosen: Any) -> State:
    return State(0, 2, Settings(**chosen), {"LostRank": "Mend it."})


def end_entry(sentence: str) -> dict[str, Any]:
    return verdict_entry("end", Verdict("LostRank", sentence))


def test_only_the_first_end_in_the_log_counts() -> None:
    state = state_of()
    state.receive(0, end_entry("first."))
    state.receive(1, end_entry("second."))
    assert state.end == Verdict("LostRank", "first.", remedy="Mend it.")
    assert state.ended.is_set()


def test_an_end_is_proposed_once() -> None:
    state = state_of()
    state.propose(Verdict("LostRank", "first."))
    state.propose(Verdict("LostRank", "second."))
    assert [entry["verdict"]["sentence"] for entry in written(state)] == ["first."]
    assert state.end is None


def test_an_entry_that_both_threads_meet_counts_once() -> None:
    state = state_of()
    state.receive(0, {"type": "goodbye", "rank": 1})
    state.receive(0, end_entry("too late."))
    assert (state.log.read, state.end) == (1, None)


def test_an_entry_of_an_unknown_type_is_passed_over() -> None:
    state = state_of()
    state.receive(0, {"type": "of a later version"})
    assert (state.log.read, state.end) == (1, None)


@pytest.mark.parametrize(
    "entry", [{}, {"type": "mark"}, {"type": "mark", "number": "x"}, {"type": "end", "verdict": 3}]
)
def test_an_entry_that_is_not_ours_is_refused_and_not_met_again(entry: dict[str, Any]) -> None:
    state = state_of()
    with pytest.raises((KeyError, TypeError, ValueError)):
        state.receive(0, entry)
    assert state.log.read == 1


def test_once_others_are_ahead_every_batch_is_looked_at() -> None:
    state = state_of()
    start, closing = Mark("train_start", EPOCH), Mark("train_end", EPOCH, at=4, rank=1)
    state.reach(start, opens=SpanCounters(EPOCH))
    state.receive(0, mark_entry(0, start))
    assert state.alarm == NEVER
    state.receive(1, mark_entry(1, closing))
    assert state.alarm == 0


def test_a_fit_that_another_rank_has_ended_is_finished() -> None:
    state = state_of()
    state.receive(0, mark_entry(9, Mark("fit_end", "the fit")))
    assert state.finished


@pytest.mark.parametrize(
    ("policy", "sent"),
    [("raise", ["end"]), ("warn", ["notice"]), ("allow", list[str]())],
    ids=["raise", "warn", "allow"],
)
def test_an_uneven_evaluation_is_what_the_user_says_it_is(
    policy: Literal["raise", "warn", "allow"], sent: list[str]
) -> None:
    state = state_of(uneven_eval=policy)
    evaluation = SpanCounters("validation", evaluation=True)
    state.reach(Mark("eval_start", "validation"), opens=evaluation)
    evaluation.started = 4
    closing = Mark("eval_end", "validation", at=3, reason="exhausted", rank=1)
    state.receive(0, mark_entry(1, closing))
    state.look()
    state.reach(Mark("eval_end", "validation", at=4, reason="exhausted"))
    assert [entry["type"] for entry in written(state)] == sent


def test_the_row_of_a_rank_between_spans_is_that_of_the_span_it_has_closed() -> None:
    state = state_of()
    assert state.own_row()["state"] == "between spans"
    state.reach(Mark("train_start", EPOCH), opens=(span := SpanCounters(EPOCH)))
    span.started = 4
    assert (state.own_row()["batches"], state.own_row()["state"]) == (4, "in batch 4")
    state.reach(Mark("train_end", EPOCH, at=4, reason="exhausted"))
    assert (state.own_row()["batches"], state.own_row()["state"]) == (4, "ran out")


def test_progress_changes_with_every_batch_step_and_mark() -> None:
    state = state_of()
    seen = [state.progress()]
    state.reach(Mark("train_start", EPOCH), opens=(span := SpanCounters(EPOCH)))
    seen.append(state.progress())
    span.started += 1
    seen.append(state.progress())
    state.steps += 1
    seen.append(state.progress())
    state.reach(Mark("train_end", EPOCH, at=1))
    assert len({*seen, state.progress()}) == 5


# The judgements of the roll call, the ticks and the stall ------------------------------------------------------------


def test_the_smallest_party_comes_first() -> None:
    records = {0: {"lr": 1}, 1: {"lr": 2}, 2: {"lr": 1}, 3: {}}
    assert group_ranks_by_value(records, "lr") == [(2, [1]), (None, [3]), (1, [0, 2])]


def test_plans_that_agree_or_say_nothing_are_no_mismatch() -> None:
    records = {0: {"batch_size": 8, "note": "a"}, 1: {"batch_size": 8, "note": "b"}}
    assert judge_plans(records) is None


def test_the_first_field_in_which_plans_differ_is_named() -> None:
    records = {0: {"batch_size": 8, "max_steps": 5}, 1: {"batch_size": 8, "max_steps": 6}, 2: {"batch_size": 8}}
    sentence, ranks = first_difference(records, ["batch_size", "max_steps"]) or ("", ())
    assert sentence == "max_steps is 5 on rank 0, 6 on rank 1, unknown on rank 2"
    assert ranks == (0, 1, 2)


def test_with_two_parties_of_one_size_no_rank_is_the_odd_one() -> None:
    found = judge_plans({rank: {"batch_size": 8 + rank % 2} for rank in range(4)})
    assert found is not None
    assert found.ranks == (0, 1, 2, 3)


TICK = {"rank": 0, "steps": 8, "step_hash": 5, "rates": [0.1, 0.2]}


@pytest.mark.parametrize(
    ("difference", "kind"),
    [
        ({}, None),
        ({"steps": 7}, "StepMismatch"),
        ({"step_hash": 6}, "StepMismatch"),
        ({"rates": [0.1]}, "LearningRateMismatch"),
        ({"rates": [0.1, 0.3], "steps": 7}, "StepMismatch"),
    ],
)
def test_ticks_are_compared_steps_first(difference: dict[str, Any], kind: str | None) -> None:
    found = Tick("tick/1/64", "batch 64 of train epoch 0", {**TICK, "rank": 1, **difference}).compare(TICK)
    assert (found and found.kind) == kind
    assert found is None or found.ranks == (0, 1)


def test_a_tick_says_where_and_what_both_ranks_had() -> None:
    found = Tick("tick/1/64", "batch 64 of train epoch 0", {**TICK, "rank": 1, "step_hash": 6}).compare(TICK)
    said = "at batch 64 of train epoch 0, rank 0 had applied 8 optimizer steps and rank 1 8, but after other batches."
    assert found is not None
    assert found.sentence == said


@pytest.mark.parametrize(
    ("states", "culprits"),
    [
        (["collective", "loader", "code"], (1,)),
        (["collective", "code", "collective"], (1,)),
        (["collective", "collective", "collective"], (0, 1, 2)),
        (["loader", "loader", "collective"], (0, 1)),
    ],
)
def test_in_a_stall_a_rank_in_its_loader_outranks_one_in_its_code_and_that_one_in_a_collective(
    states: list[str], culprits: tuple[int, ...]
) -> None:
    words = {"loader": "in its loader", "collective": "in a collective", "code": "in its code"}
    records = {
        rank: {"rank": rank, "state": words[state], "frames": [], "collectives": {}}
        for rank, state in enumerate(states)
    }
    found = judge_stall(records, 180.0)
    assert found.ranks == culprits
    assert found.why == "no rank is in a line of the user's own."


class Keys:
    """A channel that has what it is given."""

    def __init__(self, **values: dict[str, Any]) -> None:
        self.values = {key.replace("_", "/"): value for key, value in values.items()}

    def has(self, *keys: str) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> dict[str, Any]:
        return self.values[key]

    def get_many(self, keys: list[str]) -> list[dict[str, Any]]:
        return [self.values[key] for key in keys]

    def delete(self, key: str) -> None:
        del self.values[key]


@pytest.mark.parametrize("deadline", [float("inf"), 0.0])
def test_a_gathering_is_done_once_everybody_has_reported_or_at_its_deadline(deadline: float) -> None:
    channel, done = Keys(plan_0={"rank": 0}), list[Any]()
    gathering = Gathering("plan", range(2), deadline, lambda *found: done.append(found))
    assert gathering.poll(cast(Any, channel)) == (deadline == 0.0)
    assert done == ([] if deadline else [({0: {"rank": 0}}, [1])])


def test_what_has_been_gathered_is_deleted() -> None:
    channel, done = Keys(plan_0={"rank": 0}, plan_1={"rank": 1}), list[Any]()
    assert Gathering("plan", range(2), float("inf"), lambda *found: done.append(found)).poll(cast(Any, channel))
    assert done == [({0: {"rank": 0}, 1: {"rank": 1}}, [])]
    assert channel.values == {}


def test_awaiting_ends_with_the_record() -> None:
    done = list[Any]()
    assert Awaiting("plan", done.append).poll(cast(Any, Keys(plan={"x": 1})))
    assert done == [{"x": 1}]


def test_awaiting_goes_on_without_it() -> None:
    assert not Awaiting("plan", lambda found: pytest.fail(f"done with {found}")).poll(cast(Any, Keys()))


def test_rank_0_may_take_the_store_with_it_once_it_has_said_goodbye() -> None:
    state = state_of()
    state.receive(0, {"type": "goodbye", "rank": 1})
    assert not state.finished
    state.receive(1, {"type": "goodbye", "rank": 0})
    assert state.finished


def test_numbers_of_numpy_are_the_same_learning_rate_on_every_rank() -> None:
    ticks = [
        Tick.of(rank, SpanCounters(EPOCH), steps=0, step_hash=0, rates=cast(Any, rates))
        for rank, rates in enumerate(([0.5], [numpy.float32(0.5)]))
    ]
    assert ticks[0].key == ticks[1].key
    assert ticks[1].compare(json.loads(json.dumps(ticks[0].record))) is None


class Speaker:
    def __init__(self) -> None:
        self.polled, self.written = list[Any](), dict[str, Any]()

    def hand(self, job: Any) -> None:
        job(self)

    def poll(self, pollable: Any) -> None:
        self.polled.append(pollable)

    def set(self, key: str, record: Any) -> None:
        self.written[key] = record

    def has(self, key: str) -> bool:
        return key in self.written

    def get_many(self, keys: list[str]) -> list[Any]:
        return [self.written[key] for key in keys]


@pytest.mark.parametrize(
    ("batches", "evaluates", "said"),
    [((4, 4), True, "Stalled"), ((4, 3), False, "Stalled"), ((4, 3), True, None)],
    ids=["in one place", "after the evaluation", "in the evaluation"],
)
def test_a_pause_outside_of_an_uneven_evaluation_is_not_put_down_to_it(
    batches: Any, evaluates: bool, said: str | None
) -> None:
    state = State(0, 2, Settings(stall_seconds=0.001), {}, present=[0, 1])
    state.notices.append(Verdict("UnevenBatches", "rank 1 ran out of data after 2 batches of validation."))
    stall = Stall(state, cast(Any, Speaker()))
    stall.look()
    stall.moved_at -= 1
    stall.look()
    records = {
        rank: {
            **row(rank, SpanCounters(EPOCH, started=count), 0, ""),
            "state": "in a collective",
            "frames": [],
            "collectives": {},
            "evaluates": evaluates,
        }
        for rank, count in enumerate(batches)
    }
    stall._report(records, [])
    assert [verdict.kind for verdict in printed(state)] == ([said] if said else [])
    assert (state.proposed is None) == (said is not None)


def test_a_rank_that_has_left_is_not_asked_where_it_stands() -> None:
    speaker = Speaker()
    speaker.written["bye/1"] = {"bye": True}
    state = State(0, 3, Settings(stall_seconds=0.001), {}, present=[0, 1, 2])
    stall = Stall(state, cast(Any, speaker))
    stall.look()
    stall.moved_at -= 1
    stall.look()
    assert [gathering._ranks for gathering in speaker.polled] == [[0, 2]]


def test_a_roll_call_that_takes_longer_than_a_stall_is_none() -> None:
    speaker = Speaker()
    state = State(0, 2, Settings(stall_seconds=0.001), {}, present=[])
    stall = Stall(state, cast(Any, speaker))
    stall.look()
    stall.moved_at -= 1
    stall.look()
    assert speaker.polled[0].poll(speaker)
    assert printed(state) == []
    assert state.proposed is None


def test_a_rank_that_moved_in_the_meantime_makes_it_no_stall() -> None:
    speaker = Speaker()
    state = State(0, 2, Settings(stall_seconds=0.001), {}, present=[0, 1])
    stall = Stall(state, cast(Any, speaker))
    stall.look()
    stall.moved_at -= 1
    stall.look()
    assert len(speaker.polled) == 1
    stall._report({0: dict(speaker.written["stall/0"]), 1: {"moved": True}}, [])
    assert printed(state) == []
    state.steps += 1
    stall._posted = True
    stall.look()
    assert speaker.written["stall/0"] == {"moved": True}

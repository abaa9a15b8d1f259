"""Every message, line by line, and that whatever is said fits through the store."""

import dataclasses
import json
import pickle
import textwrap
from typing import Any, Literal, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from countoff.core import verdict
from countoff.core.guard import Guard
from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.judgement import judge, lost_rank, odd_ranks, row
from countoff.core.protocol.plan_comparison import judge_plans
from countoff.core.protocol.records import Mark, mark_entry, verdict_entry, verdict_from_json, verdict_to_json
from countoff.core.protocol.rule import Divergence
from countoff.core.protocol.state import State
from countoff.core.protocol.ticks import Tick
from countoff.core.runtime import shutdown
from countoff.core.runtime.channel import RECORD_BYTES, encode
from countoff.core.runtime.stall import judge_stall
from countoff.core.runtime.verdict_table import with_table
from countoff.core.settings import Settings
from countoff.core.verdict import TABLE_ROWS, VERDICTS, DivergenceError, Kind, Verdict, error_for, table
from tests.outbox import written

EPOCH = "train epoch 0"
REMEDIES: dict[Kind, str] = {"UnevenBatches": "Give every rank the same number of batches: drop_last=True."}
LOADERS = (
    "The ranks' loaders differ in length. Every gradient from here on would average batches of different "
    "places, until a collective without a partner hangs."
)
DECISIONS = "The ranks took different decisions from the same counts (a break, a limit, or a condition of one rank)."


def closing(reason: Literal["exhausted", "stopped"], at: int = 4, **counts: Any) -> Mark:
    return Mark("train_end", EPOCH, at=at, reason=reason, rank=1, **counts)


def uneven(standing: Mark, count: int, own: Mark | None = None, *, evaluation: bool = False) -> Verdict:
    """What rank 0 says when it finds that it cannot follow rank 1's mark."""
    return judge(Divergence("UnevenBatches", standing, count, own, evaluation=evaluation), 0)


def received(verdict: Verdict) -> Verdict:
    """What another rank makes of a verdict that it reads from the log."""
    state = State(0, 100_000, Settings(), REMEDIES)
    state.receive(0, json.loads(json.dumps(verdict_entry("end", verdict))))
    assert state.end is not None
    return state.end


def message(text: str) -> str:
    return textwrap.dedent(text).strip("\n")


def ranks_with(fetched: list[int], state: str = "in batch 5") -> list[dict[str, Any]]:
    return [row(rank, SpanCounters(EPOCH, started=held), 2, state) for rank, held in enumerate(fetched)]


# The texts --------------------------------------------------------------------------------------------------------


def test_a_loader_that_ran_out_against_a_batch_in_hand() -> None:
    found = uneven(closing("exhausted"), 5)
    assert found.sentence == "rank 1 ran out of data after 4 batches of train epoch 0; rank 0 has batch 5."
    assert (found.ranks, found.why) == ((1, 0), LOADERS)


def test_a_pass_that_stopped_against_a_batch_begun() -> None:
    found = uneven(closing("stopped"), 5)
    assert found.sentence == "rank 1 stopped after 4 batches of train epoch 0; rank 0 has begun batch 5."
    assert found.why == DECISIONS


def test_an_evaluation_begun_early_against_a_batch_begun() -> None:
    found = uneven(Mark("eval_start", "validation", at=1, rank=1), 2)
    assert found.sentence == "rank 1 began validation after 1 train batch; rank 0 has begun batch 2."
    assert found.why == DECISIONS


def test_two_marks_in_one_place_say_what_each_rank_did() -> None:
    found = uneven(closing("exhausted", at=1), 2, Mark("eval_start", "validation", at=2))
    did = "rank 1 ran out of data after 1 batch of train epoch 0; rank 0 began validation after 2 train batches."
    assert found.sentence == did


def test_evaluations_of_several_loaders_say_how_many_batches_each_had() -> None:
    theirs = Mark("eval_end", "validation", at=5, reason="exhausted", counts=(3, 2), rank=1)
    mine = Mark("eval_end", "validation", at=5, reason="exhausted", counts=(2, 3))
    found = uneven(theirs, 5, mine, evaluation=True)
    sides = ("rank 1 ran out of data after 5 batches (3 + 2)", "rank 0 ran out of data after 5 batches (2 + 3)")
    assert found.sentence == f"{sides[0]} of validation; {sides[1]} of validation."
    why = "The ranks' evaluation loaders differ in length; a metric that synchronises per batch hangs there."
    assert found.why == why


@pytest.mark.parametrize(
    ("kind", "did"),
    [("fit_start", "began the fit"), ("fit_end", "ended the fit"), ("train_start", "began train epoch 0")],
)
def test_a_mark_without_counts_says_what_the_rank_did(kind: Any, did: str) -> None:
    found = uneven(Mark(kind, EPOCH, rank=1), 4, closing("exhausted"))
    assert found.sentence == f"rank 1 {did}; rank 0 ran out of data after 4 batches of train epoch 0."


def test_other_numbers_of_steps() -> None:
    found = judge(Divergence("StepMismatch", closing("exhausted", steps=1), 2), 0)
    counts = "rank 1 had applied 1 optimizer step and rank 0 2 optimizer steps"
    assert found.headline == f"StepMismatch: after 4 batches of train epoch 0, {counts}."


def test_as_many_steps_after_other_batches() -> None:
    found = judge(Divergence("StepMismatch", closing("exhausted", steps=2), 2), 0)
    counts = "rank 1 had applied 2 optimizer steps and rank 0 2 optimizer steps, but after other batches"
    assert found.headline == f"StepMismatch: after 4 batches of train epoch 0, {counts}."


def test_a_plan_of_one_rank_alone() -> None:
    found = judge_plans({0: {"batch_size": 8}, 1: {"batch_size": 4}, 2: {"batch_size": 8}})
    assert found is not None
    assert found.render() == message("""
        countoff: PlanMismatch: before the first batch, batch_size is 4 on rank 1, 8 on ranks 0, 2.
          why: Ranks that count to different numbers take different decisions at every limit, schedule and epoch's end.
    """)
    assert found.ranks == (1,)


def test_a_lost_rank() -> None:
    assert lost_rank(3, "died without a word (pid 7)", "It was killed, or it crashed.").render() == message("""
        countoff: LostRank: rank 3 died without a word (pid 7).
          why: It was killed, or it crashed.
    """)


def test_the_whole_message_of_two_ranks() -> None:
    found = received(uneven(closing("exhausted"), 5))
    last = {**row(1, SpanCounters(EPOCH, started=4), 2, "ran out")}
    rows = (last, row(0, SpanCounters(EPOCH, started=4, prefetched=5), 2, "in batch 4"))
    said = Verdict(found.kind, found.sentence, (1, 0), found.why, found.remedy, rows, spread_seconds=0.00123)
    assert said.render() == message("""
        countoff: UnevenBatches: rank 1 ran out of data after 4 batches of train epoch 0; rank 0 has batch 5.
          out of step: ranks 1, 0 of 2 ranks
          rank  where          batches  fetched  steps  state
          1     train epoch 0  4        4        2      ran out
          0     train epoch 0  4        5        2      in batch 4
          known on every rank 1.2 ms after it could be proved
          why: The ranks' loaders differ in length. Every gradient from here on would average batches of different places, until a collective without a partner hangs.
          do:  Give every rank the same number of batches: drop_last=True.
    """)  # noqa: E501  # each part of a message is one line, however long


def test_no_table_is_shown_before_anybody_has_a_batch() -> None:
    said = Verdict("PlanMismatch", "they differ.", (0,), rows=(row(0, None, 0, "between spans"),)).render()
    assert said.splitlines() == ["countoff: PlanMismatch: they differ.", "  out of step: rank 0 of 1 rank"]


def test_a_stall_names_the_ranks_in_their_loaders_before_those_that_wait_for_them() -> None:
    record = {"frames": ["train.py:9 in main"], "collectives": {"0": 5}}
    records = {rank: {**row(rank, None, 0, "in a collective"), **record} for rank in range(3)}
    records[2] |= {"state": "in its loader", "frames": ["data.py:7 in read"], "collectives": {"0": 4}}
    found = judge_stall(records, 180.0)
    assert found.sentence == "no rank has got on for 180 s; rank 2 is in its loader."
    counts = "Collectives issued in process group 0: 4 by rank 2, 5 by ranks 0, 1."
    assert found.why == f"rank 2 is at data.py:7 in read; ranks 0, 1 are at train.py:9 in main. {counts}"
    assert (found.ranks, [line["rank"] for line in found.rows]) == ((2,), [2, 0, 1])


# The table and the odd ones -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "rest"), [(16, []), (17, ["  … and 1 rank more"]), (40, ["  … and 24 ranks more"])])
def test_a_table_is_folded_past_sixteen_rows(ranks: int, rest: list[str]) -> None:
    assert table(ranks_with([5] * ranks))[17:] == rest


def test_no_rows_make_no_table() -> None:
    assert table(()) == []


@pytest.mark.parametrize(
    ("sides", "proven", "odd"),
    [
        ([False, True, False], (1, 0), (1,)),
        ([False, True, False], (0, 1), (1,)),
        ([True, False, True, True, False, True, None], (0, 1), (1, 4)),
        ([True, False, True, True, False, None], (0, 1), (0, 1)),
        ([True, False], (1, 0), (1, 0)),
        ([True, True, False, False], (2, 0), (2, 0)),
        ([True, False, False, None, None, None], (0, 1), (0, 1)),
        ([False, False, False], (0, 1), (0, 1)),
        ([None, None], (), ()),
    ],
)
def test_the_odd_ranks_are_the_side_that_stays_the_smaller_and_else_those_of_the_proof(
    sides: list[bool | None], proven: tuple[int, ...], odd: tuple[int, ...]
) -> None:
    assert odd_ranks([{"rank": rank, "side": side} for rank, side in enumerate(sides)], proven) == odd


def test_a_rank_that_left_is_named_and_not_those_that_go_on() -> None:
    left, ended = Mark("train_end", EPOCH, at=3, reason="exited", rank=1), closing("exhausted")
    other = dataclasses.replace(ended, rank=2)
    for divergence, rank in (
        (Divergence("UnevenBatches", left, 4), 2),
        (Divergence("UnevenBatches", other, 3, left), 1),
    ):
        verdict = judge(divergence, rank)
        assert (verdict.kind, verdict.ranks) == ("LostRank", (1,))
        assert verdict.sentence == "rank 1 left the job (sys.exit) in batch 3 of train epoch 0, where rank 2 goes on."


def test_after_a_break_of_one_rank_the_remedy_speaks_of_that_first() -> None:
    stopped = uneven(closing("stopped"), 5)
    remedy = received(stopped).remedy
    assert remedy.startswith("look for a break")
    assert remedy.endswith(REMEDIES["UnevenBatches"])


@pytest.mark.parametrize("hostile", ["\x1b[2J\x1b]0;title\x07", "a\nb", "\u202etxt", "\ud800", "\x9b31m", "\r"])
def test_what_a_stranger_wrote_is_printed_harmlessly(hostile: str) -> None:
    verdict = Verdict("LostRank", f"rank 1 {hostile}", (1,), why=hostile, rows=({"where": hostile, "batches": 3},))
    for text in (verdict.headline, str(error_for(verdict)), *verdict.render().splitlines()):
        assert text.isprintable()


class Published:
    """A channel on which rank 0 has published the table of so many ranks."""

    def __init__(self, ranks: int, odd: list[int], failed: Any = None) -> None:
        rows = ranks_with([5] * min(ranks, TABLE_ROWS))
        self.values: dict[str, Any] = {f"table/{mark_index}": line for mark_index, line in enumerate(rows)}
        self.values["table"] = {"rows": ranks, "odd": odd, "spread": 0.002, "failed": failed}

    def has(self, *keys: str) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> Any:
        return self.values[key]

    def get_many(self, keys: list[str]) -> list[Any]:
        return [self.values[key] for key in keys]


def test_the_published_table_goes_into_the_verdict() -> None:
    said = with_table(cast(Any, Published(3, [2])), Verdict("UnevenBatches", "they differ.", (1, 0)), {})
    assert (said.ranks, len(said.rows), said.spread_seconds) == ((2,), 3, 0.002)


def test_a_rank_that_failed_by_itself_is_the_better_cause() -> None:
    channel = Published(3, [2], failed=[1, "raised ValueError: torn shard"])
    said = with_table(cast(Any, channel), Verdict("UnevenBatches", "they differ.", (2, 0)), {"LostRank": "Mend it."})
    assert (said.headline, said.remedy) == ("LostRank: rank 1 raised ValueError: torn shard.", "Mend it.")
    assert len(said.rows) == 3


def test_a_message_about_many_ranks_says_how_many_they_are() -> None:
    said = with_table(cast(Any, Published(40, [2])), Verdict("UnevenBatches", "they differ.", (2, 0)), {})
    lines = said.render().splitlines()
    assert lines[1] == "  out of step: rank 2 of 40 ranks"
    assert lines[-2] == "  … and 24 ranks more"


# On its way -------------------------------------------------------------------------------------------------------


def test_a_verdict_survives_the_wire_and_takes_the_reader_s_remedy() -> None:
    found = Verdict("UnevenBatches", "they differ.", (1, 0), why="They do.", gone=True, time=1700000000.25)
    assert received(found) == Verdict(
        found.kind, found.sentence, (1, 0), found.why, REMEDIES[found.kind], (), True, found.time
    )


@pytest.mark.parametrize(
    "record", [{}, {"kind": "LostRank"}, {**verdict_to_json(Verdict("LostRank", "it is.")), "ranks": 3}]
)
def test_what_is_no_verdict_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        verdict_from_json(record)


KINDS: list[Kind] = [kind for kind, info in VERDICTS.items() if info.default.startswith("raises")]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_raised_as_the_error_of_its_name(kind: Kind) -> None:
    error = error_for(Verdict(kind, "they differ."))
    assert type(error) is getattr(verdict, kind)
    assert isinstance(error, DivergenceError)
    assert str(error) == "they differ."


def test_a_kind_without_an_error_of_its_own_is_raised_as_the_base() -> None:
    assert type(error_for(Verdict("Stalled", "nobody moves."))) is DivergenceError


@pytest.mark.parametrize("kind", [*KINDS, "Stalled"])
def test_an_error_survives_pickling(kind: Kind) -> None:
    error = error_for(Verdict(kind, "they differ.", (1, 0), rows=tuple(ranks_with([4, 5]))))
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.verdict) == (type(error), str(error), error.verdict)
    assert copy.verdict.rows == error.verdict.rows


# Whatever happens, a record fits -----------------------------------------------------------------------------------


words = st.text(st.characters(exclude_categories=[]), max_size=400) | st.sampled_from(
    ["x" * 5000, "é" * 5000, "会" * 5000, "😀" * 5000, "\x1b" * 5000, '"\\' * 5000, "\ud800" * 5000, ""]
)


@settings(deadline=None)
@given(words, words)
def test_the_words_of_any_exception_fit_into_a_record(error: str, name: str) -> None:
    state = State(99_999, 100_000, Settings(), {})
    state.said.set()
    guard = Guard(Settings(), rank=0, world_size=1)
    guard.eval_start(name)  # as a user would name a validation set
    shutdown.report_failure(state, ValueError(error), f"in batch {10**9} of {guard.open_span}")
    line = row(state.rank, guard._span, 10**9, "in batch 1000000000")
    encode(written(state)[0])
    encode({**line, "known": 1700000000.123456, "failure": state.failure})
    encode({"rows": 16, "odd": [99_999] * 8, "spread": 29.123456789, "failed": [state.rank, state.failure]})


@settings(deadline=None)
@given(words)
def test_a_mark_in_a_span_of_any_name_fits_into_a_record(name: str) -> None:
    guard = Guard(Settings(), rank=0, world_size=1)
    guard.eval_start(name)
    span = guard.open_span or ""
    mark = Mark("eval_end", span, 10**9, "exhausted", 10**9, 2**48 - 1, (10**6,) * 32, 99_999, 1700000000.123456)
    encode(mark_entry(10**9, mark))
    encode(verdict_entry("end", uneven(mark, 10**9, mark, evaluation=True)))


@pytest.mark.parametrize(("value", "ranks"), [(5, 100_000), ("x" * 2000, 9), ("会" * 2000, 9), ([1] * 2000, 9)])
def test_a_plan_mismatch_of_very_many_ranks_or_very_long_values_fits_into_a_record(value: Any, ranks: int) -> None:
    plans = {rank: {"batch_size": [value, rank % 3]} for rank in range(ranks)}
    found = judge_plans(plans)
    assert found is not None
    encode(verdict_entry("end", found))


def test_a_tick_with_many_learning_rates_fits_into_a_record() -> None:
    tick = {"rank": 99_999, "steps": 10**9, "step_hash": 2**48 - 1, "rates": [-1.2345678901234567e-300] * 8}
    encode(tick)
    own = Tick("", f"batch {10**9} of train epoch 1000", {**tick, "rates": [0.1] * 8})
    found = own.compare(tick)
    assert found is not None
    assert len(encode(verdict_entry("end", found))) <= RECORD_BYTES

"""Records: they are read back as they were written, and whatever they hold, they fit into the store."""

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from countoff.core.checks import judge
from countoff.core.checks.learning_rates import rate_mismatch
from countoff.core.checks.plan import judge_plans
from countoff.core.ending import shutdown
from countoff.core.guard import Guard
from countoff.core.messages import clip
from countoff.core.protocol.failures import told_as_one
from countoff.core.protocol.records import (
    RECORD_BYTES,
    SyncPoint,
    ranks_to_json,
    sync_entry,
    verdict_entry,
    verdict_from_json,
    verdict_to_json,
)
from countoff.core.protocol.rows import row
from countoff.core.protocol.rule import Divergence
from countoff.core.session.state import State
from countoff.core.session.store.channel import encode
from countoff.core.settings import Settings
from countoff.core.verdict import Verdict
from tests.outbox import written


def test_a_sync_point_is_read_back_from_its_record() -> None:
    sync_point = SyncPoint("eval_end", "validation", 5, "stopped", 7, 2**48 - 1, (3, 2), 15, 1700000000.25)
    assert SyncPoint.from_json(json.loads(json.dumps(sync_point.to_json()))) == sync_point


def test_a_verdict_is_read_back_with_the_readers_remedy() -> None:
    """A rank that reads a verdict from the log has all of it, and the remedy in its own adapter's words."""
    found = Verdict(
        "UnevenBatches", "they differ.", (1, 0), "They do.", gone=True, time=1700000000.25, subject="a", sync_index=7
    )
    state = State(0, 100_000, Settings(), {"UnevenBatches": "Set drop_last=True."})
    state.receive(json.loads(json.dumps(verdict_entry("end", found))))
    assert state.end == dataclasses.replace(found, remedy="Set drop_last=True.")


def test_the_alternatives_of_a_remedy_are_read_back() -> None:
    found = Verdict("WrongHorizon", "it ends early.", remedy="make it for 60 steps.\nignore this.")
    read = verdict_from_json(json.loads(json.dumps(verdict_to_json(found))))
    assert read.alternatives == ["make it for 60 steps.", "ignore this."]


@pytest.mark.parametrize(
    "record", [{}, {"kind": "LostRank"}, {**verdict_to_json(Verdict("LostRank", "it is.")), "ranks": 3}]
)
def test_a_record_that_is_no_verdict_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        verdict_from_json(record)


words = st.text(st.characters(exclude_categories=[]), max_size=400) | st.sampled_from(
    ["x" * 5000, "é" * 5000, "会" * 5000, "😀" * 5000, "\x1b" * 5000, '"\\' * 5000, "\ud800" * 5000, ""]
)
FAR_APART = [rank for first in range(1000, 100_000, 3001) for rank in (first, first + 1, first + 7)]


@given(words, words)
def test_the_text_of_any_exception_fits_into_a_record(error: str, name: str) -> None:
    """The text of any exception fits into the records that carry it, in a span of any name."""
    state = State(99_999, 100_000, Settings(), {})
    state.printed.set()
    guard = Guard(Settings(), rank=0, world_size=1)
    guard.eval_start(name)  # as a user would name a validation set
    try:
        raise ValueError(error)
    except ValueError as raised:
        shutdown.report_failure(state, raised, f"in batch {10**9} of {guard.open_span}")
    line = row(state.rank, guard.span, 10**9, "in batch 1000000000")
    encode(written(state)[0])
    assert state.failure is not None
    encode({**line, "known": 1700000000.123456, "failure": state.failure.to_json(), "host": "x" * 64, "side": True})
    header = {"rows": 16, **ranks_to_json(FAR_APART), "standing": "ran out first", "behind": [99_999] * 8}
    event = told_as_one({10: state.failure, 11: dataclasses.replace(state.failure, where="before its first batch")})
    encode({**header, "spread": 29.123456789, "failed": [state.rank, clip(event, 300)], "groups": 8})
    encode({**ranks_to_json(FAR_APART), "event": clip(event, 420)})


@given(words)
def test_a_sync_point_in_a_span_of_any_name_fits_into_a_record(name: str) -> None:
    guard = Guard(Settings(), rank=0, world_size=1)
    guard.eval_start(name)
    span = guard.open_span or ""
    sync_point = SyncPoint(
        "eval_end", span, 10**9, "exhausted", 10**9, 2**48 - 1, (10**6,) * 32, 99_999, 1700000000.123456
    )
    encode(sync_entry(10**9, sync_point))
    divergence = Divergence("UnevenBatches", sync_point, 10**9, sync_point, evaluation=True)
    encode(verdict_entry("end", judge(divergence, 0)))


@pytest.mark.parametrize(("value", "ranks"), [(5, 100_000), ("x" * 2000, 9), ("会" * 2000, 9), ([1] * 2000, 9)])
def test_any_plan_mismatch_fits_into_a_record(value: Any, ranks: int) -> None:
    """A plan mismatch of very many ranks, or of very long values, fits into a record."""
    plans = {rank: {"batch_size": [value, rank % 3]} for rank in range(ranks)}
    found = judge_plans(plans)
    assert found is not None
    encode(verdict_entry("end", found))


@given(words, words, words)
def test_a_verdict_of_any_texts_fits_into_a_record(sentence: str, why: str, remedy: str) -> None:
    """Whatever it says, a verdict fits, and what is read back has the remedy as a whole or not at all."""
    ranks, time = tuple(range(99_990, 100_000)), 1700000000.123456
    found = Verdict("LearningRateMismatch", sentence, ranks, why, remedy, time=time, sync_index=10**9, subject=why)
    found = dataclasses.replace(found, standing="ran out first")
    encode(verdict_entry("notice", found))
    assert verdict_from_json(verdict_to_json(found)).remedy in ("", remedy)


def test_a_tick_with_many_learning_rates_fits_into_a_record() -> None:
    tick = {"rank": 99_999, "steps": 10**9, "step_hash": 2**48 - 1, "rates": [-1.2345678901234567e-300] * 8}
    encode(tick)
    where = f"at batch {10**9} of train epoch 1000"
    found = rate_mismatch(where, f"tick/1000/{10**9}", (99_999, 99_998), tick["rates"], [0.1] * 8)
    assert found is not None
    assert len(encode(verdict_entry("end", found))) <= RECORD_BYTES

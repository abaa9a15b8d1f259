"""The batches after which optimizer steps came, in the rows of a verdict's table."""

import json
from typing import Any

import pytest

from countoff.core import Settings
from countoff.core.ending.table import publish_table, with_table
from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.step_log import StepLog, first_apart
from countoff.core.session.state import State
from countoff.core.session.store.channel import encode
from countoff.core.verdict import Verdict, at_hosts
from tests.fake_store import FakeStore

EPOCH = "train epoch 0"


def logged(steps: list[int], *, started: int, opened: int = 0, is_open: bool = False) -> dict[str, Any]:
    """The row of a rank that has stepped after these batches."""
    span, log = SpanCounters(EPOCH, opened=opened), StepLog()
    log.begin(span)
    for batch in steps:
        span.started = batch
        log.step(span)
    span.started = started
    return json.loads(json.dumps({"stepped": log.to_json([span] if is_open else [])}))


def apart(one: dict[str, Any], other: dict[str, Any]) -> tuple[int, int] | None:
    """The batch, and the rank that has stepped after it."""
    found = first_apart({0: one, 1: other}, (0, 1))
    return found and (found.batch, found.stepped)


ALL = list(range(1, 15))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (ALL, [batch for batch in ALL if batch != 4], (4, 0)),
        ([batch for batch in ALL if batch != 4], ALL, (4, 1)),
        ([2, 4, 6], [1, 3, 5], (1, 1)),
        (ALL, [], (1, 0)),
        (ALL, ALL[:-1], (14, 0)),
        (ALL, ALL, None),
    ],
)
def test_the_first_batch_with_a_step_on_one_rank_alone(
    one: list[int], other: list[int], expected: tuple[int, int] | None
) -> None:
    assert apart(logged(one, started=14), logged(other, started=14)) == expected


def test_what_a_rank_may_still_do_is_no_difference() -> None:
    ahead, behind = logged(ALL, started=14), logged(ALL[:9], started=10, is_open=True)
    assert apart(ahead, behind) is None
    assert apart(ahead, logged(ALL[:9], started=11, is_open=True)) == (10, 0)


def test_what_is_no_longer_known_is_no_difference() -> None:
    many = list(range(1, 1000))
    assert apart(logged(many, started=999), logged(many[50:], started=999)) is None
    assert apart(logged(many, started=999), logged(many[:-3], started=999)) == (997, 0)
    uneven = [number * number for number in range(1, 60)]  # more runs than a record has room for
    assert apart(logged(uneven, started=4000), logged([*uneven, 3999], started=4000)) == (3999, 1)
    assert apart(logged(uneven, started=4000), logged(uneven[1:], started=4000)) is None


@pytest.mark.parametrize("row", [{}, logged(ALL, started=14, opened=5)])
def test_without_a_common_epoch_nothing_is_known(row: dict[str, Any]) -> None:
    assert apart(logged(ALL, started=14), row) is None


@pytest.mark.parametrize(
    "stepped", [3, [3], [[0, -1, 4, []]], [[0, 0, 4, [[1, 1 << 50, 1]]]], [[0, 0, 4, [[1, "x", 1]]]]]
)
def test_a_row_that_is_none_is_refused(stepped: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        first_apart({0: {"stepped": stepped}, 1: logged(ALL, started=14)}, (0, 1))


def verdict(subject: str = "") -> Verdict:
    sentence = f"after 14 batches of {EPOCH}, rank 0 had applied 14 optimizer steps and rank 1 13."
    return Verdict("StepMismatch", sentence, (0, 1), subject=subject, sync_index=1, standing="differ")


def state_of(rank: int, skipped: int, found: Verdict) -> State:
    state, span = State(rank, 2, Settings(), {}), SpanCounters(EPOCH)
    state.spans.append(span)
    state.step_log.begin(span)
    for batch in ALL:
        span.started = batch
        if batch != skipped:
            state.step()
    state.close_span("exhausted")
    state.adopt(found)
    return state


def test_the_message_names_the_batch() -> None:
    found, store = verdict(), FakeStore()
    rows = {rank: state_of(rank, 4 * rank, found).final_row() for rank in range(2)}
    publish_table(store, found, rows, complete=True)
    whole = with_table(store, found, {}, 2)
    assert whole.sentence == f"{found.sentence[:-1]}: rank 0 stepped after batch 4, and rank 1 did not."
    assert not any("stepped" in line for line in whole.rows)
    assert "rank 0 on a stepped" not in at_hosts(whole, {0: "a", 1: "b"}).sentence  # its host is named before


def test_of_micro_batches_nothing_is_told() -> None:
    found = verdict("micro-batches")
    assert "stepped" not in state_of(1, 4, found).final_row()


@pytest.mark.parametrize(("name", "batches", "told"), [(EPOCH, 10**6, True), ("é" * 90, 10**9, False)])
def test_a_row_fits_into_a_record(name: str, batches: int, told: bool) -> None:
    state, span = State(99_999, 100_000, Settings(), {}), SpanCounters(name, started=batches, opened=batches)
    for _ in range(2):
        state.step_log.begin(span)
        for number in range(400):
            span.started += 1 + number % 7 * number % 11
            state.step_log.step(span)
    state.spans.append(span)
    state.adopt(verdict())
    line = state.final_row()
    assert ("stepped" in line) is told
    encode({**line, "host": "h" * 64})

"""Whether each sample was read once, from what the ranks tell."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from countoff.core import FitPlan, Settings
from countoff.core.checks.check import FitStart
from countoff.core.checks.once import (
    LOOKED_AT,
    NOT_READ_ONCE,
    SKIPPED,
    Once,
    Place,
    Reading,
    judge_once,
    judge_skipped,
    step_between,
)
from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.records import RECORD_BYTES, record_text
from countoff.core.state import State

EPOCH, EPOCH_1 = "train epoch 0", "train epoch 1"
AGAIN = {"again": True, "epoch": EPOCH_1}


def mixed(row: int) -> int:
    return hash((row, "mixed")) % (1 << 64)


def reading(rows: int, read: Sequence[int], rank: int, degree: int, repeated: int = 0, dropped: int = 0) -> Reading:
    """What a rank tells that has read these rows."""
    own = range(rows * rank // degree, rows * (rank + 1) // degree)
    difference = sum(map(mixed, read)) - sum(map(mixed, own))
    place = {number * step_between(rows) % rows: number for number in range(min(rows, LOOKED_AT))}
    seen = twice = 0
    for row in read:
        if row in place:
            bit = 1 << place[row]
            twice |= seen & bit
            seen |= bit
    return Reading(rows, len(read), difference % (1 << 64), seen, twice, repeated, dropped, rank)


def shares(rows: int, degree: int, *, pad: bool = True) -> list[list[int]]:
    """What a DistributedSampler gives the ranks, shuffled."""
    order = random.Random(7).sample(range(rows), rows)
    order = order + (order * degree)[: -rows % degree] if pad else order[: rows // degree * degree]
    return [order[rank::degree] for rank in range(degree)]


def judged(rows: int, read: Sequence[Sequence[int]], repeated: int = 0, dropped: int = 0) -> str:
    degree = len(read)
    told = {rank: reading(rows, each, rank, degree, repeated, dropped) for rank, each in enumerate(read)}
    found = judge_once(EPOCH, told, dp_degree=degree)
    return "" if found is None else found.sentence


@pytest.mark.parametrize("rows", [1, 2, 64, 2047, 2048, 2049, 10_000])
@pytest.mark.parametrize("degree", [2, 3, 8])
def test_whole_epochs_are_right(rows, degree):
    assert judged(rows, shares(rows, degree), repeated=-rows % degree) == ""
    if rows >= degree:
        assert judged(rows, shares(rows, degree, pad=False), dropped=rows % degree) == ""


def test_an_order_of_its_own_on_one_rank_is_found():
    one, other = shares(64, 2), random.Random(8).sample(range(64), 32)
    unread = set(range(64)) - set(one[0]) - set(other)
    twice = set(one[0]) & set(other)
    found = judged(64, [one[0], other])
    assert f"{len(unread)} of 64 samples were read by no rank (rows {min(unread)}, " in found
    assert f"{len(twice)} more than once (rows {min(twice)}, " in found
    assert found.endswith("by ranks 0, 1).")


def test_one_sample_of_many_that_is_read_twice_is_found_by_the_sum():
    read = shares(60_000, 4)
    read[2][5] = read[1][7]
    assert "and not each of them once" in judged(60_000, read) or "more than once" in judged(60_000, read)


def test_of_many_rows_some_are_looked_at():
    order = random.Random(9).sample(range(60_000), 30_000)
    found = judged(60_000, [shares(60_000, 2)[0], order])
    assert f"of {LOOKED_AT} samples that were looked at (of 60000) were read by no rank" in found


def test_a_share_that_nobody_reads_is_found():
    assert judged(320, shares(320, 4)[:2]).startswith(f"in {EPOCH}, 160 of 320 samples were read by no rank")


def test_what_the_plan_repeats_is_counted():
    """With padding, the sum tells nothing; what is read twice by more than the plan repeats is found."""
    read = shares(61, 2)
    assert judged(61, read, repeated=1) == ""
    read[0][3:9] = read[1][3:9]
    assert "6 of 61 samples were read by no rank" in judged(61, read, repeated=1)


def test_ranks_that_share_data_count_once():
    one, other = shares(64, 2)
    told = {rank: reading(64, (one, other)[rank // 2], rank // 2, 2) for rank in range(4)}
    assert judge_once(EPOCH, told, dp_degree=2) is None


def test_nothing_is_claimed_of_datasets_that_differ_or_of_missing_shares():
    one, other = shares(64, 2)
    told = {0: reading(64, one, 0, 2), 1: reading(62, other[:-2], 1, 2)}
    assert judge_once(EPOCH, told, dp_degree=2) is None
    assert judge_once(EPOCH, {0: reading(64, one, 0, 2)}, dp_degree=2) is None


def test_a_record_has_room_and_reads_back():
    told = Reading(2**31 - 1, 2**31 - 1, 2**64 - 1, 2**LOOKED_AT - 1, 2**LOOKED_AT - 1, 2**31 - 1, 2**31 - 1, 99_999)
    text = record_text(told.to_json())
    assert len(text) <= RECORD_BYTES
    assert Reading.from_json(told.to_json(), range(100_000)) == told


@pytest.mark.parametrize(
    "wrong", [{"seen": "!"}, {"seen": "A" * 600}, {"rows": -1}, {"difference": "x"}, {"dp_rank": 2}, {"twice": None}]
)
def test_a_record_that_is_none_is_refused(wrong):
    told = reading(64, range(32), 0, 2).to_json()
    with pytest.raises((KeyError, TypeError, ValueError)):
        Reading.from_json({**told, **wrong}, range(2))


def test_skipped_batches_of_a_later_epoch_have_a_cause_of_their_own():
    found = judge_skipped("train epoch 2", 1)
    assert (found.kind, found.subject) == (NOT_READ_ONCE.name, SKIPPED)
    assert found.sentence.startswith("train epoch 2 has skipped its first 1 batch on each rank")


def test_a_place_reads_back():
    place = Place(64, 10, "5e", {10: "a", 11: "b"}, "c")
    assert Place.from_json(place.to_json()) == place
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        Place.from_json({**place.to_json(), "ahead": ["10"]})


class Reports:
    """The other ranks: judges the reports that the ranks would give."""

    def __init__(self) -> None:
        self.judged: list[Any] = []

    def report(self, name: str, record: Callable[[], Any], judge: Callable[[Any], Any], **_: Any) -> None:
        own = dict(record())
        self.judged.append(lambda others: [each for each in judge({0: own, **others}) if each is not None])


def closed(again: bool) -> Any:
    """An epoch of rank 0 of 2; returns what judges it with the record of rank 1."""
    reports, span = Reports(), SpanCounters("train epoch 1")
    once = Once(State(0, 2, Settings(), {}), repeats_order=lambda: again)
    once.fit_started(FitStart(FitPlan(dp_degree=2), {}), reports)  # pyright: ignore[reportArgumentType]
    once.span_opened(span, 1)
    once.span_closing(span, "exhausted", orderly=True)
    return reports.judged[0]


def test_who_has_kept_the_order_of_the_epoch_before_is_named():
    """All ranks, or some of them; where it is known what was read, with what follows from it."""
    assert closed(False)({1: {"again": False, "epoch": EPOCH_1}}) == []
    (all_ranks,), (one,) = closed(True)({1: AGAIN}), closed(False)({1: AGAIN})
    assert all_ranks.sentence.startswith(
        "train epoch 1 was read in the same order as the train epoch before it, though"
    )
    assert one.sentence == (
        "rank 1 read train epoch 1 in the same order as the train epoch before it, and rank 0 did not."
    )
    assert (all_ranks.kind, one.kind, one.ranks) == ("SameOrder", "SameOrder", (1,))


def test_an_epoch_is_compared_only_where_all_ranks_know_what_they_have_read():
    told = reading(64, range(32), 1, 2).to_json()
    assert closed(False)({1: {"again": False, "epoch": EPOCH_1, **told}}) == []


def test_ranks_that_are_in_other_epochs_are_not_compared():
    """Where one rank alone evaluates, its epochs have other places among its spans."""
    assert closed(True)({1: {"again": True, "epoch": "train epoch 2"}}) == []

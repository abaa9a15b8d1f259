"""Whether each sample was read once, from what the ranks tell."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from countoff.core import FitPlan, Settings
from countoff.core.checks import once
from countoff.core.checks.check import FitStart
from countoff.core.checks.once import (
    LOOKED_AT,
    NOT_READ_ONCE,
    SKIPPED,
    Marks,
    Once,
    Place,
    Reading,
    data_ranks,
    judge_once,
    judge_skipped,
    reads_once,
    step_between,
)
from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.records import RECORD_BYTES, record_text
from countoff.core.session.state import State

EPOCH, EPOCH_1 = "train epoch 0", "train epoch 1"
AGAIN = {"again": True, "epoch": EPOCH_1}


def mixed(row: int) -> int:
    return hash((row, "mixed")) % (1 << 64)


def reading(
    rows: int, read: Sequence[int], rank: int, degree: int, repeated: int = 0, dropped: int = 0, *, part: bool = False
) -> Reading:
    """What a rank tells that has read these rows."""
    own = range(rows * rank // degree, rows * (rank + 1) // degree)
    difference = sum(map(mixed, read)) - sum(map(mixed, own))
    told = Reading(rows, len(read), difference % (1 << 64), repeated, dropped, rank, part)
    seen = 0 if told.is_exact else marks_of(rows, read).seen & ((1 << LOOKED_AT) - 1)
    return Reading.from_json(told._replace(seen=seen).to_json(), range(degree))


def marks_of(rows: int, read: Sequence[int]) -> Marks:
    """Which samples it has read."""
    place = {number * step_between(rows) % rows: number for number in range(min(rows, once.COUNTED))}
    seen = twice = 0
    for row in read:
        if row in place:
            bit = 1 << place[row]
            twice |= seen & bit
            seen |= bit
    return Marks.from_json(Marks(seen, twice).to_json(rows), rows)


def shares(rows: int, degree: int, *, pad: bool = True) -> list[list[int]]:
    """What a DistributedSampler gives the ranks, shuffled."""
    order = random.Random(7).sample(range(rows), rows)
    order = order + (order * degree)[: -rows % degree] if pad else order[: rows // degree * degree]
    return [order[rank::degree] for rank in range(degree)]


def judged(rows: int, read: Sequence[Sequence[int]], repeated: int = 0, dropped: int = 0, *, part: bool = False) -> str:
    degree = len(read)
    told = {rank: reading(rows, each, rank, degree, repeated, dropped, part=part) for rank, each in enumerate(read)}
    if reads_once(told):
        return ""
    return judge_once(EPOCH, told, {rank: marks_of(rows, each) for rank, each in enumerate(read)}).sentence


@pytest.mark.parametrize("rows", [1, 2, 64, 10_000, 66_000])
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


def test_one_sample_of_many_that_is_read_twice_is_found():
    read = shares(60_000, 4)
    lost, read[2][5] = read[2][5], read[1][7]
    assert judged(60_000, read) == (
        f"in {EPOCH}, 1 of 60000 samples was read by no rank (row {lost}), and 1 more than once (row {read[1][7]}, by "
        "ranks 1, 2)."
    )


def test_the_numbers_are_those_of_all_samples():
    order = random.Random(9).sample(range(60_000), 30_000)
    read = [shares(60_000, 2)[0], order]
    unread, twice = set(range(60_000)).difference(*read), set(read[0]) & set(order)
    found = judged(60_000, read)
    assert f"{len(unread)} of 60000 samples were read by no rank (rows {min(unread)}, " in found
    assert f"{len(twice)} more than once (rows {min(twice)}, " in found


def test_of_very_many_rows_some_are_looked_at(monkeypatch):
    monkeypatch.setattr(once, "COUNTED", 5000)
    order = random.Random(9).sample(range(60_000), 30_000)
    found = judged(60_000, [shares(60_000, 2)[0], order])
    assert "of 5000 samples that were looked at (of 60000) were read by no rank" in found
    read = shares(60_000, 2)
    monkeypatch.setattr(once, "COUNTED", 0)
    read[0][3] = read[1][5]
    assert "60000 samples were read of a dataset of 60000, and not each" in judged(60_000, read)


def test_without_the_answer_of_a_rank_no_numbers_are_told():
    told = {rank: reading(64, range(32), rank, 2) for rank in range(2)}
    assert judge_once(EPOCH, told, {0: marks_of(64, range(32))}).sentence == (
        f"in {EPOCH}, 64 samples were read of a dataset of 64, and not each of them once."
    )


def test_a_share_that_nobody_reads_is_found():
    assert judged(320, shares(320, 4)[:2]).startswith(f"in {EPOCH}, 160 of 320 samples were read by no rank")


def test_what_the_plan_repeats_is_counted():
    """With padding, the sum tells nothing; what is read twice by more than the plan repeats is found."""
    read = shares(61, 2)
    assert judged(61, read, repeated=1) == ""
    read[0][3:9] = read[1][3:9]
    found = judged(61, read, repeated=1)
    assert "6 of 61 samples were read by no rank (rows " in found
    assert found.endswith("by ranks 0, 1; 1 as planned).")


@pytest.mark.parametrize("rows", [61, 70_000])
def test_in_a_part_of_an_epoch_no_sample_is_read_twice(rows):
    """What no rank has read there tells nothing."""
    read = [each[rows // 8 :] for each in shares(rows, 3)]
    padding = -rows % 3
    assert judged(rows, read, repeated=padding, part=True) == ""
    read[2][: rows // 8] = read[0][: rows // 8]
    assert judged(rows, read, repeated=padding, part=True).startswith(
        f"in the part of {EPOCH} that this run has read, {rows // 8} of {rows} samples were read more than once (rows "
    )
    told = {rank: reading(rows, each, rank, 3, padding, part=True) for rank, each in enumerate(read)}
    assert judge_once(EPOCH, told, {}).sentence.endswith(f"some of {rows} samples were read more than once.")


def test_what_the_plan_leaves_out_is_counted():
    read = shares(63, 4, pad=False)
    read[0][3:9] = read[1][3:9]
    found = judged(63, read, dropped=3)
    assert found.startswith(f"in {EPOCH}, 9 of 63 samples were read by no rank (rows ")
    assert "; 3 as planned), and 6 more than once" in found


def test_ranks_that_share_data_count_once():
    one, other = shares(64, 2)
    told = {rank: reading(64, (one, other)[rank // 2], rank // 2, 2) for rank in range(4)}
    each = data_ranks(told, 2)
    assert (list(each), reads_once(each)) == ([0, 2], True)


def test_nothing_is_claimed_of_datasets_that_differ_or_of_missing_shares():
    one, other = shares(64, 2)
    told = {0: reading(64, one, 0, 2), 1: reading(62, other[:-2], 1, 2)}
    assert not data_ranks(told, 2)
    assert not data_ranks({0: reading(64, one, 0, 2)}, 2)


def test_a_record_reads_back():
    told = Reading(2**31 - 1, 2**31 - 1, 2**64 - 1, 2**31 - 1, 2**31 - 1, 99_999, True, 2**LOOKED_AT - 1)
    text = record_text({"again": False, "epoch": "train epoch 1000000", **told._replace(seen=0, part=False).to_json()})
    assert len(text) <= RECORD_BYTES  # it has no bits: the one of a part of an epoch is written in pieces
    assert Reading.from_json(told.to_json(), range(100_000)) == told


@pytest.mark.parametrize(
    "wrong", [{"seen": "!"}, {"seen": "AAAA"}, {"rows": -1}, {"difference": "x"}, {"dp_rank": 2}, {"seen": None}]
)
def test_a_record_that_is_none_is_refused(wrong):
    told = reading(64, range(32), 0, 2, part=True).to_json()
    with pytest.raises((KeyError, TypeError, ValueError, zlib.error)):
        Reading.from_json({**told, **wrong}, range(2))


@pytest.mark.parametrize("wrong", [{}, {"seen": 7}, {"seen": "!"}, {"seen": "AAAA"}, Marks(1, 0).to_json(9)])
def test_marks_that_are_none_are_refused(wrong):
    with pytest.raises((KeyError, TypeError, ValueError, zlib.error)):
        Marks.from_json(wrong, 64)


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
        self.asked: list[tuple[Any, Any]] = []
        self._answer: Any = None

    def report(self, name: str, record: Callable[[], Any], judge: Callable[[Any], Any], **_: Any) -> None:
        own = dict(record())
        self.judged.append(lambda others: [each for each in judge({0: own, **others}) if each is not None])

    def ask(self, kind: str, question: Any, group: Any, judge: Callable[[Any], Any]) -> None:
        self.asked.append((judge, self._answer(question)))

    def answer(self, kind: str, answer: Any) -> None:
        self._answer = answer


class Reads:
    """What rank 0 has read in an epoch: every second row of 64."""

    skipped = 0

    def reading(self, batches: int) -> Any:
        return lambda: (reading(64, range(0, 64, 2), 0, 2), marks_of(64, range(0, 64, 2)))


def closed(again: bool, reads: Any = None) -> tuple[Any, Reports]:
    """An epoch of rank 0 of 2; returns what judges it with the record of rank 1, and the other ranks."""
    reports, span = Reports(), SpanCounters("train epoch 1")
    check = Once(State(0, 2, Settings(), {}), repeats_order=lambda: again)
    check.fit_started(FitStart(FitPlan(dp_degree=2), {}), reports)  # pyright: ignore[reportArgumentType]
    check.span_opened(span, 1)
    check.reads = reads
    check.span_closing(span, "exhausted", orderly=True)
    return reports.judged[0], reports


def test_who_has_kept_the_order_of_the_epoch_before_is_named():
    """All ranks, or some of them; where it is known what was read, with what follows from it."""
    assert closed(False)[0]({1: {"again": False, "epoch": EPOCH_1}}) == []
    (all_ranks,), (one,) = closed(True)[0]({1: AGAIN}), closed(False)[0]({1: AGAIN})
    assert all_ranks.sentence.startswith(
        "train epoch 1 was read in the same order as the train epoch before it, though"
    )
    assert one.sentence == (
        "rank 1 read train epoch 1 in the same order as the train epoch before it, and rank 0 did not."
    )
    assert (all_ranks.kind, one.kind, one.ranks) == ("SameOrder", "SameOrder", (1,))
    (known_here,) = closed(True)[0]({1: {"again": None, "epoch": EPOCH_1}})
    assert known_here.sentence == all_ranks.sentence  # of rank 1, nobody knows


def test_the_ranks_are_asked_what_they_have_read_where_the_sums_differ():
    """The first rank asks only then; with the answers, it tells who has kept the order of the epoch before."""
    judge, ranks = closed(False, Reads())
    assert judge({1: {"again": False, "epoch": EPOCH_1, **reading(64, range(1, 64, 2), 1, 2).to_json()}}) == []
    assert ranks.asked == []
    assert judge({1: {**AGAIN, **reading(64, range(32), 1, 2).to_json()}}) == []
    ((asked, own),) = ranks.asked
    found = asked({0: own, 1: marks_of(64, range(32)).to_json(64)})
    assert found.sentence == (
        "in train epoch 1, 16 of 64 samples were read by no rank (rows 33, 35, 37, …), and 16 more than once (rows 0, "
        "2, 4, …, by ranks 0, 1): rank 1 kept the order of the train epoch before, and rank 0 did not."
    )
    assert found.ranks == (0, 1)


def test_an_epoch_is_compared_only_where_all_ranks_know_what_they_have_read():
    told = reading(64, range(32), 1, 2).to_json()
    judge, ranks = closed(False)
    assert judge({1: {"again": False, "epoch": EPOCH_1, **told}}) == []
    assert ranks.asked == []


def test_ranks_that_are_in_other_epochs_are_not_compared():
    """Where one rank alone evaluates, its epochs have other places among its spans."""
    assert closed(True)[0]({1: {"again": True, "epoch": "train epoch 2"}}) == []

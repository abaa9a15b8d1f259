"""Splits of one dataset: which rows a rank evaluates with and another one trains on."""

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from countoff.core.checks.check import FitStart
from countoff.core.checks.splits import SplitCheck, judge_splits
from countoff.core.protocol.fit_records import SAMPLED, SplitSample
from countoff.core.protocol.records import RECORD_BYTES, FitPlan, record_text
from countoff.core.verdict import Verdict

ROWS = 20_000


def sampled(train: range | list[int], evaluated: range | list[int], *, rows: int = ROWS, of: str = "x") -> SplitSample:
    """What a rank tells that has split the rows in this way."""
    step = -(-rows // SAMPLED)

    def places(chosen: range | list[int]) -> list[int]:
        return [row // step for row in chosen if row % step == 0]

    return SplitSample.of_places(of, step, places(train), places(evaluated))


def split(seed: int, *, rows: int = ROWS, part: float = 0.1) -> SplitSample:
    """A random split with a seed."""
    order = list(range(rows))
    random.Random(seed).shuffle(order)
    count = round(rows * part)
    return sampled(order[count:], order[:count], rows=rows)


def judged(*samples: SplitSample) -> Verdict | None:
    """What is found, after the records have passed through the store; one argument for each rank."""
    told = [SplitSample.from_json(json.loads(record_text(each.to_json()))) for each in samples]
    return judge_splits(dict(enumerate(told)))


def test_the_same_split_is_silent() -> None:
    assert judged(split(7), split(7), split(7)) is None


def test_rows_that_train_on_another_rank_are_named() -> None:
    """All of them are rows of the dataset, and the sentence names real ones."""
    even, odd = list(range(0, 40, 2)), list(range(1, 40, 2))
    found = judged(sampled(even, odd, rows=40), sampled(odd, even, rows=40))
    assert found is not None
    assert found.sentence == (
        "rows 1, 3, 5, … validate on rank 0 and train on rank 1: the ranks have split the data in different ways."
    )
    assert (found.ranks, found.standing) == ((0, 1), "differ")
    same = sampled(even[:-1], [*odd[:-1], 38], rows=40)
    found = judged(sampled(even, odd[:-1], rows=40), same)
    assert found is not None
    assert found.sentence.startswith("row 38 validates on rank 1 and trains on rank 0: ")


@pytest.mark.parametrize("part", [0.5, 0.1, 0.02])
def test_random_splits_with_different_seeds_are_found(part: float) -> None:
    """A tenth of a dataset of any size is found with certainty, for what a test can tell."""
    for trial in range(20):
        found = judged(split(2 * trial, part=part), split(2 * trial + 1, part=part))
        assert found is not None, trial


def test_how_often_a_small_evaluation_is_found() -> None:
    """Where there are a few rows more than are sampled, every second one is: that is the least."""
    rows, part = SAMPLED + 1, 0.002
    trials = 40
    found = sum(
        judged(split(2 * each, rows=rows, part=part), split(2 * each + 1, rows=rows, part=part)) is not None
        for each in range(trials)
    )
    assert found > trials * 0.8  # 1 - exp(-1024 * 0.002 * 2), as each rank's rows may prove it, is 0.98


def test_a_part_of_the_train_data_is_evaluated_on_purpose() -> None:
    """As where a model is to overfit, also with another part on each rank."""
    everything = list(range(ROWS))
    assert judged(sampled(everything, everything[:2000]), sampled(everything, everything[3000:5000])) is None
    assert judged(split(1), sampled(everything, everything[:2000])) is None


def test_ranks_may_evaluate_with_shares_of_one_split() -> None:
    train, first, second = list(range(1000, ROWS)), list(range(500)), list(range(500, 1000))
    assert judged(sampled(train, first), sampled(train, second)) is None
    assert judged(sampled(train, []), sampled(train, first)) is None


def test_splits_of_other_datasets_are_not_compared() -> None:
    one, other = split(1), split(2)
    assert judged(one, other._replace(of="y")) is None
    assert judged(one, split(2, rows=2 * ROWS)) is None
    assert judge_splits({}) is None


@given(st.integers(0, (1 << SAMPLED) - 1), st.integers(0, (1 << SAMPLED) - 1), st.integers(1, 1 << 52))
def test_a_record_fits_into_the_store(train: int, evaluated: int, step: int) -> None:
    sample = SplitSample("f" * 16, step, train, evaluated)
    text = record_text(sample.to_json())
    assert len(text) <= RECORD_BYTES
    assert SplitSample.from_json(json.loads(text)) == sample


@given(st.dictionaries(st.sampled_from(["of", "step", "train", "evaluated"]), st.integers() | st.text() | st.none()))
def test_a_record_of_anything_is_refused_or_bounded(record: dict[str, Any]) -> None:
    """Another rank may write anything."""
    try:
        found = judge_splits({0: split(1, rows=100), 1: SplitSample.from_json({"of": "x", "step": 1, **record})})
    except (KeyError, TypeError, ValueError):
        return
    assert found is None or len(found.sentence) < 200


def test_many_ranks_are_judged_at_once() -> None:
    samples = {rank: split(5, rows=500) for rank in range(4000)}
    assert judge_splits(samples) is None
    found = judge_splits({**samples, 4000: split(6, rows=500)})
    assert found is not None
    assert 4000 in found.ranks


def test_a_split_that_is_known_later_is_compared_with_the_first_evaluation() -> None:
    """The end of the fit does not wait for it: a rank may not evaluate."""
    reported: list[tuple[str, Any, Any, bool]] = []

    class Reports:
        def report(self, name: str, record: Any, judge: Any, *, owed: bool = True, after: Any = ()) -> None:
            assert not after
            reported.append((name, record(), judge, owed))

    check = SplitCheck()
    others: Any = Reports()
    check.evaluates(split(1))
    check.fit_started(FitStart(FitPlan(), {}), others)
    check.counted_off()
    check.evaluates(split(1))
    (first, nothing, _, _), (later, told, judge, owed) = reported
    assert (nothing, first != later, owed) == ({}, True, False)
    assert judge({0: told}) == judge({0: told, 1: told}) == []
    assert not check.found
    assert [each.kind for each in judge({0: told, 1: split(2).to_json()})] == ["SplitLeak"]
    assert check.found

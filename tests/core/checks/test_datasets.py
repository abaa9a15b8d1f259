"""Datasets: the sentence about ranks that must hold the same one, and what a record tells of it."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from countoff.core import Settings
from countoff.core.checks.check import FitStart
from countoff.core.checks.data import DataIdentity
from countoff.core.checks.datasets import HeldDataset, judge_datasets
from countoff.core.checks.plan import PlanCheck
from countoff.core.checks.streams import StreamFacts
from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.records import RECORD_BYTES, FitPlan, record_text
from countoff.core.state import State
from countoff.core.verdict import Verdict

WHOLE = HeldDataset("", rows=96, columns=["text", "label"])


def judged(*held: HeldDataset | list[HeldDataset]) -> Verdict | None:
    """What is found, after the records have passed through the store; one argument for each rank."""
    listed = [each if isinstance(each, list) else [each] for each in held]
    records = {rank: {"held": [one.to_json() for one in each]} for rank, each in enumerate(listed)}
    return judge_datasets({rank: json.loads(record_text(record)) for rank, record in records.items()})


def test_the_same_dataset_is_silent() -> None:
    assert judged(WHOLE, WHOLE._replace(columns=["label", "text"]), WHOLE) is None
    assert judged([], [], []) is None


@pytest.mark.parametrize(
    ("odd", "sentence"),
    [
        (WHOLE._replace(rows=88), "the train dataset has 88 rows on rank 2, 96 rows on ranks 0, 1, 3."),
        (
            WHOLE._replace(columns=["text", "labels"]),
            "the train dataset has other columns on rank 2 than on ranks 0, 1, 3: label is missing on rank 2, labels "
            "is missing on ranks 0, 1, 3.",
        ),
        (
            WHOLE._replace(columns=[f"column{number}" for number in range(40)]),
            "the train dataset has other columns on rank 2 than on ranks 0, 1, 3.",
        ),
    ],
)
def test_the_minority_is_named(odd: HeldDataset, sentence: str) -> None:
    found = judged(WHOLE, WHOLE, odd, WHOLE)
    assert found is not None
    assert (found.sentence, found.ranks, found.standing, found.subject) == (sentence, (2,), "out of step", "")


def test_an_evaluation_is_named() -> None:
    """Also where only the sampler's share tells its length, and where it is another part of the same rows."""
    evals = HeldDataset("validation", rows=40, ends=(3, 38))
    found = judged([WHOLE, evals], [WHOLE, evals], [WHOLE, evals._replace(ends=(4, 38))])
    assert found is not None
    assert found.sentence == (
        "the validation dataset is chosen from another one by other indices: from row 4 to row 38 on rank 2, row 3 to "
        "row 38 on ranks 0, 1."
    )
    assert found.subject == "validation"
    shares = [HeldDataset("validation", share=share) for share in (10, 10, 9)]
    found = judged(*shares)
    assert found is not None
    assert found.sentence == (
        "the sampler's shares of the validation dataset differ, so their datasets have different lengths: a share has "
        "9 rows on rank 2, 10 rows on ranks 0, 1."
    )


def test_the_train_dataset_comes_first() -> None:
    """One cause may make all of a rank's data differ: it is said once."""
    less = [WHOLE._replace(rows=88), HeldDataset("a", rows=3)]
    found = judged([WHOLE, HeldDataset("a", rows=4)], less, [WHOLE, HeldDataset("a", rows=4)])
    assert found is not None
    assert found.sentence.startswith("the train dataset has 88 rows on rank 1")


def test_of_two_ranks_nobody_knows_which_is_right() -> None:
    found = judged(WHOLE, WHOLE._replace(rows=88))
    assert found is not None
    assert (found.ranks, found.standing) == ((0, 1), "differ")


def test_what_is_not_known_is_not_compared() -> None:
    """A rank whose objects do not tell, or that has no such dataset, may be right."""
    assert judged(WHOLE, WHOLE._replace(rows=None, columns=None), []) is None
    assert judged(HeldDataset("", rows=96), HeldDataset("", share=11)) is None
    assert judged(HeldDataset("a", rows=96), HeldDataset("b", rows=88)) is None


def test_lengths_that_differ_have_the_datasets_as_their_cause() -> None:
    """It is said once, and a difference that has another cause is not said to have that one."""

    def found(lengths: tuple[int, int], rows: tuple[int, int], **more: Any) -> Verdict:
        plans = [
            FitPlan(batches_per_epoch=length, **{name: value[rank] for name, value in more.items()})
            for rank, length in enumerate(lengths)
        ]
        reports = {rank: {"plan": plan.to_json(), "rows": rows[rank]} for rank, plan in enumerate(plans)}
        (verdict,) = PlanCheck(0).compare_reports(reports, complete=True, refused=False)
        assert verdict is not None
        return verdict

    known = found((12, 11), (96, 88))
    assert known.sentence == "before the first batch, batches_per_epoch is 12 on rank 0, 11 on rank 1."
    assert known.why.startswith("The train dataset has 96 rows on rank 0, 88 rows on rank 1. ")
    assert known.remedy.startswith("give every rank the same dataset")
    assert "dataset" not in found((12, 11), (96, 96)).why
    assert "dataset" not in found((12, 12), (96, 88), batch_size=(8, 9)).why


@pytest.mark.parametrize("known", [False, True])
def test_what_follows_from_other_datasets_is_not_said_again(known: bool) -> None:
    """A shuffle with one seed gives datasets of other lengths other orders: the datasets have been named before."""
    judges: list[Any] = []
    identity = DataIdentity(State(0, 2, Settings(), {}), datasets_differ=lambda: known)
    others: Any = SimpleNamespace(report=lambda name, record, judge, after: judges.append((record, judge, after)))
    identity.fit_started(FitStart(FitPlan(dp_rank=0, dp_degree=2), {}), others)
    span = SpanCounters("train epoch 0", started=4)
    identity.span_opened(span, 0)
    identity.read([1, 2])
    identity.span_closing(span, "exhausted", orderly=True)
    ((record, judge, after),) = judges
    streams = [
        StreamFacts("Accelerate", 2, prints=prints * 8, order="shuffled", sampler=True, length=length)
        for prints, length in (("00000001", 96), ("00000002", 88))
    ]
    records = {rank: {**record, "stream": stream.to_json()} for rank, stream in enumerate(streams)}
    found = [each.kind for each in judge(records) if each is not None]
    assert found == ([] if known else ["StreamsDiffer"])
    assert set(after) == {"datasets", "splits"}


@given(
    st.lists(
        st.builds(
            HeldDataset,
            st.text(max_size=200),
            st.none() | st.integers(0, 2**52),
            st.none() | st.integers(0, 2**52),
            st.none() | st.lists(st.text(max_size=50), max_size=20),
            st.none() | st.tuples(st.integers(0, 2**52), st.integers(0, 2**52)),
        ),
        max_size=3,
    )
)
def test_a_record_fits_into_the_store(held: list[HeldDataset]) -> None:
    assert len(record_text({"held": [each.to_json() for each in held]})) <= RECORD_BYTES // 2 + 100


@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=6)))
def test_a_record_of_anything_is_refused_or_bounded(anything: Any) -> None:
    """Another rank may write anything."""
    try:
        found = judge_datasets({0: {"held": [WHOLE.to_json()]}, 1: {"held": [anything]}})
    except (KeyError, TypeError, ValueError):
        return
    assert found is None or len(found.sentence) < 1000

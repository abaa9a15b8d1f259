"""Learning rates in the records of ranks: how they are compared, and which rank is named."""

import dataclasses
import json
import threading
from typing import Any

import pytest

from countoff.core.checks import judge
from countoff.core.checks.check import FitStart
from countoff.core.checks.learning_rates import LearningRateCheck, outlier_rates, rate_mismatch, with_rates
from countoff.core.ending.table import publish_table, with_table
from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.rates import RateLog, parse_rates
from countoff.core.protocol.records import (
    FitPlan,
    MicroCounts,
    SyncKind,
    SyncPoint,
    sync_entry,
    verdict_from_json,
    verdict_to_json,
)
from countoff.core.protocol.rule import compare_sync_points
from countoff.core.session.state import State
from countoff.core.session.store.channel import encode
from countoff.core.settings import Settings
from countoff.core.verdict import Verdict
from tests.fake_store import FakeStore
from tests.other_ranks import KeptRecords

EPOCH = "train epoch 0"
END = SyncPoint("train_end", EPOCH, 12, "exhausted", 12, 9, rank=0, rates=(0.1, 0.2))


@pytest.mark.parametrize(
    ("kind", "span", "words"),
    [
        ("train_end", EPOCH, "after 12 batches of train epoch 0"),
        ("train_start", EPOCH, "at the start of train epoch 0"),
        ("eval_start", "validation", "at the start of validation within a train epoch"),
        ("eval_end", "validation", "at the end of validation within a train epoch"),
    ],
)
def test_sync_points_with_other_rates_are_a_mismatch(kind: SyncKind, span: str, words: str) -> None:
    logged = dataclasses.replace(END, kind=kind, span=span)
    divergence = compare_sync_points(logged, dataclasses.replace(logged, rank=3, rates=(0.1, 0.3)), 5)
    assert divergence is not None
    verdict = judge(divergence, 3)
    assert (verdict.kind, verdict.ranks, verdict.standing, verdict.point) == (
        "LearningRateMismatch",
        (0, 3),
        "differ",
        "sync_point/5",
    )
    assert verdict.sentence == f"{words}, rank 0 trains with learning rate 0.1, 0.2 and rank 3 with 0.1, 0.3."
    assert verdict_from_json(json.loads(json.dumps(verdict_to_json(verdict)))).point == "sync_point/5"


@pytest.mark.parametrize("rates", [(), (0.1,), (0.1, 0.2, 0.3), (0.1, 0.2)])
def test_unknown_rates_and_other_groups_prove_nothing(rates: tuple[float, ...]) -> None:
    """A rank of another version writes no rates, and a stage of a pipeline may have other parameter groups."""
    assert compare_sync_points(END, dataclasses.replace(END, rank=1, rates=rates)) is None


def test_counts_come_before_rates() -> None:
    other = dataclasses.replace(END, rank=1, steps=11, rates=(0.5, 0.5))
    divergence = compare_sync_points(END, other)
    assert divergence is not None
    assert divergence.kind == "StepMismatch"


def test_rates_are_read_back_from_a_sync_point() -> None:
    assert SyncPoint.from_json(json.loads(json.dumps(END.to_json()))) == END
    older = {name: value for name, value in END.to_json().items() if name != "rates"}
    assert SyncPoint.from_json(older).rates == ()


@pytest.mark.parametrize("rates", ["0.1", [0.1] * 9, ["x"], [None], {"a": 1}, [10**400]])
def test_rates_that_are_none_are_refused(rates: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        parse_rates({"rates": rates})


def test_a_sync_point_with_eight_rates_fits_into_a_record() -> None:
    micro = MicroCounts(2**48 - 1, 10**9, tuple(10**8 + each for each in range(40)))
    long = (-1.2345678901234567e-300,) * 8
    for sync_point in (
        SyncPoint(
            "eval_start", "é" * 10, 10**9, "exhausted", 10**9, 2**48 - 1, (), 99_999, 1700000000.123456, micro, long
        ),
        SyncPoint("eval_end", "x" * 58, 10**9, "exhausted", 10**9, 2**48 - 1, (10**6,) * 33, 99_999, 1.5, rates=long),
    ):
        encode(sync_entry(10**9, sync_point))


def test_the_first_steps_are_compared() -> None:
    where = "at optimizer step 1 (batch 4 of train epoch 0)"
    assert rate_mismatch(where, "step/1", (0, 2), (0.2,), (0.2,)) is None
    state = State(2, 3, Settings(), {})
    state.evidence.steps(threading.get_ident())
    check, others = LearningRateCheck(state, lambda: (0.2,)), KeptRecords({"rank": 0, "rates": [0.1]})
    check.fit_started(FitStart(FitPlan(), {}, holders=(0, 1, 2)), others)
    check.stepped(SpanCounters(EPOCH, started=4), 1)
    (found,) = others.found
    assert found.sentence == f"{where}, rank 2 trains with 2 times the learning rate of rank 0 (0.2, not 0.1)."
    assert "may have differed before" not in found.why


LR = "give every rank the same lr"


@pytest.mark.parametrize(
    ("step", "theirs", "mine", "bases", "told", "remedy"),
    [
        (1, (0.1,), (0.2,), ((), ()), "rank 1 trains with 2 times the learning rate of rank 0 (0.2, not 0.1).", LR),
        (
            1,
            (0.3, 0.6),
            (0.1, 0.2),
            ((), ()),
            "rank 0 trains with 3 times the learning rate of rank 1 (0.3, 0.6, not 0.1, 0.2).",
            LR,
        ),
        (
            2,
            (0.009,),
            (0.018,),
            ((0.01,), (0.02,)),
            "rank 1 trains with 2 times the learning rate of rank 0 (0.018, not 0.009).",
            LR,
        ),
        (2, (0.009,), (0.018,), ((), ()), "rank 0 trains with learning rate 0.009 and rank 1 with 0.018.", ""),
        (1, (0.1,), (0.2,), ((1.0,), (1.0,)), "rank 0 trains with learning rate 0.1 and rank 1 with 0.2.", ""),
        (1, (0.1,), (0.2,), ((1.0,), ()), "rank 0 trains with learning rate 0.1 and rank 1 with 0.2.", ""),
        (1, (0.1,), (0.2,), ((1.0,), (3.0,)), "rank 0 trains with learning rate 0.1 and rank 1 with 0.2.", ""),
        (
            1,
            (0.1, 0.1),
            (0.1, 0.2),
            ((), ()),
            "rank 0 trains with learning rate 0.1 and rank 1 with 0.1, 0.2.",
            "",
        ),
        (1, (0.0,), (0.2,), ((), ()), "rank 0 trains with learning rate 0 and rank 1 with 0.2.", ""),
    ],
)
def test_rates_that_differ_by_one_factor_from_the_start_are_base_rates(
    step: int,
    theirs: tuple[float, ...],
    mine: tuple[float, ...],
    bases: tuple[tuple[float, ...], tuple[float, ...]],
    told: str,
    remedy: str,
) -> None:
    """As far as both ranks know these, or no schedule has begun to change them."""
    state = State(1, 2, Settings(), {})
    state.evidence.steps(threading.get_ident())
    check = LearningRateCheck(state, lambda: mine, lambda: bases[1])
    others = KeptRecords({"rank": 0, "rates": list(theirs), "base": list(bases[0])})
    check.fit_started(FitStart(FitPlan(), {}, holders=(0, 1)), others)
    check.stepped(SpanCounters(EPOCH, started=step), step)
    (found,) = others.found
    where = f"at optimizer step {step} (batch {step} of train epoch 0)"
    assert (found.sentence, found.remedy[: len(LR)]) == (f"{where}, {told}", remedy)


def test_a_rank_remembers_its_rates_at_the_last_points() -> None:
    log = RateLog()
    for number in range(100):
        log.keep(f"sync_point/{number}", (float(number),))
    log.keep("sync_point/100", ())
    assert log.at("sync_point/99") == [99.0]
    assert log.at("sync_point/3") is log.at("sync_point/100") is log.at("sync_point/101") is None


@pytest.mark.parametrize(
    ("rates", "outliers"),
    [
        ([0.1, 0.1, 0.1, 0.2], (3,)),
        ([0.1, 0.2, 0.3, 0.1, 0.1], (1, 2)),
        ([0.1, 0.1, 0.2, 0.2], ()),
        ([0.1, 0.1, 0.2, None], ()),
        ([0.1, 0.1, 0.1, None], ()),
        ([None, None], ()),
    ],
)
def test_the_ranks_beside_the_majority_are_outliers(rates: list[float | None], outliers: tuple[int, ...]) -> None:
    rows = {rank: {"rates": None if rate is None else [rate]} for rank, rate in enumerate(rates)}
    assert outlier_rates(rows) == outliers


def test_the_table_has_as_few_digits_as_tell_the_rates_apart() -> None:
    rows = with_rates({0: {"rates": [0.1, 0.1]}, 1: {"rates": [0.1000004, 0.1]}, 2: {"rates": None}})
    assert [rows[rank]["rate"] for rank in range(3)] == ["0.1", "0.1000004, 0.1", "–"]
    assert "rates" not in rows[0]


def published(rates: list[list[float] | None]) -> Verdict:
    """The verdict about rates with the table of so many ranks."""
    verdict = Verdict("LearningRateMismatch", "they differ.", (2, 1), standing="differ", point="sync_point/3", time=1.0)
    common = {"where": EPOCH, "batches": 4, "fetched": 4, "steps": 3, "state": "in batch 4"}
    rows = {
        rank: {"rank": rank, **common, "known": 1.0, "failure": "", "side": None, "host": "a", "rates": each}
        for rank, each in enumerate(rates)
    }
    store: Any = FakeStore()
    publish_table(store, verdict, rows, complete=True)
    return with_table(store, verdict, {}, len(rates))


def test_the_minority_is_named_and_the_table_has_the_rates() -> None:
    found = published([[0.1], [0.2], [0.1], [0.1]])
    assert (found.ranks, found.standing) == ((1,), "out of step")
    lines = found.render().splitlines()
    assert lines[1] == "  out of step: rank 1 of 4 ranks"
    assert lines[2].split() == ["rank", "where", "batches", "fetched", "steps", "rate", "state"]
    assert [line.split()[7] for line in lines[3:7]] == ["0.2", "0.1", "0.1", "0.1"]


def test_with_an_even_split_both_sides_differ() -> None:
    found = published([[0.1], [0.2], [0.1], [0.2]])
    assert (found.ranks, found.standing) == ((0, 1, 2, 3), "differ")
    assert found.render().splitlines()[1] == "  differ: ranks 0–3 of 4 ranks"


def test_other_verdicts_have_no_column_for_rates() -> None:
    rows = ({"rank": 0, "where": EPOCH, "batches": 4, "fetched": 4, "steps": 3, "state": "in batch 4"},)
    assert "rate " not in Verdict("UnevenBatches", "they differ.", (0,), rows=rows).render()

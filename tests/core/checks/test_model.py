"""Models: the sentence about ranks that must hold the same one, and what a record tells of it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from countoff.core.checks.check import FitStart
from countoff.core.checks.model import ModelCheck
from countoff.core.levels import effect
from countoff.core.protocol.fit_records import SharedModel
from countoff.core.protocol.records import FitPlan, record_text
from countoff.core.verdict import Verdict

GROUP = (0, 1, 2, 3)
Parameters = list[tuple[int, str, bool]]


def parameters(count: int = 48, *, frozen: Sequence[int] = (), form: str = "(4,) torch.float32") -> Parameters:
    return [(4, form, number not in frozen) for number in range(count)]


def told(models: Sequence[SharedModel]) -> dict[str, Any]:
    """What a rank reports at the roll call, after it has passed through the store."""
    return json.loads(record_text(ModelCheck().report(FitStart(FitPlan(), {}, models=models), 500)))


def judged(held: Mapping[int, Sequence[SharedModel]]) -> list[Verdict]:
    records = {rank: told(models) for rank, models in held.items()}
    return list(ModelCheck().compare_reports(records, complete=True, refused=False))


def shared(*held: Parameters) -> dict[int, list[SharedModel]]:
    return {rank: [SharedModel.of_ranks(GROUP, each)] for rank, each in enumerate(held)}


def test_equal_models_are_silent() -> None:
    assert judged(shared(*[parameters(frozen=range(40))] * 4)) == []


@pytest.mark.parametrize(
    ("odd", "sentence", "subject"),
    [
        (
            parameters(frozen=[7]),
            "47 parameters need a gradient on rank 2, 48 parameters on ranks 0, 1, 3.",
            "gradients",
        ),
        (
            parameters(46),
            "the model has 46 parameters with 184 numbers on rank 2, 48 parameters with 192 numbers on ranks 0, 1, 3.",
            "model",
        ),
        (
            [*parameters(47), (8, "(8,) torch.float32", True)],
            "the model has 48 parameters with 196 numbers on rank 2, 48 parameters with 192 numbers on ranks 0, 1, 3.",
            "model",
        ),
        (
            parameters(form="(2, 2) torch.float32"),
            "the model has 48 parameters with 192 numbers on rank 2, of other shapes or types than on ranks 0, 1, 3.",
            "model",
        ),
    ],
    ids=["gradient", "missing", "larger", "shape"],
)
def test_the_minority_is_named_in_a_warning(odd: Parameters, sentence: str, subject: str) -> None:
    [found] = judged(shared(parameters(), parameters(), odd, parameters()))
    assert found.sentence == f"before the first batch, {sentence}"
    assert (found.ranks, found.standing, found.subject) == ((2,), "out of step", subject)
    assert effect(found, {"PlanMismatch": "raise"}) == "warn"


def test_as_many_others_need_a_gradient() -> None:
    [found] = judged(shared(parameters(frozen=[3]), parameters(frozen=[3]), parameters(frozen=[4])))
    said = "other parameters need a gradient on rank 2 than on ranks 0, 1."
    assert found.sentence == f"before the first batch, {said}"


def test_of_two_ranks_nobody_knows_which_is_right() -> None:
    [found] = judged(shared(parameters(), parameters(47)))
    assert (found.ranks, found.standing) == ((0, 1), "differ")


def test_only_ranks_that_must_hold_the_same_are_compared() -> None:
    """Other groups of ranks, other numbers of models, and ranks that tell of no model."""
    pairs = [SharedModel.of_ranks(ranks, parameters(count)) for ranks, count in (((0, 1), 4), ((2, 3), 5))]
    assert judged({0: pairs[:1], 1: pairs[:1], 2: pairs[1:], 3: pairs[1:]}) == []
    two = SharedModel.of_ranks(GROUP, parameters(8), models=2)
    assert judged({0: shared(parameters())[0], 1: [two], 2: []}) == []


def test_each_group_has_a_verdict_of_its_own() -> None:
    held = {rank: [SharedModel.of_ranks((rank // 2 * 2,), parameters(4 + rank % 2))] for rank in range(4)}
    assert [found.ranks for found in judged(held)] == [(0, 1), (2, 3)]


def test_a_rank_without_parameters_is_compared_too() -> None:
    assert "0 parameters with 0 numbers on rank 1" in judged(shared(parameters(), []))[0].sentence


@given(st.integers(0, 2**53 - 1), st.text(max_size=300))
def test_what_is_told_of_a_model_is_small(numbers: int, form: str) -> None:
    models = [SharedModel.of_ranks(range(1000), [(numbers, form, True)])] * 9
    assert len(record_text(told(models))) < 250


@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=6)))
def test_a_record_of_anything_is_refused_or_bounded(anything: Any) -> None:
    """Another rank may write anything."""
    records = {0: told(shared(parameters())[0]), 1: {"models": [anything]}}
    try:
        found = list(ModelCheck().compare_reports(records, complete=True, refused=False))
    except (KeyError, TypeError, ValueError):
        return
    assert all(len(each.sentence) < 1000 for each in found)

"""Models: the sentence about ranks that must hold the same one, and what a record tells of it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from countoff.core.checks.model import Parameter, SharedModel, judge_models
from countoff.core.protocol.records import RECORD_BYTES, record_text
from countoff.core.verdict import Verdict

NAMES = [f"layers.{number}.weight" for number in range(48)]
GROUP = (0, 1, 2, 3)


def parameters(count: int = 48, *, frozen: Sequence[int] = (), form: str = "(4,) torch.float32") -> list[Parameter]:
    return [Parameter(name, form, number not in frozen) for number, name in enumerate(NAMES[:count])]


def judged(held: Mapping[int, Sequence[SharedModel]], judge: int = 0) -> list[Verdict]:
    """What one rank finds, after the records have passed through the store."""
    records = {rank: {"models": [each.to_json() for each in models]} for rank, models in held.items()}
    known = {told["of"]: model for told, model in zip(records[judge]["models"], held[judge], strict=True)}
    return list(judge_models(json.loads(json.dumps(records), object_hook=by_rank), known))


def by_rank(value: dict[str, Any]) -> dict[Any, Any]:
    return {int(key) if key.isdigit() else key: each for key, each in value.items()}


def shared(*held: Sequence[Parameter]) -> dict[int, list[SharedModel]]:
    return {rank: [SharedModel(GROUP, each)] for rank, each in enumerate(held)}


def test_equal_models_are_silent() -> None:
    assert judged(shared(*[parameters(frozen=range(40))] * 4)) == []


@pytest.mark.parametrize(
    ("odd", "sentence", "subject"),
    [
        (
            parameters(frozen=[7]),
            "layers.7.weight needs no gradient on rank 2, and needs one on ranks 0, 1, 3.",
            "gradients",
        ),
        (parameters(46), "the model has 46 parameters on rank 2, 48 parameters on ranks 0, 1, 3.", ""),
        (
            [*parameters(10), *parameters(48, form="(8,) torch.float32")[10:]],
            "the model of rank 2 differs from that of ranks 0, 1, 3, first in one of layers.10.weight to "
            "layers.11.weight.",
            "",
        ),
    ],
    ids=["gradient", "missing", "shape"],
)
def test_the_minority_is_named(odd: list[Parameter], sentence: str, subject: str) -> None:
    whole = parameters()
    (found,) = judged(shared(whole, whole, odd, whole))
    assert found.sentence == f"before the first batch, {sentence}"
    assert (found.ranks, found.standing, found.subject) == ((2,), "out of step", subject)


def test_of_two_ranks_nobody_knows_which_is_right() -> None:
    (found,) = judged(shared(parameters(), parameters(frozen=[0])))
    assert (found.ranks, found.standing) == ((0, 1), "differ")


def test_only_ranks_that_hold_the_same_are_compared() -> None:
    """Two stages of a pipeline, each on two ranks; only the second one's ranks differ, and rank 0 has no part in it."""
    first, second = parameters(10), parameters(20)
    held = {rank: [SharedModel((0, 1), first)] for rank in (0, 1)}
    held |= {2: [SharedModel((2, 3), second)], 3: [SharedModel((2, 3), parameters(20, frozen=[19]))]}
    (found,) = judged(held)
    assert found.sentence == (
        "before the first batch, parameter 20 of 20 needs no gradient on rank 3, and needs one on rank 2."
    )


@given(st.lists(st.booleans(), max_size=3000), st.integers(1, 3))
def test_a_record_fits_into_the_store(flags: list[bool], groups: int) -> None:
    held = [Parameter(f"layer.{number}", "(4,)", flag) for number, flag in enumerate(flags)]
    told = SharedModel(GROUP, held).to_json()
    assert len(record_text({"models": [told] * min(groups, 2)})) <= RECORD_BYTES


def test_a_record_of_any_length_costs_little() -> None:
    """Another rank may write anything."""
    told = SharedModel(GROUP, parameters()).to_json()
    huge = {**told, "needs": {"all": "x" * 10**6, "first": True, "runs": [10**15] * 10**6}, "prints": told["prints"]}
    other = {**told, "prints": ["x" * 10**6] * 10**4}
    (found,) = judge_models({0: {"models": [told]}, **{rank: {"models": [huge]} for rank in range(1, 1000)}}, {})
    assert "parameter 48 of 48, other parameters need a gradient on rank 0 than on" in found.sentence
    (found,) = judge_models({0: {"models": [told]}, 1: {"models": [other]}}, {})
    assert "differs from that of rank 1, first in parameters 1 to 2 of 48" in found.sentence


def test_more_runs_than_a_record_holds_are_compared() -> None:
    """As with adapters of low rank: every other parameter is frozen, and so is one more on a rank."""
    names = [f"layers.{number}.weight" for number in range(200)]
    held = [[Parameter(name, "(4,)", number % 2 == 0) for number, name in enumerate(names)] for _ in range(3)]
    held[1][150] = held[1][150]._replace(needs_gradient=False)
    (found,) = judged(shared(*held))
    assert found.sentence == (
        "before the first batch, after layers.39.weight, other parameters need a gradient on rank 1 than on ranks 0, 2."
    )
    assert (found.ranks, found.subject) == ((1,), "gradients")


def test_ranks_with_other_numbers_of_models_are_not_compared() -> None:
    """Rank 0 alone keeps the best model of the fold before, for example."""
    alone, two = SharedModel(GROUP, parameters()), SharedModel(GROUP, parameters() * 2, models=2)
    assert judged({0: [two], 1: [alone], 2: [alone]}) == []

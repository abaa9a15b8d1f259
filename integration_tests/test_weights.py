"""Weights that must be equal, compared: a change by the last bit on one rank is named; on real ranks."""

from dataclasses import replace

import pytest

from integration_tests import weight_jobs
from integration_tests.composer_jobs import needs_composer
from integration_tests.harness import RankResult
from integration_tests.output import verdict_lines
from integration_tests.weight_jobs import Accumulation, Training


def found_in(results: list[RankResult]) -> list[dict[str, str]]:
    """What was found in each case, on all ranks alike; rank 0 alone prints it, once."""
    found: list[list[dict[str, str]]] = [[each["warned"] for each in result.value] for result in results]
    told = [f"countoff: {kind}: {sentence}" for each in found[0] for kind, sentence in each.items()]
    for result in results:
        printed = [line for line in verdict_lines(result) if line.startswith("countoff")]
        assert printed == ([] if result.rank else told), result
    assert found == [found[0]] * len(found)
    return found[0]


def differs(who: str, parameter: str, steps: int = 4) -> dict[str, str]:
    first = f"the first parameter that differs is {parameter}"
    return {"WeightsDiffer": f"after {steps} optimizer step{'s' if steps > 1 else ''}, {who}; {first}."}


BOTH = "ranks 0 and 1 hold different weights"
ON_TWO = {
    "nothing is changed": (Training(), {}),
    "one bit": (Training(changed="0.weight"), differs(BOTH, "0.weight")),
    "a bias, checked after every step": (
        Training(changed="3.bias", options={"weights_every": 1}),
        differs(BOTH, "3.bias", steps=3),
    ),
    "in the last batch": (
        Training(changed="3.bias", at=weight_jobs.AT_THE_END, options={"weights_every": 20}),
        differs(BOTH, "3.bias", steps=20),
    ),
    "an optimizer that shares its work out": (Training("zero", options={"weights_every": 1}), {}),
    "no check is due": (Training(changed="0.weight", options={"weights_every": 21}), {}),
    "parameters that the wrapper leaves alone": (Training(ignored=("0.weight",)), {}),
    "a hook of the user's own": (Training("local", changed="0.weight"), {}),
    "ranks that train apart on purpose": (Training(changed="0.weight", uncounted=True), {}),
    "shards": (Training("fsdp"), {}),
    "shards, of which one is changed": (Training("fsdp", changed="0.weight"), {}),
    "tensor parallel": (Training("tp"), {}),
    "tensor parallel, in a shard": (Training("tp", changed="up.weight"), {}),
    "tensor parallel, in what is replicated": (
        Training("tp", changed="norm.weight"),
        differs(BOTH, "norm.weight"),
    ),
}
ON_FOUR = {
    "one of four": (
        Training(changed="1.weight", ranks=(2,)),
        differs("rank 2 holds other weights than ranks 0, 1, 3", "1.weight"),
    ),
    "two of four": (
        Training(changed="1.weight", ranks=(0, 3)),
        differs("ranks 0, 3 hold other weights than ranks 1, 2", "1.weight"),
    ),
    "replicas of shards": (Training("hsdp"), {}),
    "replicas of shards, of which one is changed": (
        Training("hsdp", changed="3.weight", ranks=(2,)),
        differs("ranks 0 and 2 hold different weights", "3.weight"),
    ),
}


def drifts(steps: int, unaveraged: int = 1) -> dict[str, str]:
    inside = f"; the last backward pass before step {unaveraged} ran inside no_sync()."
    differ = differs(BOTH, "0.weight", steps)["WeightsDiffer"]
    return {"WeightsDiffer": differ.removesuffix(".").replace("parameter that differs is 0.weight", FIRST) + inside}


FIRST = "parameters that differ are 0.weight, 0.bias, 1.weight, …"
ACCUMULATED = {
    "all but the last are inside": (Accumulation(), {}),
    "all but the first are inside": (Accumulation("first"), drifts(2)),
    "the step at an epoch's end has none outside": (Accumulation("fourth"), drifts(6, unaveraged=5)),
    "two steps have changed nothing": (Accumulation("first", warms_up=2), drifts(4, unaveraged=3)),
    "another optimizer steps first": (Accumulation("first", halves=True), drifts(2)),
    "gradients are averaged by hand": (Accumulation("first", averages="gradients"), {}),
    "weights are averaged by hand": (Accumulation("first", averages="weights"), {}),
    "weights are averaged before the next batch": (Accumulation("first", averages="late"), {}),
    "all are inside, on purpose": (Accumulation(""), {}),
    "a pass that only serves to clip": (Accumulation(passes_more=True), {}),
    "steps that are taken back": (Accumulation(inner=True), {}),
    "on purpose": (Accumulation("first", uncounted=True), {}),
    "a compiled model": (Accumulation(compiled=True), {}),
    "Accelerate, all but the last": (Accumulation(framework="accelerate"), {}),
    "Accelerate, all but the first": (Accumulation("first", framework="accelerate"), drifts(2)),
    "Fabric, all but the last": (Accumulation(framework="fabric"), {}),
    "Fabric, all but the first": (Accumulation("first", framework="fabric"), drifts(2)),
}


def test_weights_that_drift_apart_by_gradients_of_no_sync_are_named(run_ranks):
    """Without `weights_every`; a loop comes to the same bits as without countoff."""
    bare = [replace(job, counted=False) for job, _ in ACCUMULATED.values() if job.framework == "torch"]
    jobs = [*(job for job, _ in ACCUMULATED.values()), *bare]
    results = run_ranks(weight_jobs.accumulate_each, 2, jobs, deadline_seconds=180)
    first, second = drifts(2), drifts(4, unaveraged=3)
    # The first question counts: a rank may ask about the second comparison before a slow one asks about the first.
    found = [first if each == second else each for each in found_in(results)]
    due = {name: first if each == second else each for name, (_, each) in ACCUMULATED.items()}
    assert dict(zip(ACCUMULATED, found, strict=False)) == due
    for result in results:
        for one, two in zip(result.value, result.value[len(ACCUMULATED) :], strict=False):
            assert one["weights"] == two["weights"], jobs


def test_a_weight_that_is_changed_on_one_rank_is_named(run_ranks):
    """On two ranks, the parameter is named where ranks must hold the same, and nothing is said where they need not.

    A healthy job comes to the same bits as without countoff, and draws as many random numbers.
    """
    bare = [replace(training, options=None) for training, _ in ON_TWO.values()]
    results = run_ranks(
        weight_jobs.train_each, 2, [*(training for training, _ in ON_TWO.values()), *bare], deadline_seconds=180
    )
    found = found_in(results)
    assert dict(zip(ON_TWO, found, strict=False)) == {name: due for name, (_, due) in ON_TWO.items()}
    for result in results:
        counted, plain = result.value[: len(ON_TWO)], result.value[len(ON_TWO) :]
        for name, one, two in zip(ON_TWO, counted, plain, strict=True):
            assert (one["weights"], one["random"]) == (two["weights"], two["random"]), name


def test_the_last_comparison_of_a_fit_is_not_lost(run_ranks):
    """Whichever rank comes last to it: the other one has ended its fit by then, and stays to answer."""
    last = Training(changed="3.bias", at=weight_jobs.AT_THE_END, options={"weights_every": 20})
    trainings = [replace(last, late=late) for late in (0, 1)] * 5
    results = run_ranks(weight_jobs.train_each, 2, trainings, deadline_seconds=180)
    assert found_in(results) == [differs(BOTH, "3.bias", steps=20)] * len(trainings)


def test_the_ranks_that_hold_other_weights_are_named(run_ranks):
    """On four ranks the minority is named, among those that hold the same shard only."""
    results = run_ranks(weight_jobs.train_each, 4, [training for training, _ in ON_FOUR.values()], deadline_seconds=180)
    assert dict(zip(ON_FOUR, found_in(results), strict=True)) == {name: due for name, (_, due) in ON_FOUR.items()}


def test_weights_of_an_unknown_model_cannot_be_compared(run_ranks):
    """A plain loop must say which model it trains; a single rank has nothing to compare."""
    with_model, without = run_ranks(weight_jobs.without_model, 2), run_ranks(weight_jobs.without_model, 1)
    line = "weights_every needs the model whose weights are compared: Countoff(model=…)"
    assert [result.value for result in (*with_model, *without)] == [line, line, None]


def test_fabric_compares_the_models_that_it_has_set_up(run_ranks):
    """A changed weight is named; a healthy script comes to the same bits as without countoff."""
    results = run_ranks(weight_jobs.fit_fabric, 2, [True, False, None])
    assert found_in(results) == [differs(BOTH, "0.weight"), {}, {}]
    for result in results:
        _, counted, bare = result.value
        assert counted["weights"] == bare["weights"]


@pytest.mark.parametrize(
    "kinds",
    [["lightning"], ["accelerate", "transformers"], pytest.param(["composer"], marks=needs_composer)],
    ids=lambda kinds: kinds[0],
)
def test_healthy_jobs_say_nothing_and_train_to_the_same_bits(run_ranks, kinds):
    """With a check after every step, in each framework. That each would find a difference is in the fault matrix."""
    for result in run_ranks(weight_jobs.fit_frameworks, 2, kinds, deadline_seconds=120):
        assert result.value == [True] * len(kinds), result
        assert [line for line in verdict_lines(result) if line.startswith("countoff")] == []

"""How much evaluations have read, as countoff tells it, against what the ranks have read."""

from collections.abc import Mapping
from typing import Any

import pytest

from integration_tests import eval_totals_jobs as jobs
from integration_tests.composer_jobs import needs_composer
from integration_tests.eval_totals_jobs import Case
from integration_tests.harness import RankResult
from integration_tests.output import verdict_lines

RANKS = 4
LOOPS: dict[str, tuple[Case, list[list[int]] | None]] = {
    "plain, filled up": (Case(sampler="distributed"), [[10, 2, 0]]),
    "plain, sampler drops": (Case(sampler="distributed, drops"), [[8, 0, 2]]),
    "plain, loader drops": (Case(sampler="distributed", drop_last=True), [[8, 0, 2]]),
    "plain, two": (Case((10, 16), sampler="distributed"), [[10, 2, 0], [16, 0, 0]]),
    "plain, left": (Case(sampler="distributed", leaves=True), None),
    "plain, each rank reads all": (Case(sampler="whole"), None),
    "plain, drawn with replacement": (Case(sampler="weighted"), None),
    "plain, shares of other ranks": (Case(sampler="half"), None),
    "plain, stream": (Case(stream=True), None),
    "accelerate, filled up": (Case(), [[10, 6, 0]]),
    "accelerate, drops": (Case(drop_last=True), [[8, 0, 2]]),
    "accelerate, not filled up": (Case((16,), options={"even_batches": False}), [[16, 0, 0]]),
    "accelerate, two": (Case((10, 16)), [[10, 6, 0], [16, 0, 0]]),
    "accelerate, left": (Case(leaves=True), None),
    "accelerate, sharded twice": (Case(sampler="distributed"), None),
}


def assert_told(results: list[RankResult], cases: Mapping[str, tuple[Case, list[list[int]] | None]], name: str) -> None:
    """Rank 0 tells what was read, or nothing where that is not proven, and no rank prints a word."""
    for place, (label, (case, expected)) in enumerate(cases.items()):
        told, read, *_ = results[0].value[place]
        if expected is None:
            assert told == {}, label
            continue
        several = len(case.sizes) > 1
        assert told == {name.format(index) if several else "": each for index, each in enumerate(expected)}, label
        assert read == expected, label
    assert [line for result in results for line in verdict_lines(result)] == []


@pytest.mark.ranks(RANKS)
def test_loops_tell_what_their_evaluations_read(run_ranks: Any, ranks: int) -> None:
    """The samples read, read again and left out are those that the ranks really read, and nothing else is told."""
    pytest.importorskip("accelerate")
    cases = [(label.split(",")[0], case) for label, (case, _) in LOOPS.items()]
    assert_told(run_ranks(jobs.loops, ranks, cases, deadline_seconds=120), LOOPS, "set{}")


@pytest.mark.ranks(RANKS)
def test_lightning_logs_what_its_validations_read(run_ranks: Any, ranks: int) -> None:
    """Lightning's DistributedSampler fills up a validation; a limit is in the numbers."""
    pytest.importorskip("lightning")
    cases = {
        "filled up": (Case(), [[10, 2, 0]]),
        "drops": (Case(drop_last=True), [[8, 0, 2]]),
        "two": (Case((10, 16)), [[10, 2, 0], [16, 0, 0]]),
        "limited": (Case(options={"limit_val_batches": 1}), [[8, 0, 2]]),
        "not sharded": (Case(options={"use_distributed_sampler": False}), None),
    }
    results = run_ranks(jobs.with_lightning, ranks, [case for case, _ in cases.values()], deadline_seconds=120)
    assert_told(results, cases, "dataloader_idx_{}")


@needs_composer
@pytest.mark.ranks(RANKS)
def test_composer_logs_what_its_evaluators_read(run_ranks: Any, ranks: int) -> None:
    """Composer's evaluators are told by their labels; a limit is in the numbers."""
    cases = {
        "filled up": (Case(sampler="distributed"), [[10, 2, 0]]),
        "two": (Case((10, 16), sampler="distributed"), [[10, 2, 0], [16, 0, 0]]),
        "limited": (Case(sampler="distributed", options={"eval_subset_num_batches": 1}), [[8, 0, 2]]),
        "shares of other ranks": (Case(sampler="half"), None),
    }
    results = run_ranks(jobs.with_composer, ranks, [case for case, _ in cases.values()], deadline_seconds=120)
    assert_told(results, cases, "set{}")


@pytest.mark.ranks(RANKS)
def test_the_trainers_history_has_what_its_evaluations_read(run_ranks: Any, ranks: int) -> None:
    """The Trainer's evaluations are filled up by Accelerate; several have the names of `eval_dataset`."""
    pytest.importorskip("transformers")
    cases = {"filled up": (Case(), [[10, 6, 0]]), "two": (Case((10, 16)), [[10, 6, 0], [16, 0, 0]])}
    env = {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    results = run_ranks(jobs.with_trainer, ranks, [case for case, _ in cases.values()], env=env, deadline_seconds=120)
    assert_told(results, cases, "set{}")

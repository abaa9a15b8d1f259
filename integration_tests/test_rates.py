"""Learning rates that differ between ranks are found in epochs of few batches, in every framework, on real ranks."""

import re

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from integration_tests import rate_jobs
from integration_tests.composer_jobs import needs_composer
from integration_tests.output import assert_named, whole_message

WARNS = {"COUNTOFF_LEVELS": "LearningRateMismatch=warn"}
"""So that one launch has many jobs."""
SAID = {
    "another length": "at optimizer step 2 (batch 2 of train epoch 0), rank ",
    "another length, told": "before the first batch, OneCycleLR is made for 60 steps on rank 0, 68 steps on rank 1.",
    "another length, restored": "before the first batch, CosineAnnealingLR is made for 60 steps on rank 0, 68 steps",
    "twice the rate": "at optimizer step 1 (batch 1 of train epoch 0), rank 1 trains with 2 times the learning rate of",
    "twice the rate, told": "before the first batch, rank 1 trains with 2 times the learning rate of rank 0 (",
    "stepped on one rank": "at optimizer step 2 (batch 2 of train epoch 0), rank ",
    "the same warm-up": "after 20 batches of train epoch 0, rank ",
    "Accelerate": "at optimizer step 2 (batch 2 of train epoch 0), rank ",
    "Accelerate, told": "before the first batch, OneCycleLR is made for 120 steps on rank 0, 128 steps on rank 1.",
    "the Trainer": "before the first batch, OneCycleLR is made for 60 steps on rank 0, 68 steps on rank 1.",
    "Lightning": "before the first batch, OneCycleLR is made for 60 steps on rank 0, 68 steps on rank 1.",
    "Lightning, by its own metric": "at the start of train epoch 2, rank ",  # which one finds it first is open
    "another length, per batch": "at optimizer step 2 (batch 2 of train epoch 0), rank ",
}


def of_rates(output: str) -> list[str]:
    """What rank 0 says of learning rates."""
    begins = "[rank 0] countoff: LearningRateMismatch: "
    return [line.removeprefix(begins) for line in output.splitlines() if line.startswith(begins)]


@pytest.mark.parametrize("framework", ["all but Composer", pytest.param("Composer", marks=needs_composer)])
def test_other_rates_are_found_in_short_epochs(run_ranks, framework):
    """Each job whose ranks differ gets one message, in time; one whose ranks train with equal rates gets none."""
    results = run_ranks(rate_jobs.run_all, 2, framework, env=WARNS, deadline_seconds=240)
    jobs = {part.partition("\n")[0]: part for part in results[0].output.split("--- job ")[1:]}
    assert len(jobs) == len(rate_jobs.COMPOSER if framework == "Composer" else rate_jobs.TABLE)
    for name, output in jobs.items():
        lines = of_rates(output)
        assert bool(lines) == (name in SAID), output
        assert not lines or lines[0].startswith(SAID[name]), output
    assert framework == "Composer" or "self.log(…, sync_dist=True)" in jobs["Lightning, by its own metric"]


def test_the_rank_alone_is_named_with_all_rates(run_ranks):
    """Of four ranks, the one with another schedule is named, and the table has the rates of all."""
    results = run_ranks(rate_jobs.plain_on_four, 4, expect=None)
    assert_named(results, "LearningRateMismatch", [1], "at optimizer step 2 (batch 2 of train epoch 0)")
    text = whole_message(results)
    assert re.search(r"rank  where +batches  fetched  steps  rate +state", text), text
    rates = dict(re.findall(r"(\d) +train epoch 0 +\d+ +\d+ +\d+ +(\S+)  ", text))
    assert rates["0"] == rates["2"] == rates["3"] != rates["1"], text


def test_a_schedule_of_another_length_is_refused_before_the_first_batch(run_ranks):
    """Where countoff is told the scheduler, its lengths are compared at the roll call."""
    results = run_ranks(rate_jobs.told_on_four, 4, expect=None)
    sentence = "before the first batch, OneCycleLR is made for 38 steps on rank 1, 30 steps on ranks 0, 2, 3."
    assert_named(results, "LearningRateMismatch", [1], sentence, "all-reduce it before you make the scheduler")

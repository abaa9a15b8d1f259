"""Runs that end by themselves with fewer steps than planned, in every framework, on real ranks.

Each of them is named once, by rank 0. A run that ends as it should, or that somebody has ended, is silent.
"""

from importlib.util import find_spec

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytest.importorskip("torchdata")

from integration_tests import short_jobs
from integration_tests.composer_jobs import said
from integration_tests.nightly import nightly_but

EMPTY = "train epoch 1 gave 0 of 10 batches"
FEW = "train epoch 1 gave 5 of 10 batches"
DUE = {
    "Lightning": {
        "read once": f"the run ended after 10 of 20 steps: {EMPTY}.",
        "fewer in the second epoch": f"the run ended after 15 of 20 steps: {FEW}.",
        "read once, accumulated": f"the run ended after 3 of 6 steps: {EMPTY}.",
        "read once, fewer steps than max_steps": f"the run ended after 10 of 15 steps: {EMPTY}.",
        "nothing at all": (
            "the run ended after 0 of 20 steps: train epoch 0 gave 0 of 10 batches, and 1 later epoch gave too few as "
            "well."
        ),
        "restored at the end of an epoch": f"the run ended after 20 of 30 steps: {EMPTY} after the resume.",
    },
    "transformers": {
        "read once": f"the run ended after 10 of 20 steps: {EMPTY}.",
        "fewer in the second epoch": f"the run ended after 15 of 20 steps: {FEW}.",
        "nothing at all": "the run ended after 0 of 20 steps: train epoch 0 gave 0 of 10 batches.",
        "read once, max_steps": f"the run ended after 10 of 15 steps: {EMPTY}.",
        "nothing after a resume": f"the run ended after 10 of 20 steps: {EMPTY} after the resume.",
    },
    "Composer": {
        "read once": f"the run ended after 10 of 20 steps: {EMPTY}.",
        "fewer in the second epoch": f"the run ended after 15 of 20 steps: {FEW}.",
    },
    "loops": {
        "read once": f"the run ended after 10 of 20 steps: {EMPTY}.",
        "restored at the end of an epoch": f"the run ended after 10 of 20 steps: {EMPTY} after the resume.",
        "Accelerate, read once": f"the run ended after 10 of 20 steps: {EMPTY}.",
        "Fabric, read once": f"the run ended after 10 of 20 steps: {EMPTY}.",
    },
}


@pytest.mark.parametrize("framework", nightly_but(("Lightning", "loops"), DUE))
def test_a_run_that_ends_too_early_is_named(run_ranks, tmp_path, framework):
    if framework == "Composer" and find_spec("composer") is None:
        pytest.skip("Composer needs torch 2.7.0")
    results = run_ranks(short_jobs.run_all, 2, framework, str(tmp_path), deadline_seconds=200)
    jobs = short_jobs.ALL[framework]
    found = dict(zip(jobs, (_sentences(text) for text in said(results[0])), strict=True))
    assert found == {name: [sentence] if (sentence := DUE[framework].get(name)) else [] for name in jobs}, results[0]
    assert "ShortRun" not in results[1].output, results[1]


def test_one_process_alone_is_told_too(run_ranks):
    [result] = run_ranks(short_jobs.run_alone, 1)
    assert [_sentences(text) for text in said(result)] == [
        ["the run ended after 20 of 40 steps: train epoch 1 gave 0 of 20 batches."]
    ]


def _sentences(text: str) -> list[str]:
    lines = [line.partition("countoff: ShortRun: ") for line in text.splitlines()]
    return [sentence for _, kind, sentence in lines if kind]

"""Loops that attach nothing, and are found by watching what Accelerate has prepared, on real ranks."""

import pytest

pytest.importorskip("accelerate")

from integration_tests import found_loops
from integration_tests.composer_jobs import said

FOUND = ["2 epochs of 16 steps, found"]
BEGUN = {
    "as it is": FOUND,
    "attached": ["2 epochs of 16 steps"],
    "asked to make ranks even": FOUND,
    "of another version of Accelerate": [],
    "inside of LocalSGD": [],
    "read by a thread": [],
    "of two learning rates": FOUND,
    "over two loaders": ["4 epochs of 40 steps, found", "of [8] and [12] batches"],
    "over a stream that knows its length": [*FOUND, "asked 0 times more"],
}
SAID = {
    "asked to make ranks even": (
        "countoff: this loop was found by watching, so its ranks are not made even: that needs attach() in the code."
    ),
    "of two learning rates": "Found by watching, so it ends nothing; with attach() in the code it would end the job.",
}


def test_the_loader_that_trains_is_found_by_its_use(run_ranks):
    """What the code attaches counts alone, what cannot be told is left alone, and what is found ends nothing."""
    results = run_ranks(found_loops.run_all, 2, deadline_seconds=120)
    assert [result.value for result in results] == [BEGUN, BEGUN]
    told = dict(zip(found_loops.JOBS, said(results[0]), strict=True))
    assert {name for name, text in told.items() if text} == SAID.keys(), results[0]
    for name, text in SAID.items():
        assert text in told[name], told[name]
    assert not any(said(results[1])), results[1]
    assert results[0].output.count("batches before prepare()") == 1, "only what is attached logs its length"
    not_observed = "countoff: this loop over Accelerate's loaders is not observed: AttributeError: no gradient_state"
    assert all(result.output.count(not_observed) == 1 for result in results)

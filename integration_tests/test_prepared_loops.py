"""Loops over Accelerate's loaders that attach nothing, on real ranks."""

import pytest

pytest.importorskip("accelerate")

from integration_tests import prepared_loops
from integration_tests.composer_jobs import said

COUNTED = ["2 epochs of 16 steps, unattached"]
BEGUN = {
    "as it is": COUNTED,
    "attached": ["2 epochs of 16 steps"],
    "asked to make ranks even": COUNTED,
    "of another version of Accelerate": [],
    "inside of LocalSGD": [],
    "read by a thread": [],
    "of a model that is not prepared": [],
    "over two loaders": ["4 epochs of 40 steps, unattached", "of [8] and [12] batches"],
    "over a stream that knows its length": [*COUNTED, "asked 0 times more"],
}
NOT_EVEN = "countoff: the ranks of this loop are not made even: that needs attach() in the code."
NOT_OBSERVED = "countoff: this loop over Accelerate's loaders is not observed: AttributeError: no gradient_state"


def test_the_epochs_are_counted_in_which_a_prepared_optimizer_steps(run_ranks):
    """What the code attaches counts alone, and what cannot be told is left alone."""
    results = run_ranks(prepared_loops.run_all, 2, deadline_seconds=120)
    assert [result.value for result in results] == [BEGUN, BEGUN]
    assert results[0].output.count("batches before prepare()") == 1, "only what is attached logs its length"
    told = dict(zip(prepared_loops.JOBS, said(results[0]), strict=True))
    assert {name: text for name, text in told.items() if text}.keys() == {"asked to make ranks even"}, results[0]
    assert NOT_EVEN in told["asked to make ranks even"]
    assert not any(said(results[1])), results[1]
    assert all(result.output.count(NOT_OBSERVED) == 1 for result in results)


def test_ranks_of_two_learning_rates_are_ended(run_ranks):
    """What the objects show is a proof."""
    for result in run_ranks(prepared_loops.of_two_rates, 2, expect=None):
        assert result.exit_code, result
        assert "LearningRateMismatch: " in result.output, result

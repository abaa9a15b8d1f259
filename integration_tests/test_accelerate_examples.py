"""The examples of Accelerate and the Trainer, each names the fault, and trains once corrected."""

from pathlib import Path

import pytest

pytestmark = [pytest.mark.torchrun, pytest.mark.nightly]
EXAMPLES = Path(__file__).parents[1] / "examples"
CPU = {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
FOUND = {
    "accelerate_digits.py": "UnevenBatches: rank 1 ran out of data after 23 batches of train epoch 0",
    "transformers_digits.py": "PlanMismatch: before the first batch, batches_per_epoch is 24 on rank 0, 23 on rank 1",
}


@pytest.mark.parametrize("example", FOUND)
def test_the_rank_with_a_batch_less_is_named(run_torchrun, example):
    """Both ranks print the verdict, and torchrun gives it as the root cause."""
    run = run_torchrun(EXAMPLES / example, 2, env=CPU)
    assert run.exit_code == 1, run.output
    for rank in (0, 1):
        assert f"[rank {rank}] countoff: {FOUND[example]}" in run.output, run.output
    assert FOUND[example] in run.output.partition("Root Cause (first observed failure)")[2], run.output


@pytest.mark.parametrize("example", FOUND)
def test_the_corrected_job_trains_to_the_end(run_torchrun, example):
    """With the fault corrected the example trains well and countoff prints nothing."""
    run = run_torchrun(EXAMPLES / example, 2, "--fixed", env=CPU)
    assert run.exit_code == 0, run.output
    assert "countoff:" not in run.output, run.output
    accuracy = float(run.output.partition("of 24 batches on each rank; accuracy on held-out digits ")[2].split()[0])
    assert accuracy > 0.85, run.output

"""The examples of the documentation, as a reader starts them: they name the short rank, or train to the end."""

import re
from pathlib import Path

import pytest

from integration_tests.torchrun import CompletedRun

EXAMPLES = Path(__file__).parents[1] / "examples"


def assert_short_rank_is_named(run: CompletedRun, batches: int) -> None:
    """Both ranks print the verdict with the short rank's count, and torchrun gives it as the cause."""
    assert run.exit_code == 1, run.output
    short = f"rank 1 ran out of data after {batches} batches of train epoch 0"
    for rank in (0, 1):
        verdicts = [line for line in run.output.splitlines() if f"[rank {rank}] countoff: UnevenBatches: " in line]
        assert [short in line for line in verdicts] == [True], run.output
    root_cause = run.output.partition("Root Cause (first observed failure)")[2]
    assert "UnevenBatches: " in root_cause, run.output
    assert short in root_cause, run.output


@pytest.mark.torchrun
@pytest.mark.nightly
@pytest.mark.parametrize("example", ["lightning_digits.py", "torch_digits.py"])
def test_the_rank_with_a_file_less_is_named(run_torchrun, example):
    """Both ranks name the short one, and torchrun gives the verdict as the root cause."""
    run = run_torchrun(EXAMPLES / example, 2, deadline_seconds=180)
    assert_short_rank_is_named(run, 23)


@pytest.mark.torchrun
def test_an_own_adapter_names_the_short_rank(run_torchrun):
    """The same holds for a hand-written adapter, under real torchrun."""
    run = run_torchrun(EXAMPLES / "own_trainer.py", 2, deadline_seconds=180)
    assert_short_rank_is_named(run, 4)


@pytest.mark.torchrun
@pytest.mark.nightly
def test_the_corrected_job_trains_to_the_end(run_torchrun):
    """With the fault corrected the example trains well and countoff prints nothing."""
    run = run_torchrun(EXAMPLES / "torch_digits.py", 2, "--fixed", deadline_seconds=180)
    assert run.exit_code == 0, run.output
    assert "countoff:" not in run.output, run.output
    accuracy = float(run.output.partition("of 24 batches on each rank; accuracy on held-out digits ")[2].split()[0])
    assert accuracy > 0.9, run.output


@pytest.mark.nightly
@pytest.mark.torchrun
def test_uneven_ranks_train_to_the_end(run_torchrun):
    """All ranks take the same number of batches in every epoch, end with one accuracy, and rank 0 says so once."""
    run = run_torchrun(EXAMPLES / "uneven_digits.py", 2, "--uneven-train", "stop", deadline_seconds=180)
    assert run.exit_code == 0, run.output
    ends = re.findall(r"rank ([01]): batches per epoch \[(.*)\], accuracy on held-out digits ([\d.]+)", run.output)
    (_, taken, accuracy), other = sorted(ends)
    assert other == ("1", taken, accuracy)
    assert taken == ", ".join(["23"] * 10)
    assert float(accuracy) > 0.9, run.output
    said = "countoff: Truncated: train epoch 0 stopped on every rank after 23 batches, where rank 1 ran out"
    assert run.output.count("countoff: ") == run.output.count(said) == 1, run.output


@pytest.mark.nightly
@pytest.mark.torchrun
def test_rollouts_of_unequal_length_are_silent_and_unequal_updates_are_named(run_torchrun):
    run = run_torchrun(EXAMPLES / "rollouts_digits.py", 2)
    assert run.exit_code == 0, run.output
    assert "countoff:" not in run.output, run.output
    assert float(run.output.partition("accuracy on held-out digits ")[2].split()[0]) > 0.8, run.output
    run = run_torchrun(EXAMPLES / "rollouts_digits.py", 2, "--keep-all")
    assert run.exit_code == 1, run.output
    said = "rank 1 ran out of data after 8 batches of train epoch 20; rank 0 has batch 9."
    assert run.output.count(f"[rank 0] countoff: UnevenBatches: {said}") == 1, run.output

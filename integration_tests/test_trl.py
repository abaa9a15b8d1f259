"""TRL's trainers are the Trainer's subclasses: one of them, for real."""

import pytest

pytest.importorskip("trl")

from integration_tests import trl_jobs as jobs
from integration_tests.output import verdict_lines

CPU = {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}


@pytest.mark.nightly
def test_supervised_fine_tuning_is_left_alone_to_the_bit(run_ranks):
    """TRL's SFTTrainer prints nothing and ends with the weights it has without countoff."""
    for result in run_ranks(jobs.with_and_without, 2, [22, 22], env=CPU, deadline_seconds=200):
        plain, counted = result.value
        assert verdict_lines(result) == [], result
        assert plain["weights"] == counted["weights"]
        assert counted["counted"] == counted["steps"] == plain["steps"]


def test_supervised_fine_tuning_on_uneven_streams_is_named(run_ranks):
    """The short rank of TRL's SFTTrainer is named."""
    for result in run_ranks(jobs.fine_tune, 2, [32, 24], 20, True, expect=None, env=CPU, deadline_seconds=200):
        text = "\n".join(verdict_lines(result))
        assert "countoff: UnevenBatches: " in text, result
        assert "rank 1 ran out of data after" in text, result
        assert result.exit_code != 0


def test_a_batch_that_is_generated_is_not_taken_for_that_of_a_step(run_ranks):
    """GRPO's loader yields the prompts of several steps at once: no total is computed from their number."""
    for result in run_ranks(jobs.reinforce, 2, 4, 2, env=CPU, deadline_seconds=300):
        assert verdict_lines(result) == [], result
        assert result.value["countoff/dp_degree"] == 2
        assert result.value.get("countoff/global_batch_size", 8) == 8  # 2 samples × 2 accumulated × 2 ranks

"""A plain PyTorch loop with one line added, on real ranks."""

import re

import pytest

from integration_tests import loops
from integration_tests.in_turn import in_turn, said_in_turn
from integration_tests.output import assert_named, verdict_lines


def test_rank_0_may_host_the_store(run_ranks):
    """The short rank is named though it hosts the store."""
    results = run_ranks(loops.uneven, 2, [4, 5], expect=None, hosted_by="rank0", finalise=True)
    words = "rank 0 ran out of data after 4 batches of train epoch 0"
    assert_named(results, "UnevenBatches", [0], words, ("has batch 5", "ran out of data after 5 batches"))


def test_a_job_without_a_tcp_store_is_served_by_one_of_ours(run_ranks, tmp_path):
    """countoff makes its own store where the job has no TCPStore."""
    results = run_ranks(loops.over_file_store, 2, str(tmp_path / "store"), [5, 4], expect=None)
    assert_named(results, "UnevenBatches", [1], "rank 1 ran out of data after 4 batches")


def test_a_skipped_step_is_found_at_the_epochs_end(run_ranks):
    """A skipped optimizer step is found at the end of the epoch."""
    for result in run_ranks(loops.skip_a_step, 2, 3, 64, expect=None):
        text = "\n".join(verdict_lines(result))
        assert "countoff: StepMismatch: after 10 batches of train epoch 0" in text, result
        assert "10 optimizer steps" in text
        assert "9 optimizer steps" in text
        assert result.exit_code != 0
        assert "rank 0 stepped after batch 4, and rank 1 did not." in text, result


@pytest.mark.alone
def test_a_skipped_step_is_found_within_the_epoch(run_ranks):
    """A skipped optimizer step is found at the next tick, or at the end of the epoch if a busy store answers later."""
    for result in run_ranks(loops.skip_a_step, 2, 3, 2, expect=None):
        text = "\n".join(verdict_lines(result))
        assert re.search("countoff: StepMismatch: at batch (6|8|10) of train epoch 0", text), result
        assert "rank 0 stepped after batch 4, and rank 1 did not." in text, result
        assert result.exit_code != 0


def test_a_learning_rate_of_its_own_is_found(run_ranks):
    """A learning rate that differs by rank is found at the first optimizer step."""
    for result in run_ranks(loops.own_learning_rate, 2, expect=None):
        text = "\n".join(verdict_lines(result))
        assert "countoff: LearningRateMismatch: at optimizer step 1 (batch 1 of train epoch 0), rank " in text, result
        assert "rank 1 trains with 2 times the learning rate of rank 0 (0.2, not 0.1)." in text, result
        assert "do:  give every rank the same lr" in text, result


def test_an_evaluation_one_step_early_is_named(run_ranks):
    """A rank that evaluates one batch early is named."""
    results = run_ranks(loops.evaluates_early, 2, expect=None)
    assert_named(
        results, "UnevenBatches", [0, 1], "rank 0 began validation after 4 train batches; rank 1 has begun batch 5"
    )


def test_a_rank_that_trains_after_another_has_ended_is_found(run_ranks):
    """A rank that trains an epoch more is told that the other has ended the fit."""
    results = run_ranks(loops.trains_one_epoch_more, 2, expect=None, finalise=True)
    assert results[1].exit_code != 0
    assert "rank 0 ended the fit" in results[1].output


@pytest.mark.ranks(2, nightly=(4,))
def test_a_healthy_loop_trains_to_the_same_bits(run_ranks, ranks):
    """A healthy loop prints nothing, ends with the weights it has without countoff, and is counted right."""
    results = run_ranks(loops.healthy_without_and_with, ranks)
    plain, counted = zip(*(result.value for result in results), strict=True)
    assert {value["weights"] for value in counted} == {value["weights"] for value in plain}
    assert [line for result in results for line in verdict_lines(result)] == []
    batches = 20 // ranks
    breaks_at = min(5, batches)
    assert [value["steps"] for value in counted] == [2 * batches + breaks_at + 1] * ranks
    assert counted[0]["progress"]["countoff/batches_per_epoch"] == batches


def test_what_ranks_may_do_alone_is_healthy(run_ranks):
    """Uneven batches inside `uncounted()` and torch's Join are no fault.

    With `uneven_eval="off"`, rank 0 may evaluate alone.
    """
    jobs = {"uncounted": (loops.joined, [5, 4]), "evaluates": (loops.evaluates_on_rank_0,)}
    for result in run_ranks(in_turn, 2, jobs):
        assert said_in_turn(result) == {"uncounted": [], "evaluates": []}


@pytest.mark.nightly
@pytest.mark.parametrize(("mode", "warnings"), [("warn", 1), ("allow", 0)])
def test_an_uneven_evaluation_without_collectives_is_allowed(run_ranks, mode, warnings):
    """An uneven evaluation without collectives gets one warning or none."""
    results = run_ranks(loops.uneven_eval, 2, [3, 2], mode)
    lines = [line for result in results for line in verdict_lines(result)]
    assert sum("countoff: UnevenBatches: " in line for line in lines) == warnings

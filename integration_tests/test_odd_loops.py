"""What is counted of an odd loop ends a job only where it is proved, on real ranks."""

import pytest

from integration_tests import odd_loops
from integration_tests.output import assert_named, verdict_lines


def said(results):
    return [line for result in results for line in verdict_lines(result)]


@pytest.mark.parametrize("collectives", [True, False])
def test_a_verdict_ends_a_job_whose_loader_is_read_by_a_thread(run_ranks, collectives):
    """The main thread waits for that thread for ever; the process ends all the same, with countoff's exit code."""
    results = run_ranks(odd_loops.prefetches, 2, [10, 9], collectives, expect=None, deadline_seconds=60)
    for result in results:
        assert "rank 1 ran out of data after 9 batches of train epoch 0" in result.output, result
    assert {result.exit_code for result in results} <= {1, 87}
    assert collectives or [result.exit_code for result in results] == [87, 87]


@pytest.mark.parametrize(
    ("batches", "mode", "warnings"), [([3, 3], "warn", 0), ([3, 2], "warn", 1), ([3, 2], "allow", 0)]
)
def test_an_evaluation_beside_the_training_is_compared_by_itself(run_ranks, batches, mode, warnings):
    """It has no place among the train epochs, and its batches are compared with its own on other ranks."""
    results = run_ranks(odd_loops.evaluates_beside, 2, batches, mode)
    lines = said(results)
    assert sum("countoff: UnevenBatches: rank 1 ran out of data after 2" in line for line in lines) == warnings
    assert warnings or lines == []
    assert [result.value for result in results] == [3 * each for each in batches]


def test_a_loop_that_goes_on_with_another_loader_is_counted(run_ranks):
    results = run_ranks(odd_loops.makes_its_loader_again, 2, 5)
    assert said(results) == []
    assert [result.value for result in results] == [25, 25]


@pytest.mark.parametrize("batches", [[6, 9], [9, 9]])
def test_a_loop_that_leaves_uneven_loaders_at_the_same_batch_hears_nothing(run_ranks, batches):
    results = run_ranks(odd_loops.slices_parts, 2, batches, 5)
    assert said(results) == []
    assert [result.value for result in results] == [10, 10]


def test_a_loop_over_uneven_loaders_is_told_when_a_rank_gets_there(run_ranks):
    results = run_ranks(odd_loops.slices_parts, 2, [6, 9], None, expect=None)
    short = "rank 0 ran out of data after 6 batches of train epoch 0"
    assert_named(results, "UnevenBatches", [0], short, ("rank 1 has batch 7", "rank 1 ran out of data after 9 batches"))


def test_an_exception_of_the_loader_that_every_rank_catches_is_no_failure(run_ranks):
    results = run_ranks(odd_loops.skips_a_torn_batch, 2, [0, 1], True)
    assert said(results) == []
    assert [result.value for result in results] == [18, 18]


def test_a_batch_that_one_rank_skips_is_named_as_missing(run_ranks):
    """The cause is the missing batch. The exception was caught, and is none."""
    results = run_ranks(odd_loops.skips_a_torn_batch, 2, [1], True, expect=None)
    missing = "rank 1 ran out of data after 9 batches of train epoch 0"
    assert_named(results, "UnevenBatches", [1], missing, ("rank 0 has batch 10", "rank 0 ran out of data after 10"))


def test_an_exception_of_the_loader_that_leaves_the_program_is_named(run_ranks):
    results = run_ranks(odd_loops.skips_a_torn_batch, 2, [1], False, expect=None)
    assert_named(results, "LostRank", [1], "rank 1 raised ValueError: torn record at odd_loops.py:")

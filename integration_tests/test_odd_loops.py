"""What is counted of an odd loop ends a job only where it is proved, on real ranks."""

import pytest

from integration_tests import odd_loops
from integration_tests.in_turn import in_turn, said_in_turn
from integration_tests.output import assert_named


@pytest.mark.parametrize("collectives", [True, False])
def test_a_verdict_ends_a_job_whose_loader_is_read_by_a_thread(run_ranks, collectives):
    """The main thread waits for that thread for ever; the process ends all the same, with countoff's exit code."""
    results = run_ranks(odd_loops.prefetches, 2, [10, 9], collectives, expect=None, deadline_seconds=60)
    for result in results:
        assert "rank 1 ran out of data after 9 batches of train epoch 0" in result.output, result
    assert {result.exit_code for result in results} <= {1, 87}
    assert collectives or [result.exit_code for result in results] == [87, 87]


HEALTHY = {
    "each epoch has a loader of its own": (odd_loops.makes_its_loader_again, 5),
    "uneven loaders, left at the same batch": (odd_loops.slices_parts, [6, 9], 5),
    "even loaders, left at the same batch": (odd_loops.slices_parts, [9, 9], 5),
    "every rank catches its loader's exception": (odd_loops.skips_a_torn_batch, [0, 1], True),
    "an even evaluation beside the training": (odd_loops.evaluates_beside, [3, 3], "warn"),
    "an uneven one, allowed": (odd_loops.evaluates_beside, [3, 2], "allow"),
    "an uneven one": (odd_loops.evaluates_beside, [3, 2], "warn"),
}
COUNTED = [[25, 25], [10, 10], [10, 10], [18, 18], [9, 9], [9, 6], [9, 6]]
"""The steps of each of them on both ranks, or the batches of its evaluations."""


def test_odd_loops_that_are_healthy_are_counted_and_hear_nothing(run_ranks):
    """An uneven evaluation alone is warned of, once.

    One beside the training has no place among the train epochs, and is compared with its own on other ranks.
    """
    results = run_ranks(in_turn, 2, HEALTHY, deadline_seconds=120)
    counted = {name: [result.value[name] for result in results] for name in HEALTHY}
    assert counted == dict(zip(HEALTHY, COUNTED, strict=True))
    first, second = map(said_in_turn, results)
    uneven = first.pop("an uneven one") + second.pop("an uneven one")
    assert sum("countoff: UnevenBatches: rank 1 ran out of data after 2" in line for line in uneven) == 1, uneven
    assert [*first.values(), *second.values()] == [[]] * (2 * len(HEALTHY) - 2), results


def test_a_loop_over_uneven_loaders_is_told_when_a_rank_gets_there(run_ranks):
    results = run_ranks(odd_loops.slices_parts, 2, [6, 9], None, expect=None)
    short = "rank 0 ran out of data after 6 batches of train epoch 0"
    assert_named(results, "UnevenBatches", [0], short, ("rank 1 has batch 7", "rank 1 ran out of data after 9 batches"))


def test_a_batch_that_one_rank_skips_is_named_as_missing(run_ranks):
    """The cause is the missing batch. The exception was caught, and is none."""
    results = run_ranks(odd_loops.skips_a_torn_batch, 2, [1], True, expect=None)
    missing = "rank 1 ran out of data after 9 batches of train epoch 0"
    assert_named(results, "UnevenBatches", [1], missing, ("rank 0 has batch 10", "rank 0 ran out of data after 10"))


def test_an_exception_of_the_loader_that_leaves_the_program_is_named(run_ranks):
    results = run_ranks(odd_loops.skips_a_torn_batch, 2, [1], False, expect=None)
    assert_named(results, "LostRank", [1], "rank 1 raised ValueError: torn record at odd_loops.py:")

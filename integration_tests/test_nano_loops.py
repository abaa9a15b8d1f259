"""Loops without a loader, on real ranks: a few lines count their batches."""

import pytest

from integration_tests import nano_loops as loops
from integration_tests.in_turn import in_turn
from integration_tests.nano_loops import Run
from integration_tests.output import assert_named, verdict_lines


def test_a_healthy_loop_without_a_loader_trains_to_the_same_bits(run_ranks):
    """Every batch that the function returns is counted, nothing is printed, and the weights are the same.

    Every pass over an iterable is an epoch, and an iterator is one.
    """
    jobs = {"no loader": (loops.plain_and_counted, Run(start_step=(100, 100))), "any iterable": (loops.over_iterables,)}
    results = run_ranks(in_turn, 2, jobs)
    assert [line for result in results for line in verdict_lines(result)] == []
    for result in results:
        assert result.value["any iterable"] == [3, 3, 3, 4, 3]
        plain, (counted, batches, steps) = result.value["no loader"]
        assert plain == counted
        assert (batches, steps) == (200 + 13, 6)  # after 100 steps of two batches each; one batch is drawn ahead


def test_a_rank_that_takes_fewer_steps_is_named(run_ranks):
    """The rank that has left its loop first is named, where the other would only lose its peer."""
    results = run_ranks(loops.only_counted, 2, Run(steps=(6, 4)), expect=None, finalise=True)
    assert "rank 1 stopped after 9 batches of train epoch 0" in "\n".join(verdict_lines(results[0])), results
    assert results[0].exit_code != 0


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (Run(batch_size=(4, 8)), "batch_size is 4 on rank 0, 8 on rank 1"),
        (Run(start_step=(100, 90)), "position is [0, 0, 100] on rank 0, [0, 0, 90] on rank 1"),
    ],
)
def test_what_the_loop_says_of_itself_is_compared(run_ranks, run, words):
    """Different batch sizes and different checkpoints are found before the first batch."""
    results = run_ranks(loops.only_counted, 2, run, expect=None)
    for result in results:
        assert f"PlanMismatch: before the first batch, {words}." in "\n".join(verdict_lines(result)), results
        assert result.exit_code != 0


def test_a_short_iterator_is_named(run_ranks):
    """Of iterators of different lengths, the shorter one is named."""
    results = run_ranks(loops.uneven_iterables, 2, (5, 4), expect=None)
    words = "rank 1 ran out of data after 4 batches of train epoch 0"
    remedy = "for batch in countoff.train(itertools.islice(loader, n)), with n batches that every rank has"
    assert_named(results, "UnevenBatches", [1], words, remedy, ("has batch 5", "ran out of data after 5 batches"))

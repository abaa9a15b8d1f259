"""Accelerate loops whose ranks are out of step: named before gradients of different batches are mixed."""

import signal
from dataclasses import replace

import pytest

pytest.importorskip("accelerate")

from integration_tests import accelerate_cases as cases
from integration_tests import accelerate_jobs as jobs
from integration_tests.accelerate_jobs import Loop, trained
from integration_tests.output import assert_named, verdict_lines

UNSHARED = {"dispatch_batches": False}
UNEVEN = {
    "the second one short": Loop(batches=[4, 3]),
    "the first one short, shuffled": Loop(batches=[3, 4], shuffle=True, epochs=3),
    "one epoch": Loop(batches=[4, 3], epochs=1),
    "lengths reported alike": Loop(batches=[3, 4], reported=[4, 4]),
    "accumulating": Loop(batches=[4, 3], accumulation=4, epochs=3),
    "accumulating, shuffled": Loop(batches=[3, 4], accumulation=4, shuffle=True),
}
PARTLY_THE_SAME = ("the second one short", "the first one short, shuffled", "accumulating")
"""What they try is in the others too, or in the job of four ranks."""
PAIRS = [(0, 1), (1, 0)]  # the rank that was first and the other one


def everything(results):
    return "\n".join(map(str, results))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name in PARTLY_THE_SAME else ()) for name in UNEVEN]
)
def test_an_uneven_stream_is_named_before_a_gradient_is_mixed(run_ranks, name):
    """The short rank is named before its next epoch's gradients mix with those of this one."""
    loop = replace(UNEVEN[name], loader=UNSHARED)
    results = run_ranks(jobs.run, 2, loop, expect=None)
    short = loop.batches.index(3)
    # A rank that has ended the fit, as the short one has after one epoch, may be gone when the other objects.
    for result in results if loop.epochs > 1 else [results[1 - short]]:
        text = "\n".join(verdict_lines(result))
        assert "countoff: UnevenBatches: " in text, result
        assert f"rank {short} ran out of data after 3 batches of train epoch 0" in text, result
        assert result.exit_code != 0
        batches = trained(result.output)
        if loop.accumulation == 1:
            assert batches == [(0, 1), (0, 2), (0, 3)], result
        assert {epoch for epoch, _ in batches} == {0}, result


@pytest.mark.ranks(4)
@pytest.mark.parametrize("short", [pytest.param(0, marks=pytest.mark.nightly), 2])
def test_the_short_one_of_four_ranks_is_named(run_ranks, ranks, short):
    """All four ranks name the short one, and train no batch after its last."""
    batches = [3 if rank == short else 4 for rank in range(ranks)]
    results = run_ranks(jobs.run, ranks, Loop(batches=batches, loader=UNSHARED), expect=None)
    for result in results:
        text = "\n".join(verdict_lines(result))
        assert "countoff: UnevenBatches: " in text, everything(results)
        assert f"rank {short} ran out of data after 3 batches of train epoch 0" in text, everything(results)
        assert trained(result.output) == [(0, 1), (0, 2), (0, 3)], everything(results)


def test_three_shards_on_two_ranks_are_named(run_ranks):
    """Three shards of a `datasets` stream on two ranks are uneven, and the short rank is named."""
    pytest.importorskip(
        "accelerate", minversion="1.8", reason="Accelerate 1.8 is the first that gives whole shards to ranks"
    )
    results = run_ranks(cases.sharded_hub_stream, 2, 3, expect=None)
    for result in results:
        text = "\n".join(verdict_lines(result))
        assert "countoff: UnevenBatches: " in text, everything(results)
        assert "rank 1 ran out of data after 3 batches of train epoch 0" in text, everything(results)
        assert trained(result.output) == [(0, 1), (0, 2), (0, 3)], everything(results)


def test_lengths_that_differ_are_named_when_a_rank_gets_there(run_ranks):
    """Before that, they prove nothing: the loop may leave its loaders before they end."""
    results = run_ranks(jobs.run, 2, Loop(batches=[4, 3], reported=[4, 3], loader=UNSHARED), expect=None)
    assert_named(results, "UnevenBatches", [1], "rank 1 ran out of data after 3 batches of train epoch 0", "batch 4")


def test_a_break_of_one_rank_in_training_is_named(run_ranks):
    """A rank that alone breaks out of an epoch is named with its number of batches."""
    results = run_ranks(jobs.run, 2, Loop(samples=80, break_at={1: 3}, epochs=100), expect=None)
    for result in results:
        text = "\n".join(verdict_lines(result))
        assert "countoff: UnevenBatches: " in text, everything(results)
        assert "rank 1 stopped after 3 batches of train epoch 0" in text, everything(results)
        assert result.exit_code != 0


def test_a_break_of_one_rank_under_dispatching_is_named(run_ranks):
    """The same is named where rank 0 reads for all ranks.

    Rank 1 asks for its next epoch while rank 0 sends a batch: gloo may abort it before it hears of the verdict, or
    before it has told anybody of its break.
    """
    loop = Loop(samples=80, break_at={1: 3}, epochs=100, loader={"dispatch_batches": True})
    results = run_ranks(jobs.run, 2, loop, expect=None)
    stopped, gone = "rank 1 stopped after 3 batches of train epoch 0", "LostRank: rank 1 is gone"
    if results[1].exit_code == -signal.SIGABRT:
        assert stopped in results[0].output or gone in results[0].output, everything(results)
    else:
        assert all(stopped in result.output for result in results), everything(results)
    assert all(result.exit_code != 0 for result in results), everything(results)


def test_a_break_of_one_rank_in_an_evaluation_is_named(run_ranks):
    """A break in an evaluation costs that rank an optimizer step, and the missing step is named."""
    loop = Loop(
        samples=88, accumulation=4, evals=[24], eval_inside=2, eval_break_at={1: 1}, options={"uneven_eval": "allow"}
    )
    results = run_ranks(jobs.run, 2, loop, expect=None)
    for result in results:
        text = "\n".join(verdict_lines(result))
        assert "countoff: StepMismatch: after 11 batches of train epoch 0" in text, everything(results)
        assert "3 optimizer steps" in text, everything(results)
        assert "2 optimizer steps" in text, everything(results)
        assert result.exit_code != 0


def test_gathering_over_uneven_evaluations_can_be_a_verdict(run_ranks):
    """With `uneven_eval='raise'` an uneven evaluation is a verdict though it blocks in a gather."""
    loop = Loop(samples=40, evals=[26], gather=True, loader={"even_batches": False}, options={"uneven_eval": "raise"})
    results = run_ranks(jobs.run, 2, loop, expect=None)
    for result in results:
        text = "\n".join(verdict_lines(result))
        assert "countoff: UnevenBatches: " in text, everything(results)
        assert "rank 1 ran out of data after 3 batches of digits 0" in text, everything(results)
        assert result.exit_code != 0


def test_gathering_over_uneven_evaluations_is_a_stall(run_ranks):
    """By default an uneven evaluation is warned of, and ends the job when it has stalled in a gather."""
    loop = Loop(samples=40, evals=[24], gather=True, loader={"even_batches": False}, options={"stall_seconds": 1.5})
    loop = replace(loop, evals=[28])
    results = run_ranks(jobs.run, 2, loop, expect=None)
    assert "countoff: UnevenBatches: " in results[0].output, everything(results)
    assert any(result.exit_code for result in results), everything(results)


def test_an_undeclared_evaluation_on_rank_0_alone_is_explained(run_ranks):
    """The warning about an undeclared evaluation of rank 0 alone gives `uneven_eval='off'` as the remedy."""
    results = run_ranks(jobs.run, 2, Loop(samples=40, evals=[16], eval_ranks=[0]))
    text = "\n".join(line for result in results for line in verdict_lines(result))
    assert text.count("countoff: UnevenBatches: ") == 1, everything(results)
    assert "rank 0 began digits 0" in text, everything(results)
    assert "Countoff(..., uneven_eval='off')" in text, everything(results)
    assert all(result.value.batches == result.value.counted_batches for result in results), everything(results)


@pytest.mark.nightly
@pytest.mark.parametrize(("mode", "warnings"), [("warn", 1), ("allow", 0)])
def test_an_uneven_evaluation_that_gathers_nothing_is_allowed(run_ranks, mode, warnings):
    """An uneven evaluation without collectives gets one warning or none, and is counted on each rank."""
    loop = Loop(samples=40, evals=[28], loader={"even_batches": False}, options={"uneven_eval": mode})
    results = run_ranks(jobs.run, 2, loop)
    lines = [line for result in results for line in verdict_lines(result)]
    assert sum("countoff: UnevenBatches: " in line for line in lines) == warnings, everything(results)
    assert [result.value.evals for result in results] == [[4, 4], [3, 3]]
    assert [result.value.counted_evals for result in results] == [[4, 4], [3, 3]]


def test_ranks_that_load_different_checkpoints_are_named(run_ranks):
    """Ranks that resume from different positions are a verdict, with the position of each."""
    results = run_ranks(cases.resumed, 2, (1, 4), True, expect=None)
    for result in results:
        text = "\n".join(verdict_lines(result))
        assert "countoff: PlanMismatch: " in text, everything(results)
        assert "position is [1, 4, 7] on rank 0, [0, 9, 5] on rank 1" in text, everything(results)


def test_ranks_that_skip_other_numbers_of_batches_are_named(run_ranks):
    """The positions are compared where the epoch begins: no rank comes to its second batch."""
    results = run_ranks(cases.skips_differently, 2, expect=None)
    words = [
        f"rank {a} began train epoch 0 after {5 + a} batches of it, rank {b} after {5 + b} batches." for a, b in PAIRS
    ]
    assert_named(results, "PlanMismatch", [0, 1], tuple(words))


def test_an_uneven_stream_in_a_disabled_join_is_named(run_ranks):
    """An uneven stream is named inside `join_uneven_inputs` that has no effect."""
    results = run_ranks(cases.joined_without_effect, 2, [4, 3], expect=None)
    for result in results:
        text = "\n".join(verdict_lines(result))
        assert "rank 1 ran out of data after 3 batches of train epoch 0" in text, everything(results)
        assert trained(result.output) == [(0, 1), (0, 2), (0, 3)], everything(results)


def test_uneven_epochs_in_disabled_local_sgd_are_named(run_ranks):
    """Uneven epochs are named inside a `LocalSGD` that is not enabled."""
    results = run_ranks(cases.averaged_now_and_then, 2, 28, True, False, expect=None)
    for result in results:
        assert "rank 1 ran out of data after 3 batches of train epoch 0" in result.output, everything(results)
        assert result.exit_code != 0

"""Healthy Accelerate loops: no output, the same bits of weights, and right counts."""

import pytest

pytest.importorskip("accelerate")

from integration_tests import accelerate_cases as cases
from integration_tests import accelerate_jobs as jobs
from integration_tests.accelerate_jobs import Loop
from integration_tests.output import verdict_lines

LOOPS = {
    "shard": Loop(samples=80, evals=[16, 32]),
    "shard, filled up": Loop(samples=70, shuffle=True, accumulation=4),
    "shard, last one dropped": Loop(samples=70, drop_last=True),
    "shard, split": Loop(samples=72, loader={"split_batches": True}),
    "shard, not filled up, even": Loop(samples=80, loader={"even_batches": False}),
    "seedable sampler": Loop(samples=72, shuffle=True, loader={"use_seedable_sampler": True}),
    "dispatched": Loop(samples=76, loader={"dispatch_batches": True}),
    "dispatched stream": Loop(batches=[5] * 4),
    "stream": Loop(batches=[5] * 4, loader={"dispatch_batches": False}, shuffle=True),
    "stream, split": Loop(batches=[5] * 4, loader={"dispatch_batches": False, "split_batches": True}),
    "carried over": Loop(samples=88, accumulation=4, sync_with_dataloader=False, epochs=3),
    "evaluations inside": Loop(samples=80, evals=[16, 24], eval_inside=3, gather=True, accumulation=2),
    "every rank breaks": Loop(samples=80, break_at=dict.fromkeys(range(4), 3), options={"TICK_BATCHES": 2}),
}


def assert_alike(pairs):
    for (name, _), (plain, counted) in zip(LOOPS.items(), pairs, strict=True):
        assert plain.weights == counted.weights, name
        assert (plain.batches, plain.evals, plain.steps) == (counted.batches, counted.evals, counted.steps), name
        assert counted.counted_batches == counted.batches, name
        assert counted.counted_evals == counted.evals, name
        assert counted.counted_steps == counted.steps, name


@pytest.mark.ranks(2, nightly=(4,))
def test_every_kind_of_loader_trains_to_the_same_bits(run_ranks, ranks):
    """Every kind of loader ends with the same weights as without countoff, prints nothing, and is counted right."""
    results = run_ranks(jobs.with_and_without, ranks, list(LOOPS.values()), deadline_seconds=120)
    for result in results:
        assert verdict_lines(result) == [], result
        assert_alike(result.value)
    known = {name: counted.progress for name, (_, counted) in zip(LOOPS, results[0].value, strict=True)}
    if ranks == 2:
        filled_up = known["shard, filled up"]
        assert filled_up["countoff/batches_per_epoch"] == 9
        assert filled_up["countoff/samples_repeated"] == 2
        assert filled_up["countoff/steps_per_epoch"] == 3
        assert known["shard, last one dropped"]["countoff/samples_dropped"] == 6
        assert known["shard, split"]["countoff/global_batch_size"] == 4


def test_a_stream_longer_than_its_length_is_left_alone(run_ranks):
    """A stream that yields more than its length trains to its end; nobody asks it for its length."""
    loop = Loop(batches=[5, 5], reported=[4, 4], loader={"dispatch_batches": False})
    for result in run_ranks(jobs.with_and_without, 2, [loop]):
        assert verdict_lines(result) == [], result
        ((plain, counted),) = result.value
        assert plain.weights == counted.weights
        assert counted.counted_batches == counted.batches == [5, 5]


def test_a_declared_evaluation_on_rank_0_alone_is_healthy(run_ranks):
    """With `uneven_eval="off"`, rank 0 may evaluate alone, and its batches are counted."""
    loop = Loop(samples=40, evals=[16], eval_ranks=[0], options={"uneven_eval": "off"})
    results = run_ranks(jobs.run, 2, loop)
    assert [line for result in results for line in verdict_lines(result)] == []
    assert results[0].value.counted_evals == results[0].value.evals == [2, 2]


@pytest.mark.parametrize("save_at", [(1, 4), (0, 9)])
def test_a_resumed_run_goes_on_where_it_was(run_ranks, save_at):
    """A run resumed from a checkpoint ends with the weights and the counts of a run without a stop."""
    if save_at == (0, 9):
        pytest.importorskip(
            "accelerate", minversion="1.9", reason="a loader without a batch gives None before Accelerate 1.9"
        )
    for result in run_ranks(cases.resumed, 2, save_at):
        assert verdict_lines(result) == [], result
        found = result.value
        assert found["resumed"] == found["through"]
        assert found["counted"] == found["steps"]
        assert (found["epoch"], found["batches"]) == (3, 9)


def test_ranks_may_have_a_checkpoint_folder_of_their_own(run_ranks):
    """Every rank resumes from the position in its own folder, and none is said to be elsewhere."""
    results = run_ranks(cases.checkpoints_of_their_own, 2)
    assert [line for result in results for line in verdict_lines(result)] == []
    assert [result.value for result in results] == [(1, 5)] * 2


def test_two_accelerators_in_one_process_count_apart(run_ranks):
    """A loop after another one, each with its own Accelerator, has its own counts, and ends the fit before it."""
    for result in run_ranks(cases.two_accelerators, 2):
        assert verdict_lines(result) == [], result
        assert result.value == [(6, 6, 6), (3, 3, 3)]


@pytest.mark.parametrize(
    ("before_close", "hosted_by"),
    [
        (True, "rank0"),
        (False, "agent"),
        pytest.param(True, "agent", marks=pytest.mark.nightly),
        pytest.param(False, "rank0", marks=pytest.mark.nightly),
    ],
)
def test_end_training_may_come_before_or_after_close(run_ranks, hosted_by, before_close):
    """The order of `end_training()` and `close()` does not matter, whoever hosts the store."""
    results = run_ranks(cases.ends_training, 2, before_close, hosted_by=hosted_by, finalise=True)
    assert [line for result in results for line in verdict_lines(result)] == []


@pytest.mark.parametrize("hosted_by", ["agent", "rank0"])
def test_nobody_need_close(run_ranks, hosted_by):
    """The end of the program is the end of the fit, whoever hosts the store."""
    results = run_ranks(cases.leaves_it_to_the_exit, 2, hosted_by=hosted_by, finalise=True)
    assert [line for result in results for line in verdict_lines(result)] == []


def test_join_uneven_inputs_is_left_alone(run_ranks):
    """`join_uneven_inputs` that Accelerate leaves off, as on a CPU, changes nothing."""
    results = run_ranks(cases.joined, 2)
    assert [line for result in results for line in verdict_lines(result)] == []
    assert len({result.value for result in results}) == 1


@pytest.mark.parametrize(("configured", "argument"), [(False, None), (True, False)])
def test_counting_is_off_inside_join_uneven_inputs(run_ranks, configured, argument):
    """Uneven batches inside a Join that Accelerate has entered are no fault."""
    pytest.importorskip(
        "accelerate", minversion="1.10", reason="Accelerate 1.10 has a switch by which it enters Join on CPUs"
    )
    results = run_ranks(cases.joined_in_earnest, 2, configured, argument)
    assert [line for result in results for line in verdict_lines(result)] == []
    assert [result.value for result in results] == [[4, 4], [3, 3]]


def test_counting_is_off_inside_local_sgd(run_ranks):
    """Epochs of different lengths inside `LocalSGD` are no fault, and the weights are those without countoff."""
    results = run_ranks(cases.averaged_without_and_with, 2)
    assert [line for result in results for line in verdict_lines(result)] == []
    for result in results:
        plain, counted = result.value
        assert plain == counted
    assert [result.value[0][0] for result in results] == [[3, 3], [2, 2]]


def test_a_step_that_the_gradient_scaler_skips_is_not_counted(run_ranks):
    """An optimizer step that the gradient scaler skips is not counted."""
    results = run_ranks(cases.overflows, 2)
    assert [line for result in results for line in verdict_lines(result)] == []
    assert [result.value for result in results] == [(4, 4, True)] * 2


def test_counting_is_off_where_the_loop_says_so(run_ranks):
    """Uneven batches inside `uncounted()` are no fault."""
    results = run_ranks(cases.joined_by_hand, 2, [5, 4])
    assert [line for result in results for line in verdict_lines(result)] == []

"""Healthy Accelerate loops: no output, the same bits of weights, and right counts."""

import pytest

pytest.importorskip("accelerate")

import accelerate
from packaging.version import Version

from integration_tests import accelerate_cases as cases
from integration_tests import accelerate_jobs as jobs
from integration_tests.accelerate_jobs import Loop
from integration_tests.in_turn import in_turn, said_in_turn
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
    "a stream longer than its length": Loop(batches=[5] * 4, reported=[4] * 4, loader={"dispatch_batches": False}),
    "a declared evaluation on rank 0 alone": Loop(
        samples=40, evals=[16], eval_ranks=[0], options={"uneven_eval": "off"}
    ),
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
        first = {name: counted for name, (_, counted) in zip(LOOPS, results[0].value, strict=True)}
        assert first["a stream longer than its length"].counted_batches == [5, 5]
        assert first["a declared evaluation on rank 0 alone"].counted_evals == [2, 2]


VERSION = Version(accelerate.__version__)
RESUMED = {"resumed in the second epoch": (1, 4)}
if Version("1.9") <= VERSION:  # before that, a loader without a batch gives None
    RESUMED["resumed after the first epoch"] = (0, 9)
JOINED = {}
if Version("1.10") <= VERSION:  # the first one that has a switch by which it enters Join on CPUs
    JOINED = {"a Join that the configuration enters": (False, None), "a Join that its call enters": (True, False)}
JOBS = {
    **{name: (cases.resumed, save_at) for name, save_at in RESUMED.items()},
    **{name: (cases.joined_in_earnest, *how) for name, how in JOINED.items()},
    "a checkpoint folder of each rank's own": (cases.checkpoints_of_their_own,),
    "two Accelerators, one after the other": (cases.two_accelerators,),
    "a Join that is left off, as on a CPU": (cases.joined,),
    "a Join of torch's, uncounted": (cases.joined_by_hand, [5, 4]),
    "LocalSGD": (cases.averaged_without_and_with,),
    "a step that the gradient scaler skips": (cases.overflows,),
}
RETURNED = {
    "a checkpoint folder of each rank's own": [(1, 5)] * 2,
    "two Accelerators, one after the other": [[(6, 6, 6), (3, 3, 3)]] * 2,
    "a step that the gradient scaler skips": [(4, 4, True)] * 2,
    **{name: [[4, 4], [3, 3]] for name in JOINED},
}


def test_what_people_do_with_accelerate_is_healthy(run_ranks):
    """Nothing is printed. Uneven batches are no fault where ranks may differ, and what is skipped is not counted.

    A resumed run ends with the weights and the counts of a run without a stop, and a run with `LocalSGD` with those
    without countoff.
    """
    jobs_in_turn = {name: (cases.afresh, *call) for name, call in JOBS.items()}
    results = run_ranks(in_turn, 2, jobs_in_turn, deadline_seconds=150)
    assert [said_in_turn(result) for result in results] == [{name: [] for name in JOBS}] * 2, results
    assert {name: [result.value[name] for result in results] for name in RETURNED} == RETURNED
    for result in results:
        for name in RESUMED:
            found = result.value[name]
            assert found["resumed"] == found["through"], name
            assert found["counted"] == found["steps"], name
            assert (found["epoch"], found["batches"]) == (3, 9), name
        plain, counted = result.value["LocalSGD"]
        assert plain == counted
    assert [result.value["LocalSGD"][0][0] for result in results] == [[3, 3], [2, 2]]
    assert len({result.value["a Join that is left off, as on a CPU"] for result in results}) == 1


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

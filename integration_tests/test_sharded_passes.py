"""Forward passes of a model in shards, each of which is a collective, on real ranks with FSDP1 and FSDP2."""

import time
from dataclasses import replace

import pytest

from integration_tests import sharded_frameworks, sharded_jobs
from integration_tests.harness import Watch
from integration_tests.sharded_jobs import Sharded

UNEVEN = {1: (3,), 0: (5,)}
"""Each rank runs a pass alone in one batch, and the passes pair with one another."""
FAULTY = {
    "FSDP2": Sharded(extra=UNEVEN, frozen=True),
    "FSDP1": Sharded("fsdp1", extra=UNEVEN, frozen=True),
    "without a tick": Sharded(extra=UNEVEN, frozen=True, options={}),
}
HEALTHY = {
    "FSDP2": Sharded(extra={0: (3,), 1: (3,)}),
    "FSDP1": Sharded("fsdp1", extra={0: (3,), 1: (3,)}),
    "frozen": Sharded(frozen=True),
    "a pass that gathers nothing": Sharded("one unit", extra={1: (3, 4)}),
    "replicas": Sharded("hsdp", extra={1: (3, 4)}, frozen=True),
    "without shards": Sharded("no_shard", extra={1: (3, 4)}),
    "of a copy": Sharded(extra={1: (3, 4)}, aside="copy"),
    "uncounted": Sharded(extra=UNEVEN, frozen=True, aside="uncounted"),
    "unequal generations": Sharded(aside="synced"),
    "checkpointed": Sharded(model="checkpoint"),
    "compiled": Sharded(model="compiled"),
}


def test_a_pass_that_one_rank_runs_alone_is_named(run_ranks):
    """A warning names the batch, the ranks and both counts, once; the model keeps no hook."""
    results = run_ranks(sharded_jobs.train, 2, [*FAULTY.values()], deadline_seconds=180)
    for result in results:
        assert [each["said"] for each in result.value] == [_said(1)] * len(FAULTY)
        assert not any(each["hooks"] for each in result.value)
    assert [result.output.count("countoff: StepMismatch: ") for result in results] == [len(FAULTY), 0]
    assert "  do:  run as many forward passes of the model on every rank" in results[0].output


def test_equal_passes_and_passes_that_gather_nothing_are_silent(run_ranks):
    """Nothing is printed, the weights are the same bits as without countoff, and the model keeps no hook."""
    bare = [replace(case, options=None) for case in HEALTHY.values()]
    results = run_ranks(sharded_jobs.train, 2, [*HEALTHY.values(), *bare], deadline_seconds=240)
    for result in results:
        assert not any(each["said"] for each in result.value)
        assert not any(each["hooks"] for each in result.value)
        found = [each["weights"] for each in result.value]
        assert found[: len(HEALTHY)] == found[len(HEALTHY) :]
        assert "countoff: " not in result.output


@pytest.mark.parametrize(
    ("framework", "world_size"),
    [
        ("lightning", 2),
        pytest.param("fabric", 2, marks=pytest.mark.nightly),
        pytest.param("fabric", 4, marks=pytest.mark.nightly),
        ("accelerate", 2),
        pytest.param("transformers", 2, marks=pytest.mark.nightly),
        pytest.param("composer", 2, marks=pytest.mark.nightly),
    ],
)
def test_passes_of_a_model_that_a_framework_holds_are_compared(run_ranks, framework, world_size):
    """A pass of one rank is named; equal passes are silent, with the bits of the job without countoff."""
    pytest.importorskip("composer" if framework == "composer" else "lightning")
    last = world_size - 1
    even = dict.fromkeys(range(world_size), (3,))
    # Some frameworks have a collective in each batch: passes of two batches cannot pair there.
    wrong = [Sharded(extra={last: (3,)}, frozen=True, aside="gathered")]
    right = [Sharded(extra=even, frozen=True), Sharded()]
    cases = [*wrong, *right, *(replace(case, options=None) for case in right)]
    results = run_ranks(sharded_frameworks.train, world_size, framework, cases, deadline_seconds=240)
    for result in results:
        found = result.value
        (named,) = found[0]["said"]
        assert named in [_said(last, other)[0] for other in range(last)]
        assert not any(each["said"] for each in found[1:])
        assert [each["counted"] for each in found] == [True] * (len(wrong) + 2) + [False] * 2
        assert not any(each["hooks"] for each in found)
        kept = [each["weights"] for each in found[len(wrong) :]]
        assert kept[:2] == kept[2:]
    assert [result.output.count("countoff: ") for result in results] == [len(wrong), *[0] * last]


def _said(rank: int, other: int = 0) -> list[str]:
    return [f"in batch 3 of train epoch 0, rank {rank} ran 3 forward passes of the sharded model, rank {other} 2."]


@pytest.mark.parametrize(
    ("place", "kind", "words"),
    [
        ("before", "fsdp2", "rank 1 has begun 3 forward passes of the sharded model, rank 0 2"),
        pytest.param(
            "before",
            "fsdp1",
            "rank 1 has begun 3 forward passes of the sharded model, rank 0 2",
            marks=pytest.mark.nightly,
        ),
        ("after", "fsdp2", "rank 1 ran 4 forward passes of the sharded model, rank 0 3"),
    ],
)
def test_a_job_that_hangs_by_a_pass_of_one_rank_tells_it(run_ranks, place, kind, words):
    """The report of the stall has the passes of both ranks in the batch in which they differ."""

    def end_after_the_report(watch: Watch) -> None:
        patience = time.monotonic() + 60
        while "countoff explain Stalled" not in watch.results()[0].output and time.monotonic() < patience:
            watch.let_run(0.1)
        for rank in range(2):
            watch.kill(rank)

    results = run_ranks(
        sharded_jobs.hang, 2, place, kind, deadline_seconds=120, expect=None, while_running=end_after_the_report
    )
    said = f"countoff: Stalled: no rank has made progress for 3 s; in batch 7 of train epoch 0, {words}."
    assert said in results[0].output, results[0]
    assert "  do:  run as many forward passes of the model on every rank" in results[0].output

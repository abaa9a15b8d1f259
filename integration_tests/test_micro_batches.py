"""Work inside a batch: ranks that run different numbers of micro-batches in one optimizer step, on real ranks."""

import re
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from integration_tests import micro_jobs
from integration_tests.harness import RankResult, Watch
from integration_tests.micro_jobs import Micro
from integration_tests.nightly import nightly_but


def said(results: list[RankResult], cases: Mapping[str, Any]) -> dict[str, list[str]]:
    """What each case said, the same on all ranks."""
    found = [dict(zip(cases, (each["said"] for each in result.value), strict=False)) for result in results]
    assert all(each == found[0] for each in found)
    assert not any(each["hooks"] for result in results for each in result.value)
    return found[0]


def in_batch(number: int, more: int = 5, less: int = 4) -> list[str]:
    return [f"in batch {number} of train epoch 0, rank 1 ran {more} micro-batches, rank 0 {less}."]


FAULTY = {
    "one more, found at the end of the epoch": (Micro(extra=(7,)), in_batch(7)),
    "one more, found at a tick": (Micro(extra=(7, 8), options={"TICK_BATCHES": 2}), in_batch(7)),
    "a step of two batches": (
        Micro(extra=(7,), every=2),
        ["in batches 7 to 8 of train epoch 0, rank 1 ran 9 micro-batches, rank 0 8."],
    ),
    "compiled": (Micro(extra=(3,), model="compiled"), in_batch(3)),
    "checkpointed": (Micro(extra=(3,), model="checkpoint"), in_batch(3)),
    "a preview in each batch": (Micro(aside="preview", options={"TICK_BATCHES": 2}), in_batch(1)),
}
HEALTHY = {
    "four micro-batches": Micro(),
    "with ticks": Micro(options={"TICK_BATCHES": 2}),
    "a step of two batches": Micro(every=2),
    "checkpointed": Micro(model="checkpoint"),
    "checkpointed, reentrant": Micro(model="reentrant"),
    "compiled": Micro(model="compiled"),
    "compiled, and observed inside": Micro(model="compiled inside"),
    "recursive": Micro(model="recursive"),
    "evaluates on one rank": Micro(aside="eval"),
    "looks without gradients on one rank": Micro(aside="no_grad"),
    "a pass that raises on one rank": Micro(aside="raises"),
    "leaves passes out": Micro(aside="uncounted"),
    "copied": Micro(copies=True),
    "resumed": Micro(start_epoch=1),
}


def assert_equal(results: list[RankResult], number: int) -> None:
    """The bits of the same jobs without countoff, which come after so many with it."""
    for result in results:
        found = [each["weights"] for each in result.value][: 2 * number]
        assert found[:number] == found[number:]


def assert_silent_and_equal(results: list[RankResult], cases: Mapping[str, Any]) -> None:
    """No word, and the bits of the same job without countoff, which comes after it."""
    assert said(results, cases) == {name: [] for name in cases}
    assert_equal(results, len(cases))
    assert not any("countoff: " in result.output for result in results), results


def test_an_extra_micro_batch_is_named_in_a_plain_loop(run_ranks):
    """A warning names the batch, the ranks and both counts, once; the job goes on with the bits that it has alone."""
    bare = [replace(case, options=None) for case, _ in FAULTY.values()]
    results = run_ranks(micro_jobs.plain, 2, [*(case for case, _ in FAULTY.values()), *bare], deadline_seconds=180)
    assert said(results, FAULTY) == {name: sentence for name, (_, sentence) in FAULTY.items()}
    assert_equal(results, len(FAULTY))
    assert [result.output.count("countoff: StepMismatch: ") for result in results] == [len(FAULTY), 0]
    assert "  or:  if the ranks weight their losses by their samples" in results[0].output


def test_the_first_tick_that_differs_is_the_one_that_is_told(run_ranks):
    """Its warning is in the log before any rank can find the same at a later tick."""
    for result in run_ranks(micro_jobs.found_at_two_ticks, 2):
        assert result.value == in_batch(7), result


@pytest.mark.alone  # on a busy machine, a rank may have ended before it hears the verdict
def test_a_step_missed_after_an_extra_micro_batch_ends_the_job(run_ranks):
    """Rank 0 prints the warning, and then every rank raises the verdict about the steps."""
    case = Micro(extra=(3,), missed=4, options={"TICK_BATCHES": 2})
    results = run_ranks(micro_jobs.plain, 2, [case], deadline_seconds=120, expect=None)
    assert in_batch(3)[0] in results[0].output
    assert in_batch(3)[0] not in results[1].output
    for result in results:
        assert result.exit_code, result
        assert re.search(r"StepMismatch: at batch [46] of train epoch 1, rank \d had applied 1\d", result.output), (
            result
        )


def test_a_rank_that_hangs_in_its_extra_micro_batch_is_named(run_ranks):
    """The report of the stall tells its micro-batch, and how many the others ran before they went on."""

    def end_after_the_report(watch: Watch) -> None:
        patience = time.monotonic() + 60
        while "countoff explain Stalled" not in watch.results()[0].output and time.monotonic() < patience:
            watch.let_run(0.1)
        for rank in range(4):
            watch.kill(rank)

    results = run_ranks(micro_jobs.hang, 4, deadline_seconds=90, expect=None, while_running=end_after_the_report)
    words = "rank 1 is in micro-batch 5 of batch 10 of train epoch 0, and ranks 0, 2, 3 ran 4."
    assert f"countoff: Stalled: no rank has made progress for 2 s; {words}" in results[0].output, results[0]
    assert "  do:  run as many forward and backward passes in each step on every rank." in results[0].output


def test_equal_micro_batches_in_a_plain_loop_are_silent(run_ranks):
    """Nothing is printed, the weights are the same bits as without countoff, and the model keeps no hook."""
    bare = [replace(case, options=None) for case in HEALTHY.values()]
    results = run_ranks(micro_jobs.plain, 2, [*HEALTHY.values(), *bare], deadline_seconds=180)
    assert_silent_and_equal(results, HEALTHY)


FRAMEWORKS = {
    "accelerate": (
        micro_jobs.accelerated,
        {"accumulates": Micro(every=2), "every batch": Micro()},
        {"one more": (Micro(extra=(4,)), in_batch(4, 2, 1))},
    ),
    "lightning": (
        micro_jobs.by_hand,
        {"two optimizers": Micro()},
        {"one more": (Micro(extra=(4,)), in_batch(4, 5, 3))},
    ),
    "transformers": (
        micro_jobs.with_trainer,
        {"every batch": Micro()},
        {"one more": (Micro(extra=(4,)), in_batch(4, 2, 1))},
    ),
    "fabric": (
        micro_jobs.with_fabric,
        {"every batch": Micro()},
        {"one more": (Micro(extra=(4,)), in_batch(4, 2, 1))},
    ),
}


@pytest.mark.parametrize("framework", nightly_but(("lightning", "accelerate"), FRAMEWORKS))
def test_the_frameworks_count_the_passes_that_they_run(run_ranks, framework):
    """A healthy job is silent, with the bits of a job without countoff; an extra pass on one rank is named."""
    train, healthy, faulty = FRAMEWORKS[framework]
    cases = {**healthy, **{name: case for name, (case, _) in faulty.items()}}
    bare = [replace(case, options=None) for case in cases.values()]
    results = run_ranks(train, 2, [*cases.values(), *bare], deadline_seconds=180)
    assert_equal(results, len(cases))
    assert said(results, cases) == {
        **{name: [] for name in healthy},
        **{name: due for name, (_, due) in faulty.items()},
    }
    assert [result.output.count("countoff: ") for result in results] == [len(faulty), 0]

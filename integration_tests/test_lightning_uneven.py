"""Lightning, one rank a batch short in training: every such job ends with the verdict on every rank."""

from typing import Any

import pytest

from integration_tests.digits import own_rank
from integration_tests.in_turn import in_turn, said_in_turn
from integration_tests.lightning_jobs import Classifier, Job, fit, quiet
from integration_tests.output import assert_named, named_ranks, verdict_lines

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpoint": {"trainer": {"enable_checkpointing": True, "logger": False}},
    "sync_on_epoch": {"model": {"train_sync": "epoch"}},
    "validation_with_sync": {"val": 2, "model": {"eval_sync": "epoch"}},
    "accumulate_2": {"trainer": {"accumulate_grad_batches": 2}},
    "accumulate_3": {"trainer": {"accumulate_grad_batches": 3}},
    "sized_equal_and_wrong": {"reported": 5},
    "max_steps": {"trainer": {"max_steps": 7, "max_epochs": -1}},
}


def make_job(batches: list[int], case: dict[str, Any]) -> Job:
    more = dict(case)
    for name in ("val", "reported"):
        if name in more:
            more[name] = [more[name]] * len(batches)
    return Job(train=batches, **more)


def at_each_merge(case: str, number: int, position: str) -> bool:
    return case not in PARTLY_THE_SAME and number % 2 == (position == "last")


LONGER = ("has batch 5", "ran out of data after 5 batches")
# tests/core/protocol/test_protocol.py proves that the position of the odd rank changes nothing, on simulated ranks. So
# one position for each case is enough here, the first and the last in turn; the others are run nightly. So are those
# in which a short rank's epoch ends as in another case.
PARTLY_THE_SAME = ("checkpoint", "sync_on_epoch", "accumulate_3")
POSITIONS = [
    pytest.param(case, position, marks=[] if at_each_merge(case, number, position) else pytest.mark.nightly)
    for number, case in enumerate(CASES)
    for position in ("first", "last")
]


def one_short(ranks: int, short: int) -> list[int]:
    return [4 if rank == short else 5 for rank in range(ranks)]


@pytest.mark.ranks(2, nightly=(4,))
@pytest.mark.parametrize(("case", "position"), POSITIONS)
def test_a_rank_one_batch_short_is_named(run_ranks, ranks, case, position):
    """Every rank ends with the verdict that names the short rank and its number of batches."""
    rank = 0 if position == "first" else ranks - 1
    job = make_job(one_short(ranks, rank), CASES[case])
    results = run_ranks(fit, ranks, job, expect=None, deadline_seconds=40)
    assert_named(
        results, "UnevenBatches", [rank], f"rank {rank} ran out of data after 4 batches of train epoch 0", LONGER
    )


@pytest.mark.nightly
@pytest.mark.parametrize(("world_size", "short"), [(4, 2), (8, 3)])
def test_a_short_rank_in_the_middle_is_named(run_ranks, world_size, short):
    """Of more than two ranks the short one alone is out of step."""
    job = Job(train=one_short(world_size, short))
    results = run_ranks(fit, world_size, job, expect=None, deadline_seconds=60)
    assert_named(results, "UnevenBatches", [short], f"rank {short} ran out of data after 4 batches")


@pytest.mark.ranks(4, nightly=(8,))
def test_a_rank_one_batch_long_is_the_odd_one(run_ranks, ranks):
    """Of more than two ranks the long one alone is out of step, unless some have not got so far on a busy machine."""
    batches = [6 if rank == 1 else 5 for rank in range(ranks)]
    results = run_ranks(fit, ranks, Job(train=batches), expect=None, deadline_seconds=60)
    text = "\n".join(verdict_lines(results[0]))
    odd = named_ranks(text)
    assert odd == [1] or (len(odd) == 1 and "not got so far" in text and "out of step" not in text), text
    assert_named(
        results,
        "UnevenBatches",
        odd,
        "after 5 batches of train epoch 0",
        ("rank 1 has batch 6", "rank 1 ran out of data after 6"),
    )


@pytest.mark.ranks(2, nightly=(4,))
def test_lengths_that_differ_are_a_plan_mismatch(run_ranks, ranks):
    """Lengths that differ by rank are a verdict before the first batch."""
    batches = one_short(ranks, 1)
    results = run_ranks(fit, ranks, Job(train=batches, reported=batches), expect=None, deadline_seconds=40)
    odd = [1] if ranks > 2 else [0, 1]
    assert_named(results, "PlanMismatch", odd, "batches_per_epoch is", "4 on rank 1", "5 on rank")


def test_uneven_lengths_with_what_the_remedy_says_are_silent(run_ranks):
    """Either all ranks take as many batches as each has, or the dataset is whole and Lightning shards it."""
    limited = Job(train=[4, 3], reported=[4, 3], trainer={"limit_train_batches": 3})
    for result in run_ranks(in_turn, 2, {"limited": (fit, limited), "whole": (fit, Job(even=40))}, deadline_seconds=60):
        assert said_in_turn(result) == {"limited": [], "whole": []}


def test_uneven_lengths_with_the_other_remedy_are_cut(run_ranks):
    job = Job(train=[4, 3], reported=[4, 3], options={"uneven_train": "stop"})
    results = run_ranks(fit, 2, job, deadline_seconds=60)
    assert "Truncated: " in "".join(verdict_lines(results[0]))
    assert verdict_lines(results[1]) == []


def test_a_checkpoint_on_exception_does_not_swallow_the_verdict(run_ranks):
    """A checkpoint that is saved on an exception does not hide the verdict."""
    pytest.importorskip("lightning", minversion="2.5.3", reason="`save_on_exception` is new in Lightning 2.5.3")
    results = run_ranks(fit_with_checkpoint_on_exception, 2, expect=None, deadline_seconds=40)
    assert_named(results, "UnevenBatches", [1], "rank 1 ran out of data after 4 batches")


def fit_with_checkpoint_on_exception() -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    checkpoint = ModelCheckpoint(dirpath=".", save_on_exception=True)
    fit(Job(train=[5, 4], trainer={"callbacks": [checkpoint], "enable_checkpointing": True}))


def test_ranks_that_resume_at_different_places_are_a_plan_mismatch(run_ranks):
    """Ranks that resume from checkpoints of different batches are a verdict before the first batch."""
    results = run_ranks(fit_resumed_apart, 2, expect=None, deadline_seconds=60)
    assert_named(results, "PlanMismatch", [1, 0], "position is [1, 2, 2] on rank 0, [1, 3, 3] on rank 1")


def fit_resumed_apart() -> None:
    quiet()
    job = Job(even=40)
    for steps in (2, 3):
        trainer = job.make_trainer(max_steps=steps)
        trainer.fit(Classifier(), job.train_loader())
        trainer.save_checkpoint(f"{steps}.ckpt")
    job.make_trainer().fit(Classifier(), job.train_loader(), ckpt_path=f"{2 + own_rank()}.ckpt")

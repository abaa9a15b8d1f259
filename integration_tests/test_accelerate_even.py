"""Loops of Accelerate and the transformers Trainer whose ranks are uneven, and all take the same number of batches."""

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("accelerate")

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, Sampler, TensorDataset

from countoff.accelerate import Countoff
from integration_tests import accelerate_jobs, stateful_loaders, trainer_jobs
from integration_tests.accelerate_jobs import Loop
from integration_tests.in_turn import in_turn
from integration_tests.output import assert_named, verdict_lines

UNSHARED = {"dispatch_batches": False}
CPU = {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
STOP = {"uneven_train": "stop", "uneven_eval": "stop"}
LOOPS = [
    Loop(batches=[9, 7]),
    Loop(batches=[5, 8], accumulation=2),
    Loop(batches=[7, 9], accumulation=3, epochs=3),
    Loop(batches=[9, 7], accumulation=4),
    Loop(batches=[5, 7], accumulation=2, clip=0.1),
    Loop(batches=[4, 6], eval_batches=[5, 3], gather=True),
    Loop(batches=[6, 4], eval_batches=[3, 5], gather=True, eval_inside=2),
    Loop(batches=[6, 8], break_at={0: 5, 1: 5}),
    Loop(batches=[5, 7], shuffle=True),
    Loop(samples=70),  # Accelerate makes these even by itself
]


def cut(loop):
    """The same loop with streams that end where the shortest one does, without countoff."""
    evals = [min(loop.eval_batches)] * 2 if loop.eval_batches else ()
    return replace(loop, batches=[min(loop.batches)] * 2 if loop.batches else (), eval_batches=evals, options=None)


def with_twins(loops):
    return [loop for each in loops for loop in (cut(each), replace(each, options=STOP))]


def test_all_ranks_of_accelerate_take_the_same_batches(run_ranks):
    """Weights, steps and counts are those of the loop whose streams were cut, also where the last batch syncs."""
    loops = [replace(each, loader={} if each.samples else UNSHARED) for each in LOOPS]
    results = run_ranks(accelerate_jobs.run_all, 2, with_twins(loops), deadline_seconds=120)
    for result in results:
        for place, loop in enumerate(loops):
            by_hand, made_even = result.value[2 * place : 2 * place + 2]
            assert made_even.batches == by_hand.batches == made_even.counted_batches, (loop, result)
            assert made_even.evals == by_hand.evals, loop
            assert (made_even.weights, made_even.steps) == (by_hand.weights, by_hand.steps), loop
            assert made_even.counted_steps == made_even.steps, loop
    said = [line for line in verdict_lines(results[0]) if line.startswith("countoff: ")]
    assert said[0].startswith(
        "countoff: Truncated: train epoch 0 stopped on every rank after 7 batches, where rank 1 ran"
    )
    assert all(line.startswith("countoff: Truncated: ") for line in said)
    assert any("evaluation" in line or "stream" in line for line in said)
    assert verdict_lines(results[1]) == []


UNSPLIT = Loop(samples=33, evals=[33, 36], gather=True, loader={"even_batches": False}, epochs=1, options=STOP)
UNEVEN_SHARDS = [UNSPLIT, replace(UNSPLIT, evals=[33, 34], loader={"even_batches": False, "split_batches": True})]


class Buckets(Sampler):
    """A batch sampler without a length, as of buckets."""

    batch_size = None
    drop_last = False

    def __iter__(self):
        return iter([[0, 1], [2, 3], [4, 5]])

    def __len__(self):
        raise NotImplementedError


def take_what_accelerate_cannot_count(_):
    """The batches of a loader of buckets."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    buckets = accelerator.prepare(DataLoader(TensorDataset(torch.arange(20)), batch_sampler=Buckets()))
    with Countoff(accelerator, uneven_train="stop") as countoff:
        return sum(1 for _ in countoff.train(buckets))


def test_loaders_that_accelerate_cannot_count_are_made_even(run_ranks):
    """A batch sampler needs no length. `gather_for_metrics` cuts nothing from the last common batch.

    That is a full one on every rank.
    """
    jobs = {
        "what it cannot count": (take_what_accelerate_cannot_count, 0),
        "uneven shards": (accelerate_jobs.run_all, UNEVEN_SHARDS),
    }
    for result in run_ranks(in_turn, 2, jobs):
        assert result.value["what it cannot count"] == 1
        assert [outcome.evals for outcome in result.value["uneven shards"]] == [[4, 4], [8, 8]]
        assert [outcome.gathered for outcome in result.value["uneven shards"]] == [[32, 32], [32, 32]]


TRAINED = [
    trainer_jobs.Job(batches=[6, 4], args={"max_steps": 10}),
    trainer_jobs.Job(batches=[4, 6], args={"max_steps": 4, "gradient_accumulation_steps": 2}),
    trainer_jobs.Job(batches=[7, 5], args={"max_steps": 4, "gradient_accumulation_steps": 3}),
    trainer_jobs.Job(batches=[5, 6], args={"max_steps": 5}),
    trainer_jobs.Job(batches=[6, 7], args={"max_steps": 5}),
    trainer_jobs.Job(
        batches=[4, 5], eval_batches=[4, 3], args={"max_steps": 8, "eval_strategy": "steps", "eval_steps": 3}
    ),
]


def test_all_ranks_of_the_trainer_take_the_same_batches(run_ranks):
    """Weights and steps are those of the training whose streams were cut, `max_steps` before, at and after the end."""
    jobs = []
    for each in TRAINED:
        job = replace(each, args={**each.args, "accelerator_config": UNSHARED}, options=STOP)
        evals = [min(job.eval_batches)] * 2 if job.eval_batches else ()
        jobs += [replace(job, batches=[min(job.batches)] * 2, eval_batches=evals, options=None), job]
    results = run_ranks(trainer_jobs.train_all, 2, jobs, env=CPU, deadline_seconds=150)
    for result in results:
        for place in range(0, len(jobs), 2):
            by_hand, made_even = result.value[place : place + 2]
            assert (made_even.weights, made_even.steps) == (by_hand.weights, by_hand.steps), (jobs[place + 1], result)
            assert made_even.evaluations == by_hand.evaluations
    assert "Truncated: train epoch 0 stopped on every rank after 4 batches" in results[0].output
    assert verdict_lines(results[1]) == []


def test_the_trainer_with_uneven_lengths_is_told_why_they_must_be_equal(run_ranks):
    """Loaders that report different lengths stay a mismatch, with the reason, because each Trainer steps by its own."""
    job = trainer_jobs.Job(batches=[5, 4], reported=[5, 4], args={"accelerator_config": UNSHARED}, options=STOP)
    results = run_ranks(trainer_jobs.train, 2, job, env=CPU, expect=None, deadline_seconds=60)
    words = "before the first batch, batches_per_epoch is 5 on rank 0, 4 on rank 1"
    assert_named(results, "PlanMismatch", [0, 1], words, "Trainer steps, and ends its epochs, by the length")
    assert "trained " not in "".join(result.output for result in results)


def test_a_loader_with_a_state_resumes_where_the_loop_was(run_ranks):
    """A run resumed in mid-epoch reads batch for batch what an uninterrupted one reads, in this epoch and the next.

    So it does with Accelerate's `use_stateful_dataloader`.
    """
    jobs: dict[str, tuple[Any, ...]] = {
        f"{workers} workers": (stateful_loaders.resumed, [9, 7], 4, workers) for workers in (0, 2)
    }
    jobs["Accelerate"] = (stateful_loaders.resumed_with_accelerate, [9, 7], 4)
    for rank, result in enumerate(run_ranks(in_turn, 2, jobs)):
        for name, (whole, parts) in result.value.items():
            assert parts == whole, name
            if name != "Accelerate":
                assert whole == [1000.0 * rank + number for number in (*range(7), *range(7))], name


def test_the_state_of_a_loader_is_that_of_the_loop(run_ranks):
    """In a pass it counts what the loop has got, also for a loader of one's own and in Fabric.

    Behind a common end, a longer rank's loader has what it has left, and nothing tells it that the pass is over.
    """
    results = run_ranks(stateful_loaders.saved, 2, [9, 7], deadline_seconds=120)
    for rank, result in enumerate(results):
        whole = [1000.0 * rank + number for number in range(7)]
        for name, found in result.value.items():
            within = [whole[done:] for done in (1, 4, 6)]
            left = [] if "iterator" in name else [[8.0], [1000.0]][rank]  # rank 1 begins again
            then = [] if name.startswith("own") else [whole]
            assert found == [[each, *then] for each in (*within, left)], (name, result)

"""Lightning jobs in which nothing is wrong: no verdict, not a word, and the same bits of weights as without."""

import contextlib
import os
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from integration_tests.jobs import (
    BATCH_SIZE,
    Classifier,
    Job,
    csv_logger,
    fit,
    fit_resumed,
    logged,
    outcome,
    own_rank,
    quiet,
    sleep_once,
    verdict_lines,
)

EVEN = 80

CASES: dict[str, dict[str, Any]] = {
    "validation": {"even": EVEN, "val": 2},
    "sanity_check": {"even": EVEN, "val": 3, "trainer": {"num_sanity_val_steps": 2}},
    "validation_in_mid_epoch": {"even": EVEN, "val": 2, "trainer": {"val_check_interval": 0.5}},
    "several_validation_loaders": {"even": EVEN, "val": [2, 3]},
    "accumulation": {"even": EVEN, "trainer": {"accumulate_grad_batches": 3}},
    "early_stopping_on_all_ranks": {"even": EVEN, "model": {"stop_at": 12}},
    "max_steps_in_mid_epoch_unsized": {"train": 5, "trainer": {"max_steps": 7, "max_epochs": -1}},
    "more_than_its_length": {"train": 5, "reported": 3},
    "length_over_reported_everywhere": {"train": 5, "reported": 5, "trainer": {"limit_train_batches": 4}},
    "checkpoints": {"even": EVEN, "val": 2, "trainer": {"enable_checkpointing": True}},
    "metrics_synchronised": {"even": EVEN, "val": 2, "model": {"train_sync": "epoch", "eval_sync": "step"}},
}


def healthy_job(case: dict[str, Any], ranks: int) -> Job:
    per_rank = ("val", "train", "reported")
    more: dict[str, Any] = {name: [value] * ranks if name in per_rank else value for name, value in case.items()}
    return Job(**more)


def same_with_and_without(run_ranks: Any, function: Any, ranks: int, job: Job, **options: Any) -> list[Any]:
    """Runs a job with and without the callback; nothing is said, and every rank's outcome is the same to the bit."""
    plain = run_ranks(function, ranks, replace(job, options=None), deadline_seconds=60)
    counted = run_ranks(function, ranks, replace(job, options=options), deadline_seconds=60)
    assert [result.value for result in counted] == [result.value for result in plain]
    assert [line for result in counted for line in verdict_lines(result) if "WrongLength" not in line] == []
    return [result.value for result in counted]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("case", CASES)
def test_a_healthy_job_trains_to_the_same_bits_without_a_word(run_ranks, ranks, case):
    values = same_with_and_without(run_ranks, fit, ranks, healthy_job(CASES[case], ranks), uneven_eval="raise")
    assert len({value["weights"] for value in values}) == 1


@pytest.mark.parametrize("short", [0, 1])
def test_steps_that_end_just_where_one_loader_ends_are_healthy(run_ranks, short):
    job = Job(train=[4 + (rank != short) for rank in range(2)], trainer={"max_steps": 4, "max_epochs": -1})
    values = same_with_and_without(run_ranks, fit, 2, job)
    assert len({value["weights"] for value in values}) == 1


@pytest.mark.parametrize("kind", ["map_style", "unsized"])
def test_resuming_in_mid_epoch_is_healthy(run_ranks, kind):
    job = Job(even=40) if kind == "map_style" else Job(train=[5, 5])
    same_with_and_without(run_ranks, fit_resumed, 2, job)


def resume_behind_the_last_batch(job: Job) -> dict[str, Any]:
    """Resumes from the checkpoint of an epoch's end, where `max_steps` makes Lightning end that epoch once more."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    quiet()
    for epochs in (1, 3):
        saves = ModelCheckpoint(dirpath="checkpoints", save_last=True)
        trainer = job.make_trainer(max_steps=5 * epochs, max_epochs=-1, callbacks=[saves], enable_checkpointing=True)
        model = Classifier()
        resumed = "checkpoints/last.ckpt" if epochs > 1 else None
        trainer.fit(model, job.train_loader(), job.val_loaders(), ckpt_path=resumed)
    return outcome(trainer, model)


def test_resuming_behind_the_last_batch_of_an_epoch_is_healthy(run_ranks):
    values = same_with_and_without(run_ranks, resume_behind_the_last_batch, 2, Job(even=40, val=[2, 2]))
    assert values[0]["steps"] == 15


class OfTwo(Classifier):
    """Trains on the first of two batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch["a"], batch_idx)


def train_on_two_loaders(job: Job) -> dict[str, Any]:
    quiet()
    trainer, model = job.make_trainer(), OfTwo()
    trainer.fit(model, {"a": job.train_loader(), "b": job.train_loader()})
    return outcome(trainer, model)


@pytest.mark.parametrize("limit", [1.0, 0.25])
def test_several_train_loaders_are_healthy(run_ranks, limit):
    job = Job(even=64, trainer={"limit_train_batches": limit})
    values = same_with_and_without(run_ranks, train_on_two_loaders, 2, job)
    assert values[0]["steps"] == 2 * 8 * limit


class Pruned(Exception):
    """What ends a trial of a search, on every rank."""


def prune(number: int) -> None:
    if number == 2 * BATCH_SIZE:
        raise Pruned


def train_after_a_pruned_trial(job: Job) -> dict[str, Any]:
    quiet()
    with contextlib.suppress(Pruned):
        fit(replace(job, before=prune))
    return fit(replace(job, before=partial(sleep_once, 0, 2 * BATCH_SIZE, 4.0)))


def test_a_trial_after_one_that_was_given_up_is_not_ended_with_it(run_ranks):
    """Rank 1 waits in a collective for much longer than `grace_seconds`."""
    job = Job(train=[5, 5], options={"grace_seconds": 0.5})
    results = run_ranks(train_after_a_pruned_trial, 2, job, deadline_seconds=60)
    assert [result.value["steps"] for result in results] == [10, 10]


def accumulate_on_a_schedule(job: Job) -> dict[str, Any]:
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    quiet()
    schedule = GradientAccumulationScheduler({0: 1, 1: 3})
    trainer, model = job.make_trainer(callbacks=[schedule], max_epochs=3), Classifier()
    trainer.fit(model, job.train_loader())
    return outcome(trainer, model)


def test_an_accumulation_schedule_is_healthy(run_ranks):
    same_with_and_without(run_ranks, accumulate_on_a_schedule, 2, Job(even=40))


def two_fits_and_evaluations(job: Job) -> dict[str, Any]:
    quiet()
    trainer, model = job.make_trainer(), Classifier()
    trainer.validate(model, job.val_loaders())
    trainer.fit(model, job.train_loader(), job.val_loaders())
    trainer.fit_loop.max_epochs = 4
    trainer.fit(model, job.train_loader(), job.val_loaders())
    trainer.test(model, job.val_loaders())
    trainer.validate(model, job.val_loaders())
    return outcome(trainer, model)


def test_two_fits_and_evaluations_alone_are_healthy(run_ranks):
    same_with_and_without(run_ranks, two_fits_and_evaluations, 2, Job(even=40, val=[2, 2]))


def slow(seconds: float, number: int) -> None:
    if own_rank() == 1 and not number % 4:
        time.sleep(seconds)


def test_a_rank_three_times_slower_is_only_slow(run_ranks):
    job = Job(train=[6, 6], before=partial(slow, 0.1))
    same_with_and_without(run_ranks, fit, 2, job)


def test_a_rank_asleep_in_its_loader_is_reported_once_and_then_goes_on(run_ranks):
    job = Job(
        train=[5, 5], trainer={"max_epochs": 1}, options={"stall_seconds": 2}, before=partial(sleep_once, 1, 8, 20)
    )
    results = run_ranks(fit, 2, job, deadline_seconds=60)
    lines = verdict_lines(results[0])
    assert sum("countoff: Stalled: " in line for line in lines) == 1, results[0].output
    assert any("rank 1 is in its loader" in line for line in lines), results[0].output
    assert any("jobs.py" in line and "in sleep_once" in line for line in lines), results[0].output
    assert verdict_lines(results[1]) == []
    assert len({result.value["weights"] for result in results}) == 1


def fit_and_read_log(job: Job) -> dict[str, float]:
    quiet()
    trainer, model = job.make_trainer(logger=csv_logger()), Classifier()
    trainer.fit(model, job.train_loader(), job.val_loaders())
    return {**logged_here(), "steps": trainer.global_step, "validations": model.validations} if own_rank() == 0 else {}


def logged_here() -> dict[str, float]:
    from pathlib import Path

    return logged(Path(os.getcwd()))


@pytest.mark.ranks(2, 4)
def test_true_totals_are_logged(run_ranks, ranks):
    job = Job(even=83, trainer={"accumulate_grad_batches": 2})
    found = run_ranks(fit_and_read_log, ranks, job)[0].value
    share = -(-83 // ranks)
    batches = -(-share // 4)
    assert found["countoff/batches_per_epoch"] == batches
    assert found["countoff/steps_per_epoch"] == -(-batches // 2)
    assert found["countoff/total_steps"] == found["steps"] == 2 * -(-batches // 2)
    assert found["countoff/global_batch_size"] == 4 * 2 * ranks
    assert found["countoff/samples_per_epoch"] == share * ranks
    assert found["countoff/samples_repeated"] == share * ranks - 83
    assert found["countoff/dp_degree"] == ranks
    assert found["countoff/spread_seconds"] >= 0


def test_the_slowest_loader_and_its_rank_are_logged(run_ranks):
    job = Job(train=[6, 6], before=partial(slow, 0.1))
    found = run_ranks(fit_and_read_log, 2, job)[0].value
    assert found["countoff/loader_rank"] == 1
    assert found["countoff/loader_seconds_max"] > found["countoff/loader_seconds"] > 0


def test_a_size_taken_for_a_length_is_said_once_and_mended_on_request(run_ranks):
    job = Job(train=[8, 8], reported=[16, 16], val=[1, 1], trainer={"max_epochs": 3})
    plain = run_ranks(fit_and_read_log, 2, job)
    lines = [line for result in plain for line in verdict_lines(result)]
    assert sum("countoff: WrongLength: Lightning counts on 16 batches" in line for line in lines) == 1, plain[0].output
    assert any("16 is the size of the data set over all 2 data ranks" in line for line in lines)
    assert plain[0].value["countoff/batches_per_epoch"] == 8
    assert plain[0].value["countoff/reported_batches_per_epoch"] == 16
    assert plain[0].value["validations"] == 0  # Lightning never gets to the batch at which it would validate
    fixed = run_ranks(fit_and_read_log, 2, replace(job, options={"totals": "fix"}))
    assert fixed[0].value["countoff/reported_batches_per_epoch"] == 8
    assert fixed[0].value["validations"] == 2  # in every epoch after the first, which has shown the length
    assert fixed[0].value["steps"] == plain[0].value["steps"] == 24

"""Lightning jobs in which nothing is wrong: no verdict, no output, and the same bits of weights as without countoff."""

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import LambdaCallback

from countoff.lightning import Countoff
from integration_tests.digits import BATCH_SIZE, own_rank, sleep_once
from integration_tests.harness import Watch
from integration_tests.lightning_jobs import Classifier, Job, csv_logger, fit, fit_resumed, logged, outcome, quiet
from integration_tests.output import verdict_lines

EVEN = 80
Train = Callable[[Job], dict[str, Any]]

# One loader each for training and evaluation, on any number of ranks.
CASES: dict[str, dict[str, Any]] = {
    "validation": {"even": EVEN, "val": 2},
    "sanity check": {"even": EVEN, "val": 3, "trainer": {"num_sanity_val_steps": 2}},
    "validation in mid-epoch": {"even": EVEN, "val": 2, "trainer": {"val_check_interval": 0.5}},
    "several validation loaders": {"even": EVEN, "val": [2, 3]},
    "accumulation": {"even": EVEN, "trainer": {"accumulate_grad_batches": 3}},
    "early stopping on all ranks": {"even": EVEN, "model": {"stop_at": 12}},
    "max_steps in mid-epoch, unsized": {"train": 5, "trainer": {"max_steps": 7, "max_epochs": -1}},
    "more than its length": {"train": 5, "reported": 3},
    "length over reported everywhere": {"train": 5, "reported": 5, "trainer": {"limit_train_batches": 4}},
    "checkpoints": {"even": EVEN, "val": 2, "trainer": {"enable_checkpointing": True}},
    "metrics synchronised": {"even": EVEN, "val": 2, "model": {"train_sync": "epoch", "eval_sync": "step"}},
}


def healthy_job(case: dict[str, Any], ranks: int) -> Job:
    per_rank = ("val", "train", "reported")
    more: dict[str, Any] = {name: [value] * ranks if name in per_rank else value for name, value in case.items()}
    return Job(**more, options={"uneven_eval": "raise"})


def resume_after_the_last_batch(job: Job) -> dict[str, Any]:
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


class OfTwo(Classifier):
    """Trains on the first of two batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch["a"], batch_idx)


def train_on_two_loaders(job: Job) -> dict[str, Any]:
    quiet()
    trainer, model = job.make_trainer(), OfTwo()
    trainer.fit(model, {"a": job.train_loader(), "b": job.train_loader()})
    return outcome(trainer, model)


def accumulate_on_a_schedule(job: Job) -> dict[str, Any]:
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    quiet()
    schedule = GradientAccumulationScheduler({0: 1, 1: 3})
    trainer, model = job.make_trainer(callbacks=[schedule], max_epochs=3), Classifier()
    trainer.fit(model, job.train_loader())
    return outcome(trainer, model)


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


def slow(seconds: float, number: int) -> None:
    if own_rank() == 1 and not number % 4:
        time.sleep(seconds)


FOUR_STEPS = {"max_steps": 4, "max_epochs": -1}
# Jobs of two ranks, and the number of optimizer steps where it shows that the job did what it is here for.
OF_TWO_RANKS: dict[str, tuple[Train, Job, int | None]] = {
    "steps end where the loader of rank 0 ends": (fit, Job(train=[4, 5], trainer=FOUR_STEPS), 4),
    "steps end where the loader of rank 1 ends": (fit, Job(train=[5, 4], trainer=FOUR_STEPS), 4),
    "resumed in mid-epoch, map-style": (fit_resumed, Job(even=40), None),
    "resumed in mid-epoch, unsized": (fit_resumed, Job(train=[5, 5]), None),
    "resumed after the last batch of an epoch": (resume_after_the_last_batch, Job(even=40, val=[2, 2]), 15),
    "several train loaders": (train_on_two_loaders, Job(even=64), 16),
    "several train loaders, cut": (train_on_two_loaders, Job(even=64, trainer={"limit_train_batches": 0.25}), 4),
    "accumulation on a schedule": (accumulate_on_a_schedule, Job(even=40), None),
    "two fits, and evaluations alone": (two_fits_and_evaluations, Job(even=40, val=[2, 2]), None),
    "a rank three times slower": (fit, Job(train=[6, 6], before=partial(slow, 0.1)), 12),
}


def without_and_with(jobs: Mapping[str, tuple[Train, Job]]) -> dict[str, list[dict[str, Any]]]:
    """Runs each job without countoff and with it, one after the other in one process, and returns the outcomes."""
    start, outcomes = Path.cwd(), {}
    for number, (name, (train, job)) in enumerate(jobs.items()):
        outcomes[name] = []
        for options in (None, job.options):
            # A directory for each: Lightning gives a checkpoint another name where there is one already.
            directory = start / f"{number}-{'plain' if options is None else 'counted'}"
            directory.mkdir(exist_ok=True)
            os.chdir(directory)
            outcomes[name].append(train(replace(job, options=options)))
    return outcomes


def assert_healthy(results: list[Any]) -> None:
    """No rank printed a verdict, and every outcome is the same to the bit with countoff, and on every rank."""
    assert [line for result in results for line in verdict_lines(result) if "WrongLength" not in line] == []
    for name in results[0].value:
        weights = {outcome["weights"] for result in results for outcome in result.value[name]}
        assert len(weights) == 1, name
        for result in results:
            plain, counted = result.value[name]
            assert plain == counted, name


@pytest.mark.ranks(2, nightly=(4,))
def test_healthy_jobs_train_to_the_same_bits(run_ranks, ranks):
    """A healthy job prints nothing and ends with the same weights and steps as without countoff."""
    jobs = {name: (fit, healthy_job(case, ranks)) for name, case in CASES.items()}
    assert_healthy(run_ranks(without_and_with, ranks, jobs, deadline_seconds=240))


def test_healthy_jobs_of_two_ranks_train_to_the_same_bits(run_ranks):
    """Steps that end with a loader, resuming, several loaders, schedules, more fits and a slow rank are healthy."""
    jobs = {name: (train, job) for name, (train, job, _) in OF_TWO_RANKS.items()}
    results = run_ranks(without_and_with, 2, jobs, deadline_seconds=240)
    assert_healthy(results)
    for name, (_, _, steps) in OF_TWO_RANKS.items():
        assert steps in (None, results[0].value[name][1]["steps"]), name


class Pruned(Exception):
    """What ends a trial of a search, on every rank."""


def prune(number: int) -> None:
    if number == 2 * BATCH_SIZE:
        raise Pruned


def train_after_a_pruned_trial(job: Job) -> dict[str, Any]:
    quiet()
    with contextlib.suppress(Pruned):
        fit(replace(job, before=prune))
    return fit(replace(job, before=partial(sleep_once, 0, 2 * BATCH_SIZE, 2.0)))


def test_a_trial_after_a_pruned_trial_trains_to_its_end(run_ranks):
    """A trial that was pruned does not end the next one, in which rank 1 waits for longer than a grace."""
    job = Job(train=[5, 5], options={"GRACE_SECONDS": 0.5})
    results = run_ranks(train_after_a_pruned_trial, 2, job, deadline_seconds=60)
    assert [result.value["steps"] for result in results] == [10, 10]


RELEASED = "released"


def sleep_until_released(number: int) -> None:
    """Lets the loader of rank 1 wait before its third batch until the test makes a file."""
    if number == 2 * BATCH_SIZE and own_rank() == 1:
        while not Path(RELEASED).exists():
            time.sleep(0.05)


def test_a_rank_asleep_in_its_loader_is_reported_once(run_ranks, tmp_path):
    """Rank 0 reports the stall once, with the line in which rank 1 waits, and training goes on."""
    seconds = 2.0

    def release_after_the_report(watch: Watch) -> None:
        patience = time.monotonic() + 60
        while "countoff: Stalled: " not in watch.results()[0].output and time.monotonic() < patience:
            watch.let_run(0.1)
        watch.let_run(2 * seconds)  # time for a second report
        (directory,) = tmp_path.iterdir()
        (directory / RELEASED).touch()

    job = Job(train=[5, 5], trainer={"max_epochs": 1}, options={"stall_seconds": seconds}, before=sleep_until_released)
    results = run_ranks(fit, 2, job, deadline_seconds=90, while_running=release_after_the_report)
    lines = verdict_lines(results[0])
    assert sum("countoff: Stalled: " in line for line in lines) == 1, results[0].output
    assert any("rank 1 is in its loader" in line for line in lines), results[0].output
    source = Path(__file__).name
    assert any(source in line and "in sleep_until_released" in line for line in lines), results[0].output
    assert verdict_lines(results[1]) == []
    assert len({result.value["weights"] for result in results}) == 1


def fit_and_read_log(job: Job) -> dict[str, float]:
    quiet()
    trainer, model = job.make_trainer(logger=csv_logger()), Classifier()
    trainer.fit(model, job.train_loader(), job.val_loaders())
    return {**logged_here(), "steps": trainer.global_step, "validations": model.validations} if own_rank() == 0 else {}


def logged_here() -> dict[str, float]:
    return logged(Path(os.getcwd()))


@pytest.mark.ranks(2, nightly=(4,))
def test_true_totals_are_logged(run_ranks, ranks):
    """The totals that the logger gets are those of the run."""
    job = Job(even=83, trainer={"accumulate_grad_batches": 2})
    found = run_ranks(fit_and_read_log, ranks, job)[0].value
    share = -(-83 // ranks)
    batches = -(-share // 4)
    assert found["countoff/num_training_batches"] == batches
    assert found["countoff/steps_per_epoch"] == -(-batches // 2)
    assert found["countoff/estimated_stepping_batches"] == found["steps"] == 2 * -(-batches // 2)
    assert found["countoff/global_batch_size"] == 4 * 2 * ranks
    assert found["countoff/samples_repeated"] == share * ranks - 83


def fit_and_measure(job: Job) -> dict[str, float]:
    quiet()
    countoff, found = Countoff(), dict[str, float]()
    read = LambdaCallback(on_fit_end=lambda *_: found.update(countoff.guard.metrics if countoff.guard else {}))
    replace(job, options=None).make_trainer(callbacks=[countoff, read]).fit(Classifier(), job.train_loader())
    return found


def test_the_slowest_loader_and_its_rank_are_measured(run_ranks):
    """The rank with the slowest loader is known, with its seconds."""
    job = Job(train=[6, 6], before=partial(slow, 0.1))
    found = run_ranks(fit_and_measure, 2, job)[0].value
    assert found["countoff/loader_rank"] == 1
    assert found["countoff/loader_seconds_max"] > found["countoff/loader_seconds"] > 0


def test_a_size_taken_for_a_length_is_reported_and_fixed(run_ranks):
    """A loader's wrong length is reported once, and `totals='fix'` sets the right one."""
    job = Job(train=[8, 8], reported=[16, 16], val=[1, 1], trainer={"max_epochs": 3})
    plain = run_ranks(fit_and_read_log, 2, job)
    lines = [line for result in plain for line in verdict_lines(result)]
    assert sum("countoff: WrongLength: Lightning counts on 16 batches" in line for line in lines) == 1, plain[0].output
    assert any("16 is the size of the dataset over all 2 data ranks" in line for line in lines)
    assert plain[0].value["countoff/num_training_batches"] == 8
    assert plain[0].value["validations"] == 0  # Lightning never gets to the batch at which it would validate
    fixed = run_ranks(fit_and_read_log, 2, replace(job, options={"totals": "fix"}))
    assert fixed[0].value["validations"] == 2  # in every epoch after the first, which has shown the length
    assert fixed[0].value["steps"] == plain[0].value["steps"] == 24

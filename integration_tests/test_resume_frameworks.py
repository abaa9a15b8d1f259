"""Runs of the frameworks that load their own checkpoints in another process: what they repeat or skip is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from integration_tests.composer_jobs import needs_composer, said

REPEATED = "train epoch 0 begins again with its first batch, and the checkpoint was written after 3 batches of it: "
AGAIN = f"{REPEATED}3 batches are trained on again."
ONE_BEHIND = (
    "the first batch of the resumed run is the last one before the checkpoint, in train epoch 0: 1 batch is trained on "
    "again."
)
MORE_RANKS = (
    "train epoch 0 goes on after 32 samples (2 batches of 4 on 4 data ranks), and the checkpoint was written after 16 "
    "samples (2 batches of 4 on 2 data ranks): 16 samples are skipped."
)
BEGUN_ON_MORE_RANKS = (
    "train epoch 0 goes on after 0 samples, and the checkpoint was written after 16 samples (2 batches of 4 on 2 data "
    "ranks): 16 samples are trained on again."
)
ANOTHER_RATE = "the learning rate of the first step after the resume is 0.05, and the checkpoint had 0.1."
UNREADABLE = (
    "countoff's record in the checkpoint cannot be read (KeyError: 'version'). Where the run goes on is not compared."
)

USUAL = {
    "lightning": (
        "in mid-epoch",
        "at the last batch",
        "at the last batch, plain loader",
        "at the end of an epoch",
        "in a validation",
    ),
    "composer": (
        "in mid-epoch",
        "at the last batch",
        "after an epoch, stepped by epoch",
        "a schedule of Composer's",
        "a data set with a state",
        "streaming",
        "autoresume",
    ),
}
"""The right resumes that are tried at each merge. The others are tried nightly, without the wrong ones."""
how_usual = pytest.mark.parametrize(
    "usual", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["usual", "rare"]
)


def found(result: Any, names: Sequence[str]) -> dict[str, list[str]]:
    """What was said of each resume on one rank, as sentences; nothing but `ResumeMismatch` is expected.

    The schedules of the jobs are longer than the runs, so that the rate never stands still; that is said, too.
    """
    return {
        name: [
            line.removeprefix("countoff: ResumeMismatch: ")
            for line in text.splitlines()
            if not line.startswith((" ", "countoff: WrongHorizon: the learning rate would reach its end at step "))
        ]
        for name, text in zip(names, said(result), strict=True)
    }


def chosen(
    framework: str, healthy: Mapping[str, Any], faulty: Mapping[str, tuple[Any, str]], usual: bool
) -> tuple[dict[str, Any], dict[str, tuple[Any, str]]]:
    """The usual resumes, right and wrong, or the rare right ones."""
    assert set(USUAL[framework]) <= healthy.keys()
    right = {name: run for name, run in healthy.items() if (name in USUAL[framework]) == usual}
    return right, dict(faulty) if usual else {}


def assert_named(results: Any, healthy: Mapping[str, Any], faulty: Mapping[str, tuple[Any, str]]) -> None:
    """Rank 0 says the sentence of each faulty resume, once, and nothing else is said on any rank."""
    names = [*healthy, *faulty]
    due = {name: [] for name in healthy} | {name: [sentence] for name, (_, sentence) in faulty.items()}
    assert found(results[0], names) == due, results[0]
    for result in results[1:]:
        assert found(result, names) == {name: [] for name in names}, result


@how_usual
def test_lightning(run_ranks, tmp_path, usual):
    """Lightning's resumes, right and wrong; two of the usual ones once more from what the resumed run has written."""
    from integration_tests import lightning_resumes as jobs
    from integration_tests.lightning_resumes import Resume

    at_epoch_end = {"every_n_epochs": 1, "save_on_train_epoch_end": True}
    at_validation = {"every_n_epochs": 1, "save_on_train_epoch_end": False}
    healthy = {
        "in mid-epoch": Resume(),
        "in the second epoch, with a warm-up": Resume(step=8, schedule="warm-up"),
        "at the last batch": Resume(step=6),
        "at the last batch, plain loader": Resume(step=6, loader="plain"),
        "at the last batch, no length": Resume(step=6, loader="unsized"),
        "at the end of an epoch": Resume(saves=at_epoch_end, step=6, loader="shuffled"),
        "with a schedule by epoch": Resume(saves=at_epoch_end, step=6, loader="own sampler", interval="epoch"),
        "in mid-epoch with a schedule by epoch": Resume(step=8, schedule="steps", interval="epoch"),
        "in a validation": Resume(saves=at_validation, step=4, trainer={"val_check_interval": 2}, val=True),
        "in the validation after an epoch": Resume(saves=at_validation, step=6, val=True, loader="plain"),
        "after max_steps": Resume(saves={}, until={"max_steps": 3}, loader="plain"),
        "after max_steps without max_epochs": Resume(
            saves=at_epoch_end, until={"max_steps": 4}, step=4, trainer={"max_epochs": -1, "max_steps": 15}
        ),
        "after the last batch, without max_epochs": Resume(
            saves=at_epoch_end, until={"max_steps": 6}, step=6, trainer={"max_epochs": -1, "max_steps": 15}, val=True
        ),
        "after a fit": Resume(saves={}, until={"max_epochs": 1}, step=6),
        "with accumulation": Resume(trainer={"accumulate_grad_batches": 2}, step=2),
        "inside an accumulation's epoch end": Resume(trainer={"accumulate_grad_batches": 4}, step=1),
        "with manual optimization": Resume(manual=True, step=6, schedule="", saves={"every_n_train_steps": 2}),
        "without a record": Resume(options=None, loader="plain"),
    }
    faulty = {
        "a plain loader": (Resume(loader="plain"), AGAIN),
        "a shuffled one": (Resume(loader="shuffled"), AGAIN),
        "no length": (Resume(loader="unsized"), AGAIN),
        "one batch behind": (Resume(loader="one behind"), ONE_BEHIND),
        "an epoch skipped": (
            Resume(spoils=jobs.skip_epoch),
            "the run goes on with train epoch 1, and the checkpoint was written in train epoch 0: 3 batches of train "
            "epoch 0 are skipped.",
        ),
        "a scheduler that is not restored": (
            Resume(spoils=jobs.forget_schedule),
            "the learning-rate schedule has counted 0 steps in the first step after the resume, and had counted 3 when "
            "the checkpoint was written: the learning rate was 0.0986, and is 0.0985 in the second step.",
        ),
        "another rate": (Resume(schedule="", rate=0.05), ANOTHER_RATE),
        "a broken record": (Resume(spoils=jobs.break_record), UNREADABLE),
    }
    healthy, faulty = chosen("lightning", healthy, faulty, usual)
    runs, first, second = [*healthy.values(), *(each for each, _ in faulty.values())], tmp_path / "1", tmp_path / "2"
    run_ranks(jobs.write, 2, runs, str(first), deadline_seconds=200)
    checkpoint = torch.load(first / "0" / "step=3.ckpt", weights_only=True)
    assert "countoff" in checkpoint
    assert not [name for name in checkpoint["callbacks"] if "ountoff" in name]
    results = run_ranks(jobs.resume, 2, runs, str(first), str(second), deadline_seconds=200)
    assert_named(results, healthy, faulty)
    if not usual:
        return

    def further(each: Resume) -> Resume:
        return Resume(**{**vars(each), "step": each.step + (6 if each.loader == "plain" else 1), "trainer": {}})

    again = {name: further(healthy[name]) for name in ("in mid-epoch", "at the last batch")}
    places = [list(healthy).index(name) for name in again]
    results = run_ranks(jobs.resume_at, 2, list(again.values()), places, str(second), deadline_seconds=100)
    assert_named(results, again, {})


@pytest.mark.nightly
def test_lightning_on_other_numbers_of_ranks(run_ranks, tmp_path):
    """One rank is compared too, and what two ranks wrote is resumed by four."""
    from integration_tests import lightning_resumes as jobs
    from integration_tests.lightning_resumes import Resume

    runs = [Resume(), Resume(loader="plain"), Resume(step=6, loader="plain")]
    run_ranks(jobs.write, 1, runs, str(tmp_path / "1"))
    results = run_ranks(jobs.resume, 1, runs, str(tmp_path / "1"))
    assert found(results[0], "abc") == {
        "a": [],
        "b": [AGAIN],
        "c": [REPEATED.replace("3", "6") + "6 batches are trained on again."],
    }
    at_epoch_end = {"every_n_epochs": 1, "save_on_train_epoch_end": True}
    runs = [Resume(), Resume(saves=at_epoch_end, step=6, loader="shuffled"), Resume(loader="plain", step=2)]
    run_ranks(jobs.write, 2, runs, str(tmp_path / "2"))
    results = run_ranks(jobs.resume, 4, runs, str(tmp_path / "2"), deadline_seconds=100)
    assert found(results[0], "abc") == {"a": [], "b": [], "c": [BEGUN_ON_MORE_RANKS]}


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_transformers(run_ranks, tmp_path):
    """The Trainer's resumes, right and wrong; the right ones once more from what the resumed run has written."""
    from integration_tests import trainer_resumes as jobs
    from integration_tests.trainer_jobs import Job
    from integration_tests.trainer_resumes import Resume

    by_epoch = {"save_strategy": "epoch"}
    accumulating = Job(samples=80, args={"gradient_accumulation_steps": 3})
    constant = Job(samples=80, args={"lr_scheduler_type": "constant"})
    healthy = {
        "in mid-epoch": Resume(),
        "in the second epoch, with a warm-up": Resume(Job(samples=80, args={"warmup_steps": 5}), step=13),
        "at the last batch": Resume(step=10),
        "after an epoch": Resume(step=10, saves=by_epoch),
        "with accumulation": Resume(accumulating, step=2),
        "with accumulation, at the last batch": Resume(accumulating, step=4),
        "between evaluations": Resume(Job(samples=80, evals=(16,), args={"eval_strategy": "steps", "eval_steps": 1})),
        "ignore_data_skip": Resume(then={"ignore_data_skip": True}),
        "callbacks restored": Resume(then={"restore_callback_states_from_checkpoint": True}),
        "no length": Resume(
            Job(batches=(6, 6), args={"max_steps": 20, "accelerator_config": {"dispatch_batches": False}})
        ),
        "without a record": Resume(spoils=jobs.without_record),
    }
    faulty = {
        "one batch too few": (
            Resume(spoils=jobs.one_step_back),
            "train epoch 0 goes on after 2 batches, and the checkpoint was written after 3: 1 batch is trained on "
            "again.",
        ),
        "an epoch skipped": (
            Resume(spoils=jobs.one_epoch_on),
            "the run goes on with train epoch 1, and the checkpoint was written in train epoch 0: 7 batches of train "
            "epoch 0 are skipped.",
        ),
        "a scheduler that is not restored": (
            Resume(Job(samples=80, horizon=20), spoils=jobs.without_schedule),
            "the learning-rate schedule has counted 0 steps in the first step after the resume, and had counted 3 when "
            "the checkpoint was written: the learning rate was 0.085, and is 0.095 in the second step.",
        ),
        "another rate": (Resume(constant, rate=0.05), ANOTHER_RATE),
        "a broken record": (Resume(spoils=jobs.with_broken_record), UNREADABLE),
    }
    runs, first, second = [*healthy.values(), *(each for each, _ in faulty.values())], tmp_path / "1", tmp_path / "2"
    run_ranks(jobs.write, 2, runs, str(first), deadline_seconds=200)
    jobs.spoil(runs, first)
    results = run_ranks(jobs.resume, 2, runs, str(first), str(second), deadline_seconds=200)
    assert_named(results, healthy, faulty)
    again = {name: Resume(**{**vars(healthy[name]), "step": 15}) for name in ("in mid-epoch", "at the last batch")}
    places = [list(healthy).index(name) for name in again]
    assert_named(run_ranks(jobs.resume_at, 2, list(again.values()), places, str(second)), again, {})
    runs = [Resume(step=2), Resume(step=10)]
    results = run_ranks(jobs.resume, 4, runs, str(first), deadline_seconds=100)
    assert found(results[0], "ab") == {"a": [MORE_RANKS], "b": []}


@how_usual
@needs_composer
@pytest.mark.usefixtures("one_streaming_job")
def test_composer(run_ranks, tmp_path, usual):
    """Composer's resumes, right and wrong; two of the usual ones once more from what the resumed run has written."""
    from integration_tests import composer_resumes as jobs
    from integration_tests.composer_jobs import Job
    from integration_tests.composer_resumes import Resume

    healthy = {
        "in mid-epoch": Resume(),
        "at the last batch": Resume(batch=6),
        "in the second epoch, stepped by epoch": Resume(batch=8, every_batch=False),
        "after an epoch, stepped by epoch": Resume(saves="1ep", batch=6, every_batch=False),
        "a schedule of Composer's": Resume(schedule="composer"),
        "one that is not restored": Resume(schedule="composer", then={"load_ignore_keys": ["state/schedulers*"]}),
        "between evaluations": Resume(job=Job(even=48, evals=[2, 2], trainer={"eval_interval": "2ba"}), batch=4),
        "a data set with a state": Resume(loader="right"),
        "streaming": Resume(job=Job(streams=[96]), batch=5),
        "spin_dataloaders=False": Resume(then={"spin_dataloaders": False}),
        "stopped in mid-epoch": Resume(until={"max_duration": "5ba"}, batch=5),
        "reset_time": Resume(fits={"reset_time": True}),
        "weights alone": Resume(then={"load_weights_only": True}),
        "without the time": Resume(then={"load_ignore_keys": ["state/timestamp*"]}),
        "without a record": Resume(then={"load_ignore_keys": ["state/callbacks*"]}),
        "autoresume": Resume(autoresume=True, until={"max_duration": "4ba"}),
        "autoresume after an epoch": Resume(autoresume=True, until={"max_duration": "1ep"}),
    }
    faulty = {
        "from the start": (Resume(loader="from the start"), AGAIN),
        "one batch behind": (Resume(loader="one behind"), ONE_BEHIND),
        "a scheduler that is not restored": (
            Resume(then={"load_ignore_keys": ["state/schedulers*"]}),
            "the learning-rate schedule has counted 0 steps in the first step after the resume, and had counted 3 when "
            "the checkpoint was written: the learning rate was 0.0986, and is 0.0985 in the second step.",
        ),
        "autoresume from the start": (
            Resume(autoresume=True, loader="from the start", until={"max_duration": "3ba"}),
            AGAIN,
        ),
        "another rate": (
            Resume(schedule="", rate=0.05, then={"load_ignore_keys": ["state/optimizers*", "state/schedulers*"]}),
            ANOTHER_RATE,
        ),
    }
    healthy, faulty = chosen("composer", healthy, faulty, usual)
    runs, first, second = [*healthy.values(), *(each for each, _ in faulty.values())], tmp_path / "1", tmp_path / "2"
    run_ranks(jobs.write, 2, runs, str(first), deadline_seconds=200)
    results = run_ranks(jobs.resume, 2, runs, str(first), str(second), deadline_seconds=200)
    assert_named(results, healthy, faulty)
    if not usual:
        return
    again = {
        name: Resume(**{**vars(healthy[name]), "batch": 10}) for name in ("in mid-epoch", "a data set with a state")
    }
    places = [list(healthy).index(name) for name in again]
    assert_named(run_ranks(jobs.resume_at, 2, list(again.values()), places, str(second)), again, {})


@pytest.mark.nightly
@needs_composer
@pytest.mark.usefixtures("one_streaming_job")
def test_composer_on_more_ranks(run_ranks, tmp_path):
    """A StreamingDataset goes on with the same samples on more ranks; as many batches of a plain one are others."""
    from integration_tests import composer_resumes as jobs
    from integration_tests.composer_jobs import Job
    from integration_tests.composer_resumes import Resume

    runs = [Resume(job=Job(streams=[96]), batch=4), Resume(batch=2)]
    run_ranks(jobs.write, 2, runs, str(tmp_path))
    results = run_ranks(jobs.resume, 4, runs, str(tmp_path), deadline_seconds=100)
    assert found(results[0], "ab") == {
        "a": [],
        "b": [MORE_RANKS],
    }


def test_fabric(run_ranks, tmp_path):
    """Resumes of a script that keeps countoff in the state it saves, right and wrong."""
    from integration_tests import fabric_resumes as jobs
    from integration_tests.resume_jobs import Run

    repeated = "train epoch 1 begins again with its first batch, and the checkpoint was written after 3 batches of it: "
    healthy = [
        Run("right"),
        Run("right, unshuffled", shuffle=False),
        Run("right, and again", again=True),
        Run("right, by the sampler's seed", loader="seeded"),
        Run("a loader with a state", loader="stateful"),
        Run("a stream", loader="stream"),
        Run("saved at the last batch", saved_at=(1, 6)),
        Run("saved after the epoch", saved_at=(1, 6), after_epoch=True),
        Run("saved after the epoch, unshuffled", saved_at=(1, 6), after_epoch=True, shuffle=False),
        Run("accumulation", saved_at=(1, 4), accumulation=2),
        Run("without a record", restored="mos", resumes_at=(1, 0)),
    ]
    faulty = {
        Run("the epoch begins again", resumes_at=(1, 0)): ("data", f"{repeated}3 batches are trained on again."),
        Run("one batch too few", shuffle=False, resumes_at=(1, 2)): ("data", f"{repeated}1 batch is trained on again."),
        Run("a stream begins again", loader="stream", resumes_at=(1, 0)): (
            "data",
            f"{repeated}3 batches are trained on again.",
        ),
        Run("an epoch is skipped", resumes_at=(3, 0)): (
            "data",
            "the sampler shuffles train epoch 1 by epoch 3, the order of a later epoch. Before the checkpoint, it "
            "shuffled train epoch 1 by epoch 1.",
        ),
        Run("the sampler begins again", saved_at=(1, 6), after_epoch=True, sets_epoch=False): (
            "data",
            "the sampler shuffles train epoch 2 by epoch 0, an order that the run has had before. Before the "
            "checkpoint, it shuffled train epoch 1 by epoch 1.",
        ),
        Run("the schedule begins again", restored="moc"): (
            "rate",
            "the learning-rate schedule has counted 0 steps in the first step after the resume, and had counted 9 when "
            "the checkpoint was written: the learning rate was 0.085, and is 0.04 in the second step.",
        ),
        Run("another learning rate", scheduled=False, rate=0.05): (
            "changed rate",
            "the learning rate of the first step after the resume is 0.05, and the checkpoint had 0.1.",
        ),
    }
    runs = [*healthy, *faulty]
    run_ranks(jobs.save_all, 2, runs, tmp_path, deadline_seconds=200)
    found = run_ranks(jobs.resume_all, 2, runs, tmp_path, deadline_seconds=200)[0].value
    assert {run.name: found[run.name] for run in healthy} == {run.name: [] for run in healthy}
    expected = {run.name: [(subject, f"ResumeMismatch: {sentence}")] for run, (subject, sentence) in faulty.items()}
    assert {run.name: found[run.name] for run in faulty} == expected
    checkpoint = torch.load(tmp_path / "right.ckpt", weights_only=True)  # without countoff, from plain types
    assert checkpoint["countoff"]["steps"] == 9


def test_fabric_keeps_one_record_of_how_far_the_script_has_come(run_ranks, tmp_path):
    """It stands where the script has left its epoch, goes back to an earlier checkpoint, and stays beyond the fit."""
    from integration_tests import fabric_resumes as jobs

    for result in run_ranks(jobs.use_record, 2, tmp_path, deadline_seconds=100):
        assert result.value == {
            "before the fit": {},
            "behind a break": [1, 2, 8],
            "gone back": [1, 2, 8],
            "behind another break": [2, 3, 15],
            "said": [],
            "after the fit": [2, 3, 15],
            "left over": ["countoff"],
        }


@needs_composer
def test_a_sharded_checkpoint_of_composer_is_loaded_in_silence(run_ranks, tmp_path):
    """Composer restores of it what the Trainer has before it loads, so the record stays behind."""
    from integration_tests import composer_resumes as jobs

    for result in run_ranks(jobs.resume_sharded, 2, str(tmp_path), deadline_seconds=100):
        assert result.value == [(True, 4), (True, 12)]
        assert "countoff: " not in result.output, result

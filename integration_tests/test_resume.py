"""Runs that resume from a real checkpoint in another process: what they repeat, skip or change is named."""

import json
import os
import sys

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("accelerate")
pytest.importorskip("torchdata")

from countoff._accelerate.checkpoints import _read
from countoff.report.reader import read
from countoff.torch import Countoff
from integration_tests import devices
from integration_tests import resume_jobs as jobs
from integration_tests.digits import digits, weights
from integration_tests.loops import model_and_optimizer
from integration_tests.output import verdict_lines
from integration_tests.resume_jobs import Prepared, Run
from tests.test_docs import DOCS, blocks

AGAIN = "train epoch 1 begins again with its first batch, and the checkpoint was written after 3 batches of it: "
NAMED = {
    Run("the epoch begins again", resumes_at=(1, 0)): ("data", AGAIN + "3 batches are trained on again."),
    Run("the loop skips one batch too few", resumes_at=(1, 2)): ("data", AGAIN + "1 batch is trained on again."),
    Run("unshuffled", shuffle=False, resumes_at=(1, 0)): ("data", AGAIN + "3 batches are trained on again."),
    Run("a stream begins again", loader="stream", resumes_at=(1, 0)): (
        "data",
        AGAIN + "3 batches are trained on again.",
    ),
    Run("an epoch is skipped", start_epoch=2, resumes_at=(2, 0)): (
        "position",
        "the run goes on with train epoch 2, and the checkpoint was written in train epoch 1: 3 batches of train epoch "
        "1 are skipped.",
    ),
    Run("the sampler's epoch is not set", saved_at=(1, 6), after_epoch=True, sets_epoch=False): (
        "data",
        "the sampler shuffles train epoch 2 by epoch 0, an order that the run has had before. Before the checkpoint, "
        "it shuffled train epoch 1 by epoch 1.",
    ),
    Run("the sampler's epoch is not set, for a rest of 2", saved_at=(1, 4), loader="stateful", sets_epoch=False): (
        "data",
        "the sampler shuffles train epoch 1 by epoch 0, an order that the run has had before. Before the checkpoint, "
        "it shuffled train epoch 1 by epoch 1.",
    ),
    Run("the sampler has another seed", seed=5): (
        "other order",
        "train epoch 1 goes on after 24 samples in another order than it had before the checkpoint: the sampler "
        "shuffles by seed 5, and did by 0.",
    ),
    Run("the schedule begins again", restored="moc"): (
        "rate",
        "the learning rate of step 2 after the resume is 0.04, that of step 2 of the whole run; the checkpoint had "
        "0.085.",
    ),
    Run("another learning rate", scheduled=False, rate=0.05): (
        "changed rate",
        "the learning rate of the first step after the resume is 0.05, and the checkpoint had 0.1.",
    ),
    Run("a broken record", spoil=jobs.spoiled): (
        "record",
        "countoff's record in the checkpoint cannot be read (KeyError: 'version'). Where the run goes on is not "
        "compared.",
    ),
}


def test_what_a_resumed_loop_repeats_or_skips_is_named(run_ranks, tmp_path):
    healthy = [
        Run("right"),
        Run("right, unshuffled", shuffle=False),
        Run("right, and again", again=True),
        Run("a loader with a state", loader="stateful"),
        Run("a loader with a state, and again", loader="stateful", again=True),
        Run("a stream", loader="stream"),
        Run("accumulation", saved_at=(1, 4), accumulation=2),
        Run("accumulation, between two steps", accumulation=2),
        Run("saved at the last batch", saved_at=(1, 6)),
        Run("saved at the last batch, unshuffled", saved_at=(1, 6), shuffle=False),
        Run("saved at the last batch of a stream", saved_at=(1, 6), loader="stream"),
        Run("saved after the epoch", saved_at=(1, 6), after_epoch=True),
        Run("saved after the epoch, unshuffled", saved_at=(1, 6), after_epoch=True, shuffle=False),
        Run("saved before its batch", saved_at=(1, 4), before=True, resumes_at=(1, 3)),
        Run("without a record", restored="mos", resumes_at=(1, 0)),
    ]
    runs = [*healthy, *NAMED]
    run_ranks(jobs.save_all, 2, runs, tmp_path)
    results = run_ranks(jobs.resume_all, 2, runs, tmp_path)
    found = results[0].value
    assert {run.name: found[run.name] for run in healthy} == {run.name: [] for run in healthy}
    expected = {run.name: [(subject, f"ResumeMismatch: {sentence}")] for run, (subject, sentence) in NAMED.items()}
    assert {run.name: resume_warnings(found[run.name]) for run in NAMED} == expected


def resume_warnings(notices):
    return [(subject, headline) for subject, headline in notices if headline.startswith("ResumeMismatch: ")]


def test_a_run_of_one_rank_is_compared_with_its_checkpoint(run_ranks, tmp_path):
    named = [run for run in NAMED if "sampler" not in run.name]
    healthy = [Run("right"), Run("saved at the last batch", saved_at=(1, 12)), Run("a loader", loader="stateful")]
    run_ranks(jobs.save_all, 1, [*healthy, *named], tmp_path)
    (result,) = run_ranks(jobs.resume_all, 1, [*healthy, *named], tmp_path)
    assert [result.value[run.name] for run in healthy] == [[], [], []]
    heads = {run.name: [line for _, line in result.value[run.name] if "countoff: " in line] for run in named}
    assert heads == {run.name: [heads[run.name][0]] for run in named}
    assert all(line.startswith("[rank 0] countoff: ResumeMismatch: ") for (line,) in heads.values())
    assert heads["the epoch begins again"] == [f"[rank 0] countoff: ResumeMismatch: {NAMED[named[0]][1]}"]


PREPARED = {
    Prepared("the epoch begins again", skips=0): ("data", AGAIN + "3 batches are trained on again."),
    Prepared("one batch too few", skips=2): (
        "position",
        "train epoch 1 goes on after 2 batches, and the checkpoint was written after 3: 1 batch is trained on again.",
    ),
    Prepared("one batch too many", skips=4): (
        "position",
        "train epoch 1 goes on after 4 batches, and the checkpoint was written after 3: 1 batch is skipped.",
    ),
    Prepared("an epoch is skipped", epoch=3, skips=0): (
        "data",
        "the sampler shuffles train epoch 1 by epoch 3, the order of a later epoch. Before the checkpoint, it shuffled "
        "train epoch 1 by epoch 1.",
    ),
    Prepared("the schedule begins again", prepared=False): (
        "rate",
        "the learning rate of step 2 after the resume is 0.04, that of step 2 of the whole run; the checkpoint had "
        "0.085.",
    ),
    Prepared("half the batch size", batch_size=2): (
        "position",
        "train epoch 1 goes on after 12 samples (3 batches of 2 on 2 data ranks), and the checkpoint was written after "
        "24 samples (3 batches of 4 on 2 data ranks): 12 samples are trained on again.",
    ),
}


def test_what_a_resumed_accelerate_loop_repeats_or_skips_is_named(run_ranks, tmp_path):
    healthy = [
        Prepared("right"),
        Prepared("right, unshuffled", shuffle=False),
        Prepared("a loader with a state", stateful=True),
        Prepared("saved at the last batch", saved_at=(1, 6)),
        Prepared("saved at the last batch, unshuffled", saved_at=(1, 6), shuffle=False),
        Prepared("as many samples", batch_size=2, skips=6),
    ]
    runs = [*healthy, *PREPARED]
    run_ranks(jobs.save_prepared, 2, runs, tmp_path)
    found = run_ranks(jobs.resume_prepared, 2, runs, tmp_path)[0].value
    assert {run.name: found[run.name] for run in healthy} == {run.name: [] for run in healthy}
    expected = {run.name: [(subject, f"ResumeMismatch: {sentence}")] for run, (subject, sentence) in PREPARED.items()}
    assert {run.name: found[run.name] for run in PREPARED} == expected
    # The same batches of more ranks are other samples.
    (notice,) = run_ranks(jobs.resume_prepared, 4, [Prepared("right")], tmp_path)[0].value["right"]
    assert notice == (
        "position",
        "ResumeMismatch: train epoch 1 goes on after 48 samples (3 batches of 4 on 4 data ranks), and the checkpoint "
        "was written after 24 samples (3 batches of 4 on 2 data ranks): 24 samples are skipped.",
    )


def test_the_newest_record_in_a_folder_counts(tmp_path):
    """Four processes have written it, and then two, later in the run: all four resume where the two have stopped."""
    for number, steps in enumerate((500, 500, 100, 100)):
        record = tmp_path / f"countoff_{number}.json"
        record.write_text(json.dumps({"epoch": 0, "batches": steps, "steps": steps, "dp_rank": number}))
        os.utime(record, (steps + number, steps + number))
    found = [_read(tmp_path, process) for process in range(4)]
    assert [(each["steps"], each["dp_rank"]) for each in found] == [(500, 0), (500, 1), (500, 1), (500, 1)]


def test_a_record_that_cannot_be_opened_ends_nothing(tmp_path):
    assert _read(tmp_path, 0) == {}
    (tmp_path / "countoff_0.json").mkdir()
    assert "Is a directory" in _read(tmp_path, 0)


def test_of_two_checkpoints_that_are_loaded_the_last_one_counts(capsys):
    """Nothing of the first one is taken for what the loop says."""
    loader = DataLoader(jobs.Shares(24, 0), 4)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    records = []
    for epochs in (1, 2):
        with Countoff(optimizer=optimizer) as countoff:
            for _ in range(epochs):
                for _ in countoff.train(loader):
                    optimizer.step()
            records.append(countoff.state_dict())
    with Countoff(optimizer=optimizer) as countoff:
        for record in records:
            countoff.load_state_dict(record)
        for _ in countoff.train(loader):
            optimizer.step()
        assert countoff.state_dict()["steps"] == 18
    assert capsys.readouterr().err == ""


def documented_loop(path, stops_after=None):
    """Runs the loop of the page until it has taken so many steps. Returns the weights."""
    devices.join()
    (text,) = [block for block in blocks(DOCS / "pytorch.md", "python") if "def train(" in block]
    page = {}
    exec(compile(text, "pytorch.md", "exec"), page)
    model, optimizer = model_and_optimizer()
    taken = []

    def stop(*_):
        taken.append(1)
        if len(taken) == stops_after:
            sys.exit(0)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 60)
    optimizer.register_step_post_hook(stop)
    dataset = TensorDataset(*(part[:80] for part in digits()))
    page["train"](model, optimizer, scheduler, dataset, epochs=3, save_every=4, path=path)
    return weights(model), len(taken)


@pytest.mark.parametrize(
    ("stops_after", "place"), [(15, [1, 2, 12]), pytest.param(23, [1, 10, 20], marks=pytest.mark.nightly)]
)
def test_the_loop_of_the_documentation_resumes_in_silence(run_ranks, tmp_path, stops_after, place):
    """It ends with the weights of a run that was never stopped, and its traces are those of one training."""
    whole = run_ranks(documented_loop, 2, str(tmp_path / "whole.pt"))
    env, path = {"COUNTOFF_TRACE_DIR": str(tmp_path / "trace")}, str(tmp_path / "checkpoint.pt")
    stopped = run_ranks(documented_loop, 2, path, stops_after, env=env)
    resumed = run_ranks(documented_loop, 2, path, env=env)
    assert [line for result in (*whole, *stopped, *resumed) for line in verdict_lines(result)] == []
    assert [result.value for result in whole] == [(whole[0].value[0], 30)] * 2
    assert [result.value for result in resumed] == [(whole[0].value[0], 30 - place[-1])] * 2
    first, second = read([str(tmp_path / "trace")]).runs  # `load_state_dict` does not make a third one
    assert (first.steps_before, second.steps_before) == (0, place[-1])
    assert [fit.steps for fit in second.fits.values()] == [30, 30]
    assert second.fits[0].spans[0].start is not None
    assert second.fits[0].spans[0].start.learning_rates == (pytest.approx(0.1 * (1 - place[-1] / 60)),)
    assert {fit.plan["position"] for fit in second.fits.values()} == {json.dumps(place)}

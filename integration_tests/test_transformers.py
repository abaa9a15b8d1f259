"""The transformers Trainer with the callback, on real ranks."""

import pytest
import torch

pytest.importorskip("transformers")

from integration_tests import trainer_jobs as jobs
from integration_tests.output import verdict_lines
from integration_tests.trainer_jobs import Job

CPU = {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
UNSHARED = {"accelerator_config": {"dispatch_batches": False}}
SPLIT = {"accelerator_config": {"split_batches": True}}


def everything(results):
    return "\n".join(map(str, results))


def said(results):
    return [line for result in results for line in verdict_lines(result) if line.startswith("countoff: ")]


@pytest.mark.alone
@pytest.mark.parametrize(("batches", "accumulation"), [pytest.param([4, 3], 1, marks=pytest.mark.nightly), ([3, 4], 4)])
def test_uneven_streams_are_named_in_their_first_epoch(run_ranks, batches, accumulation):
    """With `max_steps` the Trainer would restart the short stream; it is named before that."""
    args = {"max_steps": 10, "gradient_accumulation_steps": accumulation, **UNSHARED}
    results = run_ranks(jobs.train, 2, Job(batches=batches, args=args), expect=None, env=CPU)
    short = batches.index(3)
    for result in results:
        text = "\n".join(verdict_lines(result))
        assert "countoff: UnevenBatches: " in text, everything(results)
        assert f"rank {short} ran out of data after 3 batches of train epoch 0" in text, everything(results)
        assert result.exit_code != 0
        assert "trained 1 " not in result.output, everything(results)


def test_a_rank_that_stops_alone_is_named(run_ranks):
    """A rank whose callback stops the training is named by the other."""
    results = run_ranks(jobs.train, 2, Job(samples=80, stop=(1, 3)), expect=None, env=CPU)
    text = "\n".join(verdict_lines(results[0]))  # rank 1 has ended the fit, and may be gone when rank 0 objects
    assert "rank 1 stopped after 3 batches of train epoch 0" in text, everything(results)
    assert results[0].exit_code != 0


def test_an_uneven_evaluation_can_be_a_verdict(run_ranks):
    """`uneven_eval='raise'` ends every rank with the verdict."""
    job = Job(samples=40, eval_batches=[3, 2], args={"eval_strategy": "epoch", **UNSHARED})
    job = jobs.replace(job, options={"uneven_eval": "raise"})
    results = run_ranks(jobs.train, 2, job, expect=None, env=CPU)
    for result in results:
        text = "\n".join(verdict_lines(result))
        assert "countoff: UnevenBatches: " in text, everything(results)
        assert "rank 1 ran out of data after 2 batches of evaluation" in text, everything(results)
        assert result.exit_code != 0


HEALTHY = {
    "evaluated by epoch": Job(
        samples=70, evals=[22, 30], args={"eval_strategy": "epoch", "gradient_accumulation_steps": 4}
    ),
    "evaluated inside": Job(samples=72, evals=[24], args={"eval_strategy": "steps", "eval_steps": 4}),
    "streams": Job(batches=[5] * 4, args={"max_steps": 8, **UNSHARED}),
    "dispatched streams": Job(batches=[5] * 4, args={"max_steps": 8, "gradient_accumulation_steps": 2}),
    "stopped in mid-epoch": Job(samples=80, args={"max_steps": 7}),
    "resumed in mid-epoch": Job(samples=80, resume=True, args={"save_strategy": "no"}),
}


if torch.__version__ < "2.6":  # with which transformers 4.52 and newer refuse to load the state of an optimizer
    del HEALTHY["resumed in mid-epoch"]


@pytest.mark.ranks(2, nightly=(4,))
def test_healthy_training_is_left_alone_to_the_bit(run_ranks, ranks):
    """Healthy training prints nothing, ends with the weights it has without countoff, and is counted right."""
    results = run_ranks(jobs.with_and_without, ranks, list(HEALTHY.values()), env=CPU, deadline_seconds=180)
    for result in results:
        assert verdict_lines(result) == [], result
        for name, (plain, counted) in zip(HEALTHY, result.value, strict=True):
            assert plain.weights == counted.weights, name
            assert counted.counted_steps == counted.applied == plain.applied, name
            assert counted.steps == plain.steps, name
            assert counted.evaluations == plain.evaluations, name
    (_, by_epoch), *_ = results[0].value
    first = next(line for line in by_epoch.history if "countoff/max_steps" in line)
    assert first["countoff/max_steps"] == by_epoch.steps
    assert first["countoff/samples_repeated"] == (2 if ranks == 2 else 10)


def test_a_stream_longer_than_its_length_is_left_alone(run_ranks):
    """A stream that yields more than its length is cut by the Trainer, and is no fault."""
    job = Job(batches=[5, 5], reported=[4, 4], args={"num_train_epochs": 2, **UNSHARED})
    for result in run_ranks(jobs.with_and_without, 2, [job], env=CPU):
        ((plain, counted),) = result.value
        assert plain.weights == counted.weights
        assert counted.counted_steps == counted.steps == 8
        assert not any("UnevenBatches" in line for line in verdict_lines(result))


def test_a_total_that_split_batches_makes_wrong_is_reported(run_ranks):
    """`split_batches` makes the Trainer's number of samples per step wrong, and a warning gives the right one."""
    (line,) = said(run_ranks(jobs.train, 2, Job(samples=80, args=SPLIT), env=CPU))
    assert "WrongTotal: the Trainer counts 8 samples per optimizer step over 2 processes" in line
    assert "so there are 4" in line


REMEDIES = {
    "even_batches=True, the default, and the same dataset on every rank": Job(
        samples=72, args={"accelerator_config": {"even_batches": True}}
    ),
    "let it end after as many batches on every rank": Job(batches=[4, 4], args={"max_steps": 6, **UNSHARED}),
    "the same len() on every rank, which is what it yields": Job(batches=[4, 4], reported=[4, 4], args=UNSHARED),
    "no len() and TrainingArguments(max_steps=N)": Job(batches=[4, 4], args={"max_steps": 8, **UNSHARED}),
    "the whole dataset on every rank; the Trainer makes the sampler, and no callback stops one rank": Job(samples=80),
    "all ranks evaluate after the same batch": Job(
        samples=80, evals=[16], args={"eval_strategy": "steps", "eval_steps": 5, "dataloader_drop_last": True}
    ),
    "leave split_batches off": Job(samples=80, args={"accelerator_config": {"split_batches": False}}),
    "Countoff(compare_data=False)": Job(samples=80, options={"compare_data": False}),
}


def test_a_training_with_what_a_remedy_says_is_silent(run_ranks):
    for result in run_ranks(jobs.train_all, 2, list(REMEDIES.values()), env=CPU, deadline_seconds=180):
        assert verdict_lines(result) == [], result
        assert all(outcome.steps == outcome.counted_steps for outcome in result.value)


def test_a_training_of_uneven_streams_that_stop_together_is_told_what_is_left(run_ranks):
    job = Job(batches=[4, 3], args={"max_steps": 6, **UNSHARED}, options={"uneven_train": "stop"})
    (line,) = said(run_ranks(jobs.train, 2, job, env=CPU))
    assert line.startswith("countoff: Truncated: train epoch 0 stopped on every rank after 3 batches"), line


EVALUATED = {"eval_strategy": "epoch", "gradient_accumulation_steps": 4}
OWN = {
    "plain": Job(samples=70, evals=[22], loader="plain", args=EVALUATED),
    "around plain": Job(
        samples=80, evals=[24], loader="around plain", args={"eval_strategy": "steps", "eval_steps": 4}
    ),
    "around prepared": Job(samples=80, evals=[24], loader="around prepared", args=EVALUATED),
    "list": Job(samples=80, evals=[24], loader="list", args=EVALUATED),
    "resumed": Job(samples=80, loader="plain", resume=True),
}
RETURNED = {"plain": "DataLoader", "around plain": "Around", "around prepared": "Around", "list": "list"}
if torch.__version__ < "2.6":
    del OWN["resumed"]


def test_an_unprepared_train_loader_is_left_alone(run_ranks):
    """Of a train loader that Accelerate has not prepared, nothing is counted, and one line says why."""
    results = run_ranks(jobs.with_and_without, 2, list(OWN.values()), env=CPU, deadline_seconds=120)
    for result in results:
        assert verdict_lines(result) == [], result
        for name, (plain, counted) in zip(OWN, result.value, strict=True):
            assert plain.weights == counted.weights, name
            assert (counted.steps, counted.evaluations) == (plain.steps, plain.evaluations), name
            assert (counted.counted_steps, counted.counted_batches) == (0, None), name
        warnings = [line for line in result.output.splitlines() if "countoff counts nothing in this training" in line]
        due = [RETURNED[job.loader] for job in OWN.values() for _ in range(1 + job.resume)] if result.rank == 0 else []
        assert len(warnings) == len(due), result
        for line, kind in zip(warnings, due, strict=True):
            assert f"get_train_dataloader() returned a {kind}: let it return what self.accelerator.prepare()" in line


def test_a_failed_training_is_let_go_of_by_the_next_one(run_ranks):
    """A training after one that failed is counted, and Accelerate's classes are given back."""
    results = run_ranks(jobs.once_more_after_a_failure, 2, env=CPU)
    for result in results:
        assert verdict_lines(result) == [], result
        assert result.value == (20, 20, True)


def test_a_program_that_catches_its_verdict_has_its_own_exit_code(run_ranks):
    """A rank that has caught only what a collective raised because of the verdict learns of it by its exit code."""
    results = run_ranks(jobs.survives_its_verdict, 2, env=CPU, expect=[87, 0], deadline_seconds=60)
    assert [result.value for result in results] == ["RuntimeError", "UnevenBatches"]


def test_a_trainers_objects_stay_as_they_are(run_ranks):
    """A Trainer can be copied during a fit as without countoff; all is as before after it, or an exception."""
    for result in run_ranks(jobs.objects_without_and_with, 2, env=CPU, deadline_seconds=120):
        assert result.value["trainer"]["deep copy"] == "OwnLoader", result

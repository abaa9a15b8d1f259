"""The true totals in the Trainer's logs and in its bar, and that nothing else is changed by them."""

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("transformers")

from integration_tests import trainer_jobs as jobs
from integration_tests.harness import RankResult
from integration_tests.test_transformers import CPU, UNSHARED
from integration_tests.trainer_jobs import Job, Shown

JOBS = {
    "divided": Job(samples=70, evals=[22], args={"gradient_accumulation_steps": 4, "eval_strategy": "epoch"}),
    "wrong": Job(batches=[5, 5], reported=[10, 10], args={"num_train_epochs": 3, **UNSHARED}),
    "stream": Job(batches=[5, 5], args={"max_steps": 12, **UNSHARED}),
    "limited": Job(batches=[5, 5], reported=[10, 10], args={"max_steps": 12, **UNSHARED}),
    "half an epoch": Job(samples=70, args={"num_train_epochs": 1.5}),
    "resumed": Job(batches=[5, 5], reported=[10, 10], args={"num_train_epochs": 3, **UNSHARED}, resume=True),
}


def own(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What countoff has added to each."""
    return [{name: value for name, value in each.items() if name.startswith("countoff/")} for each in entries]


def test_logs_and_bars_have_the_totals(run_ranks: Any) -> None:
    """Reporters get a short list with the first logs, and `countoff/epoch` where the Trainer's own is wrong.

    The bar of a run whose length is wrong is right once an epoch has shown it. Nothing that trains is changed.
    """
    off = [replace(job, options={"totals": "off"}) for job in JOBS.values()]
    results: list[RankResult] = run_ranks(jobs.shown_by, 2, [*JOBS.values(), *off], env=CPU, deadline_seconds=120)
    shown: dict[str, Shown] = dict(zip(JOBS, results[0].value, strict=False))
    for result in results:
        for with_totals, without in zip(result.value[: len(JOBS)], result.value[len(JOBS) :], strict=True):
            assert with_totals.weights == without.weights
            assert not any(own(without.logs) + own(without.history))
    assert {total for _, total in results[0].value[len(JOBS) + 1].drawn} == {30}  # the wrong one, as without countoff

    first, *others = own(shown["divided"].logs)
    assert first == {
        "countoff/len_dataloader": 9,
        "countoff/num_update_steps_per_epoch": 3,
        "countoff/max_steps": 6,
        "countoff/total_train_batch_size": 32,
        "countoff/samples_repeated": 2,
        "countoff/samples_dropped": 0,
    }
    evaluated = {
        "countoff/eval_samples/0": 22,
        "countoff/eval_samples_repeated/0": 2,
        "countoff/eval_samples_dropped/0": 0,
    }
    assert [each for each in others if each] == [evaluated]
    assert {total for _, total in shown["divided"].drawn if total != 3} == {6}
    for each in shown.values():
        assert own(each.history)[-len(each.logs) :] == own(each.logs)

    wrong, trained = shown["wrong"], own(shown["wrong"].logs)
    assert wrong.drawn[0] == (0, 30)
    assert (5, 15) in wrong.drawn
    assert wrong.drawn[-1] == (15, 15)
    epochs = [each["countoff/epoch"] for each in trained if "countoff/epoch" in each]
    assert epochs[:6] == [1.2, 1.4, 1.6, 1.8, 2.0, 2.2]
    assert [each["countoff/max_steps"] for each in trained if "countoff/max_steps" in each] == [15]

    streamed = own(shown["stream"].logs)
    assert streamed[0] == {"countoff/max_steps": 12, "countoff/total_train_batch_size": 8}
    assert [each.get("countoff/epoch") for each in streamed[:8]] == [None] * 5 + [1.2, 1.4, 1.6]
    assert streamed[5]["countoff/len_dataloader"] == 5
    assert shown["stream"].drawn[-1][1] == 12

    assert not any("countoff/max_steps" in each for each in own(shown["limited"].logs))

    assert not any("countoff/max_steps" in each for each in own(shown["half an epoch"].logs))
    assert shown["half an epoch"].drawn[-1] == (14, 14)
    assert not any("countoff/max_steps" in each for each in own(shown["resumed"].logs))
    assert {total for _, total in shown["resumed"].drawn} == {30}


def test_a_model_card_can_be_made(run_ranks: Any) -> None:
    """The table of a model card has a row for each evaluation, and all rows have the columns of the first one."""
    job = Job(samples=70, eval_batches=[2, 2], args={"eval_strategy": "epoch", "num_train_epochs": 3})
    streamed = Job(batches=[5, 5], eval_batches=[2, 2], args={"eval_strategy": "steps", "eval_steps": 4, **UNSHARED})
    streamed = replace(streamed, args={**streamed.args, "max_steps": 12})
    tables = run_ranks(jobs.tables_of, 2, [job, streamed], env=CPU, deadline_seconds=120)[0].value
    columns = ["Training Loss", "Epoch", "Step", "Validation Loss"]
    heads = [table.splitlines()[0].strip("| ").split("|") for table in tables]
    assert [[each.strip() for each in head] for head in heads] == [columns] * 2

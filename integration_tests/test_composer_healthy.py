"""Composer jobs in which nothing is wrong: no verdict, no output, and the same bits of weights as without countoff."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from integration_tests.composer_jobs import (
    Job,
    fit_with_and_without,
    needs_composer,
    objects_without_and_with,
    outcome,
    remove_shared_memory,
)
from integration_tests.in_turn import in_turn, said_in_turn
from integration_tests.output import verdict_lines

pytestmark = needs_composer

EVEN = [
    Job(even=66, evals=[[2, 1]] * 2, trainer={"eval_interval": "4ba"}),
    Job(even=64, cut_mix=True),
    Job(even=64, trainer={"device_train_microbatch_size": 2}),
    Job(streams=[70], evals=[2, 2]),
    Job(streams=[70], workers=2),
    Job(train=[6, 6], trainer={"max_duration": "7ba"}),
    Job(train=[6, 6], reported=[6, 6], trainer={"max_duration": "7ba"}, evals=[2, 2]),
    Job(even=64, trainer={"train_subset_num_batches": 5}, options={"totals": "fix"}),
    Job(even=64, mistaken=True, trainer={"train_subset_num_batches": 8}),
]


@pytest.fixture(autouse=True)
def _clean_up(tmp_path):
    yield
    remove_shared_memory(tmp_path)


def assert_healthy(run_ranks: Any, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Runs on all ranks; nothing is printed, and each pair of outcomes is equal, on every rank."""
    results = run_ranks(function, ranks, *arguments, deadline_seconds=240)
    assert [verdict_lines(result) for result in results] == [[] for _ in results]
    for result in results:
        assert [pair[0] for pair in result.value] == [pair[1] for pair in result.value]
        assert result.value == results[0].value
    return results[0].value


@pytest.mark.usefixtures("one_streaming_job")
def test_healthy_jobs_train_to_the_same_bits(run_ranks):
    """Healthy jobs print nothing and end with the same weights as without countoff."""
    values = assert_healthy(run_ranks, 2, fit_with_and_without, EVEN)
    assert [pair[1]["batches"] for pair in values] == [18, 16, 16, 18, 18, 7, 7, 10, 16]


@pytest.mark.ranks(4, nightly=(8,))
@pytest.mark.usefixtures("one_streaming_job")
def test_more_ranks_are_as_healthy(run_ranks, ranks):
    """The same holds with more ranks."""
    jobs = [Job(even=16 * ranks, evals=[1] * ranks), Job(streams=[16 * ranks])]
    assert_healthy(run_ranks, ranks, fit_with_and_without, jobs[: 1 if ranks == 8 else 2])


def twice(job: Job, options: dict[str, Any] | None) -> dict[str, Any]:
    """Evaluates, fits, fits on, evaluates, closes twice."""
    trainer = Job(**{**vars(job), "options": options}).make_trainer()
    trainer.eval()
    trainer.fit()
    trainer.fit(duration="1ep")
    trainer.eval()
    trainer.close()
    trainer.close()
    return outcome(trainer)


def resumed(job: Job, options: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """Stops in the middle of the second epoch and goes on in another Trainer."""
    job = Job(**{**vars(job), "options": options})
    first = job.make_trainer(max_duration="11ba")
    first.fit()
    first.save_checkpoint("resume.pt")
    first.close()
    second = job.make_trainer(load_path="resume.pt", max_duration="3ep", **more)
    second.fit()
    second.close()
    return outcome(second)


def lives(jobs: Sequence[Job]) -> list[list[dict[str, Any]]]:
    options: list[dict[str, Any] | None] = [None, {}]
    pairs = [[twice(jobs[0], each) for each in options]]
    pairs += [[resumed(job, each) for each in options] for job in jobs]
    pairs.append([resumed(jobs[0], each, spin_dataloaders=False) for each in options])
    return pairs


@pytest.mark.usefixtures("one_streaming_job")
def test_two_fits_and_resuming_in_mid_epoch_are_healthy(run_ranks):
    """Two fits of one Trainer, and a resumed one, end as they do without countoff."""
    jobs = [Job(even=64, evals=[2, 2]), Job(train=[8, 8], reported=[8, 8]), Job(streams=[64], evals=[2, 2])]
    values = assert_healthy(run_ranks, 2, lives, jobs)
    assert [pair[1]["batches"] for pair in values] == [24, 24, 24, 24, 27]


def odd_loaders() -> list[int]:
    """Batches trained on with loaders that only look as if something were wrong."""
    from composer.core import Evaluator

    from integration_tests import composer_parts as parts

    parts.start()
    shards = parts.streaming_loader([32], True, 0, {})
    images, labels = parts.digits()
    dataset = parts.TensorDataset(images[:64], labels[:64])

    class Half(parts.DistributedSampler[Any]):
        """Gives half of each share."""

        def __iter__(self) -> Any:
            return iter(list(super().__iter__())[: len(self)])

        def __len__(self) -> int:
            return self.num_samples // 2

    halves = parts.DataLoader(dataset, batch_size=4, sampler=Half(dataset))
    capped = Evaluator(label="capped", dataloader=shards, subset_num_batches=2)
    both = parts.streaming_loader([32], False, 0, {})
    trainers = [
        Job().make_trainer(train_dataloader=halves, eval_dataloader=capped, eval_interval="2ba"),
        Job().make_trainer(train_dataloader=both, eval_dataloader=both, eval_interval="3ba"),
    ]
    for trainer in trainers:
        trainer.fit()
        trainer.close()
    return [int(trainer.state.timestamp.batch) for trainer in trainers]


@pytest.mark.usefixtures("one_streaming_job")
def test_loaders_that_are_only_odd_are_healthy(run_ranks):
    """A sampler with a length of its own, a cap on a loader that reports too much, one loader in both places.

    Where an evaluation begins another pass over a StreamingDataset, streaming ends the one before it.
    """
    results = run_ranks(odd_loaders, 2, deadline_seconds=150)
    assert [verdict_lines(result) for result in results] == [[], []]
    assert [result.value for result in results] == [[8, 6], [8, 6]]


def batches_alive(options: dict[str, Any] | None) -> list[list[bool]]:
    """Of each batch of two fits, the second of which stops early, whether it is still there when the fit is over."""
    import gc
    import weakref

    from integration_tests.composer_parts import digits, start

    images, labels = digits()
    made: list[weakref.ref[Any]] = []

    class Fresh:
        batch_size = 4

        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Any:
            for first in range(0, 16, 4):
                batch = images[first : first + 4].clone(), labels[first : first + 4]
                made.append(weakref.ref(batch[0]))
                yield batch
                del batch

    start()
    alive = []
    for duration in ("1ep", "3ba"):
        made.clear()
        trainer = Job(options=options).make_trainer(train_dataloader=Fresh(), max_duration=duration)
        trainer.fit()
        trainer.state.batch = None
        gc.collect()
        alive.append([each() is not None for each in made])
        trainer.close()
    return alive


def fit_on_a_mesh() -> list[Any]:
    """What countoff makes of the mesh of Composer's FSDP2: sharded over all ranks, and over pairs that share data."""
    import os

    from composer.loggers import InMemoryLogger
    from torch.optim import SGD

    from integration_tests import composer_parts as parts

    parts.start()
    os.environ["FSDP_VERSION"] = "2"
    images, labels = parts.digits()
    dataset = parts.TensorDataset(images[:64], labels[:64])
    found: list[Any] = []
    for tensor_parallel_degree in (1, 2):
        shares, mine = parts.world_size() // tensor_parallel_degree, parts.own_rank() // tensor_parallel_degree
        sampler = parts.DistributedSampler(dataset, num_replicas=shares, rank=mine)
        config: dict[str, Any] = {"fsdp": {"data_parallel_shard_degree": shares}}
        if tensor_parallel_degree > 1:
            config["tp"] = {"layer_plan": {}, "tensor_parallel_degree": tensor_parallel_degree}
        model, memory = parts.Classifier(), InMemoryLogger()
        trainer = Job().make_trainer(
            model=model,
            optimizers=SGD(model.parameters(), lr=0.1),
            train_dataloader=parts.DataLoader(dataset, batch_size=4, sampler=sampler),
            parallelism_config=config,
            loggers=[memory],
        )
        trainer.fit()
        trainer.close()
        callback = next(each for each in trainer.state.callbacks if hasattr(each, "guard"))
        guard, samples = callback.guard, memory.data["countoff/global_train_batch_size"][-1][1]
        agreed = {"dp_rank", "dp_degree"} & guard.agreed
        found.append([int(trainer.state.timestamp.batch), guard.data.dp_degree, samples, agreed])
    return found


@pytest.mark.ranks(4)
def test_the_shares_of_the_data_are_those_of_composers_mesh(run_ranks, ranks):
    """The mesh of Composer's FSDP2 gives the number of data ranks."""
    results = run_ranks(fit_on_a_mesh, ranks, deadline_seconds=240)
    assert [verdict_lines(result) for result in results] == [[]] * 4
    assert [result.value for result in results] == [[[8, 4, 16, {"dp_degree"}], [16, 2, 8, {"dp_degree"}]]] * 4


def start_many_times() -> None:
    """What Composer asks of any callback: to be made, begun, ended and closed, and all that again."""
    from countoff.composer import Countoff

    callback = Countoff()
    for _ in range(2):
        trainer = Job(even=16, options=None).make_trainer(callbacks=[callback], max_duration="1ep")
        trainer.fit()
        trainer.engine.close()
        trainer.close()
        callback.close(trainer.state, trainer.logger)
    assert callback.guard is not None
    assert callback.guard.verdict is None
    assert callback.state_dict() == {}


def test_one_callback_serves_one_trainer_after_the_other_and_holds_no_batch(run_ranks):
    """One callback object can serve several Trainers in turn. After its fit it holds no batch, so memory is freed."""
    results = run_ranks(in_turn, 2, {"batches": (batches_alive, {}), "trainers": (start_many_times,)})
    assert [result.value["batches"] for result in results] == [[[False] * 4, [False] * 3]] * 2
    assert [said_in_turn(result)["trainers"] for result in results] == [[], []]


def made_by_llm_foundry() -> list[str]:
    """The callback as llm-foundry's registry makes it from `callbacks: {countoff: {}}`, beside one added in code."""
    import catalogue

    registry = catalogue.create("llmfoundry", "callbacks", entry_points=True)
    callback = registry.get("countoff")(totals="fix")
    trainer = Job(even=64, mistaken=True, options={}).make_trainer(callbacks=[callback], max_duration="1ep")
    trainer.fit()
    trainer.close()
    return [type(callback).__module__, callback.settings.totals, str(callback.guard)]


def test_llm_foundry_finds_the_callback(run_ranks):
    """llm-foundry's registry makes the callback, and a second one beside it does nothing."""
    results = run_ranks(made_by_llm_foundry, 2, deadline_seconds=90)
    assert [result.value for result in results] == [["countoff.composer", "fix", "None"]] * 2
    assert sum("countoff: WrongLength: " in line for line in verdict_lines(results[0])) == 1


def test_a_trainers_objects_stay_as_they_are(run_ranks):
    """The objects of a Trainer are those of a Trainer without countoff, in a fit, after it, and after an exception."""
    run_ranks(objects_without_and_with, 2, deadline_seconds=120)

"""What Kubeflow is told of real jobs, by which rank."""

import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback
from transformers import integrations

from countoff._adapter import kubeflow
from countoff.torch import attach
from integration_tests import devices, jobs, loops, trainer_jobs
from integration_tests.harness import RankResult
from tests.receiver import Receiver, receiving

KUBEFLOW = "KUBEFLOW_TRAINER_SERVER_URL"
TOKEN = "token-of-rank-{}"


@pytest.fixture
def server() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def told(run_ranks: Any, server: Receiver, tmp_path: Path) -> Any:
    """`run_ranks` in a job of Kubeflow, in which each rank has a token of its own."""

    def env(rank: int) -> dict[str, str]:
        path = tmp_path / f"token{rank}"
        path.write_text(TOKEN.format(rank))
        return {KUBEFLOW: server.url, "KUBEFLOW_TRAINER_SERVER_TOKEN": str(path), "CUDA_VISIBLE_DEVICES": ""}

    return partial(run_ranks, env=env)


def seen_threads(seen: list[str]) -> None:
    """Takes the time of a step, and notes the thread of the posts."""
    time.sleep(0.05)
    seen += [each.name for each in threading.enumerate() if each.name == "countoff kubeflow"]


def plain_loop(seen: list[str]) -> None:
    model, optimizer = loops.model_and_optimizer()
    loader = loops.even_loader()
    handle = attach(train=loader, optimizer=optimizer, epochs=2)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]  # a DistributedSampler
        for batch in loader:
            loops.train_on(model, optimizer, batch)
            seen_threads(seen)
    handle.detach()


def lightning_fit(seen: list[str]) -> None:
    jobs.quiet()
    looks = LambdaCallback(on_train_batch_end=lambda *_, **__: seen_threads(seen))
    job = jobs.Job(even=80, trainer={"callbacks": [looks]})
    job.make_trainer().fit(jobs.Classifier(), job.train_loader())


def fits() -> list[int]:
    """A plain loop and a fit of Lightning, and the plain loop once more without the variable; the threads in each."""
    kubeflow.EVERY_SECONDS = 0.01
    devices.join()
    found = []
    for train in (plain_loop, lightning_fit, plain_loop):
        seen: list[str] = []
        train(seen)
        found += [len(seen), threads_left()]
        if train is lightning_fit:
            dist.barrier()
            del os.environ[KUBEFLOW]
    return found


def threads_left() -> int:
    return sum(each.name == "countoff kubeflow" for each in threading.enumerate())


def progress_of(results: list[RankResult], server: Receiver) -> list[int]:
    """Each percentage that was posted, once it is known that the first rank alone has posted and nobody has spoken."""
    for result in results:
        assert jobs.verdict_lines(result) == [], result
        assert TOKEN.format("") not in result.output
    assert {request.headers["authorization"] for request in server.requests} == {f"Bearer {TOKEN.format(0)}"}
    return [request.content["trainerStatus"]["progressPercentage"] for request in server.requests]


def test_the_first_rank_posts_how_far_each_fit_is(told, server):
    """From 0 to 100 in each of two fits, by a thread that ends with each, and that no job without the variable has."""
    results = told(fits, 2)
    progress = progress_of(results, server)
    ends = [index for index, percentage in enumerate(progress) if percentage == 100]
    assert len(ends) == 2, progress
    for fit in (progress[: ends[0] + 1], progress[ends[0] + 1 :]):
        assert fit == sorted(fit)
        assert fit[0] == 0
        assert len(set(fit)) > 5, fit
    metrics = server.requests[-1].content["trainerStatus"]["metrics"]
    assert {"name": "countoff/total_steps", "value": "20"} in metrics
    (first, *of_first), others = results[0].value, results[1].value
    assert first > 0
    assert of_first[0] == of_first[2] == 0, "a thread is left over"
    assert of_first[1] > 0
    assert of_first[3:] == [0, 0]
    assert others == [0] * 6


def test_a_trainer_with_a_callback_for_kubeflow_is_left_to_it(told, server):
    """Where the version of transformers has none, countoff posts."""
    results = told(trainer_jobs.train, 2, trainer_jobs.Job(samples=80))
    progress = progress_of(results, server)
    assert (progress[0], progress[-1]) == (0, 100)
    names = {
        each["name"] for request in server.requests for each in request.content["trainerStatus"].get("metrics", [])
    }
    ours = any(name.startswith("countoff/") for name in names)
    assert ours != hasattr(integrations, "KubeflowCallback")

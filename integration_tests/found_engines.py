"""Loops over torch's loaders, with engines of DeepSpeed's that attach nothing; each in a process group of all ranks.

`run_all` runs each job, with a line between what they print, and returns what each has begun.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from integration_tests import devices
from integration_tests.unchanged import with_gloo_alone
from integration_tests.watching import begun, run_each, watching_loaders
from integration_tests.zoo.parts import epochs_of, loss_of, network, sgd, sharded


def engine_of(model: torch.nn.Module, stage: int = 0, **more: Any) -> Any:
    """An engine that accumulates the gradients of two batches. Collective: every rank must call it.

    Args:
        model: What it trains.
        stage: Of ZeRO.
        more: Arguments of `deepspeed.initialize`.
    """
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,  # SGD
    }
    arguments = {"model": model, "optimizer": sgd(model), "config": config, "dist_init_required": False}
    return with_gloo_alone().initialize(**arguments, **more)[0]


def train(engine: Any, loader: Any) -> list[str]:
    for _ in epochs_of(loader):
        for batch in loader:
            engine.backward(loss_of(engine, batch))
            engine.step()
    return begun()


def of_stage(stage: int) -> list[str]:
    return train(engine_of(network(), stage), sharded())


def in_a_pipeline() -> list[str]:
    """A pipeline of one stage. It takes the batches of each step by itself."""
    from deepspeed.pipe import PipelineModule

    layers, loader = PipelineModule(list(network()), num_stages=1, loss_fn=torch.nn.functional.cross_entropy), sharded()
    engine = engine_of(layers)
    for _ in epochs_of(loader):
        batches: Iterator[Any] = iter(loader)
        for _ in range(len(loader) // 2):
            engine.train_batch(batches)
    return begun()


def of_one_data_rank() -> list[str]:
    """The ranks share one model, as under tensor parallelism, and so may share their data."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    ranks = SimpleNamespace(
        get_data_parallel_group=lambda: alone,
        get_data_parallel_rank=lambda: 0,
        get_data_parallel_world_size=lambda: 1,
        get_model_parallel_group=lambda: dist.group.WORLD,
        get_model_parallel_rank=dist.get_rank,
        get_model_parallel_world_size=dist.get_world_size,
    )
    return train(engine_of(network(), mpu=ranks), sharded())


JOBS: dict[str, Callable[[], list[str]]] = {
    **{f"ZeRO {stage}": functools.partial(of_stage, stage) for stage in range(4)},
    "in a pipeline": in_a_pipeline,
    "of one data rank": of_one_data_rank,  # the last one: DeepSpeed keeps its groups
}


def run_all() -> dict[str, list[str]]:
    """Runs each job; returns the loops that were active at its end, by its name."""
    devices.join()
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    with_gloo_alone()  # its engines are watched where it has been imported
    return run_each(JOBS, watching_loaders)

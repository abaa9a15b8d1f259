"""Healthy and faulty plain loops on a mesh of two data ranks by two tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler

from countoff.mesh import dp_position
from countoff.torch import Countoff
from integration_tests import devices
from integration_tests.constants import put
from integration_tests.digits import BATCH_SIZE, digits
from integration_tests.loops import train_on
from integration_tests.micro_jobs import wait_for_notice

TICK = 8
EVALS, EPOCHS = 16, 2


@dataclass(frozen=True)
class Job:
    """What a test varies.

    Attributes:
        wrapped: How the data ranks hold the tensor-parallel model: ``ddp``, or ``fsdp``.
        batches: Batches of each of the epochs.
        fault: ``frozen``: the last rank freezes a parameter that its data peer does not, and nothing is trained.
            Empty: none.
    """

    wrapped: str = "ddp"
    batches: int = 8
    fault: str = ""


def build(mesh: Any, wrapped: str) -> Any:
    """A model in tensor-parallel parts, which each pair of data ranks holds in common, or in shards."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if wrapped == "fsdp":
        return fully_shard(model, mesh=mesh["dp"])
    return DistributedDataParallel(model, device_mesh=mesh["dp"])


def train(jobs: Sequence[Job]) -> list[dict[str, str]]:
    """Trains one job after the other on a mesh of four ranks; returns what was warned of in each."""
    devices.join()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return [_train(mesh, job) for job in jobs]


def _train(mesh: Any, job: Job) -> dict[str, str]:
    model, last = build(mesh, job.wrapped), dist.get_rank() == dist.get_world_size() - 1
    if job.fault == "frozen" and last:
        [*model.parameters()][-1].requires_grad_(False)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    share, shares = dp_position(mesh) or (0, 1)
    rows, (images, labels) = job.batches * BATCH_SIZE * shares, digits()
    both = TensorDataset(images[: rows + EVALS], labels[: rows + EVALS])
    parts = random_split(both, [rows, EVALS], torch.Generator().manual_seed(7))
    samplers = [DistributedSampler(each, num_replicas=shares, rank=share) for each in parts]
    loader, evaluation = (
        DataLoader(part, BATCH_SIZE, sampler=each) for part, each in zip(parts, samplers, strict=True)
    )
    put(TICK_BATCHES=TICK)
    options: dict[str, Any] = {"mesh": mesh, "epochs": EPOCHS, "uneven_eval": "raise"}
    countoff = Countoff(optimizer=optimizer, model=model, **options)
    for epoch in range(EPOCHS):
        samplers[0].set_epoch(epoch)
        for batch in countoff.train(loader):
            if job.fault != "frozen":
                train_on(model, optimizer, batch)
        if job.fault != "frozen":
            with torch.no_grad():
                for batch_images, _ in countoff.eval(evaluation):
                    model(batch_images)
    if job.fault:
        wait_for_notice(countoff.guard)
    dist.barrier()
    countoff.close()
    return {each.kind: each.sentence for each in countoff.guard.notices}

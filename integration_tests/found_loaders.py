"""Loops over torch's loaders that attach nothing, and are found by watching; each in a process group of all ranks.

`run_all` runs each job, with a line between what they print, and returns what each has begun.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from countoff._run import watched_loaders
from countoff.torch import attach
from integration_tests import devices
from integration_tests.jobs import own_rank
from integration_tests.watching import begun, read_by_thread, run_each, watching_loaders
from integration_tests.zoo.parts import (
    ddp,
    epochs_of,
    network,
    own_batches,
    sgd,
    sharded,
    tensors,
    train,
    train_on,
    with_workers,
)


def as_it_is() -> list[str]:
    model = ddp()
    train(model, sgd(model), sharded())
    return begun()


def attached() -> list[str]:
    model, loader = ddp(), sharded()
    attach(train=loader)
    train(model, sgd(model), loader)
    return begun()


def sharded_over_all() -> list[str]:
    model: Any = fully_shard(network(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    train(model, sgd(model), sharded())
    return begun()


def asked_to_make_even() -> list[str]:
    with mock.patch.dict(os.environ, COUNTOFF_UNEVEN_TRAIN="stop"):
        return as_it_is()


def of_another_version() -> list[str]:
    with mock.patch.object(watched_loaders, "loader_facts", side_effect=AttributeError("no batch_sampler")):
        return as_it_is()


def of_two_rates() -> list[str]:
    model = ddp()
    train(model, sgd(model, 0.1 / (1 + own_rank())), sharded())
    return begun()


def on_one_rank() -> list[str]:
    """The first rank trains a probe: by itself, and wrapped for a group of its own."""
    group = dist.new_group([0])
    if own_rank() == 0:
        for model in (network(), DistributedDataParallel(network(), process_group=group)):
            train(model, sgd(model), sharded())
    return begun()


def in_join() -> list[str]:
    model = ddp()
    optimizer = sgd(model)
    with Join([model]):
        for batch in with_workers(own_batches(4 + own_rank()), batch_size=None):
            train_on(model, optimizer, batch)
    return begun()


def by_a_thread() -> list[str]:
    model = ddp()
    optimizer = sgd(model)
    for batch in read_by_thread(sharded()):
        train_on(model, optimizer, batch)
    return begun()


def dealt_out() -> list[str]:
    """Each rank reads all batches, and trains on every second one."""
    model = ddp()
    optimizer = sgd(model)
    for _ in range(2):
        for batch in itertools.islice(with_workers(own_batches(9), batch_size=None), own_rank() % 2, 8, 2):
            train_on(model, optimizer, batch)
    return begun()


def packed(gaps: Callable[[int], Iterable[int]]) -> list[str]:
    """Each rank trains eight times in an epoch, on as many batches of its loader at once as it needs.

    Args:
        gaps: Returns the numbers of batches for the eight steps, by rank.
    """
    model = ddp()
    optimizer = sgd(model)
    for _ in range(2):
        batches = iter(with_workers(own_batches(20), batch_size=None))
        for gap in gaps(own_rank()):
            inputs, labels = zip(*itertools.islice(batches, gap), strict=True)
            train_on(model, optimizer, (torch.cat(inputs), torch.cat(labels)))
    return begun()


def one_step_left_out(rank: int) -> Iterable[int]:
    """One batch for each step, but for one step of the first rank."""
    return (1, 1, 1, 1, 2 - min(rank, 1), 1, 1, 1)


def of_equal_global_batches() -> list[str]:
    """Each rank reads the same batches, and trains on its share of each."""
    model = ddp()
    optimizer = sgd(model)
    inputs, labels = tensors()
    for batch in with_workers(list(zip(inputs.split(8), labels.split(8), strict=True)), batch_size=None):
        train_on(model, optimizer, tuple(each[own_rank() :: dist.get_world_size()] for each in batch))
    return begun()


def evaluated_with_gradients() -> list[str]:
    """Between the epochs, ranks read different numbers of the train loader's batches, and do not step."""
    model, loader = ddp(), sharded()
    optimizer = sgd(model)
    train(model, optimizer, loader, 1)
    read = [batch for batch, _ in zip(loader, range(1 + own_rank()), strict=False)]
    train(model, optimizer, loader, 1, start=1)
    return [*begun(), f"{len(read) - own_rank()} more"]


def without_a_group() -> list[str]:
    """The process group is destroyed before the first step."""
    model, loader = ddp(), sharded()
    dist.destroy_process_group()
    optimizer = sgd(model)
    for batch in loader:
        train_on(model.module, optimizer, batch)
    return begun()


def beside_another_loader() -> list[str]:
    """Each step takes a batch of another loader too, of which three were taken before."""
    model, loader, other = ddp(), sharded(), iter(sharded(160, seed=3))
    optimizer = sgd(model)
    for _ in range(3):
        next(other)
    for _ in epochs_of(loader):
        for batch in loader:
            next(other)
            train_on(model, optimizer, batch)
    return begun()


JOBS: dict[str, Callable[[], list[str]]] = {
    "as it is": as_it_is,
    "attached": attached,
    "sharded over all ranks": sharded_over_all,
    "asked to make ranks even": asked_to_make_even,
    "of another version of torch": of_another_version,
    "of two learning rates": of_two_rates,
    "on one rank": on_one_rank,
    "inside of Join": in_join,
    "read by a thread": by_a_thread,
    "dealt out": dealt_out,
    "packed": functools.partial(packed, lambda rank: [1 + (number + rank) % 2 for number in range(8)]),
    "packed once on the first rank": functools.partial(packed, one_step_left_out),
    "packed once on the last rank": functools.partial(packed, lambda rank: one_step_left_out(1 - rank)),
    "of equal global batches": of_equal_global_batches,
    "evaluated with gradients": evaluated_with_gradients,
    "beside another loader": beside_another_loader,
    "attached later": attached,  # the last rank has found more loops than the others
    "without a group": without_a_group,  # the last one
}


def run_all() -> dict[str, list[str]]:
    """Runs each job; returns the loops that were active at its end, by its name."""
    devices.join()
    return run_each(JOBS, watching_loaders)

"""Loops whose ranks read the same data, or should and do not; each returns what was warned of and its weights."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from countoff.torch import attach
from integration_tests.jobs import BATCH_SIZE, digits, own_rank, weights
from integration_tests.loops import model_and_optimizer, train_on

SAMPLES = 80


def digits_set(samples: int = SAMPLES, repeats: int = 1) -> TensorDataset:
    images, labels = digits()
    return TensorDataset(images[:samples].repeat(repeats, 1), labels[:samples].repeat(repeats))


class Whole(IterableDataset[Any]):
    """All of the digits, on every rank alike: nobody shards it."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[Any]:
        yield from zip(*digits_set().tensors, strict=True)


class Constant(IterableDataset[Any]):
    """The same sample over and over, as a benchmark's loader yields it."""

    def __iter__(self) -> Iterator[Any]:
        images, labels = digits()
        for _ in range(SAMPLES):
            yield images[0], labels[0]


class Own(IterableDataset[Any]):
    """A share by rank, as it is right where no ranks share a batch."""

    def __iter__(self) -> Iterator[Any]:
        yield from itertools.islice(zip(*digits_set().tensors, strict=True), own_rank(), None, dist.get_world_size())


class Labels(IterableDataset[Any]):
    """A handful of numbers per batch, which two ranks may well have in common."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(SAMPLES):
            yield torch.zeros(64), torch.tensor(number // BATCH_SIZE % 10)


@dataclass(frozen=True)
class Sharing:
    """How a plain loop shares its data out.

    Attributes:
        data: The data set: `digits`, or an iterable one: `whole`, `own`, `constant`, `labels`.
        samples: Samples of `digits`.
        repeats: How often they come in it.
        readers: The `rank` of each rank's DistributedSampler; empty: no such sampler. Of an iterable one: its dp_rank.
        replicas: `num_replicas` of it; 0: world_size.
        shuffle: Whether it shuffles.
        set_epoch: Whether each epoch has an order of its own.
        looks: Whether a look at the train data, without training, follows every epoch.
        epochs: How many.
        tensor_parallel: Ranks that share a batch.
        options: Those of attach; None: no countoff.
    """

    data: str = "digits"
    samples: int = SAMPLES
    repeats: int = 1
    readers: tuple[int, ...] = ()
    replicas: int = 0
    shuffle: bool = False
    set_epoch: bool = True
    looks: bool = False
    epochs: int = 2
    tensor_parallel: int = 1
    options: dict[str, Any] | None = field(default_factory=dict)

    def loader(self) -> DataLoader[Any]:
        if self.data != "digits":
            dataset = {"whole": Whole, "own": Own, "constant": Constant, "labels": Labels}[self.data]()
            return DataLoader(dataset, batch_size=BATCH_SIZE)
        dataset, sampler = digits_set(self.samples, self.repeats), None
        if self.readers:
            reader, replicas = self.readers[own_rank()], self.replicas or dist.get_world_size()
            sampler = DistributedSampler(dataset, num_replicas=replicas, rank=reader, shuffle=self.shuffle)
        return DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler)


def share(sharings: list[Sharing]) -> list[dict[str, Any]]:
    """Trains once for each way to share the data out, one after the other."""
    dist.init_process_group("gloo")
    return [_train(each) for each in sharings]


def _train(sharing: Sharing) -> dict[str, Any]:
    model, optimizer = model_and_optimizer()
    loader, mesh = sharing.loader(), None
    if sharing.tensor_parallel > 1:
        shape = dist.get_world_size() // sharing.tensor_parallel, sharing.tensor_parallel
        mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    handle = None
    if sharing.options is not None:
        handle = attach(train=loader, optimizer=optimizer, mesh=mesh, **sharing.options)
    for epoch in range(sharing.epochs):
        if isinstance(loader.sampler, DistributedSampler) and sharing.set_epoch:
            loader.sampler.set_epoch(epoch)
        for batch in loader:
            train_on(model, optimizer, batch)
        for _ in loader if sharing.looks else ():
            pass
    if handle is not None:
        handle.detach()
    notices = [] if handle is None else handle.guard.notices
    return {"weights": weights(model), "warned": {notice.kind: notice.sentence for notice in notices}}

"""Loaders of torchdata that resume in mid-epoch, read by ranks that take the same number of batches."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import countoff.accelerate
import countoff.torch
from integration_tests.jobs import own_rank


def read(loader: Any, most: int | None = None) -> tuple[list[float], Any]:
    """The samples that a loop gets, and the loader's state after `most` of them."""
    found: list[float] = []
    for (batch,) in loader:
        found.append(batch.item())
        if len(found) == most:
            return found, loader.state_dict()
    return found, loader.state_dict()


def resumed(lengths: Sequence[int], saved_after: int, workers: int) -> list[Any]:
    """Reads a pass and the next one, uninterrupted and resumed in the middle of the first, with plain PyTorch.

    Returns:
        What both have read, without countoff's part in it and with it.
    """
    dist.init_process_group("gloo")

    def make() -> Any:
        share = TensorDataset(torch.arange(lengths[own_rank()]) + 1000.0 * own_rank())
        return StatefulDataLoader(
            share, batch_size=1, num_workers=workers, multiprocessing_context="fork" if workers else None
        )

    def watched(loader: Any) -> Any:
        return countoff.torch.attach(train=loader, uneven_train="stop")

    return both(make, watched, saved_after)


def resumed_with_accelerate(lengths: Sequence[int], saved_after: int) -> list[Any]:
    """The same with a loader that Accelerate has prepared."""
    accelerator = Accelerator(cpu=True)

    def make() -> Any:
        share = TensorDataset(torch.arange(lengths[own_rank()]) + 1000.0 * own_rank())
        return DataLoaderShard(share, batch_size=1, use_stateful_dataloader=True)

    def watched(loader: Any) -> Any:
        return countoff.accelerate.attach(accelerator, train=loader, uneven_train="stop")

    return both(make, watched, saved_after)


def both(make: Any, watched: Any, saved_after: int) -> list[Any]:
    with watched(loader := make()):
        whole, state = read(loader)
        whole += read(loader)[0]
    with watched(loader := make()):
        parts, state = read(loader, saved_after)
    loader = make()
    loader.load_state_dict(state)
    with watched(loader):
        parts += read(loader)[0]
        parts += read(loader)[0]
    return [whole, parts]

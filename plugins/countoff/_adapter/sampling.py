"""Data identity for the adapters: what a loader's sampler says of an epoch, and what to do about what is found.

Batches are looked at as the loader hands them out, before they are transformed or moved to a device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from countoff._adapter.torch_facts import reported_length
from countoff.core.data.identity import UNKNOWN, DataIdentity, Sampling

__all__ = ["data_remedies", "look_at", "sampling_of"]


def data_remedies(*, shares: str, order: str, off: str) -> dict[str, str]:
    """What to do about the verdicts of data identity.

    Args:
        shares: How each rank comes to a share of its own, in the framework's words.
        order: How an epoch comes to an order of its own.
        off: How the check is turned off.
    """
    return {
        "DuplicateData": f"{shares} If equal data is what you want there, turn the check off: {off}.",
        "PeersDiffer": (
            "shard and seed by dp_rank, not by rank, so that ranks which work on one batch together read the same "
            f"samples in the same order with the same random transforms. To turn the check off: {off}."
        ),
        "SameOrder": f"{order} If one order for all epochs is what you want: DistributedSampler(shuffle=False).",
    }


def look_at(data: DataIdentity, batch: Any, loader: Any) -> None:
    """Looks at a train batch, while `data.unread`; raises nothing.

    Args:
        data: That of the guard.
        batch: As the loader has handed it out.
        loader: The loader.
    """
    data.read(batch, sampling_of(loader, dp_rank=data.dp_rank, dp_degree=data.dp_degree))


def sampling_of(loader: Any, *, dp_rank: int, dp_degree: int) -> Sampling:
    """What the sampler of a loader says, as far as it is known.

    Args:
        loader: Any loader; of one that is no DataLoader of torch, nothing is known.
        dp_rank: That of this rank.
        dp_degree: The number of dp_ranks.
    """
    if not isinstance(loader, DataLoader):
        return UNKNOWN
    is_sharded, order = isinstance(loader, _accelerate("DataLoaderDispatcher")), None
    # A StreamingDataset that gives groups of ranks the same samples because it was told to.
    comparable = (getattr(loader.dataset, "replication", None) or 1) == 1
    for sampler in _samplers(loader):
        if isinstance(sampler, DistributedSampler):
            is_sharded |= (sampler.rank, sampler.num_replicas) == (dp_rank, dp_degree)
            order = _order(sampler)
        elif isinstance(sampler, _accelerate("BatchSamplerShard", "IterableDatasetShard")):
            # Accelerate itself computes this share: where it is another than the plan's, the plan knows less.
            is_sharded = comparable = (sampler.process_index, sampler.num_processes) == (dp_rank, dp_degree)
    return Sampling(is_sharded, order, comparable)


def _order(sampler: DistributedSampler[Any]) -> tuple[Any, ...] | None:
    """What the order of an epoch follows from, where it follows from nothing else."""
    if not sampler.shuffle or type(sampler).__iter__ is not DistributedSampler.__iter__:
        return None
    return sampler.seed, sampler.epoch, reported_length(sampler.dataset)


def _samplers(loader: DataLoader[Any]) -> Iterator[Any]:
    """What the loader draws by, from the outermost on."""
    yield loader.dataset
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)


def _accelerate(*names: str) -> tuple[type, ...]:
    """Classes of Accelerate, where it has been imported."""
    module = sys.modules.get("accelerate.data_loader")
    return tuple(getattr(module, name) for name in names if hasattr(module, name))

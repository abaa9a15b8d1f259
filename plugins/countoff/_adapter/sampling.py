"""Data identity for the adapters: fingerprints of the first batches, and what a loader's sampler tells about them.

Fingerprints are taken as the loader hands batches out, before training transforms them or moves them to a device.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from countoff._adapter.dealt_streams import sampler_of, stream_facts
from countoff._adapter.torch_facts import is_data_loader, iterates_as_torch, of_library, reported_length
from countoff.core.checks.data import UNKNOWN, DataIdentity, Sampling
from countoff.core.data.plain import attribute_of

__all__ = [
    "accelerate_classes",
    "asks_for_length",
    "fingerprint_batch",
    "known_length",
    "samplers_of",
    "sampling_of",
    "torchdata_classes",
]

_DEPTH = 32
_ASKING = (BatchSampler, DistributedSampler, RandomSampler, SequentialSampler)
_SIZED = (*_ASKING, SubsetRandomSampler, WeightedRandomSampler)
_ASKING_OF_ACCELERATE = ("BatchSamplerShard", "SeedableRandomSampler", "SkipBatchSampler")
_ASKING_OF_TORCHDATA = ("BatchSampler", "RandomSampler")
"""Samplers that ask the dataset for its length, or hold one that does; of `_SIZED`, some know one of their own."""


def fingerprint_batch(data: DataIdentity, batch: Any, loader: Any) -> None:
    """Takes the fingerprint of a train batch while `data.fingerprints_due`; raises nothing.

    Args:
        data: The guard's `data`.
        batch: The batch as the loader handed it out.
        loader: The loader.
    """
    sampling = sampling_of(loader, dp_rank=data.dp_rank, dp_degree=data.dp_degree)
    data.read(batch, sampling, functools.partial(stream_facts, loader, data))


def sampling_of(loader: Any, *, dp_rank: int, dp_degree: int) -> Sampling:
    """Returns what a loader's sampler shows about the data of this rank; raises nothing.

    Args:
        loader: Any loader; nothing is known of one that is not a torch DataLoader.
        dp_rank: The dp_rank of this rank.
        dp_degree: The number of dp_ranks.
    """
    if not is_data_loader(loader):
        return UNKNOWN
    try:
        return _sampling_of(loader, dp_rank, dp_degree)
    except Exception:  # a sampler of the user's own may have no attribute of its base class
        return UNKNOWN


def _sampling_of(loader: DataLoader[Any], dp_rank: int, dp_degree: int) -> Sampling:
    is_sharded, shuffled = isinstance(loader, accelerate_classes("DataLoaderDispatcher")), None
    # A StreamingDataset with `replication` gives groups of ranks the same samples on purpose.
    replication = attribute_of(loader.dataset, "replication")
    comparable = type(replication) is not int or replication <= 1
    for sampler in samplers_of(loader):
        if isinstance(sampler, DistributedSampler):
            is_sharded |= (sampler.rank, sampler.num_replicas) == (dp_rank, dp_degree)
            if sampler.shuffle and type(sampler).__iter__ is DistributedSampler.__iter__:
                shuffled = sampler.epoch, reported_length(sampler.dataset) or 0, sampler.seed
        elif isinstance(sampler, accelerate_classes("BatchSamplerShard", "IterableDatasetShard")):
            # Accelerate itself computes this share: where it differs from the plan, the plan is incomplete.
            is_sharded = comparable = (sampler.process_index, sampler.num_processes) == (dp_rank, dp_degree)
        elif isinstance(sampler, accelerate_classes("SeedableRandomSampler")):
            shuffled = _epoch_begun(sampler), reported_length(sampler) or 0, sampler.initial_seed
    return Sampling(is_sharded, comparable, shuffled, _workers_in_turn(loader))


def _epoch_begun(sampler: Any) -> int:
    """Returns the epoch by which a sampler of Accelerate's shuffles its latest pass.

    It counts its epoch up where the pass has no sample left, which may be before the loop has its first batch.
    Source: Accelerate 1.15, data_loader.py, `SeedableRandomSampler.__iter__`, which seeds its generator by the epoch.
    """
    if not isinstance(sampler.generator, torch.Generator):
        return sampler.epoch
    begun = sampler.generator.initial_seed() - sampler.initial_seed
    return begun if begun == sampler.epoch - 1 else sampler.epoch


def _workers_in_turn(loader: DataLoader[Any]) -> int:
    """Returns the workers of a loader that each read a copy of an iterable dataset and give a batch in turn; else 0."""
    alone = isinstance(loader, accelerate_classes("DataLoaderDispatcher")) or not iterates_as_torch(loader)
    in_turn = isinstance(loader.dataset, IterableDataset) and attribute_of(loader, "in_order") is not False
    return 0 if alone or not in_turn else loader.num_workers


def samplers_of(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yields the data set and the samplers of a loader, from the outermost to the innermost."""
    yield loader.dataset
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    for _ in range(_DEPTH):  # one may hold itself
        if sampler is None:
            return
        yield sampler
        sampler = sampler_of(sampler)


def asks_for_length(loader: Any) -> bool:
    """Returns whether a pass over a loader asks its dataset for its length, so that we may do so too.

    An iterable dataset may compute its length, and once it is known torch warns of a pass that has more.
    """
    asking = (*_ASKING, *_asking_of_libraries())
    samplers = [] if isinstance(loader.dataset, IterableDataset) else list(samplers_of(loader))[1:]
    return bool(samplers) and all(type(each) in asking for each in samplers)


def known_length(loader: Any) -> int | None:
    """Returns ``len(loader)`` where that calls nothing of the user's that a pass over the loader would not call.

    None stands for any other loader: its `__len__`, or that of its dataset or sampler, may do anything.
    """
    kind = type(loader)
    if kind in (list, tuple, range):
        return reported_length(loader)  # none of a range that is endless for all purposes
    if not issubclass(kind, DataLoader) or not (of_library(kind.__len__) and of_library(kind.__iter__)):
        return None
    known = (*_SIZED, *_asking_of_libraries())
    with contextlib.suppress(Exception):  # an attribute of the user's own class may be a property
        samplers = [] if isinstance(loader.dataset, IterableDataset) else list(samplers_of(loader))[1:]
        return reported_length(loader) if samplers and all(type(each) in known for each in samplers) else None
    return None


def accelerate_classes(*names: str) -> tuple[type, ...]:
    """Returns classes of Accelerate, if it has been imported."""
    return _classes_of("accelerate.data_loader", names)


def torchdata_classes(*names: str) -> tuple[type, ...]:
    """Returns samplers of torchdata, if it has been imported."""
    return _classes_of("torchdata.stateful_dataloader.sampler", names)


def _asking_of_libraries() -> tuple[type, ...]:
    return (*accelerate_classes(*_ASKING_OF_ACCELERATE), *torchdata_classes(*_ASKING_OF_TORCHDATA))


def _classes_of(module: str, names: Iterable[str]) -> tuple[type, ...]:
    imported = sys.modules.get(module)
    return tuple(getattr(imported, name) for name in names if hasattr(imported, name))

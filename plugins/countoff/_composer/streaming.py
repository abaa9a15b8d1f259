"""Reads mosaicml-streaming's objects into facts for the arithmetic, without importing the library.

The length of a `StreamingDataset` is computed only where a subclass does not change how samples are divided.
"""

from __future__ import annotations

import sys
from typing import Any

from countoff._composer.streaming_facts import StreamFacts, StreamingFacts
from countoff.core.data.plain import attribute_of, in_class

_DIVIDES_SAMPLES = ("__iter__", "_each_sample_id", "_get_work", "_resume", "_resume_incr_epoch", "resample_streams")
_KNOWN_LOADERS = {"torch.utils.data": "DataLoader", "streaming.base.dataloader": "StreamingDataLoader"}


def has_known_iterator(loader: Any) -> bool:
    """Returns whether a loader's `__iter__` is that of torch's DataLoader or of streaming's StreamingDataLoader."""
    known = [getattr(sys.modules.get(module), name, None) for module, name in _KNOWN_LOADERS.items()]
    return any(each is not None and in_class(type(loader), "__iter__") is each.__iter__ for each in known)


def streaming_dataset(loader: Any) -> Any:
    """Returns the StreamingDataset that a DataLoader reads.

    None if it reads another data set, or a subclass that divides samples by itself.
    """
    base = getattr(sys.modules.get("streaming.base.dataset"), "StreamingDataset", None)
    dataset = attribute_of(loader, "dataset")
    if base is None or not isinstance(dataset, base) or not has_known_iterator(loader):
        return None
    changed = [name for name in _DIVIDES_SAMPLES if getattr(type(dataset), name, None) is not getattr(base, name, None)]
    return None if changed else dataset


def streaming_facts(loader: Any) -> StreamingFacts | None:
    """Returns the facts of a loader for the arithmetic of streaming; None if it does not read a StreamingDataset.

    Args:
        loader: Any loader.
    """
    dataset = streaming_dataset(loader)
    if dataset is None:
        return None
    world = dataset._unique_rank_world
    return StreamingFacts(
        epoch_size=int(dataset.epoch_size),
        nodes=world.num_nodes,
        ranks_per_node=world.ranks_per_node,
        dataset_batch_size=dataset.batch_size,
        batch_size=loader.batch_size,
        drop_last=bool(loader.drop_last),
        num_workers=loader.num_workers,
        batching_method=dataset.batching_method,
        num_canonical_nodes=dataset.num_canonical_nodes,
        shuffle=bool(dataset.shuffle),
        shuffle_algo=dataset.shuffle_algo,
        replication=dataset.replication,
        partition_algo=dataset.partition_algo,
        initial_nodes=dataset.initial_physical_nodes,
        streams=tuple(
            StreamFacts(int(samples), int(stream.choose), float(stream.proportion))
            for samples, stream in zip(dataset.samples_per_stream, dataset.streams, strict=True)
        ),
    )

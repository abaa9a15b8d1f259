"""Reads what a rank's objects store about the datasets that samplers deal out to all ranks.

A dataset of a class of the user's own is asked for nothing. Its length is known where something else has asked for it:
the facts of the train loader.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from countoff._adapter.dealt_streams import streaming_shares
from countoff._adapter.sampling import accelerate_classes, samplers_of
from countoff._adapter.torch_facts import is_data_loader, of_library
from countoff.core.data.plain import ABSENT, attribute_of, in_class, items_of
from countoff.core.data.unobserved import unobserved

__all__ = ["dealt", "dealt_rows", "is_of_hub", "rows_of", "sampler_arguments"]


def dealt_rows(loader: Any, *, dp_rank: int, dp_degree: int, known: int | None = None) -> int | None:
    """Returns the rows of the dataset that all ranks must hold alike; None if that is not proven or not known.

    It raises nothing.

    Args:
        loader: The train loader.
        dp_rank: The dp_rank of this rank.
        dp_degree: The number of dp_ranks.
        known: What `len` of the loader's dataset has given; None if that is not known.
    """
    with contextlib.suppress(Exception):  # objects of the user's may be made of anything
        dataset = dealt(loader, dp_rank, dp_degree)
        if dataset is not None:
            rows = rows_of(dataset)
            return known if rows is None and dataset is loader.dataset else rows
    return None


def sampler_arguments(loader: Any, *, dp_rank: int, dp_degree: int) -> dict[str, Any] | None:
    """Returns what deals a dataset out to all ranks was made with; None if nothing does, or it is of another class.

    It raises nothing.

    Args:
        loader: The train loader.
        dp_rank: The dp_rank of this rank.
        dp_degree: The number of dp_ranks.
    """
    with contextlib.suppress(Exception):  # as above
        if not is_data_loader(loader) or dp_degree == 1:
            return None
        if streaming_shares(loader.dataset) == dp_degree:
            told = _attributes(loader.dataset, "shuffle", "shuffle_seed", "shuffle_algo")
        elif dealt(loader, dp_rank, dp_degree) is not None:
            exact = (each for each in samplers_of(loader) if type(each) is DistributedSampler)
            if (sampler := next(exact, None)) is None:
                return None
            told = _attributes(sampler, "shuffle", "seed")
        else:
            return None
        return told if told.get("shuffle") is True else {"shuffle": told["shuffle"]}
    return None


def _attributes(of: Any, *names: str) -> dict[str, Any]:
    """The attributes of an object that it stores as a number or a text."""
    found = {name: attribute_of(of, name) for name in names}
    return {name: value for name, value in found.items() if type(value) in (bool, int, str)}


def rows_of(dataset: Any) -> int | None:
    """Returns the rows of a dataset, as it stores their number; None if nothing but a call would tell it.

    Args:
        dataset: Any object.

    >>> rows_of(range(4)), rows_of(Subset(range(4), [1, 3])), rows_of({1: 2})
    (4, 2, None)
    """
    length = in_class(type(dataset), "__len__")
    numpy = sys.modules.get("numpy")
    if length is Subset.__len__:
        return rows_of(attribute_of(dataset, "indices"))
    if length is TensorDataset.__len__:
        return rows_of(attribute_of(dataset, "tensors")[0])
    if length is ConcatDataset.__len__:
        sizes = items_of(attribute_of(dataset, "cumulative_sizes"))
        return sizes[-1] if sizes and type(sizes[-1]) is int else None
    if is_of_hub(dataset):
        return int((dataset._data if dataset._indices is None else dataset._indices).num_rows)
    if type(dataset) is torch.Tensor or (numpy is not None and type(dataset) is numpy.ndarray):
        with unobserved():
            return int(dataset.shape[0]) if dataset.ndim else None
    items = items_of(dataset)
    return None if items is None else len(items)


def dealt(loader: Any, dp_rank: int, dp_degree: int) -> Any:
    """Returns the dataset that is dealt out to all ranks.

    None where it may be right that the ranks' datasets differ: nothing deals one out, or not to all of the data ranks.

    Args:
        loader: Any loader.
        dp_rank: The dp_rank of this rank.
        dp_degree: The number of dp_ranks.
    """
    if not is_data_loader(loader) or dp_degree == 1 or isinstance(loader.dataset, IterableDataset):
        return None
    if isinstance(loader, accelerate_classes("DataLoaderDispatcher")):
        return None  # rank 0 reads for all
    own = (dp_rank, dp_degree)
    for sampler in samplers_of(loader):
        if isinstance(sampler, accelerate_classes("BatchSamplerShard")):
            return loader.dataset if (sampler.process_index, sampler.num_processes) == own else None
        if isinstance(sampler, DistributedSampler):
            exact = type(sampler) is DistributedSampler
            known = exact or of_library(type(sampler))
            if not known or (sampler.rank, sampler.num_replicas) != own:
                return None
            return sampler.dataset if exact else loader.dataset
    return None


def is_of_hub(dataset: Any) -> bool:
    """Returns whether this is a map-style dataset of `datasets`, whose tables tell its length."""
    hub = sys.modules.get("datasets")
    kind = getattr(hub, "Dataset", None)
    return kind is not None and in_class(type(dataset), "__len__") is kind.__len__ is not ABSENT

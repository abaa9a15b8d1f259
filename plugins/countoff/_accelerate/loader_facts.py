"""Reads a loader that Accelerate has prepared for `countoff.core`: it copies attributes and computes nothing.

What only the author of a data set or of a sampler can know stays unknown, because a number here counts as proof.
"""

from __future__ import annotations

import contextlib
import operator
from typing import Any

from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, IterableDatasetShard
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from countoff._accelerate.loaders import source_of
from countoff._adapter.torch_facts import counted, reported_length
from countoff.core import LoaderFacts
from countoff.core.arithmetic.prepared_loader import PreparedFacts, prepared_pass
from countoff.core.data.plain import attribute_of

__all__ = ["evaluation_facts", "is_divided", "loader_facts"]


def loader_facts(loader: Any, *, num_processes: int, process_index: int, **known: Any) -> LoaderFacts:
    """Returns the facts of one prepared loader.

    Args:
        loader: The loader.
        num_processes: Processes that read different data, at least 1.
        process_index: The index of this process among them, from 0.
        known: Facts that the caller knows better; they replace what is read from the loader.
    """
    prepared = _prepared_facts(loader, num_processes)
    iterable = isinstance(loader.dataset, IterableDataset)
    facts: dict[str, Any] = {
        "reported_batches": reported_length(loader),
        "batch_size": prepared.batch_size_per_rank,
        "drop_last": prepared.drop_last,
        "samples_per_rank": None,
        "dataset_size": None if iterable else reported_length(loader.dataset),
        "one_pass": prepared_pass(prepared, process_index=process_index),
        "partial_step": "applied",
    }
    return LoaderFacts(**counted(facts | known))


def evaluation_facts(loader: Any, *, num_processes: int, process_index: int) -> LoaderFacts | None:
    """Returns the facts of a prepared loader; None if it is not divided among just these processes.

    Args:
        loader: The loader.
        num_processes: Processes that read different data, at least 1.
        process_index: The index of this process among them, from 0.
    """
    if not is_divided(loader, num_processes=num_processes, process_index=process_index):
        return None
    return loader_facts(loader, num_processes=num_processes, process_index=process_index, reported_is_cap=False)


def is_divided(loader: Any, *, num_processes: int, process_index: int) -> bool:
    """Returns whether Accelerate divides a prepared loader among just these processes, of which this is one.

    Args:
        loader: The loader.
        num_processes: Processes that read different data, at least 1.
        process_index: The index of this process among them, from 0.
    """
    source = source_of(loader)  # which may be a dataset of the user's own
    share = (attribute_of(source, "process_index"), attribute_of(source, "num_processes"))
    return num_processes == 1 or isinstance(loader, DataLoaderDispatcher) or share == (process_index, num_processes)


def _prepared_facts(loader: Any, num_processes: int) -> PreparedFacts:
    dispatched, source = isinstance(loader, DataLoaderDispatcher), source_of(loader)
    divided = isinstance(source, (BatchSamplerShard, IterableDatasetShard))
    undivided = source.batch_sampler if isinstance(source, BatchSamplerShard) else source
    iterable = isinstance(loader.dataset, IterableDataset)
    samples, batch_size, all_different = (None, _batch_size(loader, source), False) if iterable else _drawn(undivided)
    drop_last = getattr(source if divided or isinstance(source, BatchSampler) else loader, "drop_last", False)
    return PreparedFacts(
        "DataLoaderDispatcher" if dispatched else "IterableDatasetShard" if iterable else "BatchSamplerShard",
        samples=samples,
        batch_size=batch_size,
        num_processes=num_processes,
        drop_last=bool(loader._drop_last if dispatched else drop_last),
        split_batches=bool(getattr(loader if dispatched else source if divided else None, "split_batches", False)),
        # A single process has an undivided loader, whose batches need not be made even.
        even_batches=divided and bool(getattr(source, "even_batches", True)),
        all_different=all_different,
        iterable=iterable,
        num_workers=loader.num_workers,
    )


def _batch_size(loader: Any, source: Any) -> int | None:
    """Returns the samples per batch of the undivided loader over an iterable data set."""
    return source.batch_size if isinstance(source, IterableDatasetShard) else loader.batch_size


def _drawn(batch_sampler: Any) -> tuple[int | None, int | None, bool]:
    """Returns a batch sampler's samples per pass, samples per batch, and whether those samples are all different."""
    if not isinstance(batch_sampler, BatchSampler) or type(batch_sampler).__iter__ is not BatchSampler.__iter__:
        return None, None, False
    with contextlib.suppress(Exception):  # a sampler of the user's own may have no attribute of its base class
        sampler, batch_size = batch_sampler.sampler, operator.index(batch_sampler.batch_size)  # numpy's, say
        if isinstance(sampler, DistributedSampler):  # already divided; Accelerate divides it again
            return operator.index(sampler.num_samples), batch_size, False
        if isinstance(sampler, (SequentialSampler, RandomSampler)):
            drawn_once = not getattr(sampler, "replacement", False) and len(sampler) <= len(sampler.data_source)
            return len(sampler), batch_size, drawn_once
        return None, batch_size, False
    return None, None, False

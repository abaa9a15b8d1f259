"""The loaders that Accelerate prepares: who follows them where they are iterated, and what is known of one.

The transformers Trainer iterates its loaders by itself, and makes one per evaluation. `LocalSGD`, inside which ranks
may iterate loaders unevenly, is observed in its class too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, DataLoaderShard, SkipBatchSampler
from accelerate.local_sgd import LocalSGD
from torch.utils.data import BatchSampler, IterableDataset

from countoff._adapter.even_loaders import even_inside
from countoff._adapter.hooks import SharedHooks
from countoff._adapter.loader_followers import LoaderFollowers
from countoff._adapter.passes import Even
from countoff._adapter.torch_facts import reported_length

__all__ = [
    "epoch_length",
    "even_prepared",
    "followers",
    "is_prepared",
    "same_source",
    "skipped_batches",
    "source_length",
    "source_of",
    "watch_local_sgd",
]

PREPARED = (DataLoaderShard, DataLoaderDispatcher)

followers = LoaderFollowers(lambda: PREPARED)
"""Those who follow the passes over prepared loaders."""


def watch_local_sgd(watcher: Callable[[Any, bool], None]) -> Callable[[], None]:
    """Calls a watcher when an enabled `LocalSGD` is entered or exited.

    Args:
        watcher: Called with the Accelerator, and True after an entry, False after an exit.

    Returns:
        A function that removes the watcher. With the last watcher, Accelerate's class is restored.
    """
    return _local_sgd.add(watcher)


def _watched(method: Callable[..., Any], local_sgd: Any, *error: Any, inside: bool) -> Any:
    result = method(local_sgd, *error)
    for watcher in _local_sgd if local_sgd.enabled else ():
        watcher(local_sgd.accelerator, inside)
    return result


_local_sgd: SharedHooks[Callable[[Any, bool], None]] = SharedHooks(
    lambda: {
        (LocalSGD, "__enter__"): functools.partial(_watched, inside=True),
        (LocalSGD, "__exit__"): functools.partial(_watched, inside=False),
    }
)


def is_prepared(loader: Any) -> bool:
    """Returns whether a loader is one of Accelerate's, and so can be followed."""
    return isinstance(loader, PREPARED)


def same_source(one: Any, other: Any) -> bool:
    """Returns whether two prepared loaders read the same data; one of them may skip its first batches."""
    return one is other or source_of(one) is source_of(other)


def source_of(loader: Any) -> Any:
    """Returns what determines a prepared loader's batches: its batch sampler, or for iterable data the data set."""
    return _source(loader)[0]


def skipped_batches(loader: Any) -> int:
    """Returns the batches that a prepared loader skips at its start, as one made by `skip_first_batches` does."""
    return _source(loader)[1] + int(getattr(loader, "skip_batches", 0))


def epoch_length(loader: Any) -> int | None:
    """Returns the batches of an epoch as a prepared loader reports them, with those that it skips at its start."""
    length = reported_length(loader)
    return None if length is None else length + skipped_batches(loader)


def even_prepared(loader: Any, *, proven: bool = False) -> Even | None:
    """Returns what makes a pass over a prepared loader even; None for one that one rank reads for all.

    Args:
        loader: The loader.
        proven: Whether this is the loader whose length the fit's plan proves.
    """
    if not isinstance(loader, DataLoaderShard):
        return None

    def begins() -> None:
        if _has_uneven_shards(loader):
            # `gather_for_metrics` would cut the last batch to the samples that are left of the whole data set. The last
            # batch that all ranks have is a full one.
            loader.remainder = 0

    # The shard looks one batch ahead, and sets the end of the pass from that, so what it iterates is made even.
    return functools.partial(
        even_inside, owner=loader, name="base_dataloader", ahead=True, proven=proven, begins=begins
    )


def source_length(loader: Any) -> int | None:
    """Returns the batches of the loader from which this one was prepared; None if that is unknown."""
    source = source_of(loader)
    undivided = source.batch_sampler if isinstance(source, BatchSamplerShard) else source
    return None if isinstance(undivided, IterableDataset) else reported_length(undivided)


def _has_uneven_shards(loader: Any) -> bool:
    """Whether Accelerate is known to give ranks different numbers of batches, as it may with `even_batches=False`."""
    shard: Any = source_of(loader)
    if not isinstance(shard, BatchSamplerShard) or shard.even_batches or shard.drop_last:
        return False
    if not shard.split_batches:
        batches = reported_length(shard.batch_sampler)
        return batches is not None and batches % shard.num_processes != 0
    samples = reported_length(getattr(shard.batch_sampler, "sampler", None))
    size: Any = shard.batch_size
    share = size // shard.num_processes
    return samples is not None and 0 < samples % size <= share * (shard.num_processes - 1)


def _source(loader: Any) -> tuple[Any, int]:
    if isinstance(loader.dataset, IterableDataset):
        return loader.dataset, 0
    sampler = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    skipped = 0
    while isinstance(sampler, SkipBatchSampler):
        skipped += sampler.skip_batches
        sampler = sampler.batch_sampler
    return (loader.dataset if sampler is None else sampler), skipped

"""Iteration of the loaders that Accelerate prepares, seen where it happens: in their classes' `__iter__`.

A loader's own class cannot be exchanged (Accelerate's adapters answer for the class that they wrap), and the loader
that is iterated need not be the one that was prepared: `skip_first_batches` makes another, the Trainer makes one per
evaluation. So while anybody follows, the two classes have an `__iter__` of ours, which asks the followers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

try:
    from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SkipBatchSampler
except ImportError as error:
    raise ImportError("countoff.accelerate needs Accelerate: pip install 'countoff[accelerate]'") from error
from torch.utils.data import BatchSampler, IterableDataset

from countoff._observe import reported_length

Follower = Callable[[Any, Iterator[Any]], Iterator[Any] | None]
"""Takes a loader that is about to be iterated and its own iterator; returns another in its place, or None: not mine."""

PREPARED = (DataLoaderShard, DataLoaderDispatcher)
_followers: list[Follower] = []


def follow(follower: Follower) -> Callable[[], None]:
    """Asks a follower about every prepared loader that is iterated from here on; the latest is asked first.

    Returns:
        Ends it. The last one to go leaves Accelerate's classes as they were.
    """
    if not _followers:
        for loader_class in PREPARED:
            loader_class.__iter__ = _asking(loader_class.__iter__)
    _followers.append(follower)

    def leave() -> None:
        _followers.remove(follower)
        for loader_class in PREPARED if not _followers else ():
            original = getattr(loader_class.__iter__, "countoff_original", None)
            if original is not None:  # else somebody stands on top of it: it goes on, and asks nobody
                loader_class.__iter__ = original

    return leave


def _asking(original: Callable[[Any], Iterator[Any]]) -> Any:
    @functools.wraps(original)
    def observed(loader: Any) -> Iterator[Any]:
        batches = original(loader)
        for follower in reversed(_followers):
            found = follower(loader, batches)
            if found is not None:
                return found
        return batches

    setattr(observed, "countoff_original", original)  # noqa: B010  # an attribute of a function, unknown to its type
    return observed


def is_prepared(loader: Any) -> bool:
    """Whether it is one of Accelerate's loaders, and so can be followed."""
    return isinstance(loader, PREPARED)


def same_source(one: Any, other: Any) -> bool:
    """Whether two prepared loaders read the same thing, one of them perhaps leaving out its first batches."""
    return one is other or source_of(one) is source_of(other)


def source_of(loader: Any) -> Any:
    """What a prepared loader reads by: its batch sampler, or for iterable data the data set."""
    return _source(loader)[0]


def skipped_batches(loader: Any) -> int:
    """Batches at the beginning that a prepared loader leaves out, as `skip_first_batches` makes them."""
    return _source(loader)[1] + int(getattr(loader, "skip_batches", 0))


def source_length(loader: Any) -> int | None:
    """Batches of the loader from which this one was prepared, if that can be known."""
    source = source_of(loader)
    undivided = getattr(source, "batch_sampler", source)  # what a BatchSamplerShard takes its turns from
    return None if isinstance(undivided, IterableDataset) else reported_length(undivided)


def _source(loader: Any) -> tuple[Any, int]:
    if isinstance(loader.dataset, IterableDataset):
        return loader.dataset, 0
    sampler = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    skipped = 0
    while isinstance(sampler, SkipBatchSampler):
        skipped += sampler.skip_batches
        sampler = sampler.batch_sampler
    return (loader.dataset if sampler is None else sampler), skipped

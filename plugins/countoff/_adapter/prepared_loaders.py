"""Iteration of the loaders that Accelerate prepares, seen where it happens: in their classes' `__iter__`.

A loader's own class cannot be exchanged (Accelerate's adapters answer for the class that they wrap), and the loader
that is iterated need not be the one that was prepared: `skip_first_batches` makes another, the Trainer makes one per
evaluation. So while anybody follows, the two classes have an `__iter__` of ours, which asks the followers. `LocalSGD`,
inside which ranks may iterate them unevenly, is watched in the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

try:
    from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SkipBatchSampler
    from accelerate.local_sgd import LocalSGD
except ImportError as error:
    raise ImportError("countoff.accelerate needs Accelerate: pip install 'countoff[accelerate]'") from error
from torch.utils.data import BatchSampler, IterableDataset

from countoff._adapter.torch_facts import reported_length

Follower = Callable[[Any, Iterator[Any]], Iterator[Any] | None]
"""Takes a loader that is about to be iterated and its own iterator; returns another in its place, or None: not mine."""

PREPARED = (DataLoaderShard, DataLoaderDispatcher)
_followers: list[Follower] = []
_local_sgd_watchers: list[Callable[[Any, bool], None]] = []


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


def watch_local_sgd(watcher: Callable[[Any, bool], None]) -> Callable[[], None]:
    """Calls it with the Accelerator and True when a `LocalSGD` that is enabled has been entered, and False when left.

    Returns:
        Ends it. The last one to go leaves Accelerate's class as it was.
    """
    if not _local_sgd_watchers:
        LocalSGD.__enter__ = _telling(LocalSGD.__enter__, inside=True)
        LocalSGD.__exit__ = _telling(LocalSGD.__exit__, inside=False)
    _local_sgd_watchers.append(watcher)

    def leave() -> None:
        _local_sgd_watchers.remove(watcher)
        for name in ("__enter__", "__exit__") if not _local_sgd_watchers else ():
            original = getattr(getattr(LocalSGD, name), "countoff_original", None)
            if original is not None:  # else somebody stands on top of it, as below `follow`
                setattr(LocalSGD, name, original)

    return leave


def _telling(original: Callable[..., Any], *, inside: bool) -> Any:
    @functools.wraps(original)
    def watched(local_sgd: Any, *error: Any) -> Any:
        result = original(local_sgd, *error)
        for watcher in _local_sgd_watchers if local_sgd.enabled else ():
            watcher(local_sgd.accelerator, inside)
        return result

    setattr(watched, "countoff_original", original)  # noqa: B010  # an attribute of a function, unknown to its type
    return watched


def is_prepared(loader: Any) -> bool:
    """Whether it is one of Accelerate's loaders, and so can be followed."""
    return isinstance(loader, PREPARED)


def holds_prepared(loader: Any, *, depth: int = 3) -> bool:
    """Whether one of Accelerate's loaders is among an object's attributes, or so many levels below, as in a wrapper."""
    held = getattr(loader, "__dict__", {}).values() if depth else ()
    return any(is_prepared(each) or holds_prepared(each, depth=depth - 1) for each in held)


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

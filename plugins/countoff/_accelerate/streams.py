"""Observes the streams that Accelerate's shards deal out, where the shards take their first elements.

A shard reads the whole stream on every rank and keeps a part of it. While there are watchers, a shard that begins a
pass reads through a copy of itself whose source lets the first elements be looked at. Nothing is put on an object.
Behind the first elements, the shard takes from the source's own iterator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from torch.utils.data import get_worker_info

from countoff._accelerate.loaders import source_of
from countoff._adapter.dealt_streams import indices_seen
from countoff._adapter.hooks import SharedHooks
from countoff.core.checks.data import DataIdentity

__all__ = ["watch_stream"]

_Follow = Callable[[Iterator[Any]], Iterator[Any]]


def watch_stream(train_loader: Callable[[], Any], data: Callable[[], DataIdentity]) -> Callable[[], None]:
    """Looks at the first elements of what a prepared train loader's shard deals out, from here on.

    Args:
        train_loader: Returns the prepared train loader; None for none.
        data: Returns the guard's `data`.

    Returns:
        A function that ends that. With the last watcher, Accelerate's classes are restored.
    """

    def watcher(shard: Any) -> _Follow | None:
        elements, loader = data().elements, train_loader()
        if elements is None or loader is None or source_of(loader) is not shard:
            return None
        if isinstance(shard, IterableDatasetShard):
            return elements.follow
        return functools.partial(elements.follow, seen=indices_seen(loader.dataset))

    return _watchers.add(watcher)


class _Followed:
    """A stream with the attributes of its source, whose first elements are looked at."""

    def __init__(self, source: Any, follow: _Follow) -> None:
        self._source, self._follow = source, follow

    def __iter__(self) -> Iterator[Any]:
        return self._follow(iter(self._source))

    def __len__(self) -> int:
        return len(self._source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def _dealt(deal: Callable[[Any], Iterator[Any]], shard: Any, *, source: str) -> Iterator[Any]:
    if get_worker_info() is None:  # in a worker, nobody could read what was seen
        for watcher in _watchers:
            follow = watcher(shard)
            if follow is not None:
                reading = object.__new__(type(shard))
                reading.__dict__.update(shard.__dict__)
                setattr(reading, source, _Followed(getattr(shard, source), follow))
                return deal(reading)
    return deal(shard)


_watchers: SharedHooks[Callable[[Any], _Follow | None]] = SharedHooks(
    lambda: {
        (BatchSamplerShard, "__iter__"): functools.partial(_dealt, source="batch_sampler"),
        (IterableDatasetShard, "__iter__"): functools.partial(_dealt, source="dataset"),
    }
)

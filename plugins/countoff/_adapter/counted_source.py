"""Counts the train batches of a loop without a loader, where the loop takes them from their source."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from countoff._adapter.even_loaders import even_pass
from countoff._adapter.loader_passes import LoaderPasses
from countoff._adapter.observed_loaders import cover_state_of
from countoff._adapter.observed_loop import ObservedLoop

__all__ = ["counted_source"]


def counted_source(loop: ObservedLoop, source: Any) -> Any:
    """Returns what `Attached.counted` returns where countoff is on.

    Args:
        loop: The loop.
        source: An iterable, an iterator or a function.
    """
    cover_state_of(loop, source)
    if isinstance(source, Iterator):
        batches = cast("Iterator[Any]", source)
        return loop.passes.follow(batches, None, even=functools.partial(even_pass, loader=source, again=_nothing))
    if isinstance(source, Iterable):
        return _CountedPasses(loop.passes, source)
    calls = _Calls(source)
    even = functools.partial(even_pass, loader=calls, again=_nothing)
    return loop.passes.follow(calls, None, position=loop.batches_before, even=even).__next__


def _nothing() -> Iterator[Any]:
    """What an iterator gives that is begun again."""
    return iter(())


class _Calls:
    """An iterator over what a function returns."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._function()


class _CountedPasses:
    """An iterable that counts every pass over another one."""

    def __init__(self, passes: LoaderPasses, source: Any) -> None:
        self._passes = passes
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        even = functools.partial(even_pass, loader=self._source)
        return self._passes.follow(iter(self._source), None, loader=self._source, even=even)

    def __len__(self) -> int:
        return len(self._source)

"""Stands in the place of a loader's own iterator, and is one for all who ask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["IteratorProxy"]


class IteratorProxy:
    """An iterator in the place of a loader's own one. Whatever else that one can do, this one has it do.

    A subclass defines `__next__`. Names with two underscores hide no attribute of the loader's own iterator.

    Args:
        own: The loader's own iterator.
    """

    def __init__(self, own: Iterator[Any]) -> None:
        self.__own = own

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if any(name.startswith(f"_{each.__name__.lstrip('_')}__") for each in type(self).__mro__):
            raise AttributeError(name)
        return getattr(self.__own, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__own.__reduce_ex__(protocol)

    @property  # what `isinstance` and the user's code see
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self.__own)

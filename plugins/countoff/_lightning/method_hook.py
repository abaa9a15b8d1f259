"""Calls functions of countoff's before and after a method of one of Lightning's objects, until they are removed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

__all__ = ["FetchTimer", "MethodHook"]


class MethodHook:
    """Stands in an attribute of an object in the place of the object's own method, until it is removed.

    A pickle or a deep copy of the object does not hold the hook. It holds the method of the copy there.

    Args:
        owner: The object. It must allow its attributes to be set.
        name: The method's name.
        before: Called with the method's arguments before each call.
        after: Called without arguments after each call that raised nothing.
        instead: Called in the place of the method.

    Raises:
        AttributeError: If the object has no such method.
    """

    def __init__(
        self,
        owner: Any,
        name: str,
        *,
        before: Callable[..., object] | None = None,
        after: Callable[[], object] | None = None,
        instead: Callable[..., Any] | None = None,
    ) -> None:
        self._owner = owner
        self._name = name
        self._method = getattr(owner, name)
        self._was_attribute = name in vars(owner)
        self._before = before
        self._after = after
        self._call = instead or self._method
        setattr(owner, name, self)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self._before is not None:
            self._before(*arguments, **options)
        result = self._call(*arguments, **options)
        if self._after is not None:
            self._after()
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return _method_itself, (self._method,)

    def remove(self) -> None:
        """Gives the object its own method back. Does nothing when called again.

        Where other code has replaced the hook, that stays. Where it has wrapped the hook, the hook calls nothing more
        than the method.
        """
        self._before = self._after = None
        self._call = self._method
        if vars(self._owner).get(self._name) is not self:
            return
        if self._was_attribute:
            setattr(self._owner, self._name, self._method)
        else:
            delattr(self._owner, self._name)


class FetchTimer:
    """Times each fetch of one of Lightning's data fetchers, until it is removed.

    Args:
        fetcher: The data fetcher. Some versions of Lightning do not show when it fetches; then nothing is timed.
        waited: Called after each fetch with the seconds that it took.
    """

    def __init__(self, fetcher: Any, waited: Callable[[float], None]) -> None:
        self._waited = waited
        self._began = 0.0
        self._hooks: tuple[MethodHook, ...] = ()
        if hasattr(fetcher, "_start_profiler") and hasattr(fetcher, "_stop_profiler"):
            self._hooks = (
                MethodHook(fetcher, "_start_profiler", after=self._start),
                MethodHook(fetcher, "_stop_profiler", before=self._stop),
            )

    def remove(self) -> None:
        """Times no more fetches. Does nothing when called again."""
        for hook in self._hooks:
            hook.remove()

    def _start(self) -> None:
        self._began = time.perf_counter()

    def _stop(self) -> None:
        self._waited(time.perf_counter() - self._began)


def _method_itself(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what it is given: how a copy of an object gets the object's own method in the place of a hook."""
    return method

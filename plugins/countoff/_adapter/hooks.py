"""Puts something of countoff's in an attribute of a framework's object, and takes it back.

Where other code has put its own in that place meanwhile, that stays. Where it has wrapped a hook, the hook calls
nothing more than the method.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

__all__ = ["MethodHook", "PlacedValue", "SharedHooks", "until_gone"]

Watcher = TypeVar("Watcher")


class PlacedValue:
    """A value in an attribute of an object, in the place of the object's own one, until it is removed.

    Args:
        owner: The object, or a class. It must allow its attributes to be set.
        name: The attribute's name.
        value: The value.

    Raises:
        AttributeError: If the object has no such attribute.
    """

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self._owner = owner
        self._name = name
        self._value = value
        self._own = getattr(owner, name)
        self._was_attribute = name in vars(owner)
        self._given_back = False
        setattr(owner, name, value)

    def remove(self) -> bool:
        """Gives the object its own value back, if this one is still in its place; returns whether it did."""
        if self._given_back or vars(self._owner).get(self._name) is not self._value:
            return False
        self._given_back = True
        if self._was_attribute:
            setattr(self._owner, self._name, self._own)
        else:
            delattr(self._owner, self._name)
        return True


class MethodHook:
    """Stands in the place of a method of an object, or of a class, until it is removed.

    A pickle or a deep copy of the object does not hold the hook. It holds the method of the copy there.

    Args:
        owner: The object, or a class for all of its objects. It must allow its attributes to be set.
        name: The method's name.
        before: Called with the method's arguments before each call; of a class's method, its object is the first one.
        after: Called with the arguments after each call that raised nothing.
        instead: Called in the place of the method, with the method and the arguments.

    Raises:
        AttributeError: If the object has no such method.
    """

    def __init__(
        self,
        owner: Any,
        name: str,
        *,
        before: Callable[..., object] | None = None,
        after: Callable[..., object] | None = None,
        instead: Callable[..., Any] | None = None,
    ) -> None:
        self._method = method = getattr(owner, name)
        self._before = before
        self._after = after
        self._call = method if instead is None else functools.partial(instead, method)
        self._removed = False
        # Python binds a function in a class to each object, and pickles an object in an attribute as it asks for it.
        self._placed = PlacedValue(owner, name, _as_function(self) if isinstance(owner, type) else self)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        before, after = self._before, self._after  # another thread may remove the hook meanwhile
        if before is not None:
            before(*arguments, **options)
        result = self._call(*arguments, **options)
        if after is not None:
            after(*arguments, **options)
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return _method_itself, (self._method,)

    def remove(self) -> None:
        """Gives the object its own method back. Does nothing when called again."""
        self._before = self._after = None
        self._call, self._removed = self._method, True
        self._placed.remove()
        if isinstance(below := self._method, MethodHook) and below._removed:  # it could not go before this one
            below.remove()


class SharedHooks(Generic[Watcher]):
    """Hooks on methods of a framework's classes, with those who watch them; the latest watcher is the first one.

    Nothing is put on an object of these classes, so the objects can be copied and pickled at any time.

    Args:
        methods: Returns, by class and name, what is called in the place of the method, with the method and its
            arguments. It asks the watchers.
    """

    def __init__(self, methods: Callable[[], Mapping[tuple[type, str], Callable[..., Any]]]) -> None:
        self._methods = methods
        self._hooks: dict[tuple[type, str], MethodHook] = {}
        self._watchers: list[Watcher] = []

    def __iter__(self) -> Iterator[Watcher]:
        return iter(self._watchers[::-1])

    def add(self, watcher: Watcher) -> Callable[[], None]:
        """Adds a watcher; the hooks that are not in their places yet are put there.

        Returns:
            A function that removes the watcher. With the last one, the framework's own methods are restored.
        """

        def remove() -> None:
            self._watchers = [each for each in self._watchers if each is not watcher]
            if not self._watchers:
                while self._hooks:
                    self._hooks.popitem()[1].remove()

        self._watchers.append(watcher)  # first: the last one before it may be removed at any time
        try:
            for (owner, name), instead in self._methods().items():
                if (owner, name) not in self._hooks:
                    self._hooks[owner, name] = MethodHook(owner, name, instead=instead)
        except BaseException:  # an interrupt, too: no half of the methods may stay replaced
            remove()
            raise
        return remove


def until_gone(owner: Any, release: Callable[[], object]) -> None:
    """Has a function called once an object is gone: at the next call of this, because a finalizer may come anywhere.

    Args:
        owner: The object.
        release: The function. It does nothing when called again.
    """
    _waiting.append((weakref.ref(owner), release))
    for waits in [each for each in _waiting if each[0]() is None]:
        _waiting.remove(waits)
        waits[1]()


_waiting: list[tuple[weakref.ref[Any], Callable[[], object]]] = []


def _as_function(hook: MethodHook) -> Callable[..., Any]:
    """Returns a function that calls a hook, with what the method tells about itself."""

    @functools.wraps(hook._method)
    def call(*arguments: Any, **options: Any) -> Any:
        return hook(*arguments, **options)

    return call


def _method_itself(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what it is given: how a copy of an object gets the object's own method in the place of a hook."""
    return method

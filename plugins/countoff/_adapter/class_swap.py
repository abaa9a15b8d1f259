"""Exchanges a loader's class for a subclass that observes iteration, and gives the loader its own class back.

The subclass has the names of the loader's own class, and the loader still gives its own class as its `__class__`, so
the user's loop sees what it saw before. Only `__iter__` differs. A copy or a pickle of the loader has its own class.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Iterator
from typing import Any

from countoff.core.data.plain import ABSENT, in_class

__all__ = ["Observe", "own_class", "swap_class"]

_ORIGINAL = "countoff_original"
_GIVEN_BACK = "countoff_given_back"

Observe = Callable[[Any, Iterator[Any]], Iterator[Any]]
"""Takes a loader that is about to be iterated and its own iterator; returns the iterator that the loop gets instead."""


def swap_class(loader: Any, observe: Observe) -> Callable[[], None]:
    """Observes a loader from here on; returns a function that gives its own class back, once.

    Args:
        loader: Any iterable.
        observe: Called for every pass over the loader.

    Raises:
        TypeError: If the loader has no `__iter__`, or its class cannot be exchanged, as that of a list or a generator.
    """
    original: Any = type(loader)
    given_back: list[bool] = []
    watched = id(loader)  # a reference would keep it alive

    def iterate(this: Any) -> Iterator[Any]:
        batches = _iterator(this, original)
        # What the loader's code makes of its own class is another object.
        return batches if given_back or id(this) != watched else observe(this, batches)

    def reduce(this: Any, protocol: Any) -> Any:
        return _of_own_class(original.__reduce_ex__(this, protocol))

    members: dict[str, Any] = {
        "__iter__": iterate,
        "__reduce_ex__": reduce,
        "__class__": property(lambda this: own_class(original)),  # pickle compares it with the class that it writes
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        _ORIGINAL: original,
        _GIVEN_BACK: given_back,
    }
    try:
        if not hasattr(original, "__iter__"):
            raise TypeError("no __iter__")
        _set_class(loader, _subclass(original, members))
    except (TypeError, AttributeError):
        raise TypeError(
            f"cannot observe a loader of type {original.__name__}: expected a DataLoader or an iterable object whose "
            "class is written in Python, without __slots__"
        ) from None

    def give_back() -> None:
        given_back[:] = [True]
        # Observers may leave in any order: the class of one that has left stays below that of one that has not.
        while vars(type(loader)).get(_GIVEN_BACK):
            _set_class(loader, vars(type(loader))[_ORIGINAL])

    return give_back


def _iterator(loader: Any, kind: type) -> Iterator[Any]:
    """Returns what `iter` returns for an object of a class: its `__iter__` may be no function that takes the object."""
    own = in_class(kind, "__iter__")
    bind = in_class(type(own), "__get__")
    return own() if bind is ABSENT else bind(own, loader, kind)()


def _subclass(original: type, members: dict[str, Any]) -> type:
    """Returns a subclass without a call of the user's code, which may register every class that is made.

    Raises:
        TypeError: If the class cannot have one that its objects can be given.
    """
    if type(original) in (type, ABCMeta) and not _is_told_of_subclasses(original):
        return type.__new__(type(original), original.__name__, (original,), members)
    # Made of another base and given this one afterwards, of which Python tells neither the base nor its metaclass. The
    # other base needs the same layout: what it has below the class that added the dict of the objects.
    level = original
    while level.__base__ is not None and _layout(level) == _layout(level.__base__):
        level = level.__base__
    below = level.__base__ or object
    if _is_told_of_subclasses(below):
        raise TypeError("its base has to be told of every class")
    base = type.__new__(type(below), "Base", (below,), {"__orig_bases__": ()})  # which Generic asks for
    made = type.__new__(type(original), original.__name__, (base,), members)
    made.__bases__ = (original,)
    return made


def _is_told_of_subclasses(kind: type) -> bool:
    """Whether a class, or a base of it, has an `__init_subclass__` that is not Python's own."""
    told = [each for each in kind.__mro__ if "__init_subclass__" in vars(each)]
    return any(each.__module__ not in ("builtins", "typing") for each in told)


def _layout(kind: type) -> tuple[int, int, int]:
    return kind.__basicsize__, kind.__dictoffset__, kind.__weakrefoffset__


def _set_class(loader: Any, new: type) -> None:
    # As `loader.__class__ = new`, which the property of a class that observes hides.
    vars(object)["__class__"].__set__(loader, new)


def own_class(value: Any) -> Any:
    """Returns the class from which a subclass that observes was made, also in several steps; any other value as is."""
    while isinstance(value, type) and _ORIGINAL in vars(value):
        value = vars(value)[_ORIGINAL]
    return value


def _of_own_class(reduced: Any) -> Any:
    """Returns what `__reduce_ex__` has returned, for an object of the loader's own class."""
    if not isinstance(reduced, tuple):
        return reduced
    make, arguments, *rest = reduced
    return (own_class(make), tuple(map(own_class, arguments)), *rest)

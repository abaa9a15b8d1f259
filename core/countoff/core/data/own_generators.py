"""Whether a stream holds a random generator of its own, in the objects and the suspended frames that it consists of.

A generator may be a local variable of the user's `__iter__`, a global of its module, or an attribute. Nothing is called
and no attribute is computed: the walk reads frames, functions and `__dict__`s, and is bounded. It goes one way only,
towards silence: what it finds beside the stream's own generators makes a comparison prove less, never more.
"""

from __future__ import annotations

import functools
import gc
import random
import sys
import types
from collections.abc import Iterator
from itertools import islice
from typing import Any

from countoff.core.data.plain import attributes_of, bases_of, module_of, names_in
from countoff.core.packages import WITH_GENERATORS

__all__ = ["holds_generator"]

_MOST_OBJECTS, _MOST_ITEMS = 1024, 32
_MAKERS = frozenset({"Random", "SystemRandom", "Generator", "RandomState", "default_rng"})


def holds_generator(stream: Any) -> bool:
    """Returns whether a dataset or its iterator holds or makes a random generator, other than the global ones.

    Args:
        stream: An object, or a suspended iterator.

    Example:
        >>> rng = random.Random(1)
        >>> holds_generator(rng.random() for _ in range(3)), holds_generator(iter([1]))
        (True, False)
    """
    waiting, seen = [stream], set[int]()
    while waiting and len(seen) < _MOST_OBJECTS:
        value = waiting.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if _is_generator(value):
            return True
        if type(value) is types.CodeType:
            if not _MAKERS.isdisjoint(value.co_names):
                return True
            continue
        waiting += _inside(value)
    return False


def _is_generator(value: Any) -> bool:
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    kinds: list[type] = [random.Random]
    shared = [random.random.__self__]
    if numpy is not None:
        kinds += [numpy.random.Generator, numpy.random.RandomState]
        shared.append(numpy.random.mtrand._rand)
    if torch is not None:
        kinds.append(torch.Generator)
        shared.append(torch.default_generator)
    return issubclass(type(value), tuple(kinds)) and not any(value is each for each in shared)


def _inside(value: Any) -> list[Any]:
    """The objects that a value is made of, where it is of a kind that can be looked into without calling its code."""
    kind = type(value)  # not `isinstance`, which asks an object of another class for its `__class__`
    if kind is types.GeneratorType:
        return _of_frame(value)
    if kind is types.FunctionType:
        named = _named(value.__code__, value.__globals__)
        return [*(value.__closure__ or ()), *(value.__defaults__ or ()), *named]
    if kind is types.CellType:
        return gc.get_referents(value)
    if kind is types.MethodType:
        return [value.__func__, value.__self__]
    if kind is types.BuiltinMethodType:
        return [] if type(value.__self__) is types.ModuleType else [value.__self__]
    if kind is functools.partial:
        return [value.func, *value.args, *value.keywords.values()]
    if kind is list or kind is tuple:
        return list(value[:_MOST_ITEMS])
    if kind is dict:
        return list(islice(value.values(), _MOST_ITEMS))
    if issubclass(kind, (types.ModuleType, type)):
        return []
    if module_of(kind) in ("builtins", "itertools") and issubclass(kind, Iterator):
        return gc.get_referents(value)[:_MOST_ITEMS]
    return _of_object(value)


def _of_frame(generator: types.GeneratorType[Any, Any, Any]) -> list[Any]:
    """What a suspended generator holds: its variables, and the iterators of its loops, which have no names."""
    frame = generator.gi_frame
    if frame is None:
        return []
    kept = gc.get_referents(generator)
    if sys.version_info < (3, 11):
        kept = [each for each in gc.get_referents(frame) if id(each) not in (id(frame.f_globals), id(frame.f_builtins))]
    kept = [each for each in kept if not isinstance(each, (types.FrameType, types.CodeType))]
    return [*kept, *_named(generator.gi_code, frame.f_globals)]


def _named(code: types.CodeType, variables: dict[str, Any]) -> list[Any]:
    """The code, that inside of it, and the globals that they name; nothing of a library's."""
    if str(variables.get("__name__", "")).partition(".")[0] in WITH_GENERATORS:
        return []
    codes, found = [code], list[Any]()
    while codes:
        code = codes.pop()
        found += [code, *(variables[name] for name in code.co_names if name in variables)]
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return found


def _of_object(value: Any) -> list[Any]:
    """The attributes of an object, and the functions of its classes."""
    found = list(islice(attributes_of(value).values(), _MOST_ITEMS))
    for kind in bases_of(type(value)):
        if module_of(kind).partition(".")[0] not in (*WITH_GENERATORS, "builtins", "typing", "collections"):
            found += [each for each in names_in(kind).values() if type(each) is types.FunctionType]
    return found

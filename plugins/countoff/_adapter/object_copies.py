"""Copies of small Python objects and functions, so that calling the copy changes nothing of the user's.

`copy.deepcopy` shares functions, with all that they hold, and copies whole models. This copies functions too, and
refuses what is large, or what no copy can stand for.
"""

from __future__ import annotations

import builtins
import datetime
import decimal
import dis
import enum
import fractions
import functools
import pathlib
import types
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

__all__ = ["NotCopied", "copied"]

_PENDING = object()
_BUILTINS = {**vars(builtins), "print": lambda *_, **__: None}
"""What a copied function finds without importing it."""
_LOOKED_UP = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")
_MOST_OBJECTS = 5_000
_MOST_ELEMENTS = 65_536
_IMMUTABLE = (
    *(type(None), type(...), bool, int, float, complex, str, bytes, range, slice, type, enum.Enum, pathlib.PurePath),
    *(datetime.date, datetime.timedelta, decimal.Decimal, fractions.Fraction, types.ModuleType),
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, torch.dtype, torch.device),
)


class NotCopied(Exception):
    """An object that is not copied: it is large, or belongs to more than itself."""


def copied(value: Any, instead: Mapping[int, Any]) -> Any:
    """Returns a copy of an object and of all that it holds.

    Args:
        value: The object.
        instead: What to put in the place of some objects, by their `id`.

    Raises:
        NotCopied: If anything in it is a module of torch, a tensor on a device, large, or of an unknown kind.
    """
    try:
        return _Copier(instead).copy(value)
    except NotCopied:
        raise
    except Exception as error:  # a class of the user's that does not let itself be copied
        raise NotCopied(str(error)) from error


class _Copier:
    def __init__(self, instead: Mapping[int, Any]) -> None:
        self._copies = dict(instead)
        self._kept: list[Any] = []  # as long as an object lives, no other one has its `id`

    def copy(self, value: Any) -> Any:
        if isinstance(value, _IMMUTABLE):
            return value
        if id(value) not in self._copies:
            if len(self._kept) >= _MOST_OBJECTS:
                raise NotCopied("it holds too many objects")
            self._kept.append(value)
            self._copies[id(value)] = _PENDING
            self._MAKERS.get(type(value), _Copier._other)(self, value)
        elif self._copies[id(value)] is _PENDING:
            raise NotCopied("it holds itself")
        return self._copies[id(value)]

    def _other(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if value.device.type != "cpu" or value.numel() > _MOST_ELEMENTS:
                raise NotCopied("it holds a tensor that is large or on a device")
            self._is(value, value.detach().clone())
        elif type(value).__module__ == "numpy":
            self._numpy(value)
        elif isinstance(value, torch.nn.Module) or not hasattr(value, "__dict__"):
            raise NotCopied(f"it holds a {type(value).__name__}")
        else:
            self._object(value)

    def _is(self, value: Any, copy: Any) -> Any:
        self._copies[id(value)] = copy
        return copy

    def _numpy(self, value: Any) -> None:
        if type(value).__name__ == "ufunc":
            self._is(value, value)
        elif getattr(value, "size", _MOST_ELEMENTS + 1) <= _MOST_ELEMENTS:
            self._is(value, value.copy())
        else:
            raise NotCopied("it holds a large array")

    def _list(self, value: list[Any]) -> None:
        self._is(value, list[Any]()).extend(map(self.copy, value))

    def _dict(self, value: dict[Any, Any]) -> None:
        self._is(value, dict[Any, Any]()).update({self.copy(key): self.copy(each) for key, each in value.items()})

    def _set(self, value: Any) -> None:
        self._is(value, type(value)(map(self.copy, value)))

    def _tuple(self, value: tuple[Any, ...]) -> None:
        self._is(value, tuple(map(self.copy, value)))

    def _partial(self, value: functools.partial[Any]) -> None:
        keywords = {name: self.copy(each) for name, each in value.keywords.items()}
        self._is(value, functools.partial(self.copy(value.func), *map(self.copy, value.args), **keywords))

    def _method(self, value: types.MethodType) -> None:
        self._is(value, types.MethodType(self.copy(value.__func__), self.copy(value.__self__)))

    def _function(self, value: types.FunctionType) -> None:
        """A function with copies of what it has closed over, and of the globals that its code names."""
        cells = tuple(types.CellType() for _ in value.__closure__ or ())
        own: dict[str, Any] = {"__builtins__": _BUILTINS, "__name__": value.__module__}
        new = self._is(value, types.FunctionType(value.__code__, own, value.__name__, None, cells))
        new.__defaults__, new.__kwdefaults__ = self.copy(value.__defaults__), self.copy(value.__kwdefaults__)
        for name in _globals_in(value.__code__) & value.__globals__.keys():
            own[name] = self.copy(value.__globals__[name])
        for cell, old in zip(cells, value.__closure__ or (), strict=True):
            cell.cell_contents = self.copy(old.cell_contents)

    def _object(self, value: Any) -> None:
        kind = type(value)
        base = next((each for each in (dict, list, types.SimpleNamespace) if isinstance(value, each)), object)
        new = self._is(value, base.__new__(kind))
        if isinstance(value, dict):
            dict.update(new, {self.copy(key): self.copy(each) for key, each in dict.items(cast("Any", value))})
        elif isinstance(value, list):
            list.extend(new, map(self.copy, list.__iter__(cast("Any", value))))
        for name, each in vars(value).items():
            new.__dict__[name] = self.copy(each)

    _MAKERS: Mapping[type, Callable[[Any, Any], None]] = {
        list: _list,
        dict: _dict,
        set: _set,
        frozenset: _set,
        tuple: _tuple,
        functools.partial: _partial,
        types.MethodType: _method,
        types.FunctionType: _function,
    }


def _globals_in(code: types.CodeType) -> set[str]:
    """The names that code looks up among its globals, also in the functions that it makes."""
    names = {each.argval for each in dis.get_instructions(code) if each.opname in _LOOKED_UP}
    return names.union(*(_globals_in(each) for each in code.co_consts if isinstance(each, types.CodeType)))

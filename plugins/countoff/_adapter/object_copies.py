"""Copies of small Python objects and functions, of which no call can change anything of the user's.

`copy.deepcopy` shares functions, with all that they hold, and copies whole models. This copies functions too. It
refuses what is large, what no copy can stand for, and code of the user's that does more than compute.
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
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch

__all__ = ["NotCopied", "copied"]

_MOST_OBJECTS = 5_000
_MOST_ELEMENTS = 65_536
_PENDING = object()
_IMMUTABLE = (
    *(type(None), type(...), bool, int, float, complex, str, bytes, range, slice, type, enum.Enum, pathlib.PurePath),
    *(datetime.date, datetime.timedelta, decimal.Decimal, fractions.Fraction, types.ModuleType),
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, torch.dtype, torch.device),
)
_BUILTINS = {**vars(builtins), "print": lambda *_, **__: None}
"""What a copied function finds without importing it."""

_FRAMEWORKS = frozenset(
    (
        *("torch", "transformers", "diffusers", "accelerate", "timm", "deepspeed", "composer", "lightning"),
        *("pytorch_lightning", "lightning_fabric", "torchtitan"),
    )
)
"""Packages whose schedulers compute, and do nothing else."""
_MODULES = frozenset(("math", "cmath", "numpy", "random", "bisect", "functools", "itertools", "operator", "warnings"))
"""Modules that code of the user's may look up: they compute, or their state is given back."""
_CALLED = frozenset(
    (
        *("abs", "all", "any", "bool", "dict", "divmod", "enumerate", "float", "getattr", "hasattr", "int"),
        *("isinstance", "len", "list", "max", "min", "next", "pow", "range", "reversed", "round", "set", "sorted"),
        *("str", "sum", "super", "tuple", "zip", "ValueError", "IndexError", "KeyError", "NotImplementedError"),
        "__class__",
    )
)
"""Builtin names that code of the user's may look up."""
_CHANGES = ("STORE_GLOBAL", "DELETE_GLOBAL")
_BEHIND = frozenset(("__class__", "__dict__", "__globals__", "__builtins__", "__setattr__"))
"""Attributes by which a copy would reach what it shares with the original."""
_CALLED_BY_ITSELF = frozenset(
    (
        *("get_lr", "step", "_get_closed_form_lr", "__call__", "__len__", "__getitem__", "__iter__", "__next__"),
        *("__float__", "__int__", "__bool__", "__contains__", "__add__", "__mul__", "__truediv__", "__sub__"),
        *("__lt__", "__gt__", "__le__", "__ge__", "__eq__"),
    )
)
_MAGIC = ("__getattr__", "__getattribute__", "__setattr__", "__delattr__")


class NotCopied(Exception):
    """An object that is not copied: it is large, belongs to more than itself, or its code does more than compute."""


def copied(value: Any, instead: Mapping[int, Any]) -> Any:
    """Returns a copy of an object and of all that it holds.

    Args:
        value: The object.
        instead: What to put in the place of some objects, by their `id`.

    Raises:
        NotCopied: If anything in it is a module of torch, a tensor on a device, large, or of an unknown kind; or if
            functions or methods of it are the user's, and may do more than compute.
    """
    try:
        copier = _Copier(instead)
        copy = copier.copy(value)
        copier.check_methods()
    except NotCopied:
        raise
    except Exception as error:  # a class of the user's that does not let itself be copied
        raise NotCopied(str(error)) from error
    return copy


class _Copier:
    def __init__(self, instead: Mapping[int, Any]) -> None:
        self._copies = dict(instead)
        self._kept: list[Any] = []  # as long as an object lives, no other one has its `id`
        self._objects_left, self._elements_left = _MOST_OBJECTS, _MOST_ELEMENTS
        self._classes: dict[type, None] = {}
        self._names: set[str] = set()  # of attributes that the copied code looks up
        self._checked: set[types.FunctionType] = set()

    def copy(self, value: Any) -> Any:
        if isinstance(value, _IMMUTABLE):
            return value
        if id(value) not in self._copies:
            self._spend(1)
            self._kept.append(value)
            self._copies[id(value)] = _PENDING
            self._MAKERS.get(type(value), _Copier._other)(self, value)
        elif self._copies[id(value)] is _PENDING:
            raise NotCopied("it holds itself")
        return self._copies[id(value)]

    def check_methods(self) -> None:
        """Looks at the methods that the copied code may call: those of the names that it looks up.

        Raises:
            NotCopied: If one of them may do more than compute.
        """
        names = -1
        while names != len(self._names):
            names = len(self._names)
            for kind in list(self._classes):
                for name in (self._names | _CALLED_BY_ITSELF) & vars(kind).keys():
                    for function in _functions_in(vars(kind)[name]):
                        self._check(function, copied=False)

    def _spend(self, objects: int, elements: int = 0) -> None:
        self._objects_left -= objects
        self._elements_left -= elements
        if self._objects_left < 0 or self._elements_left < 0:
            raise NotCopied("it is large")

    def _other(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if value.device.type != "cpu":
                raise NotCopied("it holds a tensor on a device")
            self._spend(0, value.numel())
            self._is(value, value.detach().clone())
        elif type(value).__module__ == "numpy":
            if type(value).__name__ != "ufunc":
                self._spend(0, value.size)
            self._is(value, value if type(value).__name__ == "ufunc" else value.copy())
        elif isinstance(value, torch.nn.Module) or not hasattr(value, "__dict__"):
            raise NotCopied(f"it holds a {type(value).__name__}")
        else:
            self._object(value)

    def _is(self, value: Any, copy: Any) -> Any:
        self._copies[id(value)] = copy
        return copy

    def _list(self, value: list[Any]) -> None:
        self._spend(len(value))
        self._is(value, list[Any]()).extend(map(self.copy, value))

    def _dict(self, value: dict[Any, Any]) -> None:
        self._spend(len(value))
        self._is(value, dict[Any, Any]()).update({self.copy(key): self.copy(each) for key, each in value.items()})

    def _frozen(self, value: Any) -> None:
        self._spend(len(value))
        self._is(value, type(value)(map(self.copy, value)))

    def _partial(self, value: functools.partial[Any]) -> None:
        keywords = {name: self.copy(each) for name, each in value.keywords.items()}
        self._is(value, functools.partial(self.copy(value.func), *map(self.copy, value.args), **keywords))

    def _method(self, value: types.MethodType) -> None:
        self._names.add(value.__func__.__name__)
        self._is(value, types.MethodType(value.__func__, self.copy(value.__self__)))

    def _function(self, value: types.FunctionType) -> None:
        """A function with copies of what it has closed over, and of the globals that its code names."""
        self._check(value, copied=True)
        cells = tuple(types.CellType() for _ in value.__closure__ or ())
        own: dict[str, Any] = {"__builtins__": _BUILTINS, "__name__": value.__module__}
        new = self._is(value, types.FunctionType(value.__code__, own, value.__name__, None, cells))
        new.__defaults__, new.__kwdefaults__ = self.copy(value.__defaults__), self.copy(value.__kwdefaults__)
        for name, _ in _globals_of(value):
            own[name] = self.copy(value.__globals__[name])
        for cell, old in zip(cells, value.__closure__ or (), strict=True):
            cell.cell_contents = self.copy(old.cell_contents)

    def _object(self, value: Any) -> None:
        kind = type(value)
        of_user = [each for each in kind.__mro__ if _package_of(each) not in {*_FRAMEWORKS, *sys.stdlib_module_names}]
        if hasattr(kind, "__del__") or any(name in vars(each) for each in of_user for name in _MAGIC):
            raise NotCopied(f"it holds a {kind.__name__}, which does more than hold")
        self._classes |= dict.fromkeys(of_user)
        base = next((each for each in (dict, list, types.SimpleNamespace) if isinstance(value, each)), object)
        new = self._is(value, base.__new__(kind))
        if isinstance(value, dict):
            self._spend(len(value))
            dict.update(new, {self.copy(key): self.copy(each) for key, each in dict.items(cast("Any", value))})
        elif isinstance(value, list):
            self._spend(len(value))
            list.extend(new, map(self.copy, list.__iter__(cast("Any", value))))
        for name, each in vars(value).items():
            new.__dict__[name] = self.copy(each)

    def _check(self, function: types.FunctionType, *, copied: bool) -> None:
        """Refuses a function of the user's that may do more than compute.

        Args:
            function: The function.
            copied: Whether it gets globals of its own; a method keeps those of its module.
        """
        if function in self._checked or _package_of(function) in _FRAMEWORKS:
            return
        self._checked.add(function)
        for each in _instructions(function.__code__):
            if each.opname in _CHANGES and not copied:
                raise NotCopied(f"{function.__name__} changes a global")
            if each.opname == "IMPORT_NAME" and each.argval not in _MODULES:
                raise NotCopied(f"{function.__name__} imports {each.argval}")
            if each.opname.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "STORE_ATTR")):
                if each.argval in _BEHIND:
                    raise NotCopied(f"{function.__name__} looks behind an object")
                self._names.add(each.argval)
            builtin = each.opname in ("LOAD_GLOBAL", "LOAD_NAME") and each.argval not in function.__globals__
            if builtin and each.argval not in _CALLED and not (copied and each.argval == "print"):
                raise NotCopied(f"{function.__name__} calls {each.argval}")
        for name, value in _globals_of(function):
            if not self._may_use(value, copied=copied):
                raise NotCopied(f"{function.__name__} uses {name}")

    def _may_use(self, value: Any, *, copied: bool) -> bool:
        if isinstance(value, types.ModuleType):
            return value.__name__ in _MODULES
        if isinstance(value, (type, types.BuiltinFunctionType)) or type(value).__name__ == "ufunc":
            package = getattr(value, "__module__", None) or "numpy"
            return (
                package in _MODULES
                or package.partition(".")[0] in _FRAMEWORKS
                or getattr(value, "__name__", "") in _CALLED
            )
        if isinstance(value, types.FunctionType) and not copied:
            self._check(value, copied=False)
            return True
        return copied or isinstance(value, (bool, int, float, str, tuple, type(None)))

    _MAKERS: Mapping[type, Callable[[Any, Any], None]] = {
        list: _list,
        dict: _dict,
        set: _frozen,
        frozenset: _frozen,
        tuple: _frozen,
        functools.partial: _partial,
        types.MethodType: _method,
        types.FunctionType: _function,
    }


def _package_of(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]


def _functions_in(value: Any) -> Iterator[types.FunctionType]:
    """Yields the functions of a class's attribute."""
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, (staticmethod, classmethod)):
        value = cast("Any", value).__func__
    if isinstance(value, functools.cached_property):
        value = value.func
    if isinstance(value, types.FunctionType):
        yield value


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    """Yields what code does, also in the functions that it makes."""
    yield from dis.get_instructions(code)
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _instructions(each)


def _globals_of(function: types.FunctionType) -> list[tuple[str, Any]]:
    """The globals that a function looks up, by name."""
    names = {each.argval for each in _instructions(function.__code__) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return [(name, function.__globals__[name]) for name in sorted(names & function.__globals__.keys())]

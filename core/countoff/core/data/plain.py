"""Reads objects of the user's without calling their code.

A batch, a sample or a dataset may be of any class. Its methods may compute on access, draw random numbers, or hand each
item out only once. So none of them is called: not `__len__`, `__iter__` or `__getitem__`, no property, no
`__getattr__`, `__class__`, `__hash__` or `__eq__`, and nothing of its metaclass. What is read is the storage of
Python's own types, and of a subclass only where the subclass leaves the access to that storage as it is: otherwise the
storage need not be what training sees.
"""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Sequence
from typing import Any, Final

from countoff.core.packages import WITH_MAPPINGS

__all__ = [
    "ABSENT",
    "attribute_of",
    "attributes_of",
    "bases_of",
    "fields_of",
    "in_class",
    "items_of",
    "module_of",
    "names_in",
    "pairs_of",
]

ABSENT: Final = type("Absent", (), {"__repr__": lambda self: "ABSENT"})()
"""What is found where nothing can be read."""
bases_of: Any = type.__dict__["__mro__"].__get__
"""Returns a class and its bases, in the order in which they are asked for an attribute."""
names_in: Any = type.__dict__["__dict__"].__get__
"""Returns what a class itself has, by name."""
_module_of: Any = type.__dict__["__module__"].__get__
_OF_ITEMS = ("__getitem__", "__iter__", "__len__", "__getattribute__")
_OF_PAIRS = (*_OF_ITEMS, "keys", "values", "items", "get")
_DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter, object)


def in_class(kind: type, name: str) -> Any:
    """Returns what a class or one of its bases has under a name, as it is written there; `ABSENT` if none has.

    >>> in_class(bool, "__repr__") is bool.__repr__, in_class(bool, "no such")
    (True, ABSENT)
    """
    for base in bases_of(kind):
        own = names_in(base)
        if name in own:
            return own[name]
    return ABSENT


def module_of(kind: type) -> str:
    """Returns the name of the module that a class says it is from."""
    return str(_module_of(kind))


def attributes_of(value: Any) -> dict[str, Any]:
    """Returns the attributes that an object stores in its own `__dict__`; none if it has no such."""
    found = in_class(type(value), "__dict__")
    is_storage = type(found) is types.GetSetDescriptorType or type(found) is types.MemberDescriptorType
    attributes = found.__get__(value) if is_storage else None
    return attributes if type(attributes) is dict else {}


def attribute_of(value: Any, name: str) -> Any:
    """Returns an attribute that an object or its class stores; `ABSENT` if the class computes it, or if there is none.

    >>> attribute_of(types.SimpleNamespace(a=1), "a"), attribute_of(1, "real")
    (1, ABSENT)
    """
    kind = type(value)
    found = in_class(kind, name)
    if type(found) is types.MemberDescriptorType:  # a slot
        try:
            return found.__get__(value)
        except AttributeError:
            return ABSENT
    is_computed = found is not ABSENT and in_class(type(found), "__set__") is not ABSENT
    if is_computed or type(in_class(kind, "__getattribute__")) is not types.WrapperDescriptorType:  # else Python code
        return ABSENT
    of_class = found if in_class(type(found), "__get__") is ABSENT else ABSENT
    return attributes_of(value).get(name, of_class)


def pairs_of(value: Any) -> list[tuple[Any, Any]] | None:
    """Returns the keys and values of a mapping; None if it is none, or if it computes them.

    >>> pairs_of(collections.OrderedDict(a=1)), pairs_of([1])
    ([('a', 1)], None)
    """
    kind = type(value)
    if kind is dict:
        return list(value.items())
    if issubclass(kind, dict):
        return list(dict.items(value)) if _stores(kind, _OF_PAIRS, _DICTS) else None
    if _is_below(kind, collections.UserDict) and _stores(kind, _OF_PAIRS, (object,)):
        return pairs_of(attribute_of(value, "data"))
    return None


def items_of(value: Any) -> Sequence[Any] | None:
    """Returns the items of a sequence as a list, a tuple or a range; None if it is none, or if it computes them.

    Text and bytes are no sequences here.

    >>> items_of([1]), items_of(collections.UserList([1])), items_of({1})
    ([1], [1], None)
    """
    kind = type(value)
    if kind is list or kind is tuple or kind is range:
        return value
    for base in (list, tuple):
        if issubclass(kind, base):
            return base.__getitem__(value, slice(None)) if _stores(kind, _OF_ITEMS, (base, object)) else None
    if _is_below(kind, collections.UserList) and _stores(kind, _OF_ITEMS, (object,)):
        return items_of(attribute_of(value, "data"))
    return None


def fields_of(value: Any) -> list[tuple[str, Any]] | None:
    """Returns the names and values of a dataclass's fields; None if it is none, or if it computes one of them."""
    declared = in_class(type(value), "__dataclass_fields__")
    if type(declared) is not dict:
        return None
    real = dataclasses._FIELD  # pyright: ignore[reportAttributeAccessIssue]  # not a ClassVar or an InitVar
    names = [name for name, field in declared.items() if type(field) is dataclasses.Field and field._field_type is real]
    found = [(name, attribute_of(value, name)) for name in names]
    return None if any(each is ABSENT for _, each in found) else found


def _is_below(kind: type, base: type) -> bool:
    """Whether a class has a base. `issubclass` would ask an abstract base, which asks the metaclass of the class."""
    return any(each is base for each in bases_of(kind))


def _stores(kind: type, names: Sequence[str], bases: Sequence[type]) -> bool:
    """Whether a class has each of these methods from one of some bases, or from a library."""
    for name in names:
        found = in_class(kind, name)
        if any(found is names_in(base).get(name, None) for base in bases):
            continue
        if type(found) is not types.FunctionType or str(found.__module__).partition(".")[0] not in WITH_MAPPINGS:
            return False
    return True

"""Which own numbers an iterable dataset's `__iter__` reads: of this rank, and how many ranks there are.

Only code objects and what is stored are looked at: nothing of the user's is called, and no attribute is computed. A
share is computed from both numbers, as in `islice(rows, rank, None, world_size)`. Left out are numbers that go into a
text, and those in a statement that names what makes a seed, a log line or a file.
"""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from countoff.core.data.plain import ABSENT, attribute_of, in_class, module_of
from countoff.core.packages import WITH_GENERATORS

__all__ = ["OwnNumbers", "own_numbers"]

_MOST_CODES = 32
_TORCH = "torch.distributed.distributed_c10d"
_OF_TORCH = {"get_rank": "rank", "get_world_size": "ranks"}
_OF_ACCELERATE = {"process_index": "rank", "num_processes": "ranks"}
_NO_SHARE = ("print", "log", "debug", "warn", "seed", "rand", "rng", "tqdm", "open")
"""A name with one of these in it is no name of what takes a share."""
_STATEMENT_ENDS = ("POP_TOP", "STORE_", "RETURN_", "YIELD_", "JUMP_", "POP_JUMP_", "FOR_ITER")
_INTO_TEXT = ("FORMAT_", "CONVERT_VALUE")
_CALLS = frozenset({"PUSH_NULL", "PRECALL", "CALL", "CALL_FUNCTION", "CALL_METHOD", "LOAD_METHOD", "CACHE"})


class OwnNumbers(NamedTuple):
    """What a dataset's `__iter__` reads, as it is written there.

    Attributes:
        rank: What is the rank's own number.
        ranks: What is the number of ranks.
    """

    rank: tuple[str, ...] = ()
    ranks: tuple[str, ...] = ()


def own_numbers(dataset: Any, rank: int, ranks: int) -> OwnNumbers:
    """Returns what is read there, of attributes, globals, variables around it, and functions that are known.

    Args:
        dataset: An iterable dataset of a class of the user's own.
        rank: This rank's number.
        ranks: The number of ranks.

    Example:
        >>> class Shares:
        ...     def __init__(self, rank, ranks):
        ...         self.rank, self.ranks = rank, ranks
        ...     def __iter__(self):
        ...         return iter(range(self.rank, 96, self.ranks))
        >>> own_numbers(Shares(1, 2), 1, 2)
        OwnNumbers(rank=('self.rank',), ranks=('self.ranks',))
        >>> own_numbers(Shares(0, 2), 1, 2).rank
        ()
    """
    found: dict[str, set[str]] = {"rank": set(), "ranks": set()}
    for name, value in _read(dataset):
        if type(value) is int:
            found["rank"] |= {name} if value == rank else set()
            found["ranks"] |= {name} if value == ranks else set()
        elif type(value) is str:
            found[value].add(name)
    return OwnNumbers(*(tuple(sorted(each, key=_unlikely)) for each in found.values()))


def _unlikely(name: str) -> tuple[bool, str]:
    """Sorts names that tell what they are before those that may have the same number by chance."""
    return not any(word in name.lower() for word in ("rank", "world", "process", "replica")), name


def _read(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yields what the code reads, with its value: an integer, or what is known of its result."""
    waiting: list[types.FunctionType] = [*_functions(in_class(type(dataset), "__iter__"))]
    known = list[types.FunctionType]()
    while waiting and len(known) < _MOST_CODES:
        function = waiting.pop(0)
        if any(function is each for each in known) or _is_of_a_library(function):
            continue
        known.append(function)
        code = function.__code__
        own = code.co_varnames[0] if code.co_argcount else ""
        around = dict(zip(code.co_freevars, function.__closure__ or (), strict=False))
        codes = [code]
        while codes:
            inside = codes.pop()
            codes += [each for each in inside.co_consts if type(each) is types.CodeType]
            for name, value in _read_in(inside, function.__globals__, own, dataset, around):
                if name == f"{own}.":
                    waiting += _functions(value)
                else:
                    yield name, value


def _read_in(
    code: types.CodeType, variables: dict[str, Any], own: str, dataset: Any, around: dict[str, types.CellType]
) -> Iterator[tuple[str, Any]]:
    """As `_read`, of one code object. The class's own functions are yielded under a name that ends with a point."""
    name, value = "", ABSENT
    numbers: list[tuple[str, Any]] = []  # of this statement
    takes_share, is_last = True, False
    for each in dis.get_instructions(code):
        operation, argument = each.opname, each.argval
        if type(argument) is str and operation.startswith(("LOAD_", "STORE_")) and operation != "LOAD_CONST":
            takes_share &= not any(word in argument.lower() for word in _NO_SHARE)
        if operation.startswith(_INTO_TEXT) and is_last:
            numbers.pop()
        if operation.startswith(_STATEMENT_ENDS):
            if takes_share:
                yield from numbers
            numbers, takes_share = [], True
        before, is_last = len(numbers), is_last and (operation in _CALLS or operation == "LOAD_CONST")
        if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
            name, value = str(argument), variables.get(argument, ABSENT)
        elif operation.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF")):
            last = argument[-1] if type(argument) is tuple else argument
            name, value = str(last), dataset if last == own else _in_cell(around.get(last))
        elif operation in ("LOAD_ATTR", "LOAD_METHOD"):
            if value is dataset:
                method = in_class(type(dataset), argument)
                if _functions(method):
                    yield f"{own}.", method
            known = _known(value, argument)
            name, value = f"{name}.{argument}", _attribute(value, argument)
            if known:
                numbers.append((name, known))
        elif operation not in _CALLS or type(value) is not type:
            name, value = "", ABSENT
        if type(value) is int:
            numbers.append((name, value))
        elif type(value) is types.FunctionType and value.__module__ == _TORCH and value.__name__ in _OF_TORCH:
            numbers.append((f"{value.__name__}()", _OF_TORCH[value.__name__]))
        is_last |= len(numbers) > before


def _attribute(value: Any, name: str) -> Any:
    if type(value) is types.ModuleType:
        return vars(value).get(name, ABSENT)
    return ABSENT if value is ABSENT else attribute_of(value, name)


def _known(value: Any, name: str) -> str:
    """What an attribute of Accelerate's own objects is, which their classes compute."""
    kind: Any = value if type(value) is type else type(value)
    accelerate = sys.modules.get("accelerate")
    of_accelerate = accelerate is not None and module_of(kind).partition(".")[0] == "accelerate"
    return _OF_ACCELERATE.get(name, "") if of_accelerate else ""


def _functions(found: Any) -> list[types.FunctionType]:
    """The function that a class holds as a method or as a property."""
    if type(found) is property:
        found = found.fget
    return [found] if type(found) is types.FunctionType else []


def _is_of_a_library(function: types.FunctionType) -> bool:
    return str(function.__globals__.get("__name__", "")).partition(".")[0] in (*WITH_GENERATORS, "datasets")


def _in_cell(cell: types.CellType | None) -> Any:
    try:
        return ABSENT if cell is None else cell.cell_contents
    except ValueError:  # it is empty yet
        return ABSENT

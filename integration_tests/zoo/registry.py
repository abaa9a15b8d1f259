"""The list of the zoo's programs: the decorator that adds one, and the families that hold them."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

Function = Callable[[Mapping[str, Any]], Any]
MODES: Final[Mapping[str, Mapping[str, Any]]] = {
    "off": {"enabled": False},
    "again": {"enabled": False},
    "on": {},
    "stop": {"uneven_train": "stop"},
}
"""The options that a program gets. "again" is for one that may not be the same each time without countoff."""
FAMILIES: Final[Mapping[str, str]] = {
    "plain_loops": "torch",
    "threads": "torch",
    "retries": "torch",
    "lives": "torch",
    "loaders": "torch",
    "libraries": "torch",
    "batches": "torch",
    "evaluations": "torch",
    "optimizers": "torch",
    "reinforcement": "torch",
    "surroundings": "torch",
    "processes": "torch",
    "endings": "torch",
    "accelerate_loops": "accelerate",
    "fabric_loops": "lightning",
    "lightning_fits": "lightning",
    "composer_fits": "composer",
    "trainers": "transformers",
}
"""Each family's module, and the package without which none of it can run."""


@dataclass(frozen=True)
class Program:
    """One healthy program.

    Attributes:
        function: The program. It gets the options of countoff, and returns what must be equal with each of them.
        modes: The keys of `MODES` with which it runs; the first one is "off".
        ranks: On how many ranks it runs.
        alone: Whether each run has processes of its own, because it ends them, forks them, or changes what is global.
        nightly: Whether it is left out of `make test`.
        needs: A package without which it cannot run.
    """

    function: Function
    modes: tuple[str, ...]
    ranks: int
    alone: bool
    nightly: bool
    needs: str

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def family(self) -> str:
        return self.function.__module__.rpartition(".")[2]


_programs: dict[str, Program] = {}


def healthy(
    *,
    even: bool = False,
    ranks: int = 2,
    alone: bool = False,
    nightly: bool = False,
    needs: str = "",
) -> Callable[[Function], Function]:
    """Returns a decorator that adds a program to the zoo.

    Args:
        even: Also run it with `uneven_train="stop"`.
        ranks: As in `Program`; so are the others.
        alone: Whether each run has processes of its own.
        nightly: Whether it is left out of `make test`.
        needs: A package without which it cannot run.

    Raises:
        ValueError: If there is a program of this name, or it has no docstring.
    """

    def add(function: Function) -> Function:
        modes = ("off", "on", *(("stop",) if even else ()))
        program = Program(function, modes, ranks, alone, nightly, needs)
        if not function.__doc__:
            raise ValueError(f"{program.name} needs a docstring: one sentence that says what is odd about it")
        if _programs.setdefault(program.name, program).family != program.family:
            raise ValueError(f"there are two programs named {program.name}")
        return function

    return add


def programs_of(family: str) -> list[Program]:
    """Returns the programs of one family that can run here, in the order of its module."""
    if find_spec(FAMILIES[family]) is None:
        return []
    importlib.import_module(f"integration_tests.zoo.{family}")
    found = [program for program in _programs.values() if program.family == family]
    return [program for program in found if not program.needs or find_spec(program.needs) is not None]


def program_named(family: str, name: str) -> Program:
    """Returns one program."""
    programs_of(family)
    return _programs[name]

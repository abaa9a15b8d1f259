"""What a fact looks like to people: the page and the text both show these parts, and know no other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple


class Column(NamedTuple):
    """A column: its header, and whether it has numbers."""

    name: str
    is_number: bool = False


class Cell(NamedTuple):
    """A cell.

    Attributes:
        text: What is in it.
        is_highlighted: Whether it is worth a look.
        hint: More about it.
    """

    text: str
    is_highlighted: bool = False
    hint: str = ""


NONE = Cell("–")
"""Where there is nothing to say."""


@dataclass(frozen=True)
class Table:
    """Rows, the first cell of which says what they are about; the note below explains them."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    note: str = ""
    form: ClassVar[str] = "table"


@dataclass(frozen=True)
class Lines:
    """Sentences."""

    lines: Sequence[str]
    title: str = ""
    form: ClassVar[str] = "lines"


@dataclass(frozen=True)
class Stack:
    """Frames of a stack."""

    lines: Sequence[str]
    title: str = ""
    form: ClassVar[str] = "stack"


class RateLine(NamedTuple):
    """The learning rates of one parameter group.

    Attributes:
        steps: The optimizer steps, ascending.
        rates: The learning rate at each of them.
        ranks: Whose it is; empty where all ranks have the same.
    """

    steps: list[int]
    rates: list[float]
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Curve:
    """Learning rates by optimizer step, and the steps after which schedules would have ended."""

    lines: Sequence[RateLine]
    horizons: Sequence[int]
    title: str = ""
    form: ClassVar[str] = "curve"


Part = Table | Lines | Stack | Curve


class Fact(NamedTuple):
    """One fact of a run.

    Attributes:
        key: Its name for a program.
        value: What a program reads, as JSON types.
        parts: What people see; nothing where the trace says nothing about it.
        title: A heading above all parts.
    """

    key: str
    value: Any
    parts: Sequence[Part] = ()
    title: str = ""

"""A table that the page and the text both show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Column(NamedTuple):
    """A column: its header, and whether it has numbers."""

    name: str
    is_number: bool = False


class Cell(NamedTuple):
    """A cell.

    Attributes:
        text: What is in it.
        is_odd: Whether it is worth a look.
        hint: More about it.
    """

    text: str
    is_odd: bool = False
    hint: str = ""


NONE = Cell("–")
"""Where there is nothing to say."""


@dataclass(frozen=True)
class Table:
    """Rows, the first cell of which says what they are about."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]

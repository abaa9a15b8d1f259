"""The one way in which what is in a file of a trace becomes a value: anybody may have written it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, cast, get_args

from countoff.core.messages import plain
from countoff.core.verdict import Standing, Verdict
from countoff.report.model import Value

MOST_RANKS = 1 << 17
MOST_ENTRIES = 256
"""Entries of a list that are read."""
LONG_TEXT = 4_000
"""Characters of a sentence that are kept; of a name, it is fewer."""
_TEXT = 300
_LARGEST = 2.0**53


class Record:
    """A JSON object. Each method reads one of its values as what it should be.

    What is something else counts as not there: None, or empty. All numbers are finite, and all texts are printable and
    of bounded length; only `lines` may hold newlines.

    Args:
        values: The object.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    @classmethod
    def parse(cls, text: bytes) -> Record | None:
        """Reads JSON; None if it is no object."""
        try:
            values = json.loads(text.decode("utf-8"))
        except (ValueError, RecursionError):
            return None
        return cls(values) if isinstance(values, dict) else None

    def __contains__(self, key: str) -> bool:
        return key in self._values

    @property
    def kind(self) -> str:
        """The kind of the line that it is."""
        kind = self._values.get("k")
        return kind if isinstance(kind, str) else ""

    def is_true(self, key: str) -> bool:
        """Whether a value is ``true``."""
        return self._values.get(key) is True

    def is_list(self, key: str) -> bool:
        """Whether a value is a list, be it empty."""
        return isinstance(self._values.get(key), list)

    def number(self, key: str, absent: float | None = None) -> float | None:
        """A number that is exact as a float."""
        return _number(self._values.get(key, absent))

    def count(self, key: str, absent: int | None = None) -> int | None:
        """A number of things."""
        value = self._values.get(key, absent)
        return value if type(value) is int and 0 <= value <= _LARGEST else None

    def text(self, key: str, most: int = _TEXT) -> str:
        """A text on one line that a terminal and a page can show."""
        return _text(self._values.get(key), most)

    def texts(self, key: str) -> tuple[str, ...]:
        """The texts of a list."""
        return tuple(_text(each) for each in self._entries(key) if isinstance(each, str))

    def numbers(self, key: str) -> tuple[float, ...]:
        """The numbers of a list."""
        return tuple(number for each in self._entries(key) if (number := _number(each)) is not None)

    def ranks(self, key: str, absent: list[int] | None = None) -> tuple[int, ...] | None:
        """A list of ranks."""
        value = self._values.get(key, absent)
        if not isinstance(value, list) or len(value) > MOST_RANKS:
            return None
        return tuple(value) if all(type(rank) is int and 0 <= rank < MOST_RANKS for rank in value) else None

    def named_numbers(self, key: str) -> dict[str, float]:
        """The numbers of an object, by their names."""
        items = self._items(key, MOST_ENTRIES)
        return {_text(name): number for name, each in items if (number := _number(each)) is not None}

    def named_values(self, key: str) -> dict[str, Value]:
        """Single values by their names; anything longer becomes its text."""
        return {_text(name): _value(each) for name, each in self._items(key, MOST_ENTRIES)}

    def lines(self, key: str) -> str:
        """A text of several lines: each is printable."""
        value = self._values.get(key)
        return "\n".join(map(plain, _cut(value, LONG_TEXT).split("\n"))) if isinstance(value, str) else ""

    def hosts(self, key: str) -> dict[int, str]:
        """The names of hosts, by rank."""
        items = self._items(key, MOST_RANKS)
        return {int(rank): _text(name) for rank, name in items if rank.isascii() and rank.isdigit() and len(rank) < 7}

    def rows(self, key: str, most: int = MOST_ENTRIES) -> tuple[dict[str, Any], ...]:
        """The rows of a verdict's table, each with the number of its ranks."""
        found = [
            {_text(name): cell for name, each in list(row.items())[:MOST_ENTRIES] if (cell := _value(each)) is not None}
            for row in self._entries(key, most)
            if isinstance(row, dict)
        ]
        return tuple({**row, "ranks": Record(row).count("ranks") or 1} for row in found if row)

    def record(self, key: str) -> Record | None:
        """An object within this one."""
        value = self._values.get(key)
        return Record(value) if isinstance(value, dict) else None

    def records(self, key: str, most: int = MOST_ENTRIES) -> list[Record]:
        """The objects of a list."""
        return [Record(each) for each in self._entries(key, most) if isinstance(each, dict)]

    def verdict(self, time: float) -> Verdict | None:
        """The record itself as a verdict, as `Verdict.to_dict` has written it.

        Args:
            time: When it was written, where it does not say so.
        """
        kind, sentence, ranks = self.text("kind"), self.text("sentence", LONG_TEXT), self.ranks("ranks", [])
        if not kind or not sentence or ranks is None:
            return None
        standing, rows = self.text("standing"), self.rows("rows")
        return Verdict(
            kind,
            sentence,
            ranks,
            self.text("why", LONG_TEXT),
            self.lines("remedy"),
            rows,
            standing=cast("Standing", standing) if standing in get_args(Standing) else "out of step",
            world_size=min(MOST_RANKS, self.count("world_size") or 0),
            part=self.ranks("part") or (),
            hosts=self.hosts("hosts"),
            time=self.number("time") or time,
            counted=sum(row["ranks"] for row in rows),
        )

    def _entries(self, key: str, most: int = MOST_ENTRIES) -> list[object]:
        value = self._values.get(key)
        return cast("list[object]", value)[:most] if isinstance(value, list) else []

    def _items(self, key: str, most: int) -> list[tuple[str, object]]:
        value = self._values.get(key)
        return list(cast("dict[str, object]", value).items())[:most] if isinstance(value, dict) else []


def _number(value: object) -> float | None:
    if type(value) is float:
        return value if -_LARGEST <= value <= _LARGEST else None
    return float(value) if type(value) is int and abs(value) <= _LARGEST else None


def _text(value: object, most: int = _TEXT) -> str:
    if not isinstance(value, str):
        return ""
    value = _cut(value, most)
    return sys.intern(value if value.isprintable() else plain(value))


def _cut(value: str, most: int) -> str:
    return value if len(value) <= most else f"{value[:most]}…"


def _value(value: object) -> Value:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return None if _number(value) is None else value
    return _text(value if isinstance(value, str) else json.dumps(value))

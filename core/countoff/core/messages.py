"""How messages write counts, ranks and names, wherever countoff says something."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

__all__ = ["clip", "count_of", "listed", "names_of", "nearest", "number_of", "plain", "ranks_by", "runs_of"]

_Value = TypeVar("_Value")

_ALIKE = 0.6
"""How much of two names must be the same, as `difflib` measures it, for one to be meant by the other."""
_SHORTEST = 2
"""Letters of a beginning that is enough to find the whole name."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns ``; did you mean …?`` with the known names nearest to the given one; an empty text if none is near.

    Names that begin with the given one are the nearest, then the most similar one, in whatever case. Several are named
    only where they are equally near.

    Example:
        >>> nearest("bacth_size", ["batch_size", "seq_len"])
        '; did you mean batch_size?'
        >>> nearest("--dp", ["--dp-shard", "--dp-replicate", "--cp"])
        '; did you mean --dp-shard or --dp-replicate?'
    """
    names = {one: one.lower() for one in known}
    given = name.lower()
    near = [one for one, lower in names.items() if len(given.strip("-")) >= _SHORTEST and lower.startswith(given)]
    if not near:
        alike = {one: difflib.SequenceMatcher(None, lower, given).ratio() for one, lower in names.items()}
        most = max(alike.values(), default=0.0)
        near = [one for one, ratio in alike.items() if ratio == most >= _ALIKE]
    if not near:
        return ""
    *others, last = near
    before = f"{', '.join(others)} or " if others else ""
    return f"; did you mean {before}{last}?"


def count_of(number: int, noun: str) -> str:
    """A number and its noun: ``1 batch``, ``4 batches``, ``1 step``.

    >>> count_of(4, "batch"), count_of(1, "step")
    ('4 batches', '1 step')
    """
    plural = noun + ("es" if noun.endswith(("batch", "pass")) else "s")
    return f"{number} {noun if number == 1 else plural}"


def number_of(value: float, digits: int = 3) -> str:
    """A number as a person writes it: few digits, and an exponent without zeros.

    Args:
        value: The number.
        digits: Significant digits, at least 1.

    >>> number_of(0.00031711500169576796), number_of(0.1), number_of(0.03251, digits=4)
    ('3.17e-4', '0.1', '0.03251')
    """
    if value != value or abs(value) == float("inf") or value == 0 or 1e-3 <= abs(value) < 10**digits:
        return f"{value:.{digits}g}"
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"


def names_of(ranks: Sequence[int]) -> str:
    """Ranks as a person lists them: three or more in a row as a range, and the rest folded past eight.

    >>> names_of([1]), names_of([0, 2, 3]), names_of([0, *range(8, 16)])
    ('rank 1', 'ranks 0, 2, 3', 'ranks 0, 8–15')
    """
    return f"rank{'' if len(ranks) == 1 else 's'} {listed(ranks)}"


def listed(ranks: Sequence[int]) -> str:
    """The ranks of `names_of` without the word.

    >>> listed([0, 1, 4, 5, 6])
    '0, 1, 4–6'
    """
    items: list[str] = []
    for first, last in runs_of(ranks):
        items += [f"{first}–{last}"] if last - first > 1 else map(str, range(first, last + 1))
    folded = f", … ({len(ranks)} in all)" if len(items) > 8 else ""
    return ", ".join(items[:8]) + folded


def runs_of(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Ranks as runs of consecutive ones, each from its first to its last, in the order of the list.

    >>> runs_of([8, 9, 10, 2, 5, 6])
    [(8, 10), (2, 2), (5, 6)]
    """
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], rank
        else:
            runs.append((rank, rank))
    return runs


def plain(text: str) -> str:
    r"""Escapes what could move a terminal's cursor or forge a line. Anybody can write to the store.

    >>> plain("rank 1 raised \x1b[31mValueError")
    'rank 1 raised \\x1b[31mValueError'
    """
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def clip(text: str, length: int) -> str:
    """Shortens a text until it takes at most `length` characters as JSON, so that a record fits into the store.

    >>> clip("shard 3 is torn", 100), clip("ä" * 50, 20)
    ('shard 3 is torn', 'ää…')
    """
    if len(json.dumps(text)) <= length:
        return text
    while text and len(json.dumps(text + "…")) > length:
        text = text[: len(text) * 9 // 10]
    return text + "…"


def ranks_by(values: Mapping[int, _Value]) -> list[tuple[_Value, list[int]]]:
    """Returns each value with the ranks that have it, ascending; the value of the fewest ranks first.

    Args:
        values: One value per rank, by rank. They need not be hashable, but are grouped faster then.

    >>> ranks_by({0: 1, 1: 2, 2: 1})
    [(2, [1]), (1, [0, 2])]
    """
    found: list[tuple[_Value, list[int]]] = []
    places: dict[Any, int] = {}  # of the hashable values: where many ranks differ, a search would take too long
    for rank, value in sorted(values.items(), key=lambda each: each[0]):
        try:
            place = places.setdefault(value, len(found))
        except TypeError:
            place = next((number for number, (known, _) in enumerate(found) if known == value), len(found))
        if place == len(found):
            found.append((value, []))
        found[place][1].append(rank)
    return sorted(found, key=lambda group: len(group[1]))

"""Ranks in groups: those that have the same value, those that have another one than most, and their short names."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from countoff.core.messages import listed, names_of

V = TypeVar("V", bound=Hashable)
_LABELLED = 3


def ranks_by(values: Mapping[int, V]) -> dict[V, tuple[int, ...]]:
    """The ranks that have each value, in the order in which the values come.

    >>> ranks_by({0: "a", 1: "b", 2: "a"})
    {'a': (0, 2), 'b': (1,)}
    """
    groups: defaultdict[V, list[int]] = defaultdict(list)
    for rank, value in values.items():
        groups[value].append(rank)
    return {value: tuple(ranks) for value, ranks in groups.items()}


def outlier_ranks(values: Mapping[int, Hashable]) -> set[int]:
    """The ranks that have another value than most; all ranks where no value is the most common one.

    >>> outlier_ranks({0: 9, 1: 9, 2: 8}), outlier_ranks({0: 9, 1: 8}), outlier_ranks({0: 9, 1: 9})
    ({2}, {0, 1}, set())
    """
    common = Counter(values.values()).most_common(2)
    if len(common) < 2:
        return set()
    (usual, most), (_, next_most) = common
    return {rank for rank, value in values.items() if value != usual or most == next_most}


def ranks_in(cell: object, ranks: Iterable[int]) -> list[int]:
    """Those of some ranks that a cell of a verdict's table names.

    >>> ranks_in(3, range(8)), ranks_in("0, 4–7", range(8))
    ([3], [0, 4, 5, 6, 7])
    """
    pairs = re.findall(r"(\d{1,9})(?:–(\d{1,9}))?", str(cell))
    bounds = [(int(first), int(last or first)) for first, last in pairs]
    return [rank for rank in ranks if any(first <= rank <= last for first, last in bounds)]


def label_of(ranks: Sequence[int]) -> str:
    """Ranks as a short label.

    >>> label_of([4]), label_of(range(8)), label_of([0, 2, 4, 6, 8, 10])
    ('rank 4', 'ranks 0–7', 'ranks 0, 2, 4, … (6)')
    """
    items = listed(ranks).split(", ")
    if len(items) <= _LABELLED:
        return names_of(ranks)
    return f"ranks {', '.join(items[:_LABELLED])}, … ({len(ranks)})"

"""Reads of a sample of rows whether a rank trains on them or evaluates with them: `SplitLeak`.

Only choices of rows that are stored are read: the indices of a `Subset`, or those of a map-style dataset of `datasets`.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Subset

from countoff._adapter.held_datasets import dealt, is_of_hub, rows_of
from countoff.core.checks.splits import FACTOR, SAMPLED, SplitSample, width_of
from countoff.core.data.plain import attribute_of, in_class, items_of, module_of
from countoff.core.data.unobserved import unobserved

__all__ = ["split_sample"]

_MOST_OBJECTS, _MOST_NUMBERS = 1 << 21, 1 << 25
"""Indices that are read at most: as objects of Python, about 80 ns each, and in one piece of memory, about 10 ns."""
_PIECE = 1 << 18
_DEPTH = 4
_SIGNED = FACTOR - (1 << 64)
_INTEGERS = (torch.int64, torch.int32)


class _Choice(NamedTuple):
    """Rows that were chosen of a dataset.

    Attributes:
        parent: The dataset.
        indices: What stores their numbers there: the outermost choice first, each of the rows of the one behind it.
        rows: How many there are.
    """

    parent: Any
    indices: list[Any]
    rows: int


def split_sample(loaders: Mapping[str | None, Any], *, dp_rank: int, dp_degree: int) -> SplitSample | None:
    """Returns what a sample of rows tells of the train and the evaluation data; None if they are no parts of one.

    It raises nothing. The train loader's sampler must deal its data out to all ranks: then these train one model, and
    hold one dataset.

    Args:
        loaders: Loaders by the evaluation's name; None for the train loader.
        dp_rank: The dp_rank of this rank.
        dp_degree: The number of dp_ranks.
    """
    with contextlib.suppress(Exception), unobserved():  # objects of the user's may be made of anything
        train = dealt(loaders.get(None), dp_rank, dp_degree)
        chosen = None if train is None else _choice(train)
        others = [_choice(each.dataset) for name, each in loaders.items() if name and isinstance(each, DataLoader)]
        evaluated = [each for each in others if each is not None and chosen and _is_same(each.parent, chosen.parent)]
        if chosen is None or not evaluated:
            return None
        known = chosen.parent.num_rows if _is_table(chosen.parent) else rows_of(chosen.parent)
        sizes = (chosen.rows, *(each.rows for each in evaluated))
        largest = known or 1 + max(_largest(each) for each in (chosen, *evaluated))
        width = width_of(max(largest, 1))
        kind = type(chosen.parent)
        of = repr((module_of(kind), kind.__qualname__, known, sizes))
        return SplitSample.of_places(
            hashlib.blake2b(of.encode(), digest_size=8).hexdigest(),
            width,
            _places(chosen, width),
            sorted({place for each in evaluated for place in _places(each, width)}),
        )
    return None


def _choice(dataset: Any) -> _Choice | None:
    """The choice of rows that a dataset is, through choices of choices; None if it stores none."""
    parent, indices = dataset, []
    for _ in range(_DEPTH):
        if _is_subset(parent):
            indices.append(_stored(attribute_of(parent, "indices")))
            parent = attribute_of(parent, "dataset")
        elif is_of_hub(parent) and parent._indices is not None:
            indices.append(parent._indices.column(0))
            parent = parent._data.table
        else:
            break
    rows = rows_of(dataset)
    return _Choice(parent, indices, rows) if indices and rows else None


def _is_subset(dataset: Any) -> bool:
    """Whether it gives the rows of its indices: a subclass may give others."""
    kind = type(dataset)
    return all(in_class(kind, name) is in_class(Subset, name) for name in ("__len__", "__getitem__"))


def _is_same(one: Any, other: Any) -> bool:
    """Whether two choices are of the same dataset. Tables of `datasets` share the memory of their columns."""
    if one is other:
        return True
    if not (_is_table(one) and _is_table(other)) or one.num_rows != other.num_rows:
        return False
    common = set(one.column_names) & set(other.column_names)
    return any(_place_in_memory(one, name) == _place_in_memory(other, name) for name in common)


def _is_table(parent: Any) -> bool:
    return type(parent) is getattr(sys.modules.get("pyarrow"), "Table", None)


def _place_in_memory(table: Any, name: str) -> list[Any]:
    chunks = table.column(name).chunks
    return [(each.offset, [part and part.address for part in each.buffers()]) for each in chunks]


def _largest(choice: _Choice) -> int:
    """The largest number of a row that a choice has."""
    return max(int(piece.max()) for piece in _rows_of(choice))


def _places(choice: _Choice, width: int) -> list[int]:
    """The places of the sampled rows that a choice has."""
    seen = torch.zeros(SAMPLED, dtype=torch.bool)
    mask = (1 << width) - 1
    for piece in _rows_of(choice):
        place = (piece * _SIGNED) & mask
        seen[place[(place < SAMPLED) & (piece >= 0) & (piece <= mask)]] = True
    return [int(place) for place in seen.nonzero().flatten().tolist()]


def _rows_of(choice: _Choice) -> Iterator[torch.Tensor]:
    """The numbers of the rows in the dataset that they were chosen of, some at a time."""
    outer, *inner = choice.indices
    behind = [torch.cat(list(_pieces(each))) for each in inner]
    for piece in _pieces(outer):
        for each in behind:
            piece = each[piece]
        yield piece


def _stored(indices: Any) -> Any:
    """The indices, in one piece of memory where they are objects of Python.

    Raises:
        TypeError: If they are no integers, or if there are too many.
    """
    found = items_of(indices)
    if found is None or type(found) is range:
        return indices
    if len(found) > _MOST_OBJECTS or set(map(type, found)) != {int}:
        raise TypeError(f"expected at most {_MOST_OBJECTS} integers")
    return torch.frombuffer(array.array("q", found), dtype=torch.int64)


def _pieces(indices: Any) -> Iterator[torch.Tensor]:
    """The indices, some at a time.

    Raises:
        TypeError: If their class may compute them, if they are no integers, or if there are too many.
    """
    numpy, arrow = sys.modules.get("numpy"), sys.modules.get("pyarrow")
    if arrow is not None and type(indices) is arrow.ChunkedArray:
        for chunk in indices.chunks:
            yield from _pieces(chunk.to_numpy())
        return
    stored = type(indices) in (torch.Tensor, range) or (numpy is not None and type(indices) is numpy.ndarray)
    if not stored or len(indices) > _MOST_NUMBERS:
        raise TypeError(f"the indices of a {type(indices)} are not read")
    for first in range(0, len(indices), _PIECE):
        piece = indices[first : first + _PIECE]
        if numpy is not None and type(piece) is numpy.ndarray:
            piece = torch.from_numpy(piece.astype(numpy.int64))
        elif type(piece) is range:
            piece = torch.arange(piece.start, piece.stop, piece.step)
        if piece.dtype not in _INTEGERS or piece.device.type != "cpu" or piece.ndim != 1:
            raise TypeError(f"expected integers in the memory of the host, got {piece.dtype} on {piece.device}")
        yield piece.long()

"""Reads of a sample of rows whether a rank trains on them or evaluates with them: `SplitLeak`.

Only choices of rows that are stored are read: the indices of a `Subset`, or those of a map-style dataset of `datasets`.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Subset

from countoff._adapter.held_datasets import dealt, is_of_hub, rows_of
from countoff.core.data.plain import attribute_of, in_class, items_of, module_of
from countoff.core.data.unobserved import unobserved
from countoff.core.protocol.fit_records import SAMPLED, SplitSample

__all__ = ["split_sample"]

_MOST = 1 << 22
"""Indices that are read at most: 0.3 s as objects of Python."""
_DEPTH = 4


class _Choice(NamedTuple):
    """Rows that were chosen of a dataset: their numbers there."""

    parent: Any
    rows: torch.Tensor


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
        # Of a length that is not known, ranks come to one number up to which its rows are.
        rows = known or 1 << max(int(each.rows.max()) for each in (chosen, *evaluated)).bit_length()
        step = -(-rows // SAMPLED)
        kind = type(chosen.parent)
        sizes = [len(each.rows) for each in (chosen, *evaluated)]
        of = repr((module_of(kind), kind.__qualname__, known, sizes))
        return SplitSample.of_places(
            hashlib.blake2b(of.encode(), digest_size=8).hexdigest(),
            step,
            _places(chosen, step),
            [place for each in evaluated for place in _places(each, step)],
        )
    return None


def _choice(dataset: Any) -> _Choice | None:
    """The choice of rows that a dataset is, through choices of choices; None if it stores none."""
    parent, rows = dataset, None
    for _ in range(_DEPTH):
        if _is_subset(parent):
            chosen, parent = attribute_of(parent, "indices"), attribute_of(parent, "dataset")
        elif is_of_hub(parent) and parent._indices is not None:
            chosen, parent = parent._indices.column(0), parent._data.table
        else:
            break
        numbers = _numbers(chosen)
        rows = numbers if rows is None else numbers[rows]
    return None if rows is None or not len(rows) else _Choice(parent, rows)


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


def _places(choice: _Choice, step: int) -> list[int]:
    """The sampled rows that a choice has, each by its place among them."""
    rows = choice.rows[(choice.rows >= 0) & (choice.rows < step * SAMPLED) & (choice.rows % step == 0)]
    return (rows // step).tolist()


def _numbers(indices: Any) -> torch.Tensor:
    """Stored indices as a tensor.

    Raises:
        TypeError: If their class may compute them, if they are no integers, or if there are too many.
    """
    numpy, arrow = sys.modules.get("numpy"), sys.modules.get("pyarrow")
    found = items_of(indices)
    if found is not None:
        if len(found) > _MOST or not (type(found) is range or set(map(type, found)) == {int}):
            raise TypeError(f"expected at most {_MOST} integers")
        return torch.tensor(found, dtype=torch.int64)
    if arrow is not None and type(indices) is arrow.ChunkedArray and len(indices) <= _MOST:
        indices = indices.to_numpy()
    if numpy is not None and type(indices) is numpy.ndarray and indices.dtype.kind in "iu" and indices.size <= _MOST:
        indices = torch.from_numpy(indices.astype(numpy.int64))
    if type(indices) is not torch.Tensor or indices.ndim != 1 or len(indices) > _MOST or indices.device.type != "cpu":
        raise TypeError(f"the indices of a {type(indices)} are not read")
    if indices.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"expected integers, got {indices.dtype}")
    return indices.long()

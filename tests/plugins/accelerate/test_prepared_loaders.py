"""What is known of a loader that Accelerate has prepared, and what asking for it would call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("accelerate")

from accelerate.data_loader import DataLoaderShard
from torch.utils.data import IterableDataset, Sampler, SequentialSampler, SubsetRandomSampler

from countoff._adapter.sampling import asks_for_length


class Own(Sampler[int]):
    """A sampler of the user's own, which may compute its length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class Stream(IterableDataset[int]):
    """An iterable dataset, likewise."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


@pytest.mark.parametrize(
    ("dataset", "more", "asks"),
    [
        (range(8), {}, True),
        (range(8), {"shuffle": True}, True),
        (range(8), {"sampler": SequentialSampler(range(8))}, True),
        (range(8), {"sampler": SubsetRandomSampler(range(8))}, False),
        (range(8), {"sampler": Own()}, False),
        (Stream(), {}, False),
        (Stream(), {"batch_size": None}, False),
    ],
)
def test_a_length_is_asked_for_only_where_each_pass_asks_for_it(dataset: Any, more: dict[str, Any], asks: bool) -> None:
    assert asks_for_length(DataLoaderShard(dataset, **{"batch_size": 2, **more})) == asks

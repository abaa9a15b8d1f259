"""A StreamingDataset of mosaicml-streaming that Accelerate deals out, known before the first batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("streaming")

from accelerate.data_loader import DataLoaderShard, IterableDatasetShard
from streaming import StreamingDataset
from torch.utils.data import DataLoader

from countoff._adapter.dealt_streams import streamed_twice
from countoff.core import Settings
from countoff.core.checks.data import DataIdentity
from countoff.core.session.state import State


class Labelled(StreamingDataset):
    """It reads its samples in another form."""

    def __getitem__(self, at: Any) -> Any:
        return super().__getitem__(at), 0


class Whole(StreamingDataset):
    """It yields all samples on every rank."""

    def __iter__(self) -> Any:
        return iter(range(8))


def found(kind: type[StreamingDataset], ranks: int = 2, *, dealt: bool = True) -> str:
    """The kind and the subject of what is warned of, of a dataset of so many ranks."""
    dataset = object.__new__(kind)  # a real one has as many ranks as the job
    dataset._parallel_rank_world = SimpleNamespace(num_ranks=ranks)  # pyright: ignore[reportAttributeAccessIssue]
    shard: Any = IterableDatasetShard(dataset, batch_size=4, num_processes=2) if dealt else dataset
    loader: Any = DataLoaderShard(shard, batch_size=4)
    verdict = streamed_twice(loader, DataIdentity(State(0, 2, Settings(), {})), 3)
    return "" if verdict is None else f"{verdict.kind} {verdict.subject}"


def test_a_streaming_dataset_that_is_dealt_out_is_sharded_twice() -> None:
    assert found(StreamingDataset) == found(Labelled) == "DoubleSharded StreamingDataset"


def test_other_loaders_are_not() -> None:
    """One that is prepared as for a single process, one of a job of one rank, and one that divides nothing."""
    assert found(StreamingDataset, dealt=False) == found(StreamingDataset, ranks=1) == found(Whole) == ""
    data = DataIdentity(State(0, 2, Settings(), {}))
    assert streamed_twice(DataLoader(list(range(8))), data, 0) is streamed_twice([], data, 0) is None  # pyright: ignore[reportArgumentType]

"""What is read of the datasets that samplers deal out, and what is left alone."""

import sys
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from countoff._adapter.held_datasets import dealt_rows, rows_of


class Untouchable(Dataset[Any]):
    """A dataset of the user's own, which nobody may ask for anything."""

    asked = 0

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        type(self).asked += 1
        return self.count

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a row was read")


class Longer(TensorDataset):
    """One that computes its length."""

    def __len__(self) -> int:
        raise AssertionError("it was asked")


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        raise AssertionError("it was read")


class OwnShares(DistributedSampler[Any]):
    """A sampler of the user's own, by which each rank may read data of its own."""

    def __iter__(self) -> Any:
        return iter(range(4))


def sampled(dataset: Any, rank: int = 1, replicas: int = 4, kind: Any = DistributedSampler) -> DataLoader[Any]:
    return DataLoader(dataset, 4, sampler=kind(dataset, num_replicas=replicas, rank=rank))


def held(train: Any, known: int | None = None) -> int | None:
    return dealt_rows(train, dp_rank=1, dp_degree=4, known=known)


@pytest.mark.parametrize(
    ("dataset", "rows"),
    [
        (TensorDataset(torch.zeros(6, 2)), 6),
        (Subset(Untouchable(9), [3, 4, 5]), 3),
        (Subset(Untouchable(9), range(2, 7)), 5),
        (Subset(Untouchable(9), torch.arange(7)), 7),  # pyright: ignore[reportArgumentType]
        (ConcatDataset([TensorDataset(torch.zeros(2)), TensorDataset(torch.zeros(3))]), 5),
        ([1, 2], 2),
        (numpy.zeros((8, 2)), 8),
        (torch.zeros(3, 1), 3),
        (Longer(torch.zeros(6)), None),
        (Untouchable(6), None),
        (torch.tensor(1.0), None),
        (object(), None),
        ({"a": 1}, None),
    ],
)
def test_rows_are_read_where_they_are_stored(dataset: Any, rows: int | None) -> None:
    before = Untouchable.asked
    assert rows_of(dataset) == rows
    assert Untouchable.asked == before


def test_rows_of_datasets_are_those_of_its_tables() -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [0, 1, 2]})
    part = whole.select([2, 0])
    assert (rows_of(whole), rows_of(part)) == (3, 2)
    assert (held(sampled(whole)), held(sampled(part))) == (3, 2)

    class Own(datasets.Dataset):
        def __len__(self) -> int:
            raise AssertionError("it was asked")

    assert rows_of(Own(whole.data)) is None


def test_a_class_of_the_users_own_is_asked_for_nothing() -> None:
    """The adapter has asked for the length when it read the train loader's facts."""
    train = sampled(Untouchable(10))
    before = Untouchable.asked
    assert held(train) is None
    assert held(train, known=10) == 10
    assert Untouchable.asked == before


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(TensorDataset(torch.zeros(6)), 4),
        DataLoader(TensorDataset(torch.zeros(6)), 4, shuffle=True),
        DataLoader(Stream(), 4),
        sampled(TensorDataset(torch.zeros(6)), rank=0, replicas=1),
        sampled(TensorDataset(torch.zeros(6)), rank=1, replicas=2),
        sampled(TensorDataset(torch.zeros(6)), kind=OwnShares),
        [1, 2],
        None,
    ],
    ids=["no sampler", "random", "stream", "alone", "other ranks", "own sampler", "list", "none"],
)
def test_nothing_is_said_of_data_that_nothing_deals_out_to_all_ranks(loader: Any) -> None:
    """A rank may then hold data of its own."""
    assert held(loader, known=6) is None


def test_one_rank_is_compared_with_nobody() -> None:
    loader = sampled(TensorDataset(torch.zeros(6)), rank=0, replicas=1)
    assert dealt_rows(loader, dp_rank=0, dp_degree=1) is None


def test_what_accelerate_deals_out_is_compared_and_what_one_rank_reads_is_not() -> None:
    pytest.importorskip("accelerate")
    from accelerate.data_loader import prepare_data_loader

    def prepared(**how: Any) -> Any:
        loader = DataLoader(TensorDataset(torch.zeros(40)), 4, shuffle=True)
        return prepare_data_loader(loader, torch.device("cpu"), num_processes=4, process_index=1, **how)

    assert held(prepared()) == 40
    assert held(prepared(split_batches=True)) == 40
    alone = prepare_data_loader(DataLoader(TensorDataset(torch.zeros(40)), 4), num_processes=1, process_index=0)
    assert held(alone) is None
    if "accelerate.state" in sys.modules:
        from accelerate.state import PartialState

        PartialState._reset_state()


def test_random_numbers_stay_as_they_are() -> None:
    loader = sampled(Subset(Untouchable(40), torch.arange(30)))  # pyright: ignore[reportArgumentType]
    before = torch.get_rng_state()
    held(loader)
    assert torch.equal(before, torch.get_rng_state())

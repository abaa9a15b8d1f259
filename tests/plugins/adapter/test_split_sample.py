"""What is read of a split: stored indices of one dataset, and nothing that a class may compute."""

import random
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, random_split
from torch.utils.data.distributed import DistributedSampler

from countoff._adapter.split_sample import split_sample
from countoff.core.checks.splits import judge_splits
from countoff.core.protocol.fit_records import SplitSample


class Untouchable(Dataset[Any]):
    """A dataset of the user's own, which nobody may ask for anything after it was split."""

    closed = False

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        assert not self.closed
        return self.count

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a row was read")


class Shifted(Subset[Any]):
    """A choice that gives other rows than those of its indices."""

    def __getitem__(self, idx: Any) -> Any:
        return self.dataset[self.indices[idx] + 1]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[each] for each in indices]


class Computed(list[int]):
    """Indices that are computed."""

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("an index was computed")


def told(train: Any, evaluation: Any, *, deal: bool = True) -> SplitSample | None:
    """What a rank tells whose loaders have these datasets."""
    sampler = DistributedSampler(train, num_replicas=2, rank=0) if deal else None
    loaders = {None: DataLoader(train, 4, sampler=sampler), "evaluation": DataLoader(evaluation, 4)}
    Untouchable.closed = True
    try:
        return split_sample(loaders, dp_rank=0, dp_degree=2)
    finally:
        Untouchable.closed = False


def split(seed: int, make: Any = list, count: int = 3000) -> SplitSample | None:
    """The same for a random split; `make` makes what stores the indices of each part."""
    parent, order = Untouchable(count), list(range(count))
    random.Random(seed).shuffle(order)
    return told(Subset(parent, make(order[count // 10 :])), Subset(parent, make(order[: count // 10])))


STORES = {
    "list": list,
    "tuple": tuple,
    "tensor": torch.tensor,
    "int32": lambda order: torch.tensor(order, dtype=torch.int32),
    "array": numpy.array,
    "uint16": lambda order: numpy.array(order, dtype=numpy.uint16),
}


@pytest.mark.parametrize("make", STORES.values(), ids=STORES)
def test_indices_are_read_however_they_are_stored(make: Any) -> None:
    """All of them tell the same, and splits with other seeds are found."""
    one, other = split(1, make), split(2, make)
    assert one is not None
    assert other is not None
    assert one == split(1)
    assert one.train.bit_count() > 8 * one.evaluated.bit_count() > 0
    found = judge_splits({0: one, 1: other})
    assert found is not None
    assert judge_splits({0: one, 1: one}) is None


def test_the_rows_that_are_named_are_those_of_the_dataset() -> None:
    parent = Untouchable(10)
    one = told(Subset(parent, [0, 1, 8]), Subset(parent, [9]))
    other = told(Subset(parent, [0, 1, 9]), Subset(parent, [8]))
    assert one is not None
    assert other is not None
    found = judge_splits({0: one, 1: other})
    assert found is not None
    assert found.sentence.startswith("row 9 validates on rank 0 and trains on rank 1: ")


def test_a_split_of_a_split_has_the_rows_of_the_whole() -> None:
    whole = Untouchable(50)
    rest = Subset(whole, list(range(40, 0, -1)))
    nested = told(Subset(rest, range(30)), Subset(rest, [30, 31]))
    assert nested is not None
    flat = told(Subset(whole, range(40, 10, -1)), Subset(whole, [10, 9]))
    assert flat is not None
    assert (nested.train, nested.evaluated) == (flat.train, flat.evaluated)


def test_rows_of_datasets_are_read_through_their_indices() -> None:
    """Also where each part has lost a column, as in the Trainer."""
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict({"text": [str(number) for number in range(60)], "note": [0] * 60})
    parts = [whole.train_test_split(test_size=12, seed=seed) for seed in (1, 2)]
    samples = [told(each["train"].remove_columns("note"), each["test"].remove_columns("note")) for each in parts]
    one, other = samples
    assert one is not None
    assert other is not None
    assert judge_splits({0: one, 1: other}) is not None
    test = set(parts[0]["test"]["text"])
    rows = [row for row in range(60) if one.evaluated >> row & 1]
    assert {str(row) for row in rows} == test
    elsewhere = datasets.Dataset.from_dict({"text": [str(number) for number in range(60)]})
    assert told(parts[0]["train"], elsewhere.select([5, 2])) is None


def _none() -> dict[str, Any]:
    parent = Untouchable(40)
    train, rest = Subset(parent, range(30)), Subset(parent, range(30, 40))
    return {
        "another dataset of one size": (train, Subset(Untouchable(40), range(30, 40))),
        "no choice": (parent, rest),
        "no choice to evaluate": (train, Untouchable(4)),
        "other rows than its indices": (Shifted(parent, range(30)), rest),
        "computed indices": (Subset(parent, Computed(range(30))), rest),
        "no integers": (Subset(parent, [True, False]), rest),
        "floats": (Subset(parent, torch.rand(3)), rest),  # pyright: ignore[reportArgumentType]
        "a matrix": (Subset(parent, torch.zeros(3, 3, dtype=torch.int64)), rest),  # pyright: ignore[reportArgumentType]
        "too many": (Subset(parent, range(1 << 26)), rest),
    }


@pytest.mark.parametrize("case", _none())
def test_nothing_is_told_where_nothing_is_known(case: str) -> None:
    assert told(*_none()[case]) is None


def test_nothing_is_told_where_no_sampler_deals_the_train_data_out() -> None:
    """Each rank may hold data of its own, and train a model of its own."""
    parent = Untouchable(40)
    assert told(Subset(parent, range(30)), Subset(parent, range(30, 40)), deal=False) is None
    assert split_sample({}, dp_rank=0, dp_degree=2) is None


def test_nothing_is_changed_and_negative_indices_are_no_rows() -> None:
    parent = Untouchable(40)
    before = torch.get_rng_state()
    found = told(Subset(parent, [-1, 3]), Subset(parent, [5, -7]))
    assert found is not None
    assert (found.train.bit_count(), found.evaluated.bit_count()) == (1, 1)
    parts = random_split(parent, [30, 10], torch.Generator().manual_seed(1))
    assert told(*parts) is not None
    assert torch.equal(before, torch.get_rng_state())


def test_an_index_that_the_dataset_does_not_have_is_no_row() -> None:
    """The program fails where it reads it, and not here."""
    rows = list(range(4096))
    found = told(Subset(rows, [0, 8192]), Subset(rows, [2]))  # pyright: ignore[reportArgumentType]
    assert found is not None
    assert (found.train, found.evaluated) == (1, 2)
    assert SplitSample.from_json(found.to_json()) == found

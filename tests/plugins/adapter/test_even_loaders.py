"""From which loaders batches are fetched ahead, where ranks are made even."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from countoff._adapter.class_swap import swap_class
from countoff._adapter.even_loaders import fetches_ahead, keeps_length, proven_length
from countoff._adapter.torch_facts import loader_facts
from countoff.core import Settings
from countoff.core.totals import Totals

SAMPLES = list(range(8))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(SAMPLES)


class Drawing(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(8, (1,))) for _ in SAMPLES)


class OwnPass(DataLoader[Any]):
    def __iter__(self) -> Any:
        return map(abs, super().__iter__())


class Named(DataLoader[Any]):
    """Differs from torch's in its name only."""


def shard() -> DistributedSampler[Any]:
    return DistributedSampler(SAMPLES, 2, 0)  # pyright: ignore


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(SAMPLES, num_workers=1),  # pyright: ignore
        lambda: DataLoader(SAMPLES, num_workers=1, shuffle=True, batch_size=4),  # pyright: ignore
        lambda: DataLoader(SAMPLES, num_workers=1, sampler=shard()),  # pyright: ignore
        lambda: DataLoader(SAMPLES, num_workers=1, batch_sampler=BatchSampler(RandomSampler(SAMPLES), 2, False)),  # pyright: ignore
        lambda: DataLoader(Stream(), num_workers=1),
        lambda: Named(Stream(), num_workers=1),
        lambda: StatefulDataLoader(Stream(), num_workers=1),
        lambda: StatefulDataLoader(SAMPLES, num_workers=1, shuffle=True),  # pyright: ignore
    ],
)
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's own call, with torch 2.13
def test_a_loader_with_workers_fetches_ahead(make: Any) -> None:
    """What it does in this process for a batch is known: nobody sees whether a batch is taken sooner."""
    loader = make()
    assert fetches_ahead(loader)
    give_back = swap_class(loader, lambda _, batches: batches)
    assert fetches_ahead(loader)
    give_back()


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(SAMPLES),  # pyright: ignore
        lambda: DataLoader(Stream()),
        lambda: DataLoader(SAMPLES, num_workers=1, sampler=Drawing()),  # pyright: ignore
        lambda: DataLoader(SAMPLES, num_workers=1, batch_sampler=BatchSampler(Drawing(), 2, False)),  # pyright: ignore
        lambda: OwnPass(SAMPLES, num_workers=1),  # pyright: ignore
        lambda: SAMPLES,
        lambda: iter(SAMPLES),
    ],
)
def test_any_other_source_does_not(make: Any) -> None:
    """It may draw random numbers for a batch, or fill the memory of the last one again."""
    assert not fetches_ahead(make())


class Repeated(DataLoader[Any]):
    """Each pass gives the batches of the sampler twice."""

    def __iter__(self) -> Any:
        for _ in range(2):
            yield from super().__iter__()

    def __len__(self) -> int:
        return 2 * super().__len__()


def test_a_pass_of_the_users_own_proves_no_length() -> None:
    """Its batches need not be those of the sampler: the length that it reports is all that is known."""
    loader: Any = Repeated(SAMPLES, batch_size=2, sampler=shard())  # pyright: ignore
    facts = loader_facts(loader)
    assert (facts.reported_batches, facts.samples_per_rank) == (len(loader), None)
    assert not keeps_length(loader)
    own: Any = DataLoader(SAMPLES, batch_size=2, sampler=shard())  # pyright: ignore
    give_back = swap_class(own, lambda _, batches: batches)
    assert loader_facts(own).samples_per_rank is not None
    assert keeps_length(own)
    give_back()


def test_a_plan_proves_a_length_of_all_passes() -> None:
    """Where it tells how many batches every epoch has, a loader that follows a data set that grows proves none."""
    fixed, grows = DataLoader(SAMPLES, batch_size=2, sampler=shard()), DataLoader(SAMPLES, batch_size=2)  # pyright: ignore
    for loader, batches, tells in ((fixed, 2, 2), (grows, 4, None)):
        totals = Totals(loader_facts(loader), dp_degree=1, framework="len(loader)")
        assert proven_length(loader, totals, Settings()) == batches
        assert proven_length(loader, totals, Settings(uneven_train="stop")) == tells

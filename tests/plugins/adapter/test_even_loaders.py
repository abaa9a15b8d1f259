"""How passes are made even, and from which loaders batches are fetched ahead then."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from countoff._adapter.class_swap import swap_class
from countoff._adapter.even_loaders import even_inside, even_pass, fetches_ahead, keeps_length, proven_length
from countoff._adapter.torch_facts import loader_facts
from countoff.core import Settings
from countoff.core.arithmetic.totals import Totals

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
        totals = Totals(loader_facts(loader), dp_degree=1)
        assert proven_length(loader, totals, Settings()) == batches
        assert proven_length(loader, totals, Settings(uneven_train="stop")) == tells


class EvenPass:
    """Stands for an even pass of the guard's."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self.batches)

    def go_on_with(self, batches: Iterator[Any]) -> None:
        self.batches = batches


class EvenGuard:
    """Makes each pass even, or none, and keeps what it was told of the last one."""

    def __init__(self, *, makes_even: bool = True) -> None:
        self.makes_even = makes_even
        self.known: dict[str, Any] = {}

    def even(self, batches: Iterator[Any], **known: Any) -> Iterator[Any]:
        self.known = known
        return EvenPass(batches) if self.makes_even else batches


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's own call, with torch 2.13
def test_a_loader_that_saves_its_state_is_not_fetched_ahead() -> None:
    """Its state is the one where the loop is: nothing of the loader's is replaced to make it so."""
    guard: Any = EvenGuard()
    for make, prefetches in ((DataLoader, True), (StatefulDataLoader, False)):
        loader: Any = make(Stream(), num_workers=1)
        before = set(dir(loader))
        even_pass(guard, iter(()), [], loader=loader)
        assert guard.known["prefetches"] == prefetches
        assert set(dir(loader)) == before
        assert type(loader) is make


def test_a_pass_whose_loader_has_failed_goes_on_with_the_next_ones_batches() -> None:
    guard: Any = EvenGuard()
    begun: list[Any] = []
    first = even_pass(guard, iter([1, 2]), begun, loader=SAMPLES)
    assert (next(first), begun) == (1, [first])
    assert even_pass(guard, iter([8, 9]), begun, loader=SAMPLES) is first
    assert list(first) == [8, 9]


def test_a_pass_that_is_not_made_even_is_kept_for_no_other() -> None:
    guard: Any = EvenGuard(makes_even=False)
    begun: list[Any] = []
    own = iter(SAMPLES)
    assert even_pass(guard, own, begun, loader=SAMPLES) is own
    assert begun == []


class Framework:
    """A loader around another one, of which it asks attributes before it iterates it."""

    def __init__(self) -> None:
        self.inner: Any = DataLoader(SAMPLES, batch_size=4)  # pyright: ignore
        self.fails = False

    def __iter__(self) -> Iterator[Any]:
        assert self.inner.batch_size == 4
        if self.fails:
            raise ValueError("torn")
        for batch in self.inner:
            yield batch.tolist()


@pytest.mark.parametrize("makes_even", [True, False])
def test_a_loader_inside_of_a_frameworks_one_is_made_even(makes_even: bool) -> None:
    """While the first batch is fetched, something else stands in its place, and is gone after that."""
    guard: Any = EvenGuard(makes_even=makes_even)
    owner, begun, begins = Framework(), list[Any](), list[str]()
    own = owner.inner
    batches = even_inside(
        guard,
        iter(owner),
        begun,
        owner=owner,
        name="inner",
        ahead=True,
        proven=True,
        begins=lambda: begins.append("begins"),
    )
    assert (owner.inner, begun, begins) == (own, [], [])
    assert next(batches) == [0, 1, 2, 3]
    assert (owner.inner is own, len(begun), begins) == (True, makes_even, ["begins"] * makes_even)
    assert (guard.known["ahead"], guard.known["proven"]) == (True, True)
    assert list(batches) == [[4, 5, 6, 7]]


def test_a_loader_that_fails_at_its_beginning_has_its_own_one_inside() -> None:
    guard: Any = EvenGuard()
    owner, begun = Framework(), list[Any]()
    own, owner.fails = owner.inner, True
    batches = even_inside(guard, iter(owner), begun, owner=owner, name="inner", ahead=False)
    with pytest.raises(ValueError, match="torn"):
        next(batches)
    assert (owner.inner, begun) == (own, [])


def test_a_pass_that_goes_on_after_a_failure_inside_is_the_same_even_pass() -> None:
    guard: Any = EvenGuard()
    owner, begun = Framework(), list[Any]()
    ways: Any = {"owner": owner, "name": "inner", "ahead": False}
    next(even_inside(guard, iter(owner), begun, **ways))
    (even,) = begun
    following = even_inside(guard, iter(owner), begun, **ways)
    assert list(following) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert begun == [even]

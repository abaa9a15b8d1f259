"""What the generator of one pass does with the batches, and with iterators of every kind."""

import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from countoff._adapter.loader_passes import LoaderPasses
from countoff.core import FitPlan, Guard
from countoff.core.settings import Settings


class Batch:
    pass


class OwnIterator:
    """A loader that is its own iterator: each `__iter__` begins again."""

    def __iter__(self) -> "OwnIterator":
        self.left = 3
        return self

    def __next__(self) -> Batch:
        if not self.left:
            raise StopIteration
        self.left -= 1
        return Batch()


class OnlyNext:
    """An iterator without `__iter__`, which a `for` over its loader does not need."""

    def __init__(self) -> None:
        self.left = 3

    def __next__(self) -> Batch:
        return OwnIterator.__next__(self)  # pyright: ignore[reportArgumentType]


@pytest.fixture
def passes() -> LoaderPasses:
    guard = Guard(Settings(), rank=0, world_size=1)
    guard.fit_start(FitPlan())
    return LoaderPasses(guard, epoch=0, exhausted=lambda: None, diverged=lambda: None)


@pytest.mark.parametrize("batches", [OwnIterator, OnlyNext])
def test_any_iterator_is_read_by_its_next_alone(passes: LoaderPasses, batches: Any) -> None:
    """What a loader returns is asked for batches, and never for another iterator."""
    loader = batches()
    if batches is OwnIterator:
        iter(loader)
        next(loader)
    assert len(list(passes.follow(loader, None))) == (2 if batches is OwnIterator else 3)
    assert passes.guard.train_batches == (2 if batches is OwnIterator else 3)


def test_a_batch_lives_no_longer_than_in_the_loop(passes: LoaderPasses) -> None:
    """Once the loop has let go of a batch, the next one is fetched without it in memory."""
    seen: list[weakref.ref[Batch]] = []
    alive: list[bool] = []

    def batches() -> Iterator[Batch]:
        for _ in range(3):
            alive.append(any(each() is not None for each in seen))
            yield Batch()

    for batch in passes.follow(batches(), None):
        seen.append(weakref.ref(batch))
        del batch
    assert alive == [False, False, False]


def test_a_pass_counts_its_own_batches(passes: LoaderPasses) -> None:
    """A pass that resumes after an evaluation was abandoned goes on with its own count, not the evaluation's."""
    train, evaluation = passes.follow(iter(range(5)), None), passes.follow(iter(range(5)), "validation")
    taken = [next(each) for each in (train, evaluation, evaluation, train)]
    assert taken == [0, 0, 1, 1]
    assert passes.guard.train_batches == 2
    assert passes.guard.batches == 2
    assert len(list(train)) == 3
    assert passes.guard.train_batches == 5
    assert next(evaluation) == 2  # closed by now: handed on, and not counted
    assert passes.guard.open_span is None

"""A loader that is observed hands out the same batches; the observer counts them and reports how the pass ended."""

from collections import UserDict, UserString
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from countoff._adapter.loader_observer import LoaderObserver, samples_in
from countoff.core.session.liveness.stacks import main_thread

DATA: Any = list(range(5))


class Calls:
    """What the observer reports."""

    def __init__(self) -> None:
        self.fetches = 0
        self.caught: list[BaseException] = []
        self.errors: list[BaseException] = []
        self.exhausted = 0
        self.requests = 0

    def waited(self, seconds: float) -> None:
        assert seconds >= 0
        self.fetches += 1

    def request(self) -> None:
        self.requests += 1

    def exhaust(self) -> None:
        self.exhausted += 1

    def observe(self, loader: Any) -> LoaderObserver:
        return LoaderObserver(
            loader,
            self.waited,
            failing=self.caught.append,
            failed=self.errors.append,
            exhausted=self.exhaust,
            batch_requested=self.request,
        )


class Failing:
    def __iter__(self) -> Iterator[int]:
        yield 1
        raise ValueError("shard 3 is torn")


class Ending:
    def __iter__(self) -> Iterator[int]:
        yield from range(3)


def test_a_pass_is_counted_to_its_end() -> None:
    calls, loader = Calls(), DataLoader(DATA, batch_size=2)
    observer = calls.observe(loader)
    assert [len(batch) for batch in loader] == [2, 2, 1]
    assert observer.begun is not None
    assert (observer.begun.batches, observer.begun.exhausted, observer.begun.last) == (3, True, None)
    assert (calls.fetches, calls.exhausted, calls.errors, calls.requests) == (3, 1, [], 0)


def test_requests_are_reported_in_the_used_pass_only() -> None:
    calls, loader = Calls(), DataLoader(DATA, batch_size=2)
    observer = calls.observe(loader)
    next(iter(loader))
    batches = iter(loader)
    next(batches)
    observer.used = observer.begun
    assert len(list(batches)) == 2
    assert calls.requests == 3


def test_an_exception_of_the_loader_is_reported_and_raised() -> None:
    calls, loader = Calls(), Failing()
    calls.observe(loader)
    with pytest.raises(ValueError, match="shard 3 is torn"):
        list(loader)
    assert ([str(error) for error in calls.caught], calls.errors) == (["shard 3 is torn"], [])


@pytest.mark.parametrize(("expected", "failures"), [(4, 1), (3, 0), (None, 0)])
def test_a_pass_shorter_than_proven_has_failed(expected: int | None, failures: int) -> None:
    calls, loader = Calls(), Ending()
    calls.observe(loader).expected = expected
    assert list(loader) == [0, 1, 2]
    assert len(calls.errors) == failures


def test_a_released_loader_has_its_own_class() -> None:
    calls, loader = Calls(), Ending()
    observer = calls.observe(loader)
    assert isinstance(loader, Ending)
    assert type(loader) is not Ending
    observer.release()
    observer.release()
    assert type(loader) is Ending
    assert list(loader) == [0, 1, 2]
    assert calls.fetches == 0


@pytest.mark.parametrize("loader", [[1, 2], (each for each in [1, 2])], ids=["list", "generator"])
def test_a_loader_that_cannot_be_observed_is_left_alone(loader: Any) -> None:
    observer = Calls().observe(loader)
    assert list(loader) == [1, 2]
    assert observer.begun is None
    observer.release()


def test_a_rank_inside_an_observed_loader_is_in_its_loader() -> None:
    class Looking:
        def __iter__(self) -> Iterator[str]:
            yield main_thread().state

    loader = Looking()
    Calls().observe(loader)
    assert list(loader) == ["loader"]


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(3, 2), 3),
        ((torch.zeros(4), torch.zeros(9)), 4),
        ({"images": torch.zeros(5), "labels": torch.zeros(5)}, 5),
        ([{"images": torch.zeros(6)}], 6),
        (torch.tensor(1.0), None),
        ("text", None),
        ([], None),
    ],
)
def test_samples_are_counted_by_the_first_tensor(batch: Any, samples: int | None) -> None:
    assert samples_in(batch) == samples


class Named(list[Any]):
    def __getitem__(self, key: Any) -> Any:
        raise TypeError("only names")

    __iter__ = __len__ = __getitem__  # pyright: ignore


class Lazy(Mapping[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise RuntimeError("decoded on access")

    __iter__ = __len__ = __getitem__  # pyright: ignore


class OwnTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError("called")


def test_samples_are_counted_without_the_users_code() -> None:
    """The number is for a message only. What is not plain has no number, and what holds itself has none either."""
    endless: list[Any] = []
    endless.append(endless)
    own = torch.zeros(3).as_subclass(OwnTensor)
    for batch in (UserString("abc"), [UserString("abc")], Lazy(), own, endless, object(), numpy.float32(1)):
        assert samples_in(batch) is None
    assert samples_in(Named([torch.zeros(3)])) == 3
    assert samples_in(UserDict(x=torch.zeros(3))) == 3
    assert samples_in({"x": numpy.zeros((4, 2))}) == 4

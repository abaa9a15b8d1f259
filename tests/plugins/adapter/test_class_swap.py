"""A loader is observed by a class that is exchanged, and gets back the one that it had."""

import copy
import pickle
from abc import ABCMeta
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Generic, TypeVar

import pytest
from torch.utils.data import DataLoader

from countoff._adapter.class_swap import swap_class

DATA: Any = list(range(4))


def batches() -> Iterator[int]:
    yield from DATA


@pytest.mark.parametrize("refused", [lambda: [1, 2], batches, lambda: None], ids=["list", "generator", "None"])
def test_what_cannot_be_observed_is_refused(refused: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match=r"cannot observe a loader of type (list|generator|NoneType): expected a "):
        swap_class(refused(), lambda _, iterator: iterator)


def test_the_observing_class_has_the_names_of_the_loaders_own() -> None:
    class Loader:
        def __iter__(self) -> Iterator[int]:
            return batches()

    loader = Loader()
    give_back = swap_class(loader, lambda _, iterator: iterator)
    assert isinstance(loader, Loader)
    assert type(loader) is not Loader
    for name in ("__name__", "__qualname__", "__module__"):
        assert getattr(type(loader), name) == getattr(Loader, name)
    give_back()
    assert type(loader) is Loader


def test_a_class_is_given_back_once() -> None:
    """Who gives it back again takes nothing from who observes the loader now."""
    loader = DataLoader(DATA, batch_size=2)
    first = swap_class(loader, lambda _, iterator: iterator)
    first()
    second = swap_class(loader, lambda _, iterator: iterator)
    first()
    assert type(loader) is not DataLoader
    second()
    assert type(loader) is DataLoader


class Pairs:
    """A loader of the user's own."""

    def __init__(self) -> None:
        self.pairs = 3

    def __iter__(self) -> Iterator[int]:
        return batches()


class Reduced(Pairs):
    """A loader that makes its copies by itself, of the class that it finds."""

    def __reduce__(self) -> Any:
        return type(self), (), {"pairs": 5}


@pytest.mark.parametrize("kind", [Pairs, Reduced, lambda: DataLoader(DATA, batch_size=2)])
@pytest.mark.parametrize("times", [1, 2])
def test_copies_of_an_observed_loader_are_those_of_the_loader(kind: Callable[[], Any], times: int) -> None:
    """A pickle, of every protocol, and a copy are as without an observer, also with two of them."""
    loader: Any = kind()
    original, protocols = type(loader), range(pickle.HIGHEST_PROTOCOL + 1)
    before = [pickle.dumps(loader, protocol) for protocol in protocols]
    give_back = [swap_class(loader, lambda this, iterator: iterator) for _ in range(times)]
    assert type(loader) is not original
    assert loader.__class__ is original
    assert [pickle.dumps(loader, protocol) for protocol in protocols] == before
    assert type(copy.copy(loader)) is type(copy.deepcopy(loader)) is original
    for each in reversed(give_back):
        each()
    assert type(loader) is original
    assert [pickle.dumps(loader, protocol) for protocol in protocols] == before


def test_observers_may_leave_in_any_order() -> None:
    """One that has left sees no pass, and nothing of it stays once all have left; one that has not sees every pass."""
    loader = Pairs()
    seen: list[str] = []

    def observer(name: str) -> Callable[[], None]:
        def observe(_: Any, iterator: Iterator[int]) -> Iterator[int]:
            seen.append(name)
            return iterator

        return swap_class(loader, observe)

    first, second = observer("first"), observer("second")
    assert list(loader) == DATA
    assert seen == ["first", "second"]
    first()
    assert list(loader) == DATA
    assert seen == ["first", "second", "second"]
    second()
    assert type(loader) is Pairs
    first()
    assert type(loader) is Pairs


class Registered:
    """A base that keeps a list of its subclasses."""

    known: ClassVar[list[type]] = []

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        Registered.known.append(cls)


class Counting(ABCMeta):
    """A metaclass that sees every class that is made."""

    made: ClassVar[list[str]] = []

    def __init__(cls, name: str, *arguments: Any) -> None:
        super().__init__(name, *arguments)
        Counting.made.append(name)


Item = TypeVar("Item")


class Generics(Generic[Item]):
    def __iter__(self) -> Iterator[int]:
        return batches()


class RegisteredPairs(Pairs, Registered):
    """Registered by its base."""


class RegisteredGenerics(Generics[int], Registered):
    """Registered by its base, behind the one of Generic."""


class RegisteredLoader(DataLoader[int], Registered):
    """A DataLoader that is registered."""


class CountedPairs(Pairs, metaclass=Counting):
    """Registered by its metaclass."""


@pytest.mark.parametrize(
    "kind",
    [RegisteredPairs, RegisteredGenerics, lambda: RegisteredLoader(DATA), CountedPairs],
    ids=["its base", "its base behind Generic", "DataLoader", "its metaclass"],
)
def test_no_code_of_the_users_hears_of_the_observing_class(kind: Callable[[], Any]) -> None:
    """A registry of subclasses holds the loader's own class, and what it makes of that is not observed."""
    loader = kind()
    before = list(Registered.known), list(Counting.made)
    give_back = swap_class(loader, lambda this, iterator: iter([7]))
    assert list(loader) == [7]
    assert (Registered.known, Counting.made) == before
    give_back()
    assert list(loader) == DATA


class Slice(Pairs):
    """A loader that makes another one of its own class."""

    def take(self) -> "Slice":
        return type(self)()


def test_another_loader_of_the_same_class_is_not_observed() -> None:
    loader = Slice()
    give_back = swap_class(loader, lambda this, iterator: iter([7]))
    clone = loader.take()
    assert (list(loader), list(clone)) == ([7], DATA)
    give_back()
    assert list(clone) == DATA

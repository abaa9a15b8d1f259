"""Loaders are observed by a class that is exchanged: of all loaders or of none, and given back as it was."""

import copy
import pickle
from abc import ABCMeta
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Generic, TypeVar

import pytest
import torch.utils.data
from torch.utils.data import DataLoader

from countoff._adapter.class_swap import handle_of, swap_class
from countoff.torch import attach

DATA: Any = list(range(4))


def batches() -> Iterator[int]:
    yield from DATA


@pytest.mark.parametrize("refused", [lambda: [1, 2], batches], ids=["list", "generator"])
def test_a_refused_loader_leaves_the_others_as_they_were(refused: Callable[[], Any]) -> None:
    train = DataLoader(DATA, batch_size=2)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"attach\(eval=…\) cannot observe a loader of type (list|generator)"):
            attach(train=train, eval=refused())
        assert type(train) is DataLoader
    handle = attach(train=train, eval=DataLoader(DATA))
    assert len(list(train)) == handle.guard.train_batches == 2
    handle.detach()
    assert type(train) is DataLoader


@pytest.mark.parametrize("source", [batches(), [1, 2], iter([1, 2]), batches], ids=lambda source: type(source).__name__)
def test_a_refused_source_of_batches_is_told_what_works(source: Any) -> None:
    """What cannot be attached as the train loader is refused with the way to count it, and that way works."""
    with pytest.raises(TypeError, match=r"^attach\(train=…\) cannot .* leave out train= .* handle\.counted\(source\)$"):
        attach(train=source)
    with attach() as handle:
        counted = handle.counted(source)
        taken = [counted()] if callable(counted) else list(counted)
        assert len(taken) == handle.guard.train_batches


def test_a_loader_in_two_places_gets_its_own_class_back() -> None:
    loader = DataLoader(DATA, batch_size=2)
    attach(train=loader, eval=loader).detach()
    assert type(loader) is DataLoader


def test_a_second_attach_replaces_the_first() -> None:
    train = DataLoader(DATA, batch_size=2)
    attach(train=train)
    handle = attach(train=train)
    assert type(train).__bases__ == (DataLoader,)
    handle.detach()
    assert type(train) is DataLoader


def test_the_observing_class_has_the_names_of_the_loaders_own() -> None:
    class Loader:
        def __iter__(self) -> Iterator[int]:
            return batches()

    loader = Loader()
    with attach(train=loader):
        assert isinstance(loader, Loader)
        assert type(loader) is not Loader
        for name in ("__name__", "__qualname__", "__module__"):
            assert getattr(type(loader), name) == getattr(Loader, name)
    assert type(loader) is Loader


def test_detach_twice_gives_the_class_back_once() -> None:
    train = DataLoader(DATA, batch_size=2)
    handle = attach(train=train)
    handle.detach()
    other = attach(train=train)
    handle.detach()
    assert type(train) is not torch.utils.data.DataLoader
    other.detach()
    assert type(train) is DataLoader


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


class WithState(Pairs):
    """A loader that can report its state."""

    def state_dict(self) -> dict[str, int]:
        return {"own": 1}


def test_a_method_of_the_loader_is_replaced_where_it_has_one() -> None:
    """The substitute gets the loader's own method; a loader without it gets none."""
    loader, other = WithState(), Pairs()
    methods: Any = {"state_dict": lambda this, own: {**own(), "seen": 2}}
    give_back = [swap_class(each, lambda this, iterator: iterator, methods=methods) for each in (loader, other)]
    assert loader.state_dict() == {"own": 1, "seen": 2}
    assert not hasattr(other, "state_dict")
    for each in give_back:
        each()
    assert loader.state_dict() == {"own": 1}


def test_observers_may_leave_in_any_order() -> None:
    """One that has left sees no pass, and nothing of it stays once all have left; one that has not sees every pass."""
    loader, own = WithState(), WithState
    seen: list[str] = []

    def observer(name: str) -> Callable[[], None]:
        def observe(_: Any, iterator: Iterator[int]) -> Iterator[int]:
            seen.append(name)
            return iterator

        return swap_class(loader, observe, methods={"state_dict": lambda this, state: {**state(), name: 2}})

    first, second = observer("first"), observer("second")
    assert list(loader) == DATA
    assert seen == ["first", "second"]
    first()
    assert list(loader) == DATA
    assert seen == ["first", "second", "second"]
    assert loader.state_dict() == {"own": 1, "second": 2}
    second()
    assert type(loader) is own
    first()
    assert type(loader) is own


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
    give_back = swap_class(loader, lambda this, iterator: iter([7]), handle="handle")
    clone = loader.take()
    assert (list(loader), list(clone)) == ([7], DATA)
    assert (handle_of(loader), handle_of(clone)) == ("handle", None)
    give_back()
    assert list(clone) == DATA

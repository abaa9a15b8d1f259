"""Who follows the passes over loaders of a class."""

from collections.abc import Iterator
from typing import Any

from countoff._adapter.loader_followers import Follower, LoaderFollowers


class Loader:
    def __init__(self, name: str) -> None:
        self.name = name

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def knows(name: str, gives: list[int]) -> Follower:
    def follower(loader: Any, batches: Iterator[Any]) -> Iterator[Any] | None:
        return iter([*gives, *batches]) if loader.name == name else None

    return follower


def test_the_follower_that_knows_a_loader_gives_what_its_loop_gets() -> None:
    """The latest one is asked first; a loader that nobody knows is iterated as it is, and so is each at the end."""
    followers, one, other, unknown = LoaderFollowers(lambda: [Loader]), Loader("one"), Loader("other"), Loader("")
    before = dict(vars(Loader))
    remove = [followers.add(knows("one", [10])), followers.add(knows("other", [20]))]
    assert ([*one], [*other], [*unknown]) == ([10, 0, 1, 2], [20, 0, 1, 2], [0, 1, 2])
    remove.append(followers.add(knows("one", [30])))
    assert [*one] == [30, 0, 1, 2]
    for each in remove:
        each()
    assert [*one] == [*other] == [0, 1, 2]
    assert dict(vars(Loader)) == before
    assert vars(one) == {"name": "one"}

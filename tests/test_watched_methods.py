"""Methods of a framework's classes are replaced while somebody watches them, and given back."""

from collections.abc import Callable
from typing import Any

import pytest

from countoff._adapter.watched_methods import WatchedMethods


class Framework:
    """A class of a framework."""

    def save(self) -> str:
        return "saved"

    def load(self) -> str:
        return "loaded"


class Own(Framework):
    """A subclass of the user's own."""

    def save(self) -> str:
        return f"twice {super().save()}"


@pytest.fixture
def watched() -> WatchedMethods[str]:
    def asking(original: Callable[..., str]) -> Any:
        def method(this: Any) -> str:
            return " ".join([original(this), *methods])

        return method

    methods: WatchedMethods[str] = WatchedMethods({(Framework, "save"): asking, (Framework, "load"): asking})
    return methods


def test_the_frameworks_methods_are_restored_with_the_last_watcher(watched: WatchedMethods[str]) -> None:
    """The latest watcher is asked first; with none left the class is as it was, and nothing was put on its objects."""
    before, thing = dict(vars(Framework)), Framework()
    first, second = watched.add("one"), watched.add("two")
    assert (thing.save(), thing.load()) == ("saved two one", "loaded two one")
    assert Own().save() == "twice saved two one"
    first()
    assert thing.save() == "saved two"
    second()
    assert thing.save() == "saved"
    assert (dict(vars(Framework)), vars(thing)) == (before, {})


def test_a_method_that_other_code_has_wrapped_stays(
    watched: WatchedMethods[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where other code has wrapped countoff's method, that stays in place and has no watcher to ask."""
    remove = watched.add("one")
    ours = Framework.save
    monkeypatch.setattr(Framework, "save", lambda this: f"theirs {ours(this)}")
    assert Framework().save() == "theirs saved one"
    remove()
    assert Framework().save() == "theirs saved"
    assert Framework().load() == "loaded"

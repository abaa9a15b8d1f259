"""What is put on a framework's objects and classes: what it calls, how it goes, and that no copy holds it."""

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from countoff._adapter.hooks import MethodHook, PlacedValue, SharedHooks


class Loop:
    """An object with a method of its class, and one in an attribute."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.end = self._end

    def run(self, number: int, *, twice: bool = False) -> int:
        """Runs."""
        self.heard.append(f"run {number}")
        return 2 * number if twice else number

    def _end(self) -> None:
        self.heard.append("end")


class Own(Loop):
    """A subclass of the user's own."""

    def run(self, number: int, *, twice: bool = False) -> int:
        return 10 * super().run(number, twice=twice)


def hooked(loop: Loop, name: str) -> MethodHook:
    def hear(when: str) -> Callable[..., None]:
        return lambda *arguments, **options: loop.heard.append(f"{when} {arguments} {options}")

    return MethodHook(loop, name, before=hear("before"), after=hear("after"))


def test_the_functions_are_called_around_the_method() -> None:
    loop = Loop()
    hooked(loop, "run")
    assert loop.run(3, twice=True) == 6
    assert loop.heard == ["before (3,) {'twice': True}", "run 3", "after (3,) {'twice': True}"]


def test_what_stands_in_for_the_method_is_given_the_method() -> None:
    loop = Loop()
    hook = MethodHook(loop, "run", instead=lambda run, number: run(number + 1) + 100)
    assert (loop.run(3), loop.heard) == (104, ["run 4"])
    hook.remove()
    assert loop.run(3) == 3


def test_a_removed_hook_leaves_no_trace() -> None:
    loop = Loop()
    attributes = dict(vars(loop))
    hooks = [hooked(loop, "run"), hooked(loop, "end")]
    for hook in [*hooks, *hooks]:
        hook.remove()
    assert vars(loop) == attributes
    loop.end()
    assert loop.heard == ["end"]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_hooks_of_one_method_leave_in_any_order(order: tuple[int, int]) -> None:
    loop = Loop()
    attributes = dict(vars(loop))
    hooks = [MethodHook(loop, "run", instead=lambda run, number, add=add: run(number) + add) for add in (10, 100)]
    assert loop.run(3) == 113
    first, second = order
    hooks[first].remove()
    assert loop.run(3) == 3 + (10, 100)[second]
    hooks[second].remove()
    assert loop.run(3) == 3
    del loop.heard[:]
    assert vars(loop) == attributes


def test_a_hook_that_others_have_wrapped_calls_the_method_alone() -> None:
    loop = Loop()
    hook = hooked(loop, "run")
    inner = loop.run
    vars(loop)["run"] = lambda number: inner(number) + 1
    hook.remove()
    assert loop.run(3) == 4
    assert loop.heard == ["run 3"]


def test_a_hook_that_removes_itself_still_calls_the_method() -> None:
    loop = Loop()
    hook = MethodHook(loop, "run", before=lambda number: hook.remove())
    assert loop.run(3) == 3
    assert "run" not in vars(loop)


def test_a_copy_has_its_own_method_in_the_place_of_the_hook() -> None:
    loop = Loop()
    for name in ("run", "end"):
        hooked(loop, name)
    for copied in (copy.deepcopy(loop), pickle.loads(pickle.dumps(loop))):
        assert copied.run(3) == 3
        copied.end()
        assert copied.heard == ["run 3", "end"]
    assert loop.heard == []


def test_a_hook_of_a_class_is_called_for_its_objects() -> None:
    """With the object as the first argument; nothing is put on the object, and the method tells what it told before."""
    before, loop, heard = dict(vars(Loop)), Own(), list[Any]()
    attributes = dict(vars(loop))

    def heard_of(this: Loop, *_: Any, **__: Any) -> None:
        heard.append(this)

    hook = MethodHook(Loop, "run", before=heard_of, after=lambda *_, **__: heard.append("after"))
    assert loop.run(3) == 30
    assert heard == [loop, "after"]
    assert inspect.isfunction(Loop.run)
    assert (Loop.run.__doc__, inspect.signature(Loop.run)) == ("Runs.", inspect.signature(before["run"]))
    assert type(pickle.loads(pickle.dumps(loop))) is Own
    hook.remove()
    loop.heard.clear()
    assert (dict(vars(Loop)), vars(loop)) == (before, attributes)


def test_a_value_is_given_back() -> None:
    loop = Loop()
    placed = PlacedValue(loop, "heard", ["another"])
    assert loop.heard == ["another"]
    placed.remove()
    assert loop.heard == []


def test_a_value_that_others_have_replaced_stays() -> None:
    loop = Loop()
    placed = PlacedValue(loop, "heard", ["another"])
    loop.heard = ["theirs"]
    placed.remove()
    assert loop.heard == ["theirs"]


def test_a_value_is_given_back_once() -> None:
    """The framework may put the same value there by itself later."""
    loop = Loop()
    placed = PlacedValue(loop, "heard", ["another"])
    placed.remove()
    loop.heard = ["another"]
    placed.remove()
    assert loop.heard == ["another"]


class Framework:
    """A class of a framework."""

    def save(self) -> str:
        return "saved"

    def load(self) -> str:
        return "loaded"


class Program(Framework):
    """A subclass of the user's own."""

    def save(self) -> str:
        return f"twice {super().save()}"


@pytest.fixture
def shared() -> SharedHooks[str]:
    def asking(method: Callable[[Any], str], this: Any) -> str:
        return " ".join([method(this), *hooks])

    hooks: SharedHooks[str] = SharedHooks(lambda: {(Framework, "save"): asking, (Framework, "load"): asking})
    return hooks


def test_the_frameworks_methods_are_restored_with_the_last_watcher(shared: SharedHooks[str]) -> None:
    """The latest watcher is asked first; with none left the class is as it was, and nothing was put on its objects."""
    before, thing = dict(vars(Framework)), Framework()
    first, second = shared.add("one"), shared.add("two")
    assert (thing.save(), thing.load()) == ("saved two one", "loaded two one")
    assert Program().save() == "twice saved two one"
    first()
    assert thing.save() == "saved two"
    second()
    assert thing.save() == "saved"
    assert (dict(vars(Framework)), vars(thing)) == (before, {})


def test_the_last_watcher_may_go_while_another_comes() -> None:
    """As where the garbage collector frees the object of the one before."""
    hooks: SharedHooks[str] = SharedHooks(lambda: methods())

    def asking(method: Callable[[Any], str], this: Any) -> str:
        return " ".join([method(this), *hooks])

    def methods() -> dict[tuple[type, str], Any]:
        removed.pop()()
        return {(Framework, "save"): asking, (Framework, "load"): asking}

    removed = [lambda: None]
    removed.append(hooks.add("one"))
    remove = hooks.add("two")
    assert (Framework().save(), Framework().load()) == ("saved two", "loaded two")
    remove()
    assert Framework().save() == "saved"


def test_many_watchers_are_no_deeper_than_one(shared: SharedHooks[str]) -> None:
    """A study makes hundreds of loops in one process, and may end none of them."""
    watchers = [str(number) for number in range(2000)]
    remove = [shared.add(watcher) for watcher in watchers]
    assert Framework().save().split() == ["saved", *watchers[::-1]]
    for each in remove:
        each()
    assert Framework().save() == "saved"


def test_a_method_that_other_code_has_wrapped_stays(shared: SharedHooks[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where other code has wrapped countoff's method, that stays in place and has no watcher to ask."""
    remove = shared.add("one")
    ours = Framework.save
    monkeypatch.setattr(Framework, "save", lambda this: f"theirs {ours(this)}")
    assert Framework().save() == "theirs saved one"
    remove()
    assert Framework().save() == "theirs saved"
    assert Framework().load() == "loaded"
    shared.add("two")()
    assert Framework().save() == "theirs saved"

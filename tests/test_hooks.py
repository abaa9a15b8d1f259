"""Hooks on the methods of a framework's objects: what they call, how they go, and that no copy holds them."""

import copy
import pickle
from typing import Any

from countoff._lightning.method_hook import FetchTimer, MethodHook


class Loop:
    """An object with a method of its class, and one in an attribute."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.end = self._end

    def run(self, number: int, *, twice: bool = False) -> int:
        self.heard.append(f"run {number}")
        return 2 * number if twice else number

    def _end(self) -> None:
        self.heard.append("end")


def hooked(loop: Loop, name: str) -> MethodHook:
    def before(*arguments: Any, **options: Any) -> None:
        loop.heard.append(f"before {arguments} {options}")

    return MethodHook(loop, name, before=before, after=lambda: loop.heard.append("after"))


def test_the_functions_are_called_around_the_method() -> None:
    loop = Loop()
    hooked(loop, "run")
    assert loop.run(3, twice=True) == 6
    assert loop.heard == ["before (3,) {'twice': True}", "run 3", "after"]


def test_a_removed_hook_leaves_no_trace() -> None:
    loop = Loop()
    attributes = dict(vars(loop))
    hooks = [hooked(loop, "run"), hooked(loop, "end")]
    for hook in [*hooks, *hooks]:
        hook.remove()
    assert vars(loop) == attributes
    loop.end()
    assert loop.heard == ["end"]


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


class Fetcher:
    """As Lightning's: two attributes that are called around each fetch."""

    def __init__(self, calls: list[str]) -> None:
        self._start_profiler = lambda: calls.append("start")
        self._stop_profiler = lambda: calls.append("stop")

    def fetch(self) -> None:
        self._start_profiler()
        self._stop_profiler()


def test_a_fetch_is_timed_until_the_timer_is_removed() -> None:
    calls, seconds = [], []
    fetcher = Fetcher(calls)
    attributes = dict(vars(fetcher))
    timer = FetchTimer(fetcher, seconds.append)
    fetcher.fetch()
    timer.remove()
    fetcher.fetch()
    assert calls == ["start", "stop"] * 2
    assert len(seconds) == 1
    assert seconds[0] >= 0
    assert vars(fetcher) == attributes


def test_a_fetcher_that_does_not_show_its_fetches_is_left_alone() -> None:
    fetcher = object()
    FetchTimer(fetcher, print).remove()
    FetchTimer(None, print).remove()

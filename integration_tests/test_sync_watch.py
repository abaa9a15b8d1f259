"""The watch over what countoff's code on the training thread does to a GPU, with a recorder in place of torch."""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from integration_tests.sync_watch import ERROR, watched, watching

OWN = "/somewhere/countoff/"


class Modes:
    """A job's points in the order in which it passes them, between ``[`` and ``]`` while the mode is countoff's."""

    def __init__(self) -> None:
        self._seen: list[str] = []
        self.see = self._seen.append  # which is no function of Python's, and so belongs to whoever calls it

    def own(self, source: str, **known: Any) -> SimpleNamespace:
        """What a module of countoff with this source defines."""
        scope = {"see": self.see, **known}
        exec(compile(source, f"{OWN}core/module.py", "exec"), scope)
        return SimpleNamespace(**scope)

    def set_mode(self, mode: int) -> None:
        """Stands in for torch's."""
        self.see("[" if mode == ERROR else "]")

    def watch(self, job: Callable[[], object]) -> str:
        """What was seen while a job ran."""
        with watching(self.set_mode, 0, roots=[OWN]):
            job()
        assert self._seen.pop() == "]", "the mode from before is set at the end, whatever happened"
        return " ".join(self._seen)


def test_the_mode_is_that_of_the_running_code():
    """Code of countoff runs in error mode; what calls it and what it calls in the mode that was in force."""
    modes = Modes()
    module = modes.own("def batch():\n see('own')\n loader()\n see('own')", loader=lambda: modes.see("loader"))

    def job() -> None:
        modes.see("job")
        module.batch()
        modes.see("job")

    assert modes.watch(job) == "job [ own ] loader [ own ] job"


def test_a_generator_is_watched_each_time_it_goes_on():
    """The generator through which a loop gets its batches, also where the loop leaves it early, or it fails."""
    modes = Modes()
    module = modes.own(
        """
def follow(batches):
    see('begin')
    try:
        for batch in batches:
            see('got')
            yield batch
            see('back')
    finally:
        see('end')
"""
    )

    def loader(batches: int) -> Iterator[int]:
        for number in range(batches):
            modes.see("fetch")
            yield number
        if batches == 1:
            raise ValueError

    def job() -> None:
        for _ in module.follow(loader(2)):
            modes.see("train")
        modes.see("|")
        with contextlib.suppress(ValueError):
            for _ in module.follow(loader(1)):
                modes.see("train")
        modes.see("|")
        left = module.follow(loader(3))
        next(left)
        left.close()
        modes.see("|")
        left = module.follow(loader(3))
        next(left)
        with contextlib.suppress(KeyError):
            left.throw(KeyError())
        modes.see("|")

    expected = (
        "[ begin ] fetch [ got ] train [ back ] fetch [ got ] train [ back ] [ end ] | "
        "[ begin ] fetch [ got ] train [ back ] [ end ] | "
        "[ begin ] fetch [ got ] [ end ] | [ begin ] fetch [ got ] [ end ] |"
    )
    assert modes.watch(job) == expected


def test_an_exception_ends_the_mode_of_the_code_that_it_leaves():
    modes = Modes()

    def fail() -> None:
        modes.see("loader")
        raise ValueError

    module = modes.own(
        """
def inner():
    see('inner')
    fail()

def batch():
    try:
        inner()
    except ValueError:
        see('caught')
        raise
""",
        fail=fail,
    )

    def job() -> None:
        with contextlib.suppress(ValueError):
            module.batch()
        modes.see("job")

    assert modes.watch(job) == "[ inner ] loader [ caught ] job"


def test_the_mode_from_before_is_set_again_if_the_job_fails():
    modes = Modes()
    with pytest.raises(ZeroDivisionError):
        modes.watch(modes.own("def batch():\n 1 / 0").batch)
    assert modes._seen == ["[", "]", "]"]


def test_recursion_through_foreign_code():
    modes = Modes()
    scope: dict[str, Any] = {}
    module = modes.own("def own(depth):\n see('own')\n if depth: scope['other'](depth)\n see('own')", scope=scope)

    def other(depth: int) -> None:
        modes.see("other")
        module.own(depth - 1)
        modes.see("other")

    scope["other"] = other
    assert modes.watch(lambda: module.own(2)) == "[ own ] other [ own ] other [ own own ] other [ own ] other [ own ]"


def test_the_standard_library_is_as_whoever_calls_it():
    """What `contextlib` or the `repr` of a tensor does for countoff counts as countoff's, for others as theirs."""
    modes = Modes()

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        modes.see("other")
        yield

    module = modes.own(
        """
@contextlib.contextmanager
def context():
    see('own')
    yield

def batch():
    with context():
        other()
    with contextlib.ExitStack() as stack:
        stack.callback(see, 'stack')
        stack.enter_context(foreign())
""",
        contextlib=contextlib,
        other=lambda: modes.see("loader"),
        foreign=context,
    )

    def job() -> None:
        module.batch()
        with contextlib.ExitStack() as stack:
            stack.callback(modes.see, "stack")
            stack.enter_context(module.context())

    assert modes.watch(job) == "[ own ] loader [ ] other [ ] [ stack ] [ own ] [ ] stack"


def test_a_job_is_watched_where_there_is_no_gpu():
    """`watched` returns what a job returns, and how often countoff's own code was entered."""
    from countoff.core.settings import Settings

    def job() -> int:
        return Settings.resolve(weights_every=3).weights_every

    assert watched(job) == (3, 1)

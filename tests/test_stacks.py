"""Where the main thread is, sampled from real frames of it."""

import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from countoff.core.runtime import stacks
from countoff.core.runtime.stacks import Place


def compiled(path: str) -> Callable[..., Any]:
    """A function that calls its argument, and looks as if it stood in that file."""
    scope: dict[str, Any] = {}
    exec(compile("def inside(call):\n    return call()", path, "exec"), scope)
    return scope["inside"]


def sampled() -> Place:
    """A sample of the main thread, which waits in this function, taken by another thread as the watchdog does."""
    found: list[Place] = []
    go_on = threading.Event()

    def sample() -> None:
        go_on.wait(5)
        found.append(stacks.main_thread())

    thread = threading.Thread(target=sample)
    thread.start()
    go_on.set()
    while not found:
        pass  # a call of join() would stand innermost
    thread.join()
    return found[0]


def test_a_thread_in_the_user_s_code_is_in_its_code() -> None:
    place = sampled()
    assert place.state == "code"
    assert place.frames[0].startswith("test_stacks.py:")
    assert place.frames[0].endswith(" in sampled")


def test_a_thread_that_waits_in_the_standard_library_is_shown_where_the_user_s_code_called_it() -> None:
    found: list[Place] = []
    thread = threading.Thread(target=lambda: found.append(stacks.main_thread()))
    thread.start()
    thread.join()
    assert found[0].frames[0].startswith("test_stacks.py:")


def test_a_thread_within_a_real_data_loader_is_in_its_loader() -> None:
    class Samples(Dataset[Any]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> Any:
            places.append(sampled())
            return index

    places: list[Place] = []
    next(iter(DataLoader(Samples())))
    assert places[0].state == "loader"
    assert any(frame.endswith(" in __getitem__") for frame in places[0].frames)


@pytest.mark.parametrize(
    "path",
    [
        "/site-packages/torch/distributed/distributed_c10d.py",
        "/site-packages/torch/autograd/graph.py",
        "/site-packages/torch/autograd/__init__.py",
        "/site-packages/torch/nn/parallel/distributed.py",
        "C:\\site-packages\\torch\\distributed\\distributed_c10d.py",
    ],
)
def test_a_thread_whose_innermost_frames_are_a_wait_of_torch_is_in_a_collective(path: str) -> None:
    assert compiled(path)(sampled).state == "collective"


def test_a_collective_far_below_the_user_s_code_is_none() -> None:
    call = sampled
    for number in range(4):
        call = partial(compiled(f"/home/me/model{number}.py"), call)
    assert compiled("/site-packages/torch/distributed/run.py")(call).state == "code"


def test_the_loader_outranks_a_collective_within_it() -> None:
    collective = partial(compiled("/site-packages/torch/distributed/distributed_c10d.py"), sampled)
    assert compiled("/site-packages/torch/utils/data/dataloader.py")(collective).state == "loader"


def test_frames_are_the_three_innermost_of_the_user_s_own_innermost_first() -> None:
    call = sampled
    for path in ("torch/nn/linear.py", "me/model.py", "lightning/pytorch/fit_loop.py", "me/train.py", "me/main.py"):
        call = partial(compiled(f"/home/{path}"), call)
    assert call().frames[1:] == ("model.py:2 in inside", "train.py:2 in inside")


def test_two_samples_are_equal_until_the_thread_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps() -> Iterator[None]:
        yield
        yield

    moving = steps()
    frame: Any = moving.gi_frame  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(sys, "_current_frames", lambda: {threading.main_thread().ident: frame})
    next(moving)
    first, second = stacks.main_thread(), stacks.main_thread()
    next(moving)
    assert first.token == second.token != stacks.main_thread().token


def test_a_main_thread_that_is_not_there_is_in_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_current_frames", dict)
    assert stacks.main_thread() == Place("code", (), (0, 0))

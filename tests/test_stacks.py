"""Where the main thread is, sampled from its real frames."""

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
    """A function that calls its argument, and whose frame has that file name."""
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
        pass  # a call of join() would be the innermost frame
    thread.join()
    return found[0]


def test_a_thread_in_user_code_is_in_its_code() -> None:
    place = sampled()
    assert place.state == "code"
    assert place.frames[0].startswith("test_stacks.py:")
    assert place.frames[0].endswith(" in sampled")


def test_a_wait_in_the_standard_library_shows_its_caller() -> None:
    """A thread that waits in the standard library is shown at the line of user code that called it."""
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
def test_a_wait_of_torch_is_a_collective(path: str) -> None:
    """A thread whose innermost frames are a wait of torch is in a collective."""
    assert compiled(path)(sampled).state == "collective"


def test_a_frame_of_torch_far_outside_is_no_collective() -> None:
    """A frame of torch that is not among the four innermost does not make the thread wait in a collective."""
    call = sampled
    for number in range(4):
        call = partial(compiled(f"/home/me/model{number}.py"), call)
    assert compiled("/site-packages/torch/distributed/run.py")(call).state == "code"


def test_the_loader_outranks_a_collective_within_it() -> None:
    collective = partial(compiled("/site-packages/torch/distributed/distributed_c10d.py"), sampled)
    assert compiled("/site-packages/torch/utils/data/dataloader.py")(collective).state == "loader"


def test_frames_are_the_three_innermost_of_user_code() -> None:
    """The frames shown are the three innermost of the user's own code, innermost first."""
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


def test_a_missing_main_thread_has_no_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_current_frames", dict)
    assert stacks.main_thread() == Place("code", (), (0, 0))


@pytest.mark.parametrize("registered", ["/plugins/countoff/fetching.py", "C:\\plugins\\countoff\\fetching.py"])
def test_a_registered_file_is_a_loader(registered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread in a file that an adapter has registered is in its loader; before that it is in its code."""
    monkeypatch.setattr(stacks, "_loaders", list(stacks._loaders))
    fetch = compiled(registered)
    assert fetch(sampled).state == "code"
    stacks.register_loader_file(registered)
    assert fetch(sampled).state == "loader"


def test_a_file_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_loaders", list[str]())
    for _ in range(2):
        stacks.register_loader_file("/plugins/countoff/fetching.py")
    assert stacks._loaders == ["/plugins/countoff/fetching.py"]

"""Where the main thread is, sampled from its real frames."""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from countoff.core.session.liveness import stacks
from countoff.core.session.liveness.stacks import Place
from tests.paths import SOURCE_ROOTS


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


def test_a_place_tells_where_it_is_in_the_framework_that_the_users_line_has_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of each of its files the innermost frame. Torch's frames are none, nor those outside of the user's line."""
    installed = "/lightning/.venv/lib/site-packages"
    files = [f"{installed}/torch/distributed/distributed_c10d.py", contextlib.__file__]
    files += [f"{installed}/lightning/{name}.py" for name in ("ddp", "result", "result", "loop", "trainer")]
    files += ["/home/me/train.py", f"{installed}/lightning/launcher.py"]
    lines = [f'  File "{file}", line {line} in call\n' for line, file in enumerate(files)]
    stack = "".join(["Stack (most recent call first):\n", *lines])
    monkeypatch.setattr(stacks, "write_main", lambda file, *_: os.write(file, stack.encode()))
    place = stacks.main_thread()
    assert place.frames == ("train.py:7 in call",)
    assert (place.framework, place.inside) == (
        "lightning",
        ("ddp.py:2 in call", "result.py:3 in call", "loop.py:5 in call"),
    )


@pytest.fixture(params=["the main thread alone", "all threads"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way in which a stack is written; the first one exists in Python 3.11 and 3.12."""
    if request.param == "all threads":
        monkeypatch.setattr(stacks, "write_main", None)
    elif stacks.write_main is None:
        pytest.skip("this Python does not have it")
    return request.param


def test_both_ways_find_the_same(way: str) -> None:
    place = compiled("/site-packages/torch/distributed/distributed_c10d.py")(sampled)
    assert place.state == "collective"
    assert place.stack[0].startswith("test_stacks.py:")
    assert place.stack[0].endswith(" in sampled")
    assert place.stack[1] == "torch/distributed/distributed_c10d.py:2 in inside"
    assert stacks.main_thread().stack[0].startswith("test_stacks.py:")  # the sampling thread itself


def test_the_innermost_of_many_frames_remain(way: str) -> None:
    def deep(depth: int) -> Place:
        return deep(depth - 1) if depth else sampled()

    place = deep(150)
    assert len(place.stack) == 64
    assert [frame.rpartition(" in ")[2] for frame in place.stack[:3]] == ["sampled", "deep", "deep"]


def test_a_file_may_have_any_name(way: str) -> None:
    name = 'üben \U0001f600, line 3 in "a".py'
    place = compiled(f"/home/me/{name}")(sampled)
    assert place.stack[1] == f"{name}:2 in inside"


def test_two_samples_are_equal_until_the_thread_has_moved(way: str) -> None:
    """To another line: what moves within one looks as if it stood still."""
    first, second = (sampled() for _ in range(2))
    assert first.token == second.token
    third = sampled()
    assert first.token != third.token


def test_the_main_thread_of_a_forked_process_may_be_another_one() -> None:
    """What was remembered of the main thread before is not used there: it is gone."""
    code = """if True:
        import os, threading
        from countoff.core.session.liveness import stacks

        def fork():
            child = os.fork()
            if child == 0:
                os._exit(stacks.main_thread().stack[0].endswith(" in fork"))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1

        forking = threading.Thread(target=fork)
        forking.start()
        forking.join()
        fork()
        """
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("why", ["more threads than a dump has", "no file descriptor", "no global interpreter lock"])
def test_a_stack_that_cannot_be_had_is_empty(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "write_main", None)
    done = threading.Event()
    threads = [threading.Thread(target=done.wait) for _ in range(101 if why.startswith("more threads") else 0)]
    for thread in threads:
        thread.start()
    if why == "no file descriptor":
        monkeypatch.setattr(os, "memfd_create", _refuse, raising=False)
        monkeypatch.setattr(stacks.tempfile, "mkstemp", _refuse)
    elif why == "no global interpreter lock":
        monkeypatch.setattr(sys, "version_info", (3, 13))
        monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    place = stacks.main_thread()
    done.set()
    for thread in threads:
        thread.join()
    assert place == Place("code", ())


def _refuse(*args: Any, **options: Any) -> Any:
    raise OSError(24, "Too many open files")


def test_without_files_in_memory_a_temporary_one_is_used(
    way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on macOS; it has no name, so nothing is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delattr(os, "memfd_create")
    assert stacks.main_thread().frames[0].startswith("test_stacks.py:")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    "heading",
    [
        "Current thread 0x00007f0000000010 (most recent call first):",
        "Thread 0x00007f0000000010 (most recent call first):",
        "Thread 0x00007f0000000010 [MainThread] (most recent call first):",  # Python 3.14
    ],
)
def test_a_thread_is_found_by_its_identity(heading: str) -> None:
    other = 'Thread 0x00007f0000000011 [0x00007f0000000010] (most recent call first):\n  File "b.py", line 1 in other\n'
    own = '  File "a.py", line 1 in own\n'
    assert stacks.lines_below("0x00007f0000000010", f"{other}\n{heading}\n{own}\n{other}") == own


def test_frames_of_other_threads_are_not_followed_from_python() -> None:
    """Between two steps the thread may have left them, and the interpreter may crash."""
    unsafe = re.compile(r"_current_frames|_current_exceptions|walk_stack|\bf_back\b")
    files = [file for root in SOURCE_ROOTS for file in root.rglob("*.py")]
    assert len(files) > 100
    assert [file.name for file in files if unsafe.search(file.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("registered", ["/plugins/countoff/fetching.py", "C:\\plugins\\countoff\\fetching.py"])
def test_a_registered_file_is_a_loader(registered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread in a file that an adapter has registered is in its loader; before that it is in its code."""
    monkeypatch.setattr(stacks, "loaders", list(stacks.loaders))
    fetch = compiled(registered)
    assert fetch(sampled).state == "code"
    stacks.register_loader_file(registered)
    assert fetch(sampled).state == "loader"


def test_a_file_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "loaders", list[str]())
    for _ in range(2):
        stacks.register_loader_file("/plugins/countoff/fetching.py")
    assert stacks.loaders == ["/plugins/countoff/fetching.py"]

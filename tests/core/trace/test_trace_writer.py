"""The thread of the trace: what it writes, and that nobody waits for a file system that fails or does not answer."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from countoff.core.trace import writer as module
from countoff.core.trace.writer import Line, Writer, join, leave


class Silent:
    """A source that has nothing to say by itself; `looked` is set once the writer has looked at it."""

    def __init__(self, lines: Sequence[Line] = ()) -> None:
        self.looked = threading.Event()
        self._lines = list(lines)

    def look(self, now: float) -> list[Line]:
        self.looked.set()
        lines, self._lines = self._lines, []
        return lines


class Traced:
    """A trace that a test writes.

    Attributes:
        directory: Its directory, which nobody has made.
        warnings: Why it has ended early.
        warned: Set once it has.
    """

    def __init__(self, tmp_path: Path) -> None:
        self.directory = tmp_path / "runs" / "today"
        self.warnings: list[str] = []
        self.warned = threading.Event()
        self.source = Silent()

    def warn(self, why: str) -> None:
        self.warnings.append(why)
        self.warned.set()

    def join(self, source: Silent | None = None) -> Writer:
        return join(source or self.source, str(self.directory), 3, self.warn)

    def leave(self, writer: Writer, source: Silent | None = None) -> None:
        leave(source or self.source, writer)

    def lines(self, name: str = "rank-00003.jsonl") -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / name).read_text().splitlines()]

    def numbers(self, name: str = "rank-00003.jsonl") -> list[int]:
        return [line["n"] for line in self.lines(name)]


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[Traced]:
    yield Traced(tmp_path)
    module.failed.clear()
    left = dict(module.writers)
    module.writers.clear()  # the tests after this one do not fail as well
    assert not left, "a writer is left over"


def wait_until(done: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def failing(number: int) -> Callable[..., Any]:
    def fail(*args: object, **more: object) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def test_lines_are_appended_in_their_order(traced: Traced) -> None:
    writer = traced.join()
    for number in range(100):
        writer.put({"n": number})
    writer.put(lambda: [{"n": 100}, {"n": 101}])
    traced.leave(writer)
    assert traced.numbers() == list(range(102))
    assert traced.warnings == []


def test_a_source_is_asked_for_lines(traced: Traced) -> None:
    source = Silent([{"n": 7}])
    writer = traced.join(source)
    assert source.looked.wait(10)
    traced.leave(writer, source)
    assert traced.numbers() == [7]


def test_all_fits_of_a_process_share_a_thread_that_ends_with_the_last(traced: Traced) -> None:
    other = Silent()
    writer, again = traced.join(), traced.join(other)
    assert writer is again
    assert threads() == 1
    traced.leave(writer)
    writer.put({"n": 1})
    traced.leave(writer, other)
    assert threads() == 0
    assert traced.numbers() == [1]


def threads() -> int:
    return sum(thread.name == "countoff trace" for thread in threading.enumerate())


def test_a_new_process_appends_behind_a_torn_line(traced: Traced) -> None:
    """A process that was killed in the middle of a line costs that line, and not the next one."""
    traced.directory.mkdir(parents=True)
    path = traced.directory / "rank-00003.jsonl"
    path.write_text('{"n":1}\n{"n":')
    writer = traced.join()
    writer.put({"n": 2})
    traced.leave(writer)
    assert path.read_text() == '{"n":1}\n{"n":\n{"n":2}\n'


def test_a_file_past_its_limit_is_renamed(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 100)
    for first in (0, 20):
        writer = traced.join()
        for number in range(first, first + 20):
            writer.put(lambda number=number: [{"n": number}])
            writer.put(lambda: [])  # each line is written by itself
        traced.leave(writer)
    names = ["rank-00003.1.jsonl", "rank-00003.2.jsonl", "rank-00003.3.jsonl", "rank-00003.jsonl"]
    assert sorted(path.name for path in traced.directory.iterdir()) == names
    assert [number for name in names for number in traced.numbers(name)] == list(range(40))


def test_what_json_cannot_hold_becomes_text(traced: Traced) -> None:
    writer = traced.join()
    writer.put({"n": Path("x"), "text": "ü \ud800 \x1b"})
    traced.leave(writer)
    assert traced.lines() == [{"n": "x", "text": "ü \ud800 \x1b"}]


@pytest.mark.parametrize("function", ["makedirs", "open", "write"])
def test_a_file_system_that_fails_ends_the_trace_with_one_warning(
    function: str, traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.os, function, failing(errno.EROFS))
    for _ in range(2):  # the second fit of the process says nothing
        writer = traced.join()
        writer.put({"n": 1})
        assert traced.warned.wait(10)
        writer.put({"n": 2})
        traced.leave(writer)
    monkeypatch.undo()
    assert traced.warnings == ["Read-only file system"]


def test_a_disk_that_fills_up_ends_the_trace(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk takes a part of a line before it is full; a reader skips that part."""
    writer, write, left = traced.join(), os.write, [20]

    def write_what_fits(file: int, text: bytes) -> int:
        taken = min(left[0], len(text), 6)
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= taken
        return write(file, text[:taken])

    monkeypatch.setattr(module.os, "write", write_what_fits)
    for number in range(10):
        writer.put({"n": number})
    assert traced.warned.wait(10)
    traced.leave(writer)
    monkeypatch.undo()
    assert traced.warnings == ["No space left on device"]
    assert (traced.directory / "rank-00003.jsonl").read_bytes() == b'{"n":0}\n{"n":1}\n{"n"'


def test_a_directory_that_vanishes_ends_the_trace(traced: Traced) -> None:
    writer = traced.join()
    writer.put({"n": 1})
    file = traced.directory / "rank-00003.jsonl"  # the writer makes it a moment after its directory
    wait_until(lambda: file.exists() and bool(file.stat().st_size))
    shutil.rmtree(traced.directory)
    writer.put({"n": 2})
    assert traced.warned.wait(10)
    traced.leave(writer)
    assert traced.warnings == ["its file was removed"]
    assert not traced.directory.exists()


def test_a_directory_that_is_a_file_ends_the_trace(traced: Traced) -> None:
    traced.directory.parent.mkdir(parents=True)
    traced.directory.write_text("not a directory")
    writer = traced.join()
    assert traced.warned.wait(10)
    traced.leave(writer)
    assert traced.warnings == ["File exists"]


def test_nobody_waits_for_a_file_system_that_does_not_answer(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, write = threading.Event(), os.write
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(module, "MOST_LINES", 50)
    monkeypatch.setattr(module.os, "write", lambda file, text: answers.wait(60) and write(file, text))
    writer = traced.join()
    began = time.monotonic()
    writer.put({"n": 0})
    wait_until(lambda: len(writer.queue) == 0)
    for number in range(1, 1000):
        writer.put({"n": number})
    assert len(writer.queue) == 50
    traced.leave(writer)
    assert time.monotonic() - began < 5
    answers.set()
    writer.thread.join(10)
    assert not writer.thread.is_alive()
    assert traced.numbers() == [0], "an abandoned trace is not written any more"
    assert traced.warnings == ["the file system does not answer"]


_HOLD = """
import sys
from countoff.core.trace import writer
class Source:
    def look(self, now): return ()
source = Source()
trace = writer.join(source, sys.argv[1], 3, print)
trace.put({"n": 1})
trace.put(lambda: [print("written", flush=True)][:0])
sys.stdin.read()
writer.leave(source, trace)
"""


def test_two_jobs_at_the_same_time_do_not_share_a_file(traced: Traced) -> None:
    command = [sys.executable, "-c", _HOLD, str(traced.directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "written\n"
        writer = traced.join()
        writer.put({"n": 2})
        assert traced.warned.wait(10)
        traced.leave(writer)
        other.communicate("", timeout=10)
    assert other.returncode == 0
    assert traced.numbers() == [1]
    assert traced.warnings == ["another process writes its trace there; give each job a directory of its own"]


def test_a_process_that_was_forked_off_does_not_keep_the_file(traced: Traced) -> None:
    """The workers of a loader live on after the fit, and for a while after their parent was killed."""
    go = threading.Event()
    writer = traced.join()
    writer.put(lambda: (go.set(), ())[1])
    assert go.wait(10)
    child = os.fork()
    if not child:
        signal.pause()
    try:
        traced.leave(writer)
        again = [sys.executable, "-c", _HOLD, str(traced.directory)]
        found = subprocess.run(again, input="", capture_output=True, text=True, timeout=20, check=True)
        assert found.stdout == "written\n"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert traced.numbers() == [1]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_written_to(
    number: int, traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.fcntl, "lockf", failing(number))
    writer = traced.join()
    writer.put({"n": 1})
    traced.leave(writer)
    assert traced.numbers() == [1]
    assert traced.warnings == []


def test_a_link_is_not_followed(traced: Traced) -> None:
    traced.directory.mkdir(parents=True)
    other = traced.directory / "other"
    other.touch()
    (traced.directory / "rank-00003.jsonl").symlink_to(other)
    writer = traced.join()
    writer.put({"n": 1})
    assert traced.warned.wait(10)
    traced.leave(writer)
    assert other.read_text() == ""


def test_a_file_system_that_does_not_answer_is_tried_once(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fit would wait for it again, and leave a thread behind."""
    answers, opened = threading.Event(), os.open
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(module.os, "open", lambda *how: answers.wait(60) and opened(*how))
    first = traced.join()
    traced.leave(first)
    for _ in range(3):
        began = time.monotonic()
        writer = traced.join()
        writer.put({"n": 1})
        assert threads() == 1
        traced.leave(writer)
        assert time.monotonic() - began < 0.1
    answers.set()
    first.thread.join(10)
    assert threads() == 0
    assert traced.warnings == ["the file system does not answer"]


def test_dropped_lines_are_counted(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, write = threading.Event(), os.write
    monkeypatch.setattr(module, "MOST_LINES", 50)
    monkeypatch.setattr(module.os, "write", lambda file, text: answers.wait(60) and write(file, text))
    writer = traced.join()
    writer.put({"n": 0})
    wait_until(lambda: len(writer.queue) == 0)
    for number in range(1, 100):
        writer.put({"n": number})
    answers.set()
    traced.leave(writer)
    lines = traced.lines()
    assert [line["n"] for line in lines if "n" in line] == list(range(51))
    assert [line["lines"] for line in lines if line.get("k") == "dropped"] == [49]

"""The abort of communicators, on groups that stand in for those of NCCL, and on a real one of gloo."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from countoff.core.ending import nccl as module
from countoff.core.ending.nccl import Abort, abort_communicators
from countoff.core.session.liveness import collectives

ABORTS = pytest.mark.skipif(torch.__version__ < "2.6", reason="ProcessGroup.abort is new in torch 2.6")


def group(abort: Callable[[], object]) -> Any:
    """A process group whose abort does that."""
    return SimpleNamespace(abort=abort)


def finish(abort: Abort) -> None:
    for thread in abort.threads:
        thread.join(30)


def test_all_groups_are_aborted_beside_one_another() -> None:
    """Each waits here until all others have begun: one after the other would not end."""
    together = threading.Barrier(3, timeout=30)
    met: list[int] = []
    abort = Abort([group(lambda: met.append(together.wait())) for _ in range(3)])
    finish(abort)
    assert sorted(met) == [0, 1, 2]
    assert not abort.under_way


def test_a_group_that_refuses_does_not_keep_the_others() -> None:
    aborted = threading.Event()
    abort = Abort([group(lambda: 1 / 0), group(aborted.set)])
    finish(abort)
    assert aborted.is_set()


def test_an_abort_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now, forever = [100.0], threading.Event()
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    abort = Abort([group(forever.wait)])
    assert abort.under_way
    now[0] += 16
    assert not abort.under_way
    forever.set()
    finish(abort)


def test_groups_of_gloo_have_no_communicator_to_abort(real_group: None) -> None:
    assert list(collectives.process_groups().values()) == ["0"]
    assert abort_communicators() is None


@ABORTS
def test_a_group_that_also_has_nccl_is_aborted(real_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no backend named, torch makes a group of gloo and NCCL. The abort of the real group runs."""
    monkeypatch.setattr(module.dist, "get_backend_config", lambda _: "cpu:gloo,cuda:nccl")
    abort = abort_communicators()
    assert abort is not None
    assert len(abort.threads) == 1
    finish(abort)
    assert not abort.under_way
    assert dist.is_initialized()


@ABORTS
def test_torch_offers_the_abort(real_group: None) -> None:
    """For a group of gloo it does nothing. Without it nothing is aborted, and nothing said."""
    for each in collectives.process_groups():
        each.abort()


def test_a_torch_that_cannot_abort_is_left_alone(real_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.dist, "get_backend_config", lambda _: "nccl")
    monkeypatch.setattr(module.dist, "ProcessGroup", object)
    assert abort_communicators() is None


def test_a_process_that_can_start_no_thread_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(module.threading.Thread, "start", refuse)
    assert not Abort([group(lambda: None)]).under_way


def test_without_a_group_there_is_nothing_to_abort() -> None:
    assert abort_communicators() is None


ENDS = """
import atexit, ctypes, sys
from countoff.core.ending import nccl

class Group:
    def __del__(self):
        print("the group waits for its watchdog")

libc = ctypes.CDLL(None)
libc.on_exit(libc.abort, None)  # as a C library that finds its threads running
group = Group()
nccl.process_groups = lambda: {group: "0"}
nccl.dist.get_backend_config = lambda group: sys.argv[1]
nccl.skip_torch_cleanup()
nccl.skip_torch_cleanup()
atexit.register(print, "an exit function")
libc.fopen.restype = ctypes.c_void_p
libc.fputs(b"text", ctypes.c_void_p(libc.fopen(b"of a C library", b"w")))
unclosed = open("unclosed", "w")
unclosed.write("text")
sys.exit(5)
"""


@pytest.mark.parametrize(
    ("backends", "code", "says"),
    [
        ("cpu:gloo,cuda:nccl", 5, "an exit function\n"),
        ("cpu:gloo", -6, "an exit function\nthe group waits for its watchdog\n"),
    ],
)
def test_a_process_skips_the_cleanup_of_torch(tmp_path: Path, backends: str, code: int, says: str) -> None:
    """It keeps its exit code, and what Python and C libraries have written. Without NCCL, nothing is skipped."""
    how: dict[str, Any] = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 60}
    run = subprocess.run([sys.executable, "-W", "ignore::ResourceWarning", "-c", ENDS, backends], **how)
    assert (run.returncode, run.stdout, run.stderr) == (code, says, "")
    assert (tmp_path / "unclosed").read_text() == "text"
    assert (tmp_path / "of a C library").read_text() == ("text" if code == 5 else "")

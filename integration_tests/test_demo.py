"""`countoff demo` shows what it announces, with real ranks, and leaves no process, and no file but its trace."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from countoff.demo import show as shown
from countoff.demo.recorder import AllReduceRecorder
from countoff.demo.records import AllReduce, excerpt, innermost
from countoff.demo.show import Show
from countoff.demo.traces import TraceDirError, trace_directory
from integration_tests.harness import NAME_LOOKUPS, python_path

DEADLINE_SECONDS = 240.0  # most of it is one import of Lightning on a busy machine


@contextlib.contextmanager
def running(directory: Path, *options: str, path: str = "") -> "Iterator[subprocess.Popen[str]]":
    """The demo, in a process of its own that has this directory for its temporary files; killed in the end."""
    own = {"PYTHONPATH": os.pathsep.join(filter(None, [path, python_path()])), "TMPDIR": str(directory)}
    environment = {**os.environ, **own, "COUNTOFF": "0", **NAME_LOOKUPS}
    command = [sys.executable, "-m", "countoff.cli.__main__", "demo", *options]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
        preexec_fn=accept_interrupts,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def accept_interrupts() -> None:
    """Undoes what a shell does to a process in the background: it would start the demo with interrupts ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def processes_of(directory: Path) -> list[int]:
    """Processes whose temporary files go into or below this directory: the demo's, all of them."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            # A zombie, which waits for somebody else to take note of its end, has no environment.
            variables = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(variable.startswith(f"TMPDIR={directory}".encode()) for variable in variables):
            found.append(int(process.name))
    return found


def assert_no_process(directory: Path) -> None:
    patience = time.monotonic() + 5
    while processes_of(directory) and time.monotonic() < patience:
        time.sleep(0.05)
    assert processes_of(directory) == []


def test_the_demo_drifts_is_named_and_trains_when_corrected_or_stopped(tmp_path_factory):
    """The demo shows the drift, the verdict, the corrected training and the uneven one, and leaves one trace."""
    tmp_path, traces = tmp_path_factory.mktemp("temporary"), tmp_path_factory.mktemp("traces") / "new"
    with running(tmp_path, "--ranks", "2", "--seconds-before-cut", "2", "--trace-dir", str(traces)) as demo:
        output, _ = demo.communicate(timeout=DEADLINE_SECONDS)
    assert demo.returncode == 0, output
    # 7 shards of 205 digits, four to rank 0 and three to rank 1, in batches of 32.
    assert "rank 0: epoch 0 batch 21 + rank 1: epoch 1 batch 1" in output, output
    assert "Lightning was at" in output
    assert "rank 1 ran out of data after 20 batches of train epoch 0" in output, output
    assert output.count("countoff: UnevenBatches: ") == 1
    assert "Each of the other ranks printed its first line." in output
    accuracy = re.search(r"no verdict, and ([\d.]+)% of the held-out digits", output)
    assert accuracy is not None, output
    assert float(accuracy[1]) >= 90
    assert re.search(r"batches_per_epoch +unknown \(inf\) +23\b", output), output
    assert output.count("countoff: Truncated: train epoch 0 stopped on every rank after 20 batches") == 1, output
    assert "120 all-reduces, each of the same batch on every rank." in output
    finished = re.search(r"finished, with 6 of 26 batches left on every other rank, and ([\d.]+)% correct", output)
    assert finished is not None, output
    assert float(finished[1]) >= 90
    assert_no_process(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert {"rank-00000.jsonl", "rank-00001.jsonl", "incident", "report.html"} == {
        each.name for each in traces.iterdir()
    }
    assert output.splitlines()[-1] == str(traces / "report.html")
    assert (
        "a lane for each rank, rank 1 first; the line where the counts begin to differ (20 ≠ 21 fetched batches); and "
        "the verdict" in (" ".join(output.split()))
    )
    assert "rank 1 ran out of data after 20 batches of train epoch 0" in (traces / "report.html").read_text("utf-8")


def test_the_temporary_directory_of_a_trace_stays_unless_the_demo_fails(tmp_path, monkeypatch):
    """A user finds the trace after the demo; a demo that fails or is interrupted leaves none."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with contextlib.suppress(KeyboardInterrupt), trace_directory(None) as directory:
        (directory / "rank-00000.jsonl").touch()
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with trace_directory(None) as directory:
        (directory / "rank-00000.jsonl").touch()
    assert [path.name for path in tmp_path.glob("*/*")] == ["rank-00000.jsonl"]


def test_a_directory_of_the_user_is_not_mixed_with_the_trace(tmp_path):
    """A directory with files is refused, and a path that is no directory; an empty one stays after a failure."""
    (tmp_path / "mine").touch()
    with pytest.raises(TraceDirError, match="is not empty"), trace_directory(str(tmp_path)):
        pass
    with pytest.raises(TraceDirError, match="cannot be used: File exists"), trace_directory(str(tmp_path / "mine")):
        pass
    (tmp_path / "mine").unlink()
    with pytest.raises(KeyboardInterrupt), trace_directory(str(tmp_path)):
        raise KeyboardInterrupt
    assert tmp_path.is_dir()


def test_in_a_pipe_the_demo_counts_seconds_while_it_waits(monkeypatch, capsys):
    """Nobody who waits for a slow import must think that it hangs."""
    monkeypatch.setattr(shown, "SIGN_SECONDS", 0.05)
    with Show().waiting("importing"):
        time.sleep(0.5)
    out, err = capsys.readouterr()
    assert out == "… importing\n"
    assert err.splitlines()[:2] == ["… 0 s", "… 0 s"]
    time.sleep(0.2)
    assert capsys.readouterr().err == ""


IMPORTING, TRAINING = "*/server.pid", "*/without/rank0.all_reduces"
"""Files in the demo's temporary files which appear when it begins to."""


@pytest.mark.parametrize(
    ("moment", "number", "exit_code"),
    [
        (IMPORTING, signal.SIGINT, 130),
        (IMPORTING, signal.SIGTERM, 143),
        pytest.param(TRAINING, signal.SIGINT, 130, marks=pytest.mark.nightly),
        (TRAINING, signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_a_demo_that_is_interrupted_or_killed_leaves_no_process(tmp_path, moment, number, exit_code):
    """An interrupted demo ends its processes and removes its files; the processes end with a killed one, too."""
    with running(tmp_path) as demo:
        patience = time.monotonic() + DEADLINE_SECONDS
        while not list(tmp_path.glob(moment)) and time.monotonic() < patience:
            time.sleep(0.05)
        assert len(processes_of(tmp_path)) >= (6 if moment == TRAINING else 2)
        if number == signal.SIGINT:
            os.killpg(demo.pid, number)  # as a terminal does
        else:
            demo.send_signal(number)
        output, _ = demo.communicate(timeout=60)
    assert demo.returncode == exit_code, output
    assert "Traceback" not in output
    assert_no_process(tmp_path)
    if number != signal.SIGKILL:
        assert list(tmp_path.iterdir()) == []


def test_an_interrupt_of_the_terminal_never_reaches_the_process_that_starts_the_ranks(tmp_path):
    """It would print a traceback of its own, if it had not got as far as its log."""
    with running(tmp_path) as demo:
        patience = time.monotonic() + DEADLINE_SECONDS
        while not (pids := [text for path in tmp_path.glob(IMPORTING) if (text := path.read_text())]):
            assert time.monotonic() < patience
            time.sleep(0.05)
        status = Path("/proc", pids[0], "status").read_text()
        demo.send_signal(signal.SIGINT)
        demo.communicate(timeout=60)
    blocked = re.search(r"SigBlk:\t(\w+)", status)
    assert blocked is not None, status
    assert int(blocked[1], 16) & 1 << (signal.SIGINT - 1)


PRESSES_AGAIN_AND_AGAIN = """
import os, signal, subprocess, time
while not os.path.exists(os.environ["TMPDIR"] + "/server.pid"):
    time.sleep(0.01)
own = os.getpid()
command = f"sleep 0.1; while kill -INT {own}; do sleep 0.002; done"
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
subprocess.Popen(["sh", "-c", command], **quiet)
exec("while True: os.kill(own, signal.SIGINT)")
"""


def test_a_demo_that_is_interrupted_again_and_again_cleans_up_and_ends_with_its_exit_code(tmp_path_factory):
    """The first Ctrl-C comes in a text that is executed, as where a named tuple is made; others until its very end."""
    tmp_path, impatient = tmp_path_factory.mktemp("temporary"), tmp_path_factory.mktemp("impatient")
    (impatient / "sklearn.py").write_text(PRESSES_AGAIN_AND_AGAIN)
    with running(tmp_path, path=str(impatient)) as demo:
        output, _ = demo.communicate(timeout=DEADLINE_SECONDS)
    assert demo.returncode == 130, output
    assert output.count("countoff: interrupted; every process of the demo has been ended") == 1, output
    assert "Traceback" not in output
    assert_no_process(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", ["ImportError", "RuntimeError"])
def test_a_job_that_cannot_be_imported_ends_the_demo_with_the_reason(tmp_path_factory, error):
    """No rank is started that could not train."""
    tmp_path, broken = tmp_path_factory.mktemp("temporary"), tmp_path_factory.mktemp("broken")
    (broken / "lightning.py").write_text(f"raise {error}('of a broken package')")
    with running(tmp_path, path=str(broken)) as demo:
        output, _ = demo.communicate(timeout=DEADLINE_SECONDS)
    assert demo.returncode == 1, output
    assert "countoff: the process that starts the ranks has died" in output
    assert f"{error}: of a broken package" in output
    assert "1. The job without countoff" not in output
    assert_no_process(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_all_reduce_that_was_cut_off_is_not_recorded(tmp_path):
    """Where the batch of a rank is 0 in what came back, its gradients are missing, too."""
    recorder = AllReduceRecorder(tmp_path)
    ddp = SimpleNamespace(register_comm_hook=lambda state, hook: None)
    recorder.on_train_start(SimpleNamespace(global_rank=0, strategy=SimpleNamespace(model=ddp)), None)
    for returned in ([0, 7, 0, 0], [0, 8, 1, 2]):
        recorder.on_train_batch_start(SimpleNamespace(current_epoch=0), None, None, returned[1] - 1)
        recorder.record(torch.tensor(returned, dtype=torch.float32))
    recorder._file.close()
    (line,) = (tmp_path / "rank0.all_reduces").read_text().splitlines()
    assert json.loads(line) == {"own": [0, 8], "averaged": [[0, 8], [1, 2]]}


def test_a_meeting_names_the_ranks_at_each_batch():
    """A meeting prints which ranks are at which batch."""
    meeting = AllReduce(19, ((0, 19), (0, 19), (1, 1)))
    assert str(meeting) == "ranks 0, 1: epoch 0 batch 19 + rank 2: epoch 1 batch 1"
    assert meeting.mixed
    assert meeting.epoch_count == 2


def test_excerpt_meetings_are_those_around_the_change():
    """The last meeting at one batch, the first mixed ones and the last one are shown."""
    like = [AllReduce(number, ((0, number), (0, number))) for number in (1, 2)]
    mixed = [AllReduce(number, ((0, number), (1, number))) for number in (3, 4, 5, 6, 7)]
    assert [meeting.number for meeting in excerpt([*like, *mixed])] == [2, 3, 4, 5, 7]
    assert [meeting.number for meeting in excerpt(like)] == [2]
    assert [meeting.number for meeting in excerpt(mixed[:1])] == [3]


def test_the_innermost_line_is_that_of_the_thread_that_trains():
    """The line shown is the innermost one of the thread that trains."""
    stacks = """Thread 0x01 (most recent call first):
  File "/x/lib/other.py", line 1 in wait

Current thread 0x02 (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 4627 in barrier
  File "/x/lightning/fabric/utilities/distributed.py", line 213 in _sync_ddp
  File "/x/lightning/pytorch/callbacks/model_checkpoint.py", line 1005 in file_exists
  File "/x/countoff/demo/job.py", line 110 in train
"""
    assert innermost(stacks) == ("distributed_c10d.py:4627 in barrier", "model_checkpoint.py:1005 in file_exists")
    assert innermost("") == ("", "")

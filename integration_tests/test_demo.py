"""`countoff demo` shows what it announces, with real ranks, and leaves no process and no file but the trace."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration_tests.harness import NAME_LOOKUPS, python_path

DEADLINE_SECONDS = 400.0  # most of it is one import of Lightning on a busy machine


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
    """Processes whose temporary files go into this directory: the demo's, all of them."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            # A zombie, which waits for somebody else to take note of its end, has no environment.
            variables = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"TMPDIR={directory}".encode() in variables:
            found.append(int(process.name))
    return found


def assert_no_process(directory: Path) -> None:
    patience = time.monotonic() + 5
    while processes_of(directory) and time.monotonic() < patience:
        time.sleep(0.05)
    assert processes_of(directory) == []


def test_the_demo_hangs_is_named_and_trains_when_corrected_or_stopped(tmp_path_factory):
    """The demo shows the hang, the verdict, the corrected training and the uneven one, and leaves one trace."""
    tmp_path, trace = tmp_path_factory.mktemp("temporary"), tmp_path_factory.mktemp("traces") / "new"
    with running(tmp_path, "--trace-dir", str(trace)) as demo:
        output, _ = demo.communicate(timeout=DEADLINE_SECONDS)
    assert demo.returncode == 0, output
    # 47 files of one batch: 12 for each rank but 11 for the last.
    rows = re.findall(r"^([0-3]) +killed +(\d+) +(.*)", output, re.MULTILINE)
    assert [(rank, "barrier (" in place, "evaluation_loop.py:" in place) for rank, _, place in rows] == [
        *((str(rank), False, False) for rank in range(3)),
        ("3", True, True),
    ], output
    assert {batches for rank, batches, _ in rows if rank != "3"} <= {"11", "12"}
    assert output.count("countoff: UnevenBatches: rank 3 ran out of data after 11 batches of train epoch 0;") == 1
    assert "\nEach of the other ranks printed its first line. Exit codes: 1, 1, 1, 1.\n" in output
    assert output.count("countoff: Truncated: train epoch 0 stopped on every rank after 11 batches") == 1, output
    summary = output.partition("\nSummary, after ")[2]
    assert "\nwithout countoff:    the job hung, and no rank said why\n" in summary, output
    assert re.search(r"\nwith countoff: +every rank named rank 3, [\d.]+ ms after its last batch\n", summary), output
    accuracies = re.findall(r"trained 10 epochs; accuracy on held-out digits ([\d.]+)\n", summary)
    assert [float(accuracy) > 0.9 for accuracy in accuracies] == [True, True], output
    assert output.splitlines()[-1] == f"To draw the trace of the second job: countoff report {trace}"
    assert {each.name for each in trace.glob("rank-*")} == {f"rank-0000{rank}.jsonl" for rank in range(4)}
    assert_no_process(tmp_path)
    assert list(tmp_path.glob("countoff-*")) == []


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("number", "exit_code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.nightly),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.nightly),
    ],
)
def test_a_demo_that_is_interrupted_or_killed_leaves_no_process(tmp_path, number, exit_code):
    """An interrupted demo ends its ranks and removes its files; the ranks end with a killed one, too."""
    with running(tmp_path) as demo:
        patience = time.monotonic() + DEADLINE_SECONDS
        while not any("Initializing distributed" in log.read_text() for log in tmp_path.glob("*/rank3.log")):
            assert time.monotonic() < patience
            assert demo.poll() is None
            time.sleep(0.05)
        assert len(processes_of(tmp_path)) == 5
        if number == signal.SIGINT:
            os.killpg(demo.pid, number)  # as a terminal does
        else:
            demo.send_signal(number)
        output, _ = demo.communicate(timeout=60)
    assert demo.returncode == exit_code, output
    assert "Traceback" not in output
    assert_no_process(tmp_path)
    if number != signal.SIGKILL:
        assert list(tmp_path.glob("countoff-*")) == []


def test_a_job_that_cannot_be_imported_ends_the_demo_with_the_reason(tmp_path_factory):
    """No rank is started that could not train."""
    tmp_path, broken = tmp_path_factory.mktemp("temporary"), tmp_path_factory.mktemp("broken")
    (broken / "sklearn.py").write_text("raise ImportError('of a broken package')")
    (broken / "lightning.py").write_text("raise ImportError('of a broken package')")
    with running(tmp_path, path=str(broken)) as demo:
        output, _ = demo.communicate(timeout=DEADLINE_SECONDS)
    assert (demo.returncode, output.splitlines()[1:]) == (1, ["countoff: of a broken package"]), output

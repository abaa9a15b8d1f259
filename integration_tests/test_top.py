"""`countoff top` and the file for Perfetto, with the trace of real ranks that train meanwhile."""

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as schema

from countoff.report.perfetto import write_perfetto
from countoff.report.reader import read
from countoff.report.top import COLUMNS
from countoff.torch import attach
from integration_tests import loops
from integration_tests.harness import tell
from integration_tests.jobs import share_loader, verdict_lines

ROOT = Path(__file__).parents[1]
SCRIPT = f"""
import sys
sys.path[:0] = {[str(ROOT / "core"), str(ROOT / "plugins")]}
from countoff.cli.__main__ import main
main()
"""
SECONDS = 30.0


class Top:
    """`countoff top` in a pipe, which a thread reads."""

    def __init__(self, directory: Path) -> None:
        self.lines: list[str] = []
        self._new = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, "top", "--every", "0.2", str(directory)], stdout=subprocess.PIPE, text=True
        )
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                with self._new:
                    self.lines.append(line.rstrip("\n"))
                    self._new.notify_all()

    @property
    def rows(self) -> list[dict[str, str]]:
        """The rows that have come."""
        return [dict(zip(COLUMNS, line.split("\t"), strict=True)) for line in self.lines if not line.startswith("#")]

    def wait_for_line(self) -> None:
        """Waits for its first line: it looks at the directory from here on."""
        with self._new:
            assert self._new.wait_for(lambda: self.lines, SECONDS)

    def wait_for_row(self, **cells: str) -> dict[str, str]:
        """Waits for a row with these cells."""
        deadline = time.monotonic() + SECONDS
        with self._new:
            while True:
                for row in self.rows:
                    if cells.items() <= row.items():
                        return row
                assert self._new.wait(deadline - time.monotonic()), self.lines[-8:]

    def wait(self) -> int:
        """Waits for its end, and returns its exit code."""
        code = self.process.wait(SECONDS)
        self._thread.join()
        return code


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "today"


@pytest.fixture
def top(directory: Path) -> Iterator[Top]:
    """It runs before the job begins, so it waits for the directory."""
    started = Top(directory)
    yield started
    with contextlib.suppress(ProcessLookupError):
        started.process.kill()
    started.wait()


def train_until_seen(go_on: Path) -> None:
    """Trains one epoch, and halts in its midst until the view has shown it."""
    dist.init_process_group("gloo")
    model, optimizer = loops.model_and_optimizer()
    loader = share_loader(20)
    attached = attach(train=loader, optimizer=optimizer)
    for number, batch in enumerate(loader):
        loops.train_on(model, optimizer, batch)
        if number == 9:
            tell("halfway")
            while not go_on.exists():
                time.sleep(0.05)
    attached.detach()


def test_a_job_that_trains_is_shown_and_its_end_too(run_ranks: Any, directory: Path, top: Top, tmp_path: Path) -> None:
    go_on = tmp_path / "go on"

    def watch(ranks: Any) -> None:
        ranks.wait_for(0, "halfway")
        row = top.wait_for_row(ranks="0-1", span="train epoch 0", most_batches="10")
        assert (row["hosts"].count(",") + 1, row["note"]) == (1, "")
        assert float(row["learning_rate"]) > 0
        assert float(row["batches_per_second"]) > 0
        assert 0 <= float(row["loader_share"]) <= 1
        assert float(row["age_seconds"]) < SECONDS
        go_on.touch()

    top.wait_for_line()
    results = run_ranks(train_until_seen, 2, go_on, env={"COUNTOFF_TRACE_DIR": str(directory)}, while_running=watch)
    assert [verdict_lines(result) for result in results] == [[], []]
    assert top.wait() == 0
    assert top.lines[0] == f"# waiting for {directory}…"
    assert top.rows[-1]["span"] == "finished"
    assert top.lines[-1] == "# countoff: no verdict: 2 ranks finished"
    path = tmp_path / "job.pftrace"
    write_perfetto(read([str(directory)]), str(path))
    trace = schema.Trace.FromString(path.read_bytes())
    names = [packet.track_descriptor.name for packet in trace.packet if packet.HasField("track_descriptor")]
    assert {"rank 0", "rank 1", "batches per second", "learning rate"} <= set(names)
    epochs = [packet.track_event for packet in trace.packet if packet.track_event.name == "train epoch 0"]
    counts = [note.int_value for each in epochs for note in each.debug_annotations if note.name == "batches"]
    assert counts == [20, 20]


def test_the_verdict_of_a_job_ends_the_view(run_ranks: Any, directory: Path, top: Top) -> None:
    run_ranks(loops.uneven, 3, [5, 4, 5], env={"COUNTOFF_TRACE_DIR": str(directory)}, expect=[1, 1, 1])
    assert top.wait() == 1
    text = "\n".join(top.lines)
    assert "# countoff: UnevenBatches: rank 1 ran out of data" in text
    assert "#   out of step: rank 1 of 3 ranks" in text

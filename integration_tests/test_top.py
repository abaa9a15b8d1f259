"""`countoff top` and the file for Perfetto, with the trace of real ranks that train meanwhile."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as schema

from countoff.report.perfetto import write_perfetto
from countoff.report.reader import read
from countoff.torch import Countoff
from integration_tests import loops
from integration_tests.digits import share_loader
from integration_tests.harness import tell
from integration_tests.output import verdict_lines
from tests.paths import SOURCE_ROOTS

SCRIPT = f"""
import sys
sys.path[:0] = {list(map(str, SOURCE_ROOTS))}
from countoff.cli.__main__ import main
main()
"""
SECONDS = 30.0


def top(directory: Path) -> tuple[int, dict[str, Any]]:
    """The exit code of `countoff top --json`, and what it prints."""
    command = [sys.executable, "-c", SCRIPT, "top", "--json", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    return done.returncode, json.loads(done.stdout)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "today"


def train_until_seen(go_on: Path) -> None:
    """Trains one epoch, and halts in its midst until the view has shown it."""
    dist.init_process_group("gloo")
    model, optimizer = loops.model_and_optimizer()
    loader = share_loader(20)
    countoff = Countoff(optimizer=optimizer)
    for number, batch in enumerate(countoff.train(loader)):
        loops.train_on(model, optimizer, batch)
        if number == 9:
            tell("halfway")
            while not go_on.exists():
                time.sleep(0.05)
    countoff.close()


def test_a_job_that_trains_is_shown_and_its_end_too(run_ranks: Any, directory: Path, tmp_path: Path) -> None:
    go_on = tmp_path / "go on"

    def watch(ranks: Any) -> None:
        ranks.wait_for(0, "halfway")
        deadline = time.monotonic() + SECONDS
        while True:  # until both ranks have written a tick
            code, look = top(directory)
            (row, *others) = look["rows"]
            if row["most_batches"] == 10 and row["ranks"] == [0, 1]:
                break
            assert time.monotonic() < deadline, look
        assert (code, others, row["span"], row["note"], len(row["hosts"])) == (0, [], "train epoch 0", "", 1)
        assert row["learning_rates"][0] > 0
        assert row["batches_per_second"] > 0
        assert 0 <= row["loader_share"] <= 1
        assert row["age_seconds"] < SECONDS
        go_on.touch()

    results = run_ranks(train_until_seen, 2, go_on, env={"COUNTOFF_TRACE_DIR": str(directory)}, while_running=watch)
    assert [verdict_lines(result) for result in results] == [[], []]
    code, look = top(directory)
    assert (code, look["ended"], [row["span"] for row in look["rows"]]) == (0, True, ["finished"])
    path = tmp_path / "job.pftrace"
    write_perfetto(read([str(directory)]), str(path))
    trace = schema.Trace.FromString(path.read_bytes())
    names = [packet.track_descriptor.name for packet in trace.packet if packet.HasField("track_descriptor")]
    assert {"rank 0", "rank 1", "batches per second", "learning rate"} <= set(names)
    epochs = [packet.track_event for packet in trace.packet if packet.track_event.name == "train epoch 0"]
    counts = [note.int_value for each in epochs for note in each.debug_annotations if note.name == "batches"]
    assert counts == [20, 20]


def test_the_verdict_of_a_job_ends_the_view(run_ranks: Any, directory: Path) -> None:
    run_ranks(loops.uneven, 3, [5, 4, 5], env={"COUNTOFF_TRACE_DIR": str(directory)}, expect=[1, 1, 1])
    code, look = top(directory)
    assert (code, look["ended"], look["failed"]) == (1, True, True)
    assert (look["verdict"]["kind"], look["verdict"]["ranks"][0]) == ("UnevenBatches", 1)

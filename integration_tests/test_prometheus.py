"""`countoff top --prometheus`, scraped while real ranks train."""

import contextlib
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from prometheus_client.parser import text_string_to_metric_families

from countoff.torch import attach
from integration_tests import loops
from integration_tests.harness import tell
from integration_tests.jobs import BATCH_SIZE, own_rank, share_loader

ROOT = Path(__file__).parents[1]
SCRIPT = f"""
import sys
sys.path[:0] = {[str(ROOT / "core"), str(ROOT / "plugins")]}
from countoff.cli.__main__ import main
main()
"""
SECONDS = 30.0
Samples = dict[tuple[str, str], float]


class Exporter:
    """`countoff top --prometheus` at a free port, as a process."""

    def __init__(self, directory: Path) -> None:
        command = [sys.executable, "-c", SCRIPT, "top", "--every", "0.2", "--prometheus", ":0", str(directory)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self._url = self.process.stdout.readline().partition(" at ")[2].partition(";")[0]

    def scrape(self) -> Samples:
        """The samples by their names, each with the value of its rank, kind or state."""
        with urllib.request.urlopen(self._url, timeout=SECONDS) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        samples = [sample for family in families for sample in family.samples]
        keys = ("rank", "kind", "state")
        return {
            (each.name, next((each.labels[key] for key in keys if key in each.labels), "")): each.value
            for each in samples
        }

    def until(self, is_so: Callable[[Samples], bool]) -> Samples:
        """Scrapes until something is so."""
        deadline = time.monotonic() + SECONDS
        while not is_so(seen := self.scrape()):
            assert time.monotonic() < deadline, seen
            time.sleep(0.05)
        return seen


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "today"


@pytest.fixture
def exporter(directory: Path) -> Iterator[Exporter]:
    """It runs before the job begins, and after its end."""
    started = Exporter(directory)
    yield started
    with contextlib.suppress(ProcessLookupError):
        started.process.kill()
    started.process.communicate()


def train_in_parts(go_on: Path) -> None:
    """Trains an epoch in which rank 1 has a batch fewer, and halts twice until it is told to go on."""
    dist.init_process_group("gloo")
    model, optimizer = loops.model_and_optimizer()
    loader = share_loader(20 - own_rank())
    attach(train=loader, optimizer=optimizer)
    for number, batch in enumerate(loader, start=1):
        loops.train_on(model, optimizer, batch)
        if number in (6, 12):
            tell(f"after batch {number}")
            while not (go_on / str(number)).exists():
                time.sleep(0.05)


def test_batches_rise_while_a_job_trains_and_its_verdict_stays(
    run_ranks: Any, directory: Path, exporter: Exporter, tmp_path: Path
) -> None:
    """They are those of each rank. The job is served from before its begin until after its end."""

    def watch(ranks: Any) -> None:
        for number in (6, 12):
            ranks.wait_for(0, f"after batch {number}")
            seen = exporter.until(
                lambda seen, number=number: all(
                    seen.get(("countoff_batches_total", rank)) == number for rank in ("0", "1")
                )
            )
            assert seen["countoff_steps_total", "0"] == number
            assert seen["countoff_samples_total", "1"] == number * BATCH_SIZE
            assert seen["countoff_loader_seconds_total", "0"] >= 0
            assert abs(time.time() - seen["countoff_last_record_timestamp_seconds", "1"]) < SECONDS
            assert (seen["countoff_ranks", "in a span"], seen["countoff_epoch", "1"]) == (2, 0)
            assert seen["countoff_verdicts_total", "UnevenBatches"] == 0
            (tmp_path / str(number)).touch()

    before = exporter.scrape()
    assert (before["countoff_runs_total", ""], before["countoff_verdicts_total", "UnevenBatches"]) == (0, 0)
    environment = {"COUNTOFF_TRACE_DIR": str(directory)}
    run_ranks(train_in_parts, 2, tmp_path, env=environment, while_running=watch, expect=[1, 1])
    seen = exporter.until(lambda seen: seen["countoff_ranks", "ended by the verdict"] == 2)
    assert seen["countoff_verdicts_total", "UnevenBatches"] == 1
    assert sum(value for (name, _), value in seen.items() if name == "countoff_verdicts_total") == 1
    assert seen["countoff_batches_total", "1"] == 19
    assert seen["countoff_batches_total", "0"] in (19, 20)
    assert exporter.process.poll() is None

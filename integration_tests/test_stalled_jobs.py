"""With the level `raise`, a stall ends the job, whatever its ranks wait in, and leaves the verdict for a scheduler."""

import json
import time
from pathlib import Path

import torch
import torch.distributed as dist

from countoff.core import DivergenceError
from countoff.core.ending.shutdown import EXIT_CODE
from countoff.torch import Countoff
from integration_tests.constants import put
from integration_tests.jobs import own_rank
from integration_tests.loops import even_loader, model_and_optimizer


def work(seconds: float) -> None:
    """Runs Python code in different lines for so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        _sum_up()
        _sum_down()


def _sum_up() -> int:
    return sum(range(10_000))


def _sum_down() -> int:
    return sum(range(10_000, 0, -1))


def write_metrics() -> None:
    """Waits for a file that nobody writes, and moves all the time."""
    while not Path("never").exists():
        work(1)


def hang_beside_the_others(directory: str) -> None:
    """In its third batch, rank 1 writes metrics, which never ends; rank 0 waits for it, and handles its error."""
    dist.init_process_group("gloo")
    model, optimizer = model_and_optimizer()
    loader = even_loader()
    put(GRACE_SECONDS=2)
    countoff = Countoff(
        optimizer=optimizer,
        levels={"Stalled": "raise"},
        stall_seconds=2,
        verdict_file=f"{directory}/verdict{own_rank()}.json",
    )
    try:
        for number, (images, labels) in enumerate(countoff.train(loader), 1):
            if number == 3 and own_rank() == 1:
                write_metrics()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    except (RuntimeError, DivergenceError):
        work(3)  # longer than a grace: as where a checkpoint is written
        print("handled")
        raise


def test_a_stall_ends_the_job(run_ranks, tmp_path):
    """The rank that holds it up is ended though it runs Python code, and the one that waits for it raises."""
    waiting, hanging = run_ranks(hang_beside_the_others, 2, str(tmp_path), deadline_seconds=120, expect=None)
    assert "countoff: Stalled: no rank has made progress for 2 s; rank 1 is in its code." in waiting.output, waiting
    assert "rank 1 is at test_stalled_jobs.py:" in waiting.output
    assert " in write_metrics" in waiting.output
    assert "This is a warning" not in waiting.output
    assert (waiting.exit_code, "handled" in waiting.output) == (1, True), waiting
    assert hanging.exit_code == EXIT_CODE, hanging
    verdict = json.loads((tmp_path / "verdict0.json").read_text())
    assert (verdict["kind"], verdict["restart"], verdict["ranks"]) == ("Stalled", "unknown", [1])
    assert " in write_metrics" in verdict["why"]

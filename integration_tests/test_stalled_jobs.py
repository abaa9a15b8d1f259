"""With the level `raise`, a stall ends the job, whatever its ranks wait in, and leaves the verdict for a scheduler."""

import json
import re
import time
from pathlib import Path

import torch
import torch.distributed as dist

from countoff.core import DivergenceError
from countoff.core.ending.shutdown import EXIT_CODE
from countoff.torch import Countoff
from integration_tests.constants import put
from integration_tests.digits import own_rank
from integration_tests.lightning_jobs import Classifier, Job, quiet
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


def evaluate_on(alone: int, module: str) -> None:
    """After an epoch one rank evaluates a model with buffers, and the others wait for it.

    Args:
        alone: The rank.
        module: The model's attribute that it calls; empty: the model itself.
    """
    dist.init_process_group("gloo")
    net = torch.nn.Sequential(torch.nn.Linear(64, 10), torch.nn.BatchNorm1d(10))
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    countoff = Countoff(optimizer=optimizer, stall_seconds=2)
    for images, labels in countoff.train(even_loader()):
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    if own_rank() == alone:
        evaluated = getattr(model, module) if module else model
        with torch.no_grad():
            for images, _ in even_loader():
                evaluated(images)
    dist.barrier()


class LogsMoreOnRank0(Classifier):
    """Logs a key on rank 0 that the other ranks do not log, and has both reduced at the end of the epoch."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        for key in ("val", "more")[: 2 - min(self.global_rank, 1)]:
            self.log(key, 1.0, sync_dist=True)


def log_other_keys() -> None:
    quiet()
    job = Job(even=32, options={"stall_seconds": 2})
    loader = job.train_loader()
    job.make_trainer().fit(LogsMoreOnRank0(), loader, loader)


def end_when_reported(watch):
    patience = time.monotonic() + 40
    while "countoff explain Stalled" not in watch.results()[0].output and time.monotonic() < patience:
        watch.let_run(0.1)
    for rank in (0, 1):
        watch.kill(rank)


def test_ranks_that_log_other_keys_are_shown_where_they_are_in_lightning(run_ranks):
    """The only line of the user's own is the call of `fit`, on both ranks."""
    stalled, _ = run_ranks(log_other_keys, 2, expect=None, while_running=end_when_reported, deadline_seconds=60)
    places = re.search(r"why: rank 0 is at (.*); rank 1 is at (.*)\.", stalled.output)
    assert places is not None, stalled
    assert re.search(r" in log_other_keys.*, in lightning at .* < result\.py:\d+ in compute", places[1])
    assert re.search(r" in log_other_keys.*, in lightning at training_epoch_loop\.py:\d+ in ", places[2])
    assert "do:  compare the lines above" in stalled.output


def test_a_rank_that_evaluates_a_ddp_alone_is_told_to_call_its_module(run_ranks):
    stalled = run_ranks(evaluate_on, 2, 1, "", expect=None, while_running=end_when_reported, deadline_seconds=60)
    assert "let a rank that evaluates alone call model.module" in stalled[0].output, stalled
    for result in run_ranks(evaluate_on, 2, 1, "module", deadline_seconds=60):
        assert "countoff: " not in result.output, result

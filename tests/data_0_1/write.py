"""Writes the files beside it: two real ranks, of which one runs out of data. README.md says how it is started."""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from countoff.core import DivergenceError

BATCHES, SHORT, SAVED_AFTER = 6, 4, 3
"""Batches of an epoch, those of rank 1 in its last epoch, and those of epoch 1 before the record is written."""
SLOW_SECONDS = 6.0
"""A pause of rank 1, so long that all ranks write ticks."""


def loader_of(rank: int) -> DataLoader[Any]:
    """A rank's batches of an epoch: rows of random numbers, the same on every machine."""
    numbers = random.Random(rank)
    rows = [[numbers.random() for _ in range(16)] for _ in range(2 * BATCHES)]
    return DataLoader(TensorDataset(torch.tensor(rows)), batch_size=2)


def train(
    rank: int,
    *,
    epochs: int,
    first_epoch: int = 0,
    record: dict[str, Any] | None = None,
    last_batches: int = BATCHES,
    pause: float = 0.0,
) -> dict[str, Any]:
    """Trains, and returns the record that a checkpoint in epoch 1 would have.

    Args:
        rank: Whose data.
        epochs: Epochs in all.
        first_epoch: The epoch with which it begins.
        record: The record of the checkpoint from which it resumes; its epoch begins again from its first batch.
        last_batches: Batches of this rank in the last epoch.
        pause: Seconds between two batches of the first epoch.
    """
    from countoff.torch import Countoff

    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=100)
    loader, evaluated = loader_of(rank), DataLoader(TensorDataset(torch.ones(4, 16)), batch_size=2)
    found: dict[str, Any] = {}
    with Countoff(optimizer=optimizer, scheduler=scheduler) as countoff:
        if record is not None:
            countoff.load_state_dict(record)
        for epoch in range(first_epoch, epochs):
            if epoch == epochs - 1 and last_batches != BATCHES:
                dataset = cast("TensorDataset", loader.dataset)
                dataset.tensors = (dataset.tensors[0][: 2 * last_batches],)
            for number, (rows,) in enumerate(countoff.train(loader, epoch=epoch), 1):
                model(rows).mean().backward()
                for parameter in model.parameters():
                    dist.all_reduce(cast("torch.Tensor", parameter.grad))
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                if pause and (epoch, number) == (first_epoch, 2):
                    time.sleep(pause)
                if (epoch, number) == (1, SAVED_AFTER):
                    found = countoff.state_dict()
            for (rows,) in countoff.eval(evaluated):
                model(rows)
    return found


def main(place: Path) -> None:
    """One rank of the job; rank 0 saves the record before the verdict comes."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    record = train(rank, epochs=2)
    if rank == 0:
        (place / "resume.json").write_text(json.dumps(record, indent=2) + "\n")
    os.environ["COUNTOFF_TRACE_DIR"] = str(place / "trace")
    os.environ["COUNTOFF_VERDICT_FILE"] = str(place / "verdict.json")
    with contextlib.suppress(DivergenceError):
        last, pause = (SHORT, SLOW_SECONDS) if rank else (BATCHES, 0.0)
        train(rank, epochs=3, first_epoch=1, record=record, last_batches=last, pause=pause)


def outputs(place: Path) -> None:
    """Writes what the commands print as JSON."""
    for name, arguments in json.loads((place / "commands.json").read_text()).items():
        command = [sys.executable, "-m", "countoff", *arguments]
        run = subprocess.run(command, stdout=subprocess.PIPE, cwd=place, check=False)
        (place / "outputs" / f"{name}.json").write_bytes(run.stdout)


if __name__ == "__main__":
    where = Path(sys.argv[1]).resolve()
    (outputs if sys.argv[2:] == ["outputs"] else main)(where)

"""The totals that a job reports whose uneven ranks take the same number of batches, on real ranks."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from countoff.torch import Countoff
from integration_tests.digits import BATCH_SIZE, digits, own_rank
from integration_tests.even_loops import Shards
from integration_tests.lightning_jobs import Classifier, Job, csv_logger, logged, quiet

PER_EPOCH = (
    "countoff/batches_per_epoch",
    "countoff/steps_per_epoch",
    "countoff/samples_per_epoch",
    "countoff/epoch_progress",
)


def loader_of(kind: str, epoch: int) -> Any:
    """Loaders of 7 and 5 batches: in the first epoch rank 1 has 5, in the second both have 7."""
    images, labels = digits()
    if kind == "unsized":
        shards = Shards([[7, 5], [7, 7]])
        shards.epoch = epoch
        return DataLoader(shards, batch_size=None)
    if kind == "divided":
        data = TensorDataset(images[:27], labels[:27])
        return DataLoader(data, batch_size=2, sampler=DistributedSampler(data))
    share = 2 * (7, 5)[own_rank()]
    data = TensorDataset(images[:share], labels[:share])
    sampler = DistributedSampler(data, 1, 0) if kind == "proven" else None
    return DataLoader(data, batch_size=2, sampler=sampler)


def progress_of(kind: str) -> list[tuple[float | None, ...]]:
    """What is known per epoch: before the first one, within it, after it, and within the second."""
    found: list[tuple[float | None, ...]] = []
    loader = loader_of(kind, 0)

    def note() -> None:
        progress = countoff.progress()
        found.append(tuple(progress.get(name) for name in PER_EPOCH))

    with Countoff(uneven_train="stop", gradient_accumulation_steps=2) as countoff:
        note()
        for epoch in range(2):
            if kind == "unsized":
                loader.dataset.epoch = epoch
            for number, _ in enumerate(countoff.train(loader)):
                dist.all_reduce(torch.ones(1))
                if number == 0:
                    note()
            if epoch == 0:
                note()
    return found


def all_progress(_: int) -> dict[str, list[tuple[float | None, ...]]]:
    dist.init_process_group("gloo")
    return {kind: progress_of(kind) for kind in ("unsized", "mapped", "proven", "divided")}


def test_the_totals_are_those_of_all_ranks(run_ranks):
    """No rank reports its own loader's length as the job's: the common one, or none while it is not known."""
    results = run_ranks(all_progress, 2, 0, deadline_seconds=90)
    unknown = (None, None, None, None)
    begun, ended = (5, 2, None, 1 / 5), (5, 2, None, 1.0)
    for kind, found in results[0].value.items():
        expected = [unknown, unknown, ended, begun]
        if kind == "proven":
            expected = [unknown, begun, ended, begun]
        if kind == "divided":
            expected = [unknown, (7, 3, 28, 1 / 7), (7, 3, 28, 1.0), (7, 3, 28, 1 / 7)]
        assert found == expected, (kind, results[0])
        assert results[1].value[kind] == expected, (kind, results[1])


def fit_and_read_log(_: int) -> dict[str, dict[str, float]]:
    quiet()
    found: dict[str, dict[str, float]] = {}
    for name, reported in (("unsized", None), ("sized", [7, 5])):
        options = {"uneven_train": "stop", "totals": "fix"}
        job = Job(train=[7, 5], reported=reported, trainer={"accumulate_grad_batches": 2}, options=options)
        logger = csv_logger()
        trainer = job.make_trainer(logger=logger)
        trainer.fit(Classifier(), job.train_loader())
        if own_rank() == 0:
            found[name] = {**logged(Path(str(logger.log_dir))), "steps": trainer.global_step}
    return found


def test_lightning_logs_the_totals_of_all_ranks(run_ranks):
    """Lightning's loggers get the totals of the common epoch once it has ended, and the run has as many steps."""
    for found in run_ranks(fit_and_read_log, 2, 0, deadline_seconds=60)[0].value.values():
        assert found["countoff/num_training_batches"] == 5
        assert found["countoff/steps_per_epoch"] == 3
        assert found["countoff/estimated_stepping_batches"] == found["steps"] == 6
        assert found["countoff/global_batch_size"] == BATCH_SIZE * 2 * 2

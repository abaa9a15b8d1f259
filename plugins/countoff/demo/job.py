"""The job of the demo, as a user might write it: digits in shards, an iterable dataset, Lightning with DDP."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

from countoff.demo.data import Data
from countoff.demo.recorder import AllReduceRecorder
from countoff.lightning import Countoff

EPOCHS = 6
CHECKPOINT_EPOCHS = 3


class Shards(IterableDataset[Any]):
    """Distributes whole shards over the ranks: some ranks get one more than others."""

    def __init__(self, directory: Path) -> None:
        self._paths = sorted(directory.glob("shard-*.npz"))

    def __iter__(self) -> Iterator[Any]:
        yield from _samples(self._paths[dist.get_rank() :: dist.get_world_size()])


class EvenShards(Shards):
    """Distributes samples in rounds of one per rank, so that all ranks get the same number.

    An incomplete last round is dropped.
    """

    def __iter__(self) -> Iterator[Any]:
        samples = [_samples(self._paths)] * dist.get_world_size()
        for one_round in zip(*samples, strict=False):
            yield one_round[dist.get_rank()]


def _samples(paths: list[Path]) -> Iterator[Any]:
    for path in paths:
        with np.load(path) as shard:
            yield from zip(shard["images"], shard["labels"], strict=True)


class Classifier(pl.LightningModule):
    """A small network that classifies digits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Returns the loss of one batch."""
        images, labels = batch
        return functional.cross_entropy(self.layers(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer, Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def accuracy(self, path: Path) -> float:
        """Returns the fraction of the held-out digits that are classified correctly."""
        with np.load(path) as held_out, torch.no_grad():
            images, labels = (torch.from_numpy(held_out[name]).to(self.device) for name in ("images", "labels"))
            return (self.layers(images).argmax(dim=1) == labels).double().mean().item()


def train(data: Data, directory: Path, *, even: bool, callback: Mapping[str, Any] | None, on_gpu: bool) -> None:
    """Trains on this rank and writes the results to files.

    Args:
        data: What to train on.
        directory: Where the files go: the logger's, the checkpoints, and the results of each rank.
        even: Whether every rank gets the same number of samples.
        callback: The options of countoff's callback; None: the Trainer has none.
        on_gpu: Whether each rank trains on a GPU of its own, with NCCL.

    Raises:
        DivergenceError: If countoff's callback finds a divergence.
    """
    log = logging.getLogger("countoff")  # at level INFO it has how soon every rank knew a verdict
    log.setLevel(logging.INFO)
    log.addHandler(handler := logging.StreamHandler())
    handler.addFilter(lambda record: record.levelno == logging.INFO)  # the verdict is printed already
    shards = EvenShards(data.directory) if even else Shards(data.directory)
    loader = DataLoader(shards, batch_size=data.batch_size)
    model = Classifier()
    trainer = pl.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=data.ranks,
        strategy="ddp",
        max_epochs=EPOCHS,
        logger=CSVLogger(str(directory), name="", version="log"),
        callbacks=[
            ModelCheckpoint(directory / "checkpoints", every_n_epochs=CHECKPOINT_EPOCHS),
            AllReduceRecorder(directory),
            *([Countoff(**callback)] if callback is not None else []),
        ],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    totals = {
        "batches_per_epoch": trainer.num_training_batches,
        "total_steps": trainer.estimated_stepping_batches,
        "steps": trainer.global_step,
        "accuracy": model.accuracy(data.directory / "held-out.npz"),
    }
    (directory / f"rank{trainer.global_rank}.json").write_text(json.dumps(totals))

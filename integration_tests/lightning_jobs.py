"""Lightning's jobs of the integration tests: real Trainers on the digits, any numbers of batches."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from countoff.lightning import Countoff
from integration_tests import devices
from integration_tests.constants import taken
from integration_tests.digits import BATCH_SIZE, digits, own_rank, share_loader, weights

QUIET: Mapping[str, Any] = {
    "strategy": "ddp",
    "max_epochs": 2,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
"""Arguments of a Trainer that prints nothing and writes no file."""


class Classifier(pl.LightningModule):
    """A linear classifier of digits, with what a test wants to be synchronised."""

    def __init__(self, train_sync: str = "", eval_sync: str = "", stop_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layer = torch.nn.Linear(64, 10)
        self._train_sync = train_sync
        self._eval_sync = eval_sync
        self._stop_at = stop_at
        self.validations = 0

    def on_validation_epoch_end(self) -> None:
        self.validations += 1

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        images, labels = batch
        loss = torch.nn.functional.cross_entropy(self.layer(images), labels)
        if self._train_sync:
            self.log("train", loss, on_step=False, on_epoch=True, sync_dist=True)
        if self._stop_at is not None and self.global_step >= self._stop_at:
            self.trainer.should_stop = True
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        images, labels = batch
        loss = torch.nn.functional.cross_entropy(self.layer(images), labels)
        if self._eval_sync:
            step = self._eval_sync == "step"
            self.log("val", loss, on_step=step, on_epoch=not step, sync_dist=True, add_dataloader_idx=True)

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@dataclass(frozen=True)
class Job:
    """What a test varies. Sequences hold one value per rank.

    Attributes:
        train: Batches of each rank's train loader.
        reported: What it reports, or None: unsized.
        val: Batches of each rank's validation loader, or of several of them.
        even: Use a map-style dataset of so many samples instead, which Lightning shards.
        trainer: Arguments of the Trainer.
        model: Arguments of the Classifier.
        options: Options of the callback; None: no callback at all.
        before: Called in a rank's train loader with the number of the sample it is about to yield.
    """

    train: Sequence[int] = ()
    reported: Sequence[int] | None = None
    val: Sequence[int | Sequence[int]] | None = None
    even: int = 0
    trainer: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] | None = field(default_factory=dict)
    before: Callable[[int], None] | None = None

    def train_loader(self) -> Any:
        if self.even:
            images, labels = digits()
            return DataLoader(TensorDataset(images[: self.even], labels[: self.even]), batch_size=BATCH_SIZE)
        rank = own_rank()
        return share_loader(self.train[rank], self.reported[rank] if self.reported else None, self.before)

    def val_loaders(self) -> Any:
        if self.val is None:
            return None
        mine = self.val[own_rank()]
        return share_loader(mine) if isinstance(mine, int) else [share_loader(batches) for batches in mine]

    def callbacks(self) -> list[Any]:
        return [] if self.options is None else [Countoff(**taken(self.options))]

    def make_trainer(self, **more: Any) -> pl.Trainer:
        arguments = {**devices.lightning(), **QUIET, "use_distributed_sampler": True}
        own = {**self.trainer, **more}
        callbacks = [*self.callbacks(), *own.pop("callbacks", [])]
        return pl.Trainer(**{**arguments, **own}, callbacks=callbacks)


def quiet() -> None:
    """Silences the Trainer's own output; verdicts are still printed."""
    import logging
    import warnings

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


def fit(job: Job) -> dict[str, Any]:
    """Trains on one rank and returns the outcome."""
    quiet()
    trainer, model = job.make_trainer(), Classifier(**job.model)
    trainer.fit(model, job.train_loader(), job.val_loaders())
    return outcome(trainer, model)


def fit_resumed(job: Job) -> dict[str, Any]:
    """Trains on one rank from a checkpoint saved after three steps, or at the end, and returns the outcome."""
    quiet()
    first, model = job.make_trainer(max_steps=3), Classifier(**job.model)
    first.fit(model, job.train_loader(), job.val_loaders())
    first.save_checkpoint("resume.ckpt")
    second, model = job.make_trainer(), Classifier(**job.model)
    second.fit(model, job.train_loader(), job.val_loaders(), ckpt_path="resume.ckpt")
    return outcome(second, model)


def outcome(trainer: pl.Trainer, model: torch.nn.Module) -> dict[str, Any]:
    """Final weights, as a hash of their bits, and the counters."""
    return {"weights": weights(model), "steps": trainer.global_step, "epoch": trainer.current_epoch}


def logged(directory: Path) -> dict[str, float]:
    """The last value of every metric that a CSVLogger wrote, and its hyperparameters."""
    import csv

    import yaml

    values: dict[str, float] = {}
    for path in directory.rglob("metrics.csv"):
        with open(path, newline="") as file:
            for line in csv.DictReader(file):
                values |= {name: float(value) for name, value in line.items() if value}
    for path in directory.rglob("hparams.yaml"):
        values |= yaml.safe_load(path.read_text())
    return values


def csv_logger() -> CSVLogger:
    """A logger into the rank's working directory."""
    return CSVLogger(os.getcwd(), name="log")

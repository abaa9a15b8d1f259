"""An iterable dataset reports the batches of all ranks as its length: a schedule is made for too many steps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, IterableDataset

from countoff.lightning import Countoff
from integration_tests.reports.parts import loss_of, net, rows, sgd

BATCHES = 40
"""Of all ranks."""


class Tarred(IterableDataset[Any]):
    def __init__(self, rank: int, ranks: int, wrong: bool) -> None:
        self._rank, self._ranks, self._wrong = rank, ranks, wrong

    def __len__(self) -> int:
        return BATCHES if self._wrong else BATCHES // self._ranks

    def __iter__(self) -> Iterator[Any]:
        images, labels = rows(4 * BATCHES).tensors
        for batch in range(self._rank, BATCHES, self._ranks):
            yield images[4 * batch : 4 * batch + 4], labels[4 * batch : 4 * batch + 4]


class Net(lightning.LightningModule):
    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.layer = net()
        self._wrong = wrong

    def training_step(self, batch: Any, index: int) -> Any:
        return loss_of(self.layer, batch)

    def train_dataloader(self) -> Any:
        return DataLoader(Tarred(self.global_rank, self.trainer.world_size, self._wrong), batch_size=None)

    def configure_optimizers(self) -> Any:
        optimizer = sgd(self)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train(wrong: bool, stage: int, folder: Path) -> None:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Countoff()],
    )
    trainer.fit(Net(wrong))

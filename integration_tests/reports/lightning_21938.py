"""A run that resumes behind epoch 0, with workers: its first epoch has the order of epoch 0 again."""

from pathlib import Path
from typing import Any

import lightning
from torch.utils.data import DataLoader

from countoff.lightning import Countoff
from integration_tests.once_jobs import forked
from integration_tests.reports.parts import loss_of, net, rows, sgd


class Net(lightning.LightningModule):
    def __init__(self, workers: int) -> None:
        super().__init__()
        self.layer = net()
        self._workers = workers

    def training_step(self, batch: Any, index: int) -> Any:
        return loss_of(self.layer, batch)

    def train_dataloader(self) -> Any:
        return DataLoader(rows(), batch_size=4, shuffle=True, **forked(self._workers))

    def configure_optimizers(self) -> Any:
        return sgd(self)


def train(wrong: bool, stage: int, folder: Path) -> None:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=3 if stage else 1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Countoff()],
    )
    trainer.fit(Net(workers=2 if wrong else 0), ckpt_path=str(folder / "first.ckpt") if stage else None)
    if stage == 0:
        trainer.save_checkpoint(folder / "first.ckpt")

"""A module that asks for `estimated_stepping_batches`: the state of the train loader is not restored at a resume."""

from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from countoff.lightning import Countoff
from integration_tests.reports.parts import loss_of, net, rows, sgd


class Net(lightning.LightningModule):
    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.layer = net()
        self._wrong = wrong

    def training_step(self, batch: Any, index: int) -> Any:
        return loss_of(self.layer, batch)

    def train_dataloader(self) -> Any:
        dataset = rows()
        return StatefulDataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset))

    def configure_optimizers(self) -> Any:
        optimizer = sgd(self)
        steps = int(self.trainer.estimated_stepping_batches) if self._wrong else 40
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Stop(lightning.Callback):
    """Ends the first run where it has written its checkpoint."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = trainer.global_step == 8


def train(wrong: bool, stage: int, folder: Path) -> None:
    saving = ModelCheckpoint(folder, filename="last", every_n_train_steps=8, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[Countoff(), saving] if stage else [Countoff(), saving, Stop()],
    )
    trainer.fit(Net(wrong), ckpt_path=str(folder / "last.ckpt") if stage else None)

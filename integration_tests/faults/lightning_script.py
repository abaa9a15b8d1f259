"""Lightning."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from integration_tests.faults.conduct import Conduct
from integration_tests.jobs import Classifier, Job


class Module(Classifier):
    """A classifier that applies its own optimizer's steps, as its conduct says."""

    def __init__(self, conduct: Conduct) -> None:
        super().__init__(eval_sync="step")
        self._conduct = conduct
        self.automatic_optimization = conduct.fault not in ("F12", "F12b")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization or loss is None:
            return loss
        optimizer: Any = self.optimizers()
        self.manual_backward(loss)
        if self._conduct.steps_after(batch_idx):
            optimizer.step()
            optimizer.zero_grad()
        return loss


class Acts(pl.Callback):
    """Does in Lightning's loop what the conduct says."""

    def __init__(self, conduct: Conduct) -> None:
        self._conduct = conduct

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._conduct.after_batch(trainer.current_epoch, batch_idx)
        if self._conduct.breaks_after(batch_idx):
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._conduct.after_epoch(trainer.current_epoch)
        dist.barrier()


class Saves(pl.Callback):
    """Writes a checkpoint after the second and the fourth batch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in (1, 3):
            trainer.save_checkpoint(f"after-{batch_idx}.ckpt")


def train(conduct: Conduct) -> None:
    """Trains one rank."""
    arguments: dict[str, Any] = {"max_epochs": conduct.epochs}
    if conduct.fault == "F8":
        arguments["val_check_interval"] = conduct.evaluates_at + 1
    job, loaders = Job(trainer=arguments, options=conduct.options), (conduct.train_loader(), conduct.eval_loader())
    if conduct.fault == "F11":
        job.make_trainer(callbacks=[Saves()], max_steps=4).fit(Module(conduct), conduct.train_loader())
        job.make_trainer().fit(Module(conduct), *loaders, ckpt_path=f"after-{1 if conduct.mine else 3}.ckpt")
        return
    job.make_trainer(callbacks=[Acts(conduct)]).fit(Module(conduct), *loaders)

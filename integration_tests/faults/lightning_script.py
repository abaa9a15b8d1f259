"""Lightning."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from integration_tests import lightning_resumes
from integration_tests.faults.rank_behavior import RankBehavior, world_size
from integration_tests.lightning_jobs import Classifier, Job


class Module(Classifier):
    """A classifier that applies its own optimizer's steps, as the rank's behavior requires."""

    def __init__(self, behavior: RankBehavior) -> None:
        super().__init__(eval_sync="step")
        self._behavior = behavior
        self.automatic_optimization = behavior.fault not in ("F12", "F12b", "F25")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self._behavior.before_fit(self)  # Lightning has wrapped it now
        return super().configure_optimizers()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization or loss is None:
            return loss
        optimizer: Any = self.optimizers()
        if self._behavior.runs_extra(batch_idx):
            wrapper: Any = self.trainer.model
            extra: Any = super().training_step(batch, batch_idx)
            with wrapper.no_sync():
                self.manual_backward(extra)
        self.manual_backward(loss)
        if self._behavior.steps_after(batch_idx):
            optimizer.step()
            optimizer.zero_grad()
        return loss


class Acts(pl.Callback):
    """Applies the rank's behavior in Lightning's loop."""

    def __init__(self, behavior: RankBehavior) -> None:
        self._behavior = behavior

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._behavior.after_batch(trainer.current_epoch, batch_idx, pl_module)
        if self._behavior.breaks_after(batch_idx):
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._behavior.after_epoch(trainer.current_epoch)
        dist.barrier()


class Saves(pl.Callback):
    """Writes a checkpoint after the second and the fourth batch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in (1, 3):
            trainer.save_checkpoint(f"after-{batch_idx}.ckpt")


def train(behavior: RankBehavior) -> None:
    """Trains one rank."""
    if behavior.resumes:
        resume_wrongly(behavior)
        return
    arguments: dict[str, Any] = {"max_epochs": behavior.epochs}
    if behavior.fault == "F8":
        arguments["val_check_interval"] = behavior.evaluates_at + 1
    job, loaders = Job(trainer=arguments, options=behavior.options), (behavior.train_loader(), behavior.eval_loader())
    if behavior.fault == "F11":
        job.make_trainer(callbacks=[Saves()], max_steps=4).fit(Module(behavior), behavior.train_loader())
        job.make_trainer().fit(Module(behavior), *loaders, ckpt_path=f"after-{1 if behavior.mine else 3}.ckpt")
        return
    job.make_trainer(callbacks=[Acts(behavior)]).fit(Module(behavior), *loaders)


def resume_wrongly(behavior: RankBehavior) -> None:
    """Writes a checkpoint in the middle of an epoch, and goes on elsewhere."""
    how: dict[str, Any] = {
        "F21": {"loader": "shuffled"},
        "F22": {"spoils": lightning_resumes.skip_epoch},
        "F23": {"spoils": lightning_resumes.forget_schedule, "step": 10},
    }[behavior.fault]
    # A schedule without an end: the runs are shorter than any that has one.
    runs = [lightning_resumes.Resume(ranks=world_size(), schedule="steps", **how)]
    lightning_resumes.write(runs, "saved")
    lightning_resumes.resume(runs, "saved")

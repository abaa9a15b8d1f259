"""The transformers Trainer."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

from integration_tests import trainer_resumes
from integration_tests.digits import own_rank
from integration_tests.faults.rank_behavior import RankBehavior, world_size
from integration_tests.trainer_jobs import Job


class Acts(TrainerCallback):
    """Applies the rank's behavior in the Trainer's loop."""

    def __init__(self, behavior: RankBehavior) -> None:
        self._behavior = behavior
        self._number = 0

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._number = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **of_trainer: Any) -> None:
        number, self._number = self._number, self._number + 1
        epoch = (state.global_step - 1) // self._behavior.batches
        self._behavior.after_batch(epoch, number, of_trainer["model"])
        if self._behavior.breaks_after(number):
            control.should_epoch_stop = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._behavior.after_epoch((state.global_step - 1) // self._behavior.batches)
        dist.barrier()


class BeginsWrongly(TrainerCallback):
    """Applies it where the Trainer has wrapped its model; to be called before countoff is."""

    def __init__(self, behavior: RankBehavior) -> None:
        self._behavior = behavior

    def on_train_begin(self, args: Any, state: Any, control: Any, **of_trainer: Any) -> None:
        self._behavior.before_fit(of_trainer["model"])


@dataclass(frozen=True)
class FaultyJob(Job):
    """A job that reads as the rank's behavior requires."""

    behavior: RankBehavior = field(kw_only=True)

    def train_set(self) -> Any:
        return self.behavior.train_loader(sharded_over=world_size()).dataset

    def eval_set(self) -> Any:
        evals = self.behavior.eval_loader(sharded_over=world_size())
        return None if evals is None else evals.dataset


def train(behavior: RankBehavior) -> None:
    """Trains one rank."""
    if behavior.resumes:
        resume_wrongly(behavior)
        return
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": behavior.batch_size,
        "dataloader_num_workers": behavior.workers,
        "accelerator_config": {"dispatch_batches": False},
        "num_train_epochs": behavior.epochs,
        "max_steps": -1 if behavior.reported else behavior.batches * behavior.epochs,
    }
    if behavior.fault == "F8":
        arguments |= {"eval_strategy": "steps", "eval_steps": behavior.evaluates_at + 1}
    elif behavior.eval_batches:
        arguments["eval_strategy"] = "epoch"
    job = FaultyJob(behavior=behavior, args=arguments, options=behavior.options)
    if behavior.fault == "F11":
        first, *_ = job.trainer(max_steps=4, save_strategy="steps", save_steps=2)
        first.train()
        second, *_ = job.trainer()
        second.train(resume_from_checkpoint=f"out/checkpoint-{2 if behavior.mine else 4}")
        return
    trainer, *_ = job.trainer()
    trainer.callback_handler.callbacks.insert(0, BeginsWrongly(behavior))
    trainer.add_callback(Acts(behavior))
    trainer.train()


def resume_wrongly(behavior: RankBehavior) -> None:
    """Writes a checkpoint in the middle of an epoch, and goes on elsewhere."""
    how: dict[str, Any] = {
        "F21": {"spoils": trainer_resumes.at_the_start},
        "F22": {"spoils": trainer_resumes.one_epoch_on},
        "F23": {"spoils": trainer_resumes.without_schedule, "step": 13},
    }[behavior.fault]
    runs = [trainer_resumes.Resume(Job(samples=40 * world_size(), horizon=20), **how)]
    trainer_resumes.write(runs, "saved")
    dist.barrier()
    if own_rank() == 0:
        trainer_resumes.spoil(runs, Path("saved"))
    dist.barrier()
    trainer_resumes.resume(runs, "saved")

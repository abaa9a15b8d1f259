"""Checkpoints of the transformers Trainer, written in one launch and loaded in another; some resumes are wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from integration_tests.trainer_jobs import Job

STATE = "trainer_state.json"


@dataclass(frozen=True)
class Resume:
    """A training that writes checkpoints, and one that goes on from one of them.

    Attributes:
        job: What both train; by default, ten batches per epoch on two ranks.
        step: Optimizer steps after which the checkpoint was written from which the second run goes on.
        saves: TrainingArguments of the first run.
        then: TrainingArguments of the second run.
        spoils: What is done to the checkpoint's folder in between, by one process.
        rate: A learning rate that a callback of the second run sets when it begins; None: none.
    """

    job: Job = field(default_factory=lambda: Job(samples=80))
    step: int = 3
    saves: Mapping[str, Any] = field(default_factory=lambda: {"save_strategy": "steps", "save_steps": 1})
    then: Mapping[str, Any] = field(default_factory=dict)
    spoils: Callable[[Path], None] | None = None
    rate: float | None = None


class SetRate(TrainerCallback):
    """Lets the training go on with another learning rate, which the schedule computes from."""

    def __init__(self, rate: float) -> None:
        self._rate = rate

    def on_train_begin(self, *_: Any, optimizer: Any, lr_scheduler: Any, **__: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = self._rate
        lr_scheduler.base_lrs = [self._rate] * len(lr_scheduler.base_lrs)


def write(resumes: Sequence[Resume], folder: str) -> None:
    """Trains each job, and writes its checkpoints."""
    for place, each in enumerate(resumes):
        print(f"--- job {place}", flush=True)
        trainer, *_ = each.job.trainer(output_dir=f"{folder}/{place}", **each.saves)
        trainer.train()


def resume(resumes: Sequence[Resume], folder: str, again: str = "") -> list[int]:
    """Goes on with each job from its checkpoint; writes checkpoints again where `again` is a folder."""
    return resume_at(resumes, range(len(resumes)), folder, again)


def resume_at(resumes: Sequence[Resume], places: Sequence[int], folder: str, again: str = "") -> list[int]:
    """The same for checkpoints that stand at these places of the folder."""
    steps = []
    for place, each in zip(places, resumes, strict=True):
        print(f"--- job {place}", flush=True)
        saves = {"save_strategy": "steps", "save_steps": 1, "output_dir": f"{again}/{place}"} if again else {}
        trainer, *_ = each.job.trainer(**saves, **each.then)
        if each.rate is not None:
            trainer.add_callback(SetRate(each.rate))
        trainer.train(resume_from_checkpoint=f"{folder}/{place}/checkpoint-{each.step}")
        steps.append(trainer.state.global_step)
    return steps


def spoil(resumes: Sequence[Resume], folder: Path) -> None:
    """Does to the checkpoints what the resumes say."""
    for place, each in enumerate(resumes):
        if each.spoils is not None:
            each.spoils(folder / str(place) / f"checkpoint-{each.step}")


def change_state(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes what the Trainer has written of its own state."""
    state = json.loads((folder / STATE).read_text())
    change(state)
    (folder / STATE).write_text(json.dumps(state))


def one_step_back(folder: Path) -> None:
    """Sets the Trainer back by a step."""
    change_state(folder, lambda state: state.update(global_step=state["global_step"] - 1))


def one_epoch_on(folder: Path) -> None:
    """Sets the Trainer to the same batch of the next epoch."""
    change_state(folder, lambda state: state.update(global_step=state["global_step"] + 10, epoch=state["epoch"] + 1))


def without_schedule(folder: Path) -> None:
    """Removes the files that hold the optimizer and its schedule."""
    (folder / "scheduler.pt").unlink()
    (folder / "optimizer.pt").unlink()


def without_record(folder: Path) -> None:
    """Leaves the state as a Trainer without countoff writes it."""
    change_state(folder, lambda state: state["stateful_callbacks"].pop("Countoff"))


def with_broken_record(folder: Path) -> None:
    """Leaves a record that is none."""
    change_state(folder, lambda state: state["stateful_callbacks"]["Countoff"].update(record={"epoch": 0}))


def at_the_start(folder: Path) -> None:
    """Sets the Trainer to the first batch of the run."""
    change_state(folder, lambda state: state.update(global_step=0, epoch=0))

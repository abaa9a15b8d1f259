"""Lightning's checkpoints, written in one launch and loaded in another, and what is wrong with some of the resumes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from integration_tests.digits import BATCH_SIZE, digits, own_rank, share_loader
from integration_tests.lightning_jobs import Classifier, Job, outcome, quiet

BATCHES = 6


class Positioned:
    """A loader that saves how many batches it has given, and goes on behind them."""

    behind = 0

    def __init__(self, batches: int = BATCHES) -> None:
        self._batches = list(share_loader(batches))
        self._given = self._start = 0

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        start, self._start = self._start, 0
        for number in range(start, len(self._batches)):
            self._given = number + 1
            yield self._batches[number]

    def state_dict(self) -> dict[str, Any]:
        return {"given": self._given}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._start = (state["given"] - self.behind) % len(self._batches)


class OneBehind(Positioned):
    """The same, by one batch off."""

    behind = 1


def digits_loader(ranks: int, *, shuffle: bool = False) -> Any:
    """A plain loader, which Lightning shards over so many ranks."""
    images, labels = digits()
    samples = BATCHES * BATCH_SIZE * ranks
    return DataLoader(TensorDataset(images[:samples], labels[:samples]), batch_size=BATCH_SIZE, shuffle=shuffle)


def own_sampler(ranks: int) -> Any:
    """A loader with a sampler of the user's own making, shuffled by seed and epoch."""
    images, labels = digits()
    samples = BATCHES * BATCH_SIZE * ranks
    data, world_size = TensorDataset(images[:samples], labels[:samples]), int(os.environ["WORLD_SIZE"])
    return DataLoader(data, batch_size=BATCH_SIZE, sampler=DistributedSampler(data, world_size, own_rank()))


LOADERS: dict[str, Callable[[int], Any]] = {
    "positioned": lambda ranks: Positioned(),
    "one behind": lambda ranks: OneBehind(),
    "plain": digits_loader,
    "shuffled": lambda ranks: digits_loader(ranks, shuffle=True),
    "own sampler": own_sampler,
    "unsized": lambda ranks: share_loader(BATCHES),
}
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=40),
    "warm-up": lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8)),
    "steps": lambda optimizer: StepLR(optimizer, 1, gamma=0.5),
}


class Scheduled(Classifier):
    """A classifier with a schedule, which may do something wrong with the checkpoint that it resumes from."""

    def __init__(self, schedule: str, interval: str, rate: float, spoils: Callable[[Any], None] | None) -> None:
        super().__init__()
        self._schedule, self._interval, self._rate, self._spoils = schedule, interval, rate, spoils

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self._rate, momentum=0.9)
        if not self._schedule:
            return optimizer
        config = {"scheduler": SCHEDULES[self._schedule](optimizer), "interval": self._interval}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def on_train_start(self) -> None:
        for optimizer in self.trainer.optimizers if self._rate != 0.1 else ():
            for group in optimizer.param_groups:
                group["lr"] = self._rate

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self._spoils is not None:
            self._spoils(checkpoint)


class Manual(Scheduled):
    """The same with two optimizers that it steps by itself."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([each], lr=self._rate) for each in self.layer.parameters()]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        loss = super().training_step(batch, batch_idx)
        assert loss is not None
        self.manual_backward(loss)
        for optimizer in self.optimizers():  # pyright: ignore[reportGeneralTypeIssues]
            optimizer.step()
            optimizer.zero_grad()
        return None


def skip_epoch(checkpoint: dict[str, Any]) -> None:
    """Sets Lightning's progress to the begin of the next epoch."""
    loops = checkpoint["loops"]["fit_loop"]
    for progress in (loops["epoch_progress"][which] for which in ("total", "current")):
        progress.update(ready=1, started=1, processed=1, completed=1)
    batches = loops["epoch_loop.batch_progress"]
    batches["current"] = dict.fromkeys(batches["current"], 0)


def forget_schedule(checkpoint: dict[str, Any]) -> None:
    """Leaves out the schedulers, so that Lightning restores the optimizers alone."""
    checkpoint["lr_schedulers"] = []


def break_record(checkpoint: dict[str, Any]) -> None:
    """Leaves a record that is none."""
    checkpoint["countoff"] = {"epoch": 0}


@dataclass(frozen=True)
class Resume:
    """A run that writes checkpoints, and one that goes on from one of them.

    Attributes:
        loader: Its name in `LOADERS`.
        saves: Arguments of the ModelCheckpoint that writes.
        step: Optimizer steps after which the checkpoint was written from which the second run goes on.
        trainer: Arguments of both Trainers.
        until: Arguments of the first Trainer.
        val: Whether it evaluates.
        schedule: Its name in `SCHEDULES`; "" for none.
        interval: How often Lightning steps that.
        rate: Learning rate of the second run.
        manual: Whether the module has two optimizers, which it steps by itself.
        spoils: What the second run's module does to the checkpoint that Lightning has loaded.
        options: Options of countoff in the first run.
        ranks: Ranks on which an epoch has `BATCHES` batches.
    """

    loader: str = "positioned"
    saves: Mapping[str, Any] = field(default_factory=lambda: {"every_n_train_steps": 1})
    step: int = 3
    trainer: Mapping[str, Any] = field(default_factory=dict)
    until: Mapping[str, Any] = field(default_factory=dict)
    val: bool = False
    schedule: str = "cosine"
    interval: str = "step"
    rate: float = 0.1
    manual: bool = False
    spoils: Callable[[Any], None] | None = None
    options: Mapping[str, Any] | None = field(default_factory=dict)
    ranks: int = 2

    def module(self, *, resumed: bool) -> Any:
        kind = Manual if self.manual else Scheduled
        return kind(self.schedule, self.interval, self.rate if resumed else 0.1, self.spoils if resumed else None)

    def loaders(self) -> list[Any]:
        return [LOADERS[self.loader](self.ranks), share_loader(2) if self.val else None]


def write(resumes: Sequence[Resume], folder: str) -> None:
    """Trains each job, and writes its checkpoints."""
    quiet()
    for place, each in enumerate(resumes):
        print(f"--- job {place}", flush=True)
        saves = ModelCheckpoint(dirpath=f"{folder}/{place}", filename="{step}", save_top_k=-1, **each.saves)
        arguments = {"max_epochs": 2, "enable_checkpointing": True, **each.trainer, **each.until}
        trainer = Job(options=each.options).make_trainer(callbacks=[saves], **arguments)
        trainer.fit(each.module(resumed=False), *each.loaders())
        if not each.saves:
            trainer.save_checkpoint(f"{folder}/{place}/step={each.step}.ckpt")


def resume(resumes: Sequence[Resume], folder: str, again: str = "") -> list[dict[str, Any]]:
    """Goes on with each job from its checkpoint; writes checkpoints again where `again` is a folder."""
    return resume_at(resumes, range(len(resumes)), folder, again)


def resume_at(resumes: Sequence[Resume], places: Sequence[int], folder: str, again: str = "") -> list[dict[str, Any]]:
    """The same for checkpoints that stand at these places of the folder."""
    quiet()
    results = []
    for place, each in zip(places, resumes, strict=True):
        print(f"--- job {place}", flush=True)
        arguments = {"max_epochs": 3, **each.trainer}
        if again:
            saves = ModelCheckpoint(dirpath=f"{again}/{place}", filename="{step}", save_top_k=-1, every_n_train_steps=1)
            arguments |= {"enable_checkpointing": True, "callbacks": [saves]}
        trainer, module = Job().make_trainer(**arguments), each.module(resumed=True)
        trainer.fit(module, *each.loaders(), ckpt_path=f"{folder}/{place}/step={each.step}.ckpt")
        results.append(outcome(trainer, module))
    return results

"""Fabric's checkpoints, written in one launch and loaded in another; some of the resumes are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from countoff.fabric import Countoff
from integration_tests import devices
from integration_tests.digits import BATCH_SIZE, digits, own_rank
from integration_tests.fabric_jobs import step_on
from integration_tests.resume_jobs import BATCHES, EPOCHS, Run, Shares, rate_of

KEYS = {"m": "model", "o": "optimizer", "s": "scheduler", "c": "countoff"}
"""The parts of a checkpoint, by the letters of `Run.restored`."""


class Continued(DistributedSampler[Any]):
    """A sampler that goes on with an epoch, where Fabric counts the sampler's epochs from 0 in every process."""

    first = 0

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(self.first + epoch)


class Job:
    """One process's part of a run with Fabric, as a script that keeps its state in a dict.

    Args:
        run: The run. `sets_epoch` is whether a resumed script lets its sampler go on with the epoch; with the loader
            ``seeded`` it does so by the sampler's seed.
        path: Its checkpoint.
        first: The epoch in which this process begins.
    """

    def __init__(self, run: Run, path: Path, first: int) -> None:
        self.run, self.path = run, path
        self.fabric = fabric = Fabric(**devices.lightning(), strategy="ddp")
        fabric.launch()
        fabric.seed_everything(7, verbose=False)
        model = fabric.setup(torch.nn.Linear(64, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.state: dict[str, Any] = {"model": model, "optimizer": fabric.setup_optimizers(optimizer)}
        if run.scheduled:
            self.state["scheduler"] = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_of)
        self.countoff = Countoff(
            fabric,
            optimizer=self.state["optimizer"],
            scheduler=self.state.get("scheduler"),
            gradient_accumulation_steps=run.accumulation,
        )
        self.state["countoff"] = self.countoff
        self.train_loader = fabric.setup_dataloaders(self._loader(first if run.sets_epoch else 0))

    def _loader(self, first: int) -> Any:
        images, labels = digits()
        if self.run.loader == "stream":
            return DataLoader(Shares(BATCHES * BATCH_SIZE, own_rank()), BATCH_SIZE)
        samples = BATCHES * BATCH_SIZE * self.run.ranks
        data = TensorDataset(images[:samples], labels[:samples])
        seeded = self.run.loader == "seeded"
        sampler = Continued(data, shuffle=self.run.shuffle, seed=first if seeded else 0)
        sampler.first = 0 if seeded else first
        kind = StatefulDataLoader if self.run.loader == "stateful" else DataLoader
        return kind(data, BATCH_SIZE, sampler=sampler)

    @property
    def guard(self) -> Any:
        """The guard of the current fit."""
        return self.countoff.guard

    def save(self) -> None:
        state = {name: part for name, part in self.state.items() if name != "countoff" or "c" in self.run.restored}
        if self.run.loader == "stateful":
            state["loader"] = self.train_loader
        self.fabric.save(self.path, state)

    def load(self) -> None:
        restored = {KEYS[letter] for letter in self.run.restored + "c"}
        state = {name: part for name, part in self.state.items() if name in restored}
        if self.run.loader == "stateful":
            state["loader"] = self.train_loader
        # Without strict, a checkpoint that was written without countoff can be loaded.
        self.fabric.load(self.path, state, strict=False)
        for group in self.state["optimizer"].param_groups if self.run.rate is not None else ():
            group["lr"] = self.run.rate

    def train(self, first: tuple[int, int], last: tuple[int, int] | None) -> None:
        """Trains from behind one place, the epoch and batches of it, to another one, where it saves."""
        for epoch in range(first[0], EPOCHS):
            skipped = first[1] if epoch == first[0] else 0
            start = skipped if self.run.loader == "stateful" else 0
            for number, batch in enumerate(self.countoff.train(self.train_loader), start + 1):
                if number <= skipped:
                    continue
                if number % self.run.accumulation == 0:
                    step_on(self.fabric, self.state["model"], self.state["optimizer"], batch)
                    if "scheduler" in self.state:
                        self.state["scheduler"].step()
                if last == (epoch, number) and not self.run.after_epoch:
                    self.save()
                    return
            if last is not None and last[0] == epoch and self.run.after_epoch:
                self.save()
                return

    def end(self) -> None:
        self.countoff.close()


def save_all(runs: list[Run], folder: Path) -> None:
    """Trains every run until its checkpoint."""
    for run in runs:
        job = Job(run, folder / f"{run.name}.ckpt", 0)
        job.train((0, 0), run.saved_at)
        job.end()


def resume_all(runs: list[Run], folder: Path) -> dict[str, list[tuple[str, str]]]:
    """Resumes every run in this process; subject and sentence of each warning, by the run's name."""
    found: dict[str, list[tuple[str, str]]] = {}
    for run in runs:
        job = Job(run, folder / f"{run.name}.ckpt", run.place[0])
        job.load()
        if run.again:  # another checkpoint, two batches later, from which another script goes on
            job.train(run.place, (run.place[0], run.place[1] + 2))
            job.end()
            job = Job(run, job.path, run.place[0])
            job.load()
            job.train((run.place[0], run.place[1] + 2), None)
        else:
            job.train(run.place, None)
        guard = job.guard
        job.end()  # the last warnings have come then
        found[run.name] = [(notice.subject, notice.headline) for notice in guard.notices]
    return found


def use_record(folder: Path) -> dict[str, Any]:
    """What a script finds of the record where it saves and loads at other places than in its loop."""
    found: dict[str, Any] = {}
    run = Run("places", shuffle=False)
    job = Job(run, folder / "places.ckpt", 0)
    found["before the fit"] = job.countoff.state_dict()
    job.train((0, 0), (1, 2))
    found["behind a break"] = _place(job)
    job.train((2, 0), None)
    job.load()  # goes back to the best checkpoint, say, and trains on
    found["gone back"] = _place(job)
    job.train((1, 2), (2, 3))
    found["behind another break"] = _place(job)
    guard = job.guard
    job.end()
    found["said"] = [notice.headline for notice in guard.notices]
    found["after the fit"] = _place(job)
    without = {"model": job.state["model"], "optimizer": job.state["optimizer"], "scheduler": job.state["scheduler"]}
    found["left over"] = list(job.fabric.load(job.path, without, strict=False))
    return found


def _place(job: Job) -> list[int]:
    record = job.countoff.state_dict()
    return [record[name] for name in ("epoch", "batches", "steps")]

"""Runs that stop at a checkpoint and resume from it in another process: plain PyTorch and Accelerate."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import countoff.accelerate
import countoff.torch
from integration_tests.digits import BATCH_SIZE, digits, own_rank
from integration_tests.loops import model_and_optimizer, train_on

BATCHES, EPOCHS = 6, 4
"""Batches of a rank's train epoch on two ranks, and epochs of the whole run."""
RATES = [0.01, 0.04, 0.08, 0.1, *(0.1 - 0.003 * step for step in range(BATCHES * EPOCHS))]
"""The learning rate of each optimizer step: a warm-up, and a decay that has a rate of its own at each step."""


@dataclass(frozen=True)
class Run:
    """A run, and how it resumes.

    Attributes:
        name: What happens.
        saved_at: The train epoch and the batches of it after which the checkpoint is written; in the loop's body.
        shuffle: Whether the sampler shuffles by the epoch.
        loader: ``sampled`` (a DistributedSampler), ``stateful`` (it is restored itself) or ``stream`` (no length).
        after_epoch: Whether the checkpoint is written after the epoch instead.
        resumes_at: The epoch of the loop that resumes, and batches that it skips in it; None: where it was saved.
        start_epoch: The epoch that the resumed loop's first pass is told; 0: none.
        restored: What is restored: ``m`` the model, ``o`` the optimizer, ``s`` the scheduler, ``c`` countoff's record.
        sets_epoch: Whether the resumed loop sets the sampler's epoch.
        seed: The seed of the resumed loop's sampler.
        rate: A learning rate that is set after the restoring; None: none.
        spoil: Changes countoff's record before it is restored.
        accumulation: Batches per optimizer step.
        before: Whether the checkpoint is written before its batch is trained on.
        scheduled: Whether there is a scheduler.
        again: Whether the resumed run writes another checkpoint two batches later, and resumes from that one too.
        ranks: Ranks on which an epoch has `BATCHES` batches.
    """

    name: str
    saved_at: tuple[int, int] = (1, 3)
    shuffle: bool = True
    loader: str = "sampled"
    after_epoch: bool = False
    resumes_at: tuple[int, int] | None = None
    start_epoch: int = 0
    restored: str = "mosc"
    sets_epoch: bool = True
    seed: int = 0
    rate: float | None = None
    spoil: Callable[[Any], Any] | None = None
    accumulation: int = 1
    before: bool = False
    scheduled: bool = True
    again: bool = False
    ranks: int = 2

    @property
    def place(self) -> tuple[int, int]:
        """Where the loop goes on."""
        if self.resumes_at is not None:
            return self.resumes_at
        return (self.saved_at[0] + 1, 0) if self.after_epoch or self.saved_at[1] == BATCHES else self.saved_at


class Shares(IterableDataset[Any]):
    """This rank's digits, the same in every epoch, with no length."""

    def __init__(self, samples: int, rank: int) -> None:
        self.samples, self.rank = samples, rank

    def __iter__(self) -> Iterator[Any]:
        images, labels = digits()
        for number in range(self.samples):
            index = (number * 2 + self.rank) % len(images)
            yield images[index], labels[index]


def train_loader(run: Run) -> DataLoader[Any]:
    images, labels = digits()
    samples = BATCHES * BATCH_SIZE * run.ranks
    if run.loader == "stream":
        return DataLoader(Shares(BATCHES * BATCH_SIZE, own_rank()), BATCH_SIZE)
    dataset = TensorDataset(images[:samples], labels[:samples])
    kind = StatefulDataLoader if run.loader == "stateful" else DataLoader
    return kind(dataset, BATCH_SIZE, sampler=DistributedSampler(dataset, shuffle=run.shuffle))


def spoiled(record: dict[str, Any]) -> dict[str, Any]:
    """A record of which a part is missing."""
    return {name: value for name, value in record.items() if name != "version"}


def rate_of(step: int) -> float:
    return RATES[min(step, len(RATES) - 1)] / 0.1


class Job:
    """One process's part of a run in plain PyTorch."""

    def __init__(self, run: Run, path: Path, start_epoch: int = 0) -> None:
        self.run, self.path, self.start_epoch = run, path, start_epoch
        self.model, self.optimizer = model_and_optimizer()
        self.loader = train_loader(run)
        self.scheduler = None
        if run.scheduled:
            self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate_of)
        self.countoff = countoff.torch.Countoff(optimizer=self.optimizer, gradient_accumulation_steps=run.accumulation)

    def save(self) -> None:
        if own_rank() == 0:
            found: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
            if self.scheduler is not None:
                found["scheduler"] = self.scheduler
            state = {name: each.state_dict() for name, each in found.items()} | {"countoff": self.countoff.state_dict()}
            if self.run.loader == "stateful":
                state["loader"] = self.loader.state_dict()  # pyright: ignore[reportAttributeAccessIssue]
            torch.save(state, self.path)
        dist.barrier()

    def load(self) -> None:
        state, run = torch.load(self.path), self.run  # with weights_only=True: it has plain types alone
        parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        for name, part in parts.items():
            if name[0] in run.restored and part is not None:
                part.load_state_dict(state[name])
        if run.seed:
            self.loader.sampler.seed = run.seed  # pyright: ignore[reportAttributeAccessIssue]
        if run.loader == "stateful":
            self.loader.load_state_dict(state["loader"])  # pyright: ignore[reportAttributeAccessIssue]
        record = state["countoff"] if "c" in run.restored else {}
        self.countoff.load_state_dict(record if run.spoil is None else run.spoil(record))
        for group in self.optimizer.param_groups if run.rate is not None else ():
            group["lr"] = run.rate

    def train(self, first: tuple[int, int], last: tuple[int, int] | None, *, after_epoch: bool = False) -> None:
        """Trains from behind one place, the epoch and batches of it, to another one, where it saves."""
        run, sampler = self.run, self.loader.sampler
        for epoch in range(first[0], EPOCHS):
            skipped = first[1] if epoch == first[0] else 0
            if isinstance(sampler, DistributedSampler) and (run.sets_epoch or first == (0, 0)):
                sampler.set_epoch(epoch)
            start = skipped if run.loader == "stateful" else 0
            told = epoch if self.start_epoch and epoch == first[0] else None
            for number, batch in enumerate(self.countoff.train(self.loader, epoch=told), start + 1):
                if number <= skipped:
                    continue
                if run.before and last == (epoch, number):
                    self.save()
                    return
                self.train_batch(number, batch)
                if last == (epoch, number) and not after_epoch:
                    self.save()
                    return
            if last is not None and last[0] == epoch and after_epoch:
                self.save()
                return

    def train_batch(self, number: int, batch: Any) -> None:
        if number % self.run.accumulation == 0:
            train_on(self.model, self.optimizer, batch)
            if self.scheduler is not None:
                self.scheduler.step()


def save_all(runs: list[Run], folder: Path) -> None:
    """Trains every run until its checkpoint."""
    dist.init_process_group("gloo")
    for run in runs:
        job = Job(run, folder / f"{run.name}.pt")
        job.train((0, 0), run.saved_at, after_epoch=run.after_epoch)
        job.countoff.close()


def resume_all(runs: list[Run], folder: Path) -> dict[str, list[tuple[str, str]]]:
    """Resumes every run in this process; subject and sentence of each warning, by the run's name."""
    dist.init_process_group("gloo")
    found: dict[str, list[tuple[str, str]]] = {}
    for run in runs:
        with said() as text:
            job = Job(run, folder / f"{run.name}.pt", start_epoch=run.start_epoch)
            job.load()
            if run.again:
                job.train(run.place, (run.place[0], run.place[1] + 2))
                job.countoff.close()
                job = Job(run, job.path)
                job.load()
                job.train((run.place[0], run.place[1] + 2), None)
            else:
                job.train(run.place, None)
            job.countoff.close()
        notices = [(notice.subject, notice.headline) for notice in job.countoff.guard.notices]
        found[run.name] = notices or [("", line) for line in text.getvalue().splitlines() if line.startswith("[rank ")]
    return found


@contextlib.contextmanager
def said() -> Iterator[io.StringIO]:
    """What is printed to stderr in a context, which is where one process alone has its warnings."""
    with contextlib.redirect_stderr(io.StringIO()) as text:
        yield text


@dataclass(frozen=True)
class Prepared:
    """A run with Accelerate, and how it resumes.

    Attributes:
        name: What happens.
        saved_at: As in `Run`.
        shuffle: Whether the loader shuffles.
        stateful: Whether Accelerate restores the loader itself.
        skips: Batches that the resumed loop skips with `skip_first_batches`; None: those that were trained on.
        epoch: The epoch that the resumed loop gives the loader; None: that of the checkpoint.
        prepared: Whether Accelerate has prepared the scheduler, and so saves and restores it.
        batch_size: Samples per process and batch of the resumed run.
        ranks: Processes on which an epoch has `BATCHES` batches.
    """

    name: str
    saved_at: tuple[int, int] = (1, 3)
    shuffle: bool = True
    stateful: bool = False
    skips: int | None = None
    epoch: int | None = None
    prepared: bool = True
    batch_size: int = BATCH_SIZE
    ranks: int = 2


class PreparedJob:
    """One process's part of a run with Accelerate."""

    def __init__(self, run: Prepared, path: Path, batch_size: int = BATCH_SIZE) -> None:
        self.run, self.path = run, path
        config = DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader=run.stateful)
        self.accelerator = accelerator = Accelerator(
            cpu=True, dataloader_config=config, step_scheduler_with_optimizer=False
        )
        images, labels = digits()
        samples = BATCHES * BATCH_SIZE * run.ranks
        loader = DataLoader(TensorDataset(images[:samples], labels[:samples]), batch_size, shuffle=run.shuffle)
        torch.manual_seed(7)
        model = torch.nn.Linear(64, 10)
        raw = torch.optim.SGD(model.parameters(), lr=0.1)
        self.scheduler: Any = torch.optim.lr_scheduler.LambdaLR(raw, rate_of)
        if run.prepared:
            self.scheduler = accelerator.prepare(self.scheduler)
        self.model, self.optimizer, self.loader = accelerator.prepare(model, raw, loader)
        self.countoff = countoff.accelerate.Countoff(accelerator)

    def train(self, first: tuple[int, int], last: tuple[int, int] | None) -> None:
        for epoch in range(first[0], EPOCHS):
            self.loader.set_epoch(epoch)
            skipped = first[1] if epoch == first[0] else 0
            loader = self.loader if not skipped else self.accelerator.skip_first_batches(self.loader, skipped)
            for number, (images, labels) in enumerate(self.countoff.train(loader), skipped + 1):
                self.accelerator.backward(torch.nn.functional.cross_entropy(self.model(images), labels))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
                if last == (epoch, number):
                    self.accelerator.save_state(str(self.path))
                    self.accelerator.wait_for_everyone()
                    return


def save_prepared(runs: list[Prepared], folder: Path) -> None:
    for run in runs:
        job = PreparedJob(run, folder / run.name)
        job.train((0, 0), run.saved_at)
        job.countoff.close()


def resume_prepared(runs: list[Prepared], folder: Path) -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    for run in runs:
        job = PreparedJob(run, folder / run.name, run.batch_size)
        job.accelerator.load_state(str(job.path))
        epoch, batches = (run.saved_at[0] + 1, 0) if run.saved_at[1] == BATCHES else run.saved_at
        skips = (0 if run.stateful else batches) if run.skips is None else run.skips
        job.train((epoch if run.epoch is None else run.epoch, skips), None)
        job.countoff.close()
        found[run.name] = [(notice.subject, notice.headline) for notice in job.countoff.guard.notices]
    return found

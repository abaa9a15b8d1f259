"""Loops that read each sample of an epoch once, or do not; each returns what was said of it, on its rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from countoff.torch import Countoff
from integration_tests.digits import BATCH_SIZE, digits, own_rank, weights
from integration_tests.loops import model_and_optimizer, train_on


class Rows(Dataset[Any]):
    """Rows of a class of the user's own, which stores no length."""

    def __init__(self, rows: int) -> None:
        images, labels = digits()
        self._images, self._labels, self._rows = images, labels, rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> Any:
        return self._images[index % 1000], self._labels[index % 1000]


def forked(workers: int) -> dict[str, Any]:
    """Workers of a loader, which begin as fast as in a script: the rank itself is a child of a forkserver."""
    return {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}


def rows_of_digits(rows: int) -> TensorDataset:
    images, labels = digits()
    places = torch.arange(rows) % len(images)
    return TensorDataset(images[places], labels[places])


@dataclass(frozen=True)
class Epochs:
    """Train epochs of a plain loop behind a DistributedSampler.

    Attributes:
        rows: Rows of the dataset.
        batch_size: Samples of one rank per batch.
        sets_epoch: Which ranks call `set_epoch`.
        workers: Workers of each loader.
        own: Whether the dataset is of a class of the user's own.
        epochs: Epochs.
        stops: Batches after which each epoch is left; 0: it is not.
        stateful: Whether the loader is one of torchdata's, which saves its state.
        restored: Batches of each epoch that such a loader has given before its state is restored into another one.
        counted: Whether countoff counts.
    """

    rows: int = 80
    batch_size: int = BATCH_SIZE
    sets_epoch: tuple[int, ...] = (0, 1)
    workers: int = 0
    own: bool = False
    epochs: int = 3
    stops: int = 0
    stateful: bool = False
    restored: int = 0
    counted: bool = True


def plain(runs: list[Epochs], traces: str) -> list[dict[str, Any]]:
    """Trains all runs, each with a trace in a directory of its own."""
    dist.init_process_group("gloo")
    return [_train(run, f"{traces}/{number}") for number, run in enumerate(runs)]


def _train(run: Epochs, trace: str) -> dict[str, Any]:
    model, optimizer = model_and_optimizer()
    dataset = Rows(run.rows) if run.own else rows_of_digits(run.rows)
    sampler = DistributedSampler(dataset)
    kind = StatefulDataLoader if run.stateful else DataLoader

    def make() -> Any:
        return kind(dataset, batch_size=run.batch_size, sampler=sampler, **forked(run.workers))

    loader = make()
    countoff = Countoff(enabled=run.counted, optimizer=optimizer, trace_dir=trace)
    for epoch in range(run.epochs):
        if own_rank() in run.sets_epoch:
            sampler.set_epoch(epoch)
        if run.restored:
            before, loader = loader, make()
            for _ in itertools.islice(before, run.restored):
                pass
            loader.load_state_dict(before.state_dict())
        for number, batch in enumerate(countoff.train(loader), 1):
            train_on(model, optimizer, batch)
            if number == run.stops:
                break
    countoff.close()
    said = [notice.sentence for notice in countoff.guard.notices if notice.kind == "NotReadOnce"]
    return {"said": said, "weights": weights(model)}


class Stream(IterableDataset[Any]):
    """Digits of one rank: each worker yields its part, or all of them.

    Args:
        divides: Whether each worker yields its part.
        same: Whether all samples are equal.
    """

    def __init__(self, divides: bool, same: bool = False) -> None:
        self._divides, self._same = divides, same
        self._rank, self._ranks = own_rank(), dist.get_world_size()

    def __iter__(self) -> Iterator[Any]:
        images, labels = digits()
        info = get_worker_info()
        first, every = (info.id, info.num_workers) if self._divides and info is not None else (0, 1)
        for row in range(self._rank + first * self._ranks, 160, every * self._ranks):
            place = 0 if self._same else row
            yield images[place], labels[place]


def streams(runs: list[tuple[bool, bool, int]]) -> list[list[str]]:
    dist.init_process_group("gloo")
    return [_stream(*run) for run in runs]


def _stream(divides: bool, same: bool, workers: int) -> list[str]:
    model, optimizer = model_and_optimizer()
    countoff = Countoff(optimizer=optimizer)
    loader = DataLoader(Stream(divides, same), batch_size=BATCH_SIZE, **forked(workers))
    for _ in range(2):
        for batch in countoff.train(loader):
            train_on(model, optimizer, batch)
    countoff.close()
    return [f"{notice.kind}: {notice.sentence}" for notice in countoff.guard.notices]


@dataclass(frozen=True)
class Resume:
    """A loop with Accelerate that stops in the second epoch, and a process that goes on with it.

    Attributes:
        seedable: Whether its sampler shuffles by a seed and its epoch.
        sets_epoch: Whether the resumed loop sets it.
        seed: The seed of the resumed process.
        skips_again: Whether it skips batches in the epoch behind that one, too.
        workers: Workers of each loader.
        passes_over: Whether it takes the batches before the checkpoint from the loader, and does not train on them.
    """

    seedable: bool = True
    sets_epoch: bool = True
    seed: int = 0
    skips_again: bool = False
    workers: int = 0
    passes_over: bool = False


_EPOCHS, _SAVED_IN, _SAVED_AFTER = 3, 1, 4


def accelerated(runs: list[Resume], directory: str, resumes: bool) -> list[list[str]]:
    return [_accelerate(run, Path(directory) / str(number), resumes) for number, run in enumerate(runs)]


def _accelerate(run: Resume, directory: Path, resumes: bool) -> list[str]:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from countoff.accelerate import Countoff

    config = DataLoaderConfiguration(use_seedable_sampler=run.seedable)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    torch.manual_seed(run.seed if resumes else 0)
    model: Any = torch.nn.Linear(64, 10)
    loader: Any = DataLoader(rows_of_digits(96), batch_size=BATCH_SIZE, shuffle=True, **forked(run.workers))
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    countoff = Countoff(accelerator)
    if resumes:
        accelerator.load_state(str(directory))
    for epoch in range(_SAVED_IN if resumes else 0, _EPOCHS):
        skips = resumes and (epoch == _SAVED_IN or run.skips_again) and not run.passes_over
        active: Any = accelerator.skip_first_batches(loader, _SAVED_AFTER) if skips else loader
        if run.sets_epoch or not resumes:
            active.set_epoch(epoch)
        for number, batch in enumerate(countoff.train(active, epoch=epoch), 1):
            if run.passes_over and resumes and epoch == _SAVED_IN and number <= _SAVED_AFTER:
                continue
            train_on(model, optimizer, batch)
            if not resumes and (epoch, number) == (_SAVED_IN, _SAVED_AFTER):
                accelerator.save_state(str(directory))
                break
        if not resumes and epoch == _SAVED_IN:
            break
    countoff.close()
    accelerator.free_memory()
    return [f"{notice.kind}: {notice.sentence}" for notice in countoff.guard.notices]


@dataclass(frozen=True)
class LightningFit:
    """A fit of Lightning behind a DistributedSampler of the module's own.

    Attributes:
        wrong: Where the sampler shuffles by rank: in the "first" epoch, in all "later" ones, or nowhere ("").
        workers: Workers of each loader.
        reloads: Whether each epoch has a loader of its own.
    """

    wrong: str = ""
    workers: int = 0
    reloads: bool = False


def lightning_fits(runs: list[LightningFit]) -> list[list[str]]:
    return [_fit(run) for run in runs]


def _fit(run: LightningFit) -> list[str]:
    import lightning

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(64, 10)
            self.sampler: Any = None

        def training_step(self, batch: Any, index: int) -> Any:
            return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def on_train_epoch_start(self) -> None:
            if run.wrong == "later":
                self.sampler.set_epoch(self.current_epoch * (1 + self.global_rank))

        def train_dataloader(self) -> Any:
            dataset = rows_of_digits(80)
            self.sampler = DistributedSampler(dataset)
            if run.wrong == "first":  # Lightning sets the epoch later, when workers have fetched ahead
                self.sampler.set_epoch(self.global_rank)
            return DataLoader(dataset, batch_size=BATCH_SIZE, sampler=self.sampler, **forked(run.workers))

    trainer, kept = counted_trainer(2, max_epochs=3, reload_dataloaders_every_n_epochs=int(run.reloads))
    trainer.fit(Net())
    return [f"{notice.kind}: {notice.sentence}" for notice in kept[0].notices]


def counted_trainer(ranks: int, **options: Any) -> tuple[Any, list[Any]]:
    """A quiet Trainer of Lightning that leaves the samplers alone, and a list that gets its fit's guard."""
    import lightning

    from countoff.lightning import Countoff

    class Keeping(lightning.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            kept.append(callback.guard)

    kept, callback = list[Any](), Countoff()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[Keeping(), callback],
        **options,
    )
    return trainer, kept

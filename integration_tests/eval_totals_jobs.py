"""Evaluations whose data sets note what is read of them, one after the other in the same ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from integration_tests import devices
from integration_tests.digits import digits, own_rank, weights

METRICS = ("eval_samples", "eval_samples_repeated", "eval_samples_dropped")


class Noted(Dataset[Any]):
    """The first so many digits; `read` has the index of each sample that this rank has read."""

    def __init__(self, size: int, make: Callable[[Any, Any], Any] | None = None) -> None:
        self.read: list[int] = []
        self._size = size
        self._images, self._labels = digits()
        self._make = make or (lambda image, label: (image, label))

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return self._make(self._images[index], self._labels[index])

    def counted(self) -> list[int]:
        """What all ranks have read: different samples, those read again, those left. Collective."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, self.read)
        everything = [index for each in found for index in each]
        unique = len(set(everything))
        return [unique, len(everything) - unique, self._size - unique]


class Stream(IterableDataset[Any]):
    """Two batches of digits."""

    def __iter__(self) -> Iterator[Any]:
        images, labels = digits()
        yield from zip(images[:4], labels[:4], strict=True)


@dataclass(frozen=True)
class Case:
    """An evaluation.

    Attributes:
        sizes: Samples of each data set.
        sampler: ``distributed``, ``distributed, drops``, ``weighted``, ``half``, or ``""``: the framework's own.
        drop_last: Whether the loader drops the last batch.
        leaves: Whether the loop leaves the loader after its first batch.
        stream: Whether there is a stream instead of a data set.
        options: Of the framework: DataLoaderConfiguration, or the Trainer's arguments.
    """

    sizes: Sequence[int] = (10,)
    sampler: str = ""
    drop_last: bool = False
    leaves: bool = False
    stream: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def loader(self, dataset: Any) -> DataLoader[Any]:
        rank, world_size = own_rank(), int(os.environ["WORLD_SIZE"])
        sampler: Any = {
            "": lambda: None,
            "whole": lambda: SequentialSampler(dataset),
            "distributed": lambda: DistributedSampler(dataset, world_size, rank, shuffle=False),
            "distributed, drops": lambda: DistributedSampler(dataset, drop_last=True),
            "weighted": lambda: WeightedRandomSampler([1.0] * len(dataset), len(dataset)),
            "half": lambda: DistributedSampler(dataset, num_replicas=world_size // 2, rank=rank % (world_size // 2)),
        }[self.sampler]()
        return DataLoader(dataset, batch_size=2, sampler=sampler, drop_last=self.drop_last)


def of_evaluations(metrics: Mapping[str, float]) -> dict[str, list[float]]:
    """What countoff tells, by the evaluation's name."""
    found: dict[str, list[float]] = {}
    for metric in METRICS:
        for name, value in metrics.items():
            if name == f"countoff/{metric}" or name.startswith(f"countoff/{metric}/"):
                found.setdefault(name.removeprefix(f"countoff/{metric}").removeprefix("/"), []).append(value)
    return found


def loops(cases: Sequence[tuple[str, Case]]) -> list[tuple[dict[str, list[float]], list[list[int]]]]:
    """Evaluates in loops of plain PyTorch and of Accelerate; returns what countoff tells, and what was read."""
    devices.join()
    return [(_plain if kind == "plain" else _accelerated)(case) for kind, case in cases]


def _plain(case: Case) -> tuple[dict[str, list[float]], list[list[int]]]:
    import countoff.torch

    datasets: list[Any] = [Stream()] if case.stream else [Noted(size) for size in case.sizes]
    loaders = {f"set{place}": case.loader(each) for place, each in enumerate(datasets)}
    with countoff.torch.Countoff() as fit:
        _evaluate(fit, loaders, leaves=case.leaves)
        return of_evaluations(fit.progress()), [] if case.stream else [each.counted() for each in datasets]


def _accelerated(case: Case) -> tuple[dict[str, list[float]], list[list[int]]]:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    import countoff.accelerate

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**case.options))
    datasets = [Noted(size) for size in case.sizes]
    loaders = {f"set{place}": accelerator.prepare(case.loader(each)) for place, each in enumerate(datasets)}
    with countoff.accelerate.Countoff(accelerator) as fit:
        _evaluate(fit, loaders, leaves=case.leaves)
        return of_evaluations(fit.progress()), [each.counted() for each in datasets]


def _evaluate(fit: Any, loaders: Mapping[str, Any], *, leaves: bool) -> None:
    fit.start()
    for name, loader in loaders.items():
        for _ in fit.eval(loader, name) if len(loaders) > 1 else fit.eval(loader):
            if leaves:
                break


def with_lightning(cases: Sequence[Case]) -> list[tuple[dict[str, list[float]], list[list[int]], str]]:
    """Trains with validation, with Lightning's Trainer; returns what it logs, what was read, and the weights."""
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import CSVLogger

    from integration_tests.lightning_jobs import Classifier, Job, logged, quiet

    quiet()
    found = []
    for place, case in enumerate(cases):
        pl.seed_everything(7)
        datasets = [Noted(size) for size in case.sizes]
        loaders = [case.loader(each) for each in datasets]
        trainer = Job().make_trainer(max_epochs=1, logger=CSVLogger(os.getcwd(), name=f"log{place}"), **case.options)
        model = Classifier()
        train = Case(sampler="distributed").loader(Noted(16))
        trainer.fit(model, train, loaders if len(loaders) > 1 else loaders[0])
        told = of_evaluations(logged(Path(f"log{place}"))) if own_rank() == 0 else {}
        found.append((told, [each.counted() for each in datasets], weights(model)))
    return found


def with_composer(cases: Sequence[Case]) -> list[tuple[dict[str, list[float]], list[list[int]]]]:
    """Trains with evaluations, with Composer's Trainer; returns what it logs and what was read."""
    from composer.core import Evaluator
    from composer.loggers import InMemoryLogger

    from integration_tests.composer_jobs import Job
    from integration_tests.composer_parts import start

    start()
    found = []
    for case in cases:
        datasets = [Noted(size, lambda image, label: (image.reshape(1, 8, 8), label)) for size in case.sizes]
        evaluators = [
            Evaluator(label=f"set{place}", dataloader=case.loader(each)) for place, each in enumerate(datasets)
        ]
        memory, once = InMemoryLogger(), {"spin_dataloaders": False}  # else it reads a batch more, before it trains
        trainer = Job(even=32).make_trainer(
            eval_dataloader=evaluators, max_duration="1ep", loggers=[memory], **once, **case.options
        )
        trainer.fit()
        told = {name: values[-1][1] for name, values in memory.data.items()}
        found.append((of_evaluations(told), [each.counted() for each in datasets]))
        trainer.close()
    return found


def with_trainer(cases: Sequence[Case]) -> list[tuple[dict[str, list[float]], list[list[int]]]]:
    """Trains with evaluations, with the Trainer of transformers; returns its history's numbers and what was read."""
    from integration_tests.trainer_jobs import Job

    found = []
    for case in cases:
        datasets: Any = {f"set{place}": Noted(size) for place, size in enumerate(case.sizes)}
        trainer, *_ = Job(samples=16, evals=[1]).trainer(
            num_train_epochs=1, eval_strategy="epoch", per_device_eval_batch_size=2
        )
        trainer.eval_dataset = datasets if len(datasets) > 1 else datasets["set0"]
        trainer.train()
        told = {name: value for line in trainer.state.log_history for name, value in line.items()}
        read = [each.counted() for each in datasets.values()]
        found.append((of_evaluations(told) if own_rank() == 0 else {}, read))
    return found

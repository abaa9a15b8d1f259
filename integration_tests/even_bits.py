"""Loops whose loaders are easily disturbed, with and without `uneven_train`: their weights and random states."""

import contextlib
import hashlib
import itertools
import pickle
import random
from collections import UserString
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, get_worker_info

import countoff.accelerate
import countoff.torch
from integration_tests import devices
from integration_tests.digits import digits, own_rank, weights

_SIZE = 4
EQUAL = 7
"""Batches of every rank, where all have the same number."""
EPOCHS = 3


def share(batches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's samples."""
    images, labels = digits()
    first = own_rank() * 300
    return images[first : first + batches * _SIZE], labels[first : first + batches * _SIZE]


def batches_of(batches: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    images, labels = share(batches)
    return list(zip(images.split(_SIZE), labels.split(_SIZE), strict=True))


class Drawing(Dataset[Any]):
    """Draws from each global generator for each sample."""

    def __init__(self, batches: int) -> None:
        self.images, self.labels = share(batches)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        noise = torch.randn(64) * random.random() * float(numpy.random.rand())
        return self.images[index] + 0.1 * noise, self.labels[index]


class DrawingStream(IterableDataset[Any]):
    """The same as a stream, whose workers share it."""

    def __init__(self, batches: int) -> None:
        self.samples = Drawing(batches)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for number in range(first, len(self.samples) // _SIZE, step):
            for index in range(number * _SIZE, number * _SIZE + _SIZE):
                yield self.samples[index]


class DrawingSampler(Sampler[int]):
    """Draws each index where it is asked for."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.samples):
            yield int(torch.randint(self.samples, (1,)))


class OwnEpochs:
    """Counts its passes, and shuffles by their number."""

    def __init__(self, batches: int) -> None:
        self.batches, self.epoch = batches_of(batches), 0

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(len(self.batches), generator=torch.Generator().manual_seed(self.epoch))
        self.epoch += 1
        return map(self.batches.__getitem__, order.tolist())


class Refilled:
    """Fills the memory of one batch again for each batch, as DALI does."""

    def __init__(self, batches: int) -> None:
        self.batches = batches_of(batches)
        self.memory = [torch.empty_like(each) for each in self.batches[0]]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            for kept, new in zip(self.memory, batch, strict=True):
                kept.copy_(new)
            yield self.memory


def in_workers(data: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=_SIZE, num_workers=2, multiprocessing_context="fork", **options)


LOADERS: dict[str, Callable[[int], Any]] = {
    "drawing": lambda batches: DataLoader(Drawing(batches), batch_size=_SIZE, shuffle=True),
    "drawing stream": lambda batches: DataLoader(DrawingStream(batches), batch_size=_SIZE),
    "drawing sampler": lambda batches: in_workers(Drawing(batches), sampler=DrawingSampler(batches * _SIZE)),
    "workers": lambda batches: in_workers(Drawing(batches), shuffle=True),
    "workers, stream": lambda batches: in_workers(DrawingStream(batches)),
    "workers, kept": lambda batches: in_workers(DrawingStream(batches), persistent_workers=True),
    "own generator": lambda batches: in_workers(
        TensorDataset(*share(batches)), shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "own epochs": OwnEpochs,
    "refilled": Refilled,
}


def run(loader: Any, policy: Any, cut: int | None = None, **options: Any) -> tuple[str, list[int], list[str]]:
    """Trains a model that draws, and returns its weights, the batches of each epoch and the random states after it.

    Args:
        loader: The loader.
        policy: The option `uneven_train`; None: countoff is not there.
        cut: Batches after which an epoch is cut by hand; None: it is not.
        options: More options of countoff.
    """
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(own_rank())
    model = devices.ddp(torch.nn.Sequential(torch.nn.Linear(64, 10), torch.nn.Dropout(0.2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    taken: list[int] = []
    states: list[str] = []
    with contextlib.ExitStack() as stack:
        counts: Any = None
        if policy is not None:
            counts = stack.enter_context(countoff.torch.Countoff(optimizer=optimizer, uneven_train=policy, **options))
        for _ in range(EPOCHS):
            taken.append(0)
            for images, labels in itertools.islice(loader, cut) if counts is None else counts.train(loader):
                torch.nn.functional.cross_entropy(model(devices.moved((images,))[0]), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
                taken[-1] += 1
            states.append(random_states())
    return weights(model), taken, states


def random_states() -> str:
    """A digest of the global generators' states."""
    state = (torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist())  # pyright: ignore
    return hashlib.sha256(pickle.dumps(state)).hexdigest()


def equal(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Trains on loaders that are of one length on all ranks, without countoff, and with `stop`."""
    devices.join()
    return {name: {str(policy): run(LOADERS[name](EQUAL), policy) for policy in (None, "stop")} for name in names}


def uneven(lengths: Sequence[int], names: Sequence[str]) -> dict[str, Any]:
    """Trains on loaders that are cut at the shortest one, by hand and by countoff."""
    devices.join()
    cut, own = min(lengths), lengths[own_rank()]
    return {name: [run(LOADERS[name](own), None, cut)[:2], run(LOADERS[name](own), "stop")[:2]] for name in names}


class Named(list[Any]):
    """A batch that must not be read by its position."""

    def __getitem__(self, key: Any) -> Any:
        raise TypeError("only names")

    __iter__ = __getitem__  # pyright: ignore


def unreadable(lengths: Sequence[int]) -> list[int]:
    """Takes batches whose classes are odd, of which longer ranks have some left."""
    devices.join()
    counts: list[int] = []
    for batch in (UserString("abc"), Named([1]), [UserString("abc")], object()):
        with countoff.torch.Countoff(uneven_train="stop") as fit:
            counts.append(sum(1 for _ in fit.train([batch] * lengths[own_rank()])))
    return counts


def by_length(lengths: Sequence[int]) -> dict[str, Any]:
    """Trains a loop that makes its schedule of a pass's length, and steps after each second batch and the last one."""
    devices.join()
    loader = DataLoader(TensorDataset(*share(lengths[own_rank()])), batch_size=_SIZE, shuffle=True)
    model = devices.ddp(torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = 0
    with countoff.torch.Countoff(optimizer=optimizer, uneven_train="stop") as fit:
        batches: Any = fit.train(loader)
        length = len(batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=length * EPOCHS)
        for _ in range(EPOCHS):
            batches = fit.train(loader)
            for number, (images, labels) in enumerate(batches):
                last = number + 1 == len(batches)
                with contextlib.nullcontext() if last or number % 2 else model.no_sync():
                    torch.nn.functional.cross_entropy(model(images), labels).backward()
                if last or number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
                    steps += 1
                schedule.step()
    rate = optimizer.param_groups[0]["lr"]
    return {"length": length, "steps": steps, "rate": rate, "weights": weights(model), "own": len(loader)}


def accelerated() -> dict[bool, dict[str, Any]]:
    """As `equal`, with loaders that Accelerate has prepared."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    found: dict[bool, dict[str, Any]] = {}
    for workers, policy in itertools.product((False, True), (None, "stop")):
        for seed in (torch.manual_seed, random.seed, numpy.random.seed):
            seed(own_rank())
        samples = Drawing(2 * EQUAL)
        loader: Any = (
            in_workers(samples, shuffle=True) if workers else DataLoader(samples, batch_size=_SIZE, shuffle=True)
        )
        model = torch.nn.Sequential(torch.nn.Linear(64, 10), torch.nn.Dropout(0.2))
        parts: Any = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        model, optimizer, loader = parts
        states: list[str] = []
        with contextlib.ExitStack() as stack:
            counts: Any = None
            if policy is not None:
                counts = stack.enter_context(countoff.accelerate.Countoff(accelerator, uneven_train=policy))
            for _ in range(EPOCHS):
                for images, labels in loader if counts is None else counts.train(loader):
                    accelerator.backward(torch.nn.functional.cross_entropy(model(images), labels))
                    optimizer.step()
                    optimizer.zero_grad()
                states.append(random_states())
        found.setdefault(workers, {})[str(policy)] = (weights(model), states)
        accelerator.free_memory()
    return found

"""Odd loops of plain PyTorch in which one rank differs, for the tests of what counting a loop proves."""

import itertools
import queue
import threading
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader

from countoff.torch import Countoff
from integration_tests import devices
from integration_tests.digits import own_rank, share_loader
from integration_tests.loops import even_loader, model_and_optimizer, train_on


class Unsized:
    """A loader of the user's own, without a length."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def prefetches(batches: list[int], collectives: bool) -> None:
    """A thread reads the loader into a queue; the main thread trains, and waits for the queue.

    It ends by a verdict alone: without collectives, a rank could end all its epochs before a slow one has begun.
    """
    devices.join()
    model, optimizer = model_and_optimizer()
    loader = Unsized(share_loader(batches[own_rank()]))
    countoff = Countoff(optimizer=optimizer)
    while True:
        waiting: queue.Queue[Any] = queue.Queue(2)

        def read(waiting: queue.Queue[Any] = waiting) -> None:
            for batch in countoff.train(loader):
                waiting.put(batch)
            waiting.put(None)

        threading.Thread(target=read, daemon=True).start()
        while (batch := waiting.get()) is not None:
            train_on(model if collectives else model.module, optimizer, batch)


def evaluates_beside(batches: list[int], uneven_eval: Any) -> int:
    """A thread evaluates while the next epoch trains."""
    devices.join()
    model, optimizer = model_and_optimizer()
    train, evaluation = even_loader(), share_loader(batches[own_rank()])
    read: list[int] = []
    with Countoff(optimizer=optimizer, uneven_eval=uneven_eval) as countoff:

        def evaluate() -> None:
            read.append(sum(1 for _ in countoff.eval(evaluation)))

        threads: list[threading.Thread] = []
        for epoch in range(3):
            train.sampler.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]
            for batch in countoff.train(train):
                train_on(model, optimizer, batch)
            threads.append(threading.Thread(target=evaluate))
            threads[-1].start()
        for thread in threads:
            thread.join()
        dist.barrier()
    return sum(read)


def makes_its_loader_again(epochs: int) -> int:
    """Each epoch has a loader of its own."""
    devices.join()
    model, optimizer = model_and_optimizer()
    with Countoff(optimizer=optimizer) as countoff:
        for epoch in range(epochs):
            loader = even_loader(40)
            loader.sampler.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]
            for batch in countoff.train(loader):
                train_on(model, optimizer, batch)
        return countoff.guard.steps


def slices_parts(batches: list[int], most: int | None) -> int:
    """Each rank holds a part of its own, and reads as many batches of it."""
    devices.join()
    model, optimizer = model_and_optimizer()
    loader = share_loader(batches[own_rank()], reported=batches[own_rank()])
    with Countoff(optimizer=optimizer) as countoff:
        for _ in range(2):
            for batch in itertools.islice(countoff.train(loader), most):
                train_on(model, optimizer, batch)
        return countoff.guard.steps


class Torn:
    """A loader of which one batch cannot be read; the next one can."""

    def __init__(self, loader: DataLoader[Any], torn: bool) -> None:
        self.loader, self.torn = loader, torn

    def __iter__(self) -> Iterator[Any]:
        self.batches, self.number = iter(self.loader), 0
        return self

    def __next__(self) -> Any:
        batch = next(self.batches)
        self.number += 1
        if self.number == 3 and self.torn:
            raise ValueError("torn record")
        return batch


def skips_a_torn_batch(ranks: list[int], caught: bool) -> int:
    """The loop goes on after an exception of its loader."""
    devices.join()
    model, optimizer = model_and_optimizer()
    loader = Torn(even_loader(), torn=own_rank() in ranks)
    with Countoff(optimizer=optimizer) as countoff:
        for _ in range(2):
            batches = countoff.train(loader)
            while True:
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                except ValueError:
                    if not caught:
                        raise
                    continue
                train_on(model, optimizer, batch)
        return countoff.guard.steps

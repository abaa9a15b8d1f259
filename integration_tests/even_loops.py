"""Plain PyTorch loops over uneven loaders that are made even, each with a twin whose loader was cut by hand."""

import collections
import contextlib
import gc
import itertools
import multiprocessing
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from countoff._adapter import even_loaders
from countoff.core.session.store.channel import Channel
from countoff.core.session.threads.process_threads import ProcessThreads
from countoff.torch import Countoff
from integration_tests import constants, devices
from integration_tests.digits import digits, own_rank, weights
from integration_tests.harness import tell

Pair = collections.namedtuple("Pair", ["images", "labels"])


class Shards(IterableDataset[Any]):
    """One rank's batches of two digits: as many as the list says for this rank, in each epoch.

    It is given whole batches, so that a loader with several workers has as many as without.
    """

    def __init__(self, epochs: Sequence[Sequence[int]], kind: str = "tuple") -> None:
        self.epochs = epochs
        self.kind = kind
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        images, labels = digits()
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for number in range(first, self.epochs[self.epoch][own_rank()], step):
            place = (number * 7 + own_rank() * 31 + self.epoch * 101) % (len(images) - 2)
            yield batch_of(self.kind, images[place : place + 2], labels[place : place + 2])


def batch_of(kind: str, images: torch.Tensor, labels: torch.Tensor) -> Any:
    """A batch as people have them."""
    if kind == "dict":
        return {"images": images, "labels": labels}
    if kind == "encoding":
        from transformers import BatchEncoding

        return BatchEncoding({"images": images, "labels": labels})
    return Pair(images, labels) if kind == "namedtuple" else (images, labels)


@dataclass(frozen=True)
class Case:
    """A job, with and without countoff.

    Attributes:
        epochs: For each epoch, the batches of each rank.
        accumulate: Batches per optimizer step.
        leave_after: Batches of an epoch after which all ranks leave the loop; None: they do not.
        evaluate_after: The batch of an epoch after which all ranks evaluate; None: they do not.
        kind: What a batch is.
        loader: Arguments of the DataLoader.
        sharded: Whether the model is FSDP2's instead of DDP's.
        options: More options of countoff.
    """

    epochs: Sequence[Sequence[int]]
    accumulate: int = 1
    leave_after: int | None = None
    evaluate_after: int | None = None
    kind: str = "tuple"
    loader: dict[str, Any] = field(default_factory=dict)
    sharded: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def cut_by_hand(case: Case, loader: Any) -> Iterator[Any]:
    """The batches of one epoch as every rank must take them."""
    return itertools.islice(loader, min(case.epochs[loader.dataset.epoch]))


def run(case: Case, counts: bool) -> dict[str, Any]:
    """Trains on one rank and returns the weights, the number of batches of each epoch and whether they were pinned."""
    torch.manual_seed(7)
    model: Any = torch.nn.Linear(64, 10)
    if case.sharded:
        device = devices.own_device()  # without a mesh, FSDP takes GPUs wherever there are some
        model = fully_shard(model.to(device), mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
    else:
        model = devices.ddp(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = Shards(case.epochs, case.kind)
    loader = DataLoader(dataset, batch_size=None, **case.loader)
    evals = DataLoader(Shards([[3] * dist.get_world_size()]), batch_size=None)
    taken: list[int] = []
    pinned: set[bool] = set()
    countoff: Any = None
    with contextlib.ExitStack() as stack:
        if counts:
            countoff = Countoff(optimizer=optimizer, uneven_train="stop", **constants.taken(case.options))
            stack.enter_context(countoff)
        for epoch in range(len(case.epochs)):
            dataset.epoch = epoch
            taken.append(0)
            for batch in countoff.train(loader) if counts else cut_by_hand(case, loader):
                taken[-1] += 1
                pinned |= {each.is_pinned() for each in (batch.values() if hasattr(batch, "values") else batch)}
                train_on(case, model, optimizer, batch, taken[-1])
                if taken[-1] == case.evaluate_after:
                    for images, labels in countoff.eval(evals) if counts else evals:
                        model(devices.moved((images, labels))[0])
                if taken[-1] == case.leave_after:
                    break
            optimizer.step()  # what an epoch's end leaves, as people write it
            optimizer.zero_grad()
    del loader, countoff, stack
    gc.collect()
    workers = len(multiprocessing.active_children())
    full = model.weight.full_tensor() if case.sharded else None
    return {
        "taken": taken,
        "workers": workers,
        "pinned": pinned,
        "weights": weights(model) if full is None else full.detach().cpu().numpy().tobytes().hex(),
    }


def train_on(case: Case, model: Any, optimizer: Any, batch: Any, number: int) -> None:
    images, labels = devices.moved(batch if isinstance(batch, (tuple, list)) else (batch["images"], batch["labels"]))
    synchronises = number % case.accumulate == 0
    waits = contextlib.nullcontext() if synchronises or case.sharded else model.no_sync()
    with waits:
        torch.nn.functional.cross_entropy(model(images), labels).backward()
    if synchronises:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def with_twins(cases: Sequence[Case]) -> list[Any]:
    """Runs each case cut by hand and made even, all in one process group."""
    devices.join()
    return [(run(case, counts=False), run(case, counts=True)) for case in cases]


def two_loaders() -> list[int]:
    """Trains on two loaders in turn, and evaluates with a collective per batch."""
    devices.join()
    first, second = (DataLoader(Shards([lengths]), batch_size=None) for lengths in ([5, 7], [4, 2]))
    evals = DataLoader(Shards([[6, 3]]), batch_size=None)
    counts: list[int] = []
    with Countoff(uneven_train="stop", uneven_eval="stop") as countoff:
        for loader in (first, second, first, evals):
            counts.append(0)
            for _ in countoff.eval(evals) if loader is evals else countoff.train(loader):
                dist.barrier()
                counts[-1] += 1
    return counts


class Troubled(Shards):
    """Shards with trouble on rank 1 before one of its batches."""

    def __init__(self, batches: int, at: int, trouble: Callable[[], None]) -> None:
        super().__init__([[batches] * 2])
        self.at = at
        self.trouble = trouble

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(super().__iter__()):
            tell("fetches")
            if own_rank() == 1 and number == self.at:
                self.trouble()
            yield batch


def raise_error() -> None:
    raise ValueError("torn shard")


def wait_for_the_end() -> None:
    """Waits to be killed or stopped by the test."""
    tell("in the loader")
    while True:
        time.sleep(0.05)


def troubled(trouble: Callable[[], None], at: int = 4) -> list[int]:
    """Trains where rank 1 has trouble in its loader at one batch, counted from 0."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with it ignored
    devices.join()
    loader = DataLoader(Troubled(9, at, trouble), batch_size=None)
    taken: list[int] = []
    with Countoff(uneven_train="stop") as countoff:
        for _ in countoff.train(loader):
            dist.barrier()
            taken.append(len(taken))
            print(f"trained on {len(taken)}", flush=True)
    return taken


def leave_alone() -> None:
    """Rank 1 leaves the loop alone, after its third batch."""
    devices.join()
    loader = DataLoader(Shards([[9, 9]]), batch_size=None)
    with Countoff(uneven_train="stop") as countoff:
        for number, _ in enumerate(countoff.train(loader)):
            dist.barrier()
            if own_rank() == 1 and number == 2:
                break
        dist.barrier()


def pairs(lengths: Sequence[int]) -> list[tuple[list[float], list[float]]]:
    """Trains on pairs of batches from two passes over one loader that are open at the same time, for two epochs."""
    devices.join()
    # With a worker, a pass looks ahead, and so finds its end though the other one ends the loop first.
    loader = DataLoader(Shards([lengths]), batch_size=None, num_workers=1, multiprocessing_context="fork")
    found: list[tuple[list[float], list[float]]] = []
    with Countoff(uneven_train="stop") as countoff:
        for _ in range(2):
            found.append(([], []))
            for one, other in zip(countoff.train(loader), countoff.train(loader), strict=False):
                dist.barrier()
                for batch, sums in zip((one, other), found[-1], strict=True):
                    sums.append(float(batch[0].sum()))
    return found


class Listed:
    """A loader that is no DataLoader: five batches, before the third of which rank 1 sleeps until it is released."""

    def __init__(self, release: str) -> None:
        self.release = release
        self.number = 0

    def __iter__(self) -> "Listed":
        return self

    def __next__(self) -> int:
        if self.number == 5:
            raise StopIteration
        if own_rank() == 1 and self.number == 2:
            sleep_until(self.release)
        self.number += 1
        return self.number


def sleep_until(release: str) -> None:
    while not Path(release).exists():
        time.sleep(0.05)


def queued(release: str) -> Iterator[int | None]:
    """The same batches out of a queue, which a thread fills: a wait for it has no frame of the user's."""
    batches: queue.Queue[int | None] = queue.Queue()

    def fill() -> None:
        for number in range(5):
            if own_rank() == 1 and number == 2:
                sleep_until(release)
            batches.put(number + 1)
        batches.put(None)

    threading.Thread(target=fill, daemon=True).start()
    return iter(batches.get, None)


STALLS = ("iterated", "queued")


def stall(seconds: float) -> dict[str, list[int]]:
    """Takes the batches of loaders that stall on rank 1 until the test releases it, one fit after the other."""
    devices.join()
    found: dict[str, list[int]] = {}
    for name in STALLS:
        source: Any = queued(name) if name == "queued" else Listed(name)
        with Countoff(uneven_train="stop", stall_seconds=seconds) as countoff:
            found[name] = list(countoff.train(source))
    return found


class Paced(Shards):
    """Nine batches of each rank. One rank has each only once the other rank can take no more batches without it."""

    def __init__(self, slow: int, lookahead: int) -> None:
        super().__init__([[9] * dist.get_world_size()])
        self.slow = slow
        self.lookahead = lookahead
        self.store = PrefixStore(f"paced/{slow}/{lookahead}", dist.distributed_c10d._get_default_store())

    def __iter__(self) -> Iterator[Any]:
        block = max(1, self.lookahead // 2)
        for number, batch in enumerate(super().__iter__()):
            granted = number if number < 2 else 2 + (number - 2) // block * block
            if own_rank() == self.slow:
                self.store.wait([str(min(granted + self.lookahead, 9) - 1)])
            else:
                self.store.set(str(number), "delivered")
            yield batch


def paced(lookaheads: Sequence[int]) -> list[int]:
    """The batches that this rank takes where one rank's loader is slower than the other's, in every case."""
    devices.join()
    even_loaders.fetches_ahead = lambda _: True  # as with workers, in which these loaders could not meet
    counts: list[int] = []
    for slow, lookahead in itertools.product(range(2), lookaheads):
        loader = DataLoader(Paced(slow, lookahead), batch_size=None)
        constants.put(LOOKAHEAD=lookahead)
        with Countoff(uneven_train="stop") as countoff:
            counts.append(sum(1 for _ in countoff.train(loader)))
    return counts


def without_reader(lengths: Sequence[int]) -> int:
    """Batches that this rank takes if the reader of rank 0 cannot connect before the loop has ended."""
    dist.init_process_group("gloo")
    ended, connect = threading.Event(), ProcessThreads._connect

    def late(self: ProcessThreads) -> Channel:
        if own_rank() == 0 and threading.current_thread() is self.reader_thread:
            ended.wait()
        return connect(self)

    ProcessThreads._connect = late
    try:
        with Countoff(uneven_train="stop") as countoff:
            taken = sum(1 for _ in countoff.train(range(lengths[own_rank()])))
            ended.set()
    finally:
        ProcessThreads._connect = connect
    return taken

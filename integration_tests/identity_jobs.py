"""Loops whose ranks read the same data, or should and do not; each returns what was warned of and its weights."""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from countoff.torch import Countoff
from integration_tests.constants import taken
from integration_tests.digits import BATCH_SIZE, digits, own_rank, weights
from integration_tests.loops import counted, model_and_optimizer, train_on

SAMPLES = 80


def digits_set(samples: int = SAMPLES, repeats: int = 1) -> TensorDataset:
    images, labels = digits()
    return TensorDataset(images[:samples].repeat(repeats, 1), labels[:samples].repeat(repeats))


class Whole(IterableDataset[Any]):
    """All of the digits, on every rank alike: nobody shards it."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[Any]:
        yield from zip(*digits_set().tensors, strict=True)


class Constant(IterableDataset[Any]):
    """The same sample over and over, as a benchmark's loader yields it."""

    def __iter__(self) -> Iterator[Any]:
        images, labels = digits()
        for _ in range(SAMPLES):
            yield images[0], labels[0]


class Own(IterableDataset[Any]):
    """A share by rank, as it is right where no ranks share a batch."""

    def __iter__(self) -> Iterator[Any]:
        yield from itertools.islice(zip(*digits_set().tensors, strict=True), own_rank(), None, dist.get_world_size())


class Labels(IterableDataset[Any]):
    """A handful of numbers per batch, which two ranks may well have in common."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(SAMPLES):
            yield torch.zeros(64), torch.tensor(number // BATCH_SIZE % 10)


@dataclass(frozen=True)
class Sharing:
    """How a plain loop shares its data out.

    Attributes:
        data: The data set: `digits`, or an iterable one: `whole`, `own`, `constant`, `labels`.
        samples: Samples of `digits`.
        repeats: How often they come in it.
        readers: The `rank` of each rank's DistributedSampler; empty: no such sampler. Of an iterable one: its dp_rank.
        replicas: `num_replicas` of it; 0: world_size.
        shuffle: Whether it shuffles.
        set_epoch: Whether each epoch has an order of its own.
        looks: Whether a look at the train data, without training, follows every epoch.
        epochs: How many.
        tensor_parallel: Ranks that share a batch.
        options: Those of countoff; None: no countoff.
    """

    data: str = "digits"
    samples: int = SAMPLES
    repeats: int = 1
    readers: tuple[int, ...] = ()
    replicas: int = 0
    shuffle: bool = False
    set_epoch: bool = True
    looks: bool = False
    epochs: int = 2
    tensor_parallel: int = 1
    options: dict[str, Any] | None = field(default_factory=dict)

    def loader(self) -> DataLoader[Any]:
        if self.data != "digits":
            dataset = {"whole": Whole, "own": Own, "constant": Constant, "labels": Labels}[self.data]()
            return DataLoader(dataset, batch_size=BATCH_SIZE)
        dataset, sampler = digits_set(self.samples, self.repeats), None
        if self.readers:
            reader, replicas = self.readers[own_rank()], self.replicas or dist.get_world_size()
            sampler = DistributedSampler(dataset, num_replicas=replicas, rank=reader, shuffle=self.shuffle)
        return DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler)


def share(sharings: list[Sharing]) -> list[dict[str, Any]]:
    """Trains once for each way to share the data out, one after the other."""
    dist.init_process_group("gloo")
    return [_train(each) for each in sharings]


def _train(sharing: Sharing) -> dict[str, Any]:
    model, optimizer = model_and_optimizer()
    loader, mesh = sharing.loader(), None
    if sharing.tensor_parallel > 1:
        shape = dist.get_world_size() // sharing.tensor_parallel, sharing.tensor_parallel
        mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    countoff = None
    if sharing.options is not None:
        countoff = Countoff(optimizer=optimizer, mesh=mesh, **taken(sharing.options))
    for epoch in range(sharing.epochs):
        if isinstance(loader.sampler, DistributedSampler) and sharing.set_epoch:
            loader.sampler.set_epoch(epoch)
        for batch in counted(countoff, loader):
            train_on(model, optimizer, batch)
        for _ in loader if sharing.looks else ():
            pass
    if countoff is not None:
        countoff.close()
    notices = [] if countoff is None else countoff.guard.notices
    return {"weights": weights(model), "warned": {notice.kind: notice.sentence for notice in notices}}


class Augmented(Mapping[str, Any]):
    """A batch that augments its images on access."""

    def __init__(self, samples: list[Any]) -> None:
        images, labels = zip(*samples, strict=True)
        self.stored = {"images": torch.stack(images), "labels": torch.stack(labels)}

    def __getitem__(self, key: str) -> Any:
        noise = torch.randn(64) * random.random() if key == "images" else 0
        return self.stored[key] + noise

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


class Once(Sequence[Any]):
    """A batch that hands each item out once, and frees it."""

    def __init__(self, samples: list[Any]) -> None:
        self.items: list[Any] = [torch.stack(each) for each in zip(*samples, strict=True)]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        item, self.items[index] = self.items[index], None
        if item is None:
            raise RuntimeError("the item was taken before")
        return item


class Operations(TorchDispatchMode):
    """Counts the operations of its thread."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def shuffled(dataset: Any, collate: Callable[[list[Any]], Any] | None = None) -> DataLoader[Any]:
    sampler = DistributedSampler(dataset, shuffle=True)
    return DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler, collate_fn=collate)


class Odd:
    """One loop over unusual batches or passes, with countoff or without it."""

    def __init__(self, enabled: bool) -> None:
        torch.manual_seed(own_rank())
        random.seed(own_rank())
        numpy.random.seed(own_rank())
        self.model, self.optimizer = model_and_optimizer()
        self.enabled = enabled
        self.countoff: Any = None
        self.seen = 0

    def epochs(self, loader: DataLoader[Any], count: int = 2, **options: Any) -> Iterator[tuple[int, Iterable[Any]]]:
        """The loader, once per epoch, each with an order of its own."""
        if self.enabled:
            self.countoff = Countoff(optimizer=self.optimizer, **options)
        for epoch in range(count):
            if isinstance(loader.sampler, DistributedSampler):
                loader.sampler.set_epoch(epoch)
            yield epoch, counted(self.countoff, loader)

    def train(self, images: Any, labels: Any) -> None:
        train_on(self.model, self.optimizer, (images, labels))

    def computed_on_access(self) -> None:
        for _, batches in self.epochs(shuffled(digits_set(), Augmented)):
            for batch in batches:
                self.train(batch["images"], batch["labels"])

    def handed_out_once(self) -> None:
        for _, batches in self.epochs(shuffled(digits_set(), Once)):
            for batch in batches:
                self.train(batch[0], batch[1])

    def filled_again(self) -> None:
        """On-policy learning: other data in the same buffer before each pass, in the same order."""
        buffer: list[Any] = list(zip(*digits_set().tensors, strict=True))
        loader = shuffled(buffer)
        for epoch, batches in self.epochs(loader, 3):
            loader.sampler.set_epoch(0)  # pyright: ignore[reportAttributeAccessIssue]
            buffer[:] = [(torch.sin(image + epoch), label) for image, label in buffer]
            for images, labels in batches:
                self.train(images, labels)

    def a_short_pass_first(self) -> None:
        """A search for a learning rate takes a few batches in the order of the first epoch."""
        loader = shuffled(digits_set())
        for epoch, batches in self.epochs(loader, 3):
            loader.sampler.set_epoch(max(0, epoch - 1))  # pyright: ignore[reportAttributeAccessIssue]
            for number, (images, labels) in enumerate(batches):
                self.train(images, labels)
                if not epoch and number == 3:
                    break

    def under_a_mode(self) -> None:
        for _, batches in self.epochs(shuffled(digits_set())):
            with Operations() as operations:
                for images, _ in batches:
                    self.model.module(images)
            self.seen += operations.count

    def with_weights_compared(self) -> None:
        options = {"model": self.model, "weights_every": 1}
        for _, batches in self.epochs(shuffled(digits_set()), **options):
            batches = iter(batches)
            while True:
                with Operations() as operations:
                    found = next(batches, None)
                self.seen += operations.count
                if found is None:
                    break
                self.train(*found)


ODD = [name for name, value in vars(Odd).items() if callable(value) and name not in ("__init__", "epochs", "train")]


def odd(enabled: bool) -> dict[str, Any]:
    """Runs each odd loop; returns what it was warned of, its weights, the random state, and what a mode has seen."""
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for name in ODD:
        loop = Odd(enabled)
        getattr(loop, name)()
        notices = []
        if loop.countoff is not None:
            loop.countoff.close()
            notices = [notice.kind for notice in loop.countoff.guard.notices]
        state = random.random(), numpy.random.random(), torch.rand(()).item()
        found[name] = {"warned": notices, "weights": weights(loop.model), "random": state, "seen": loop.seen}
    return found

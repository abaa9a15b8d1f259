"""What the programs of the zoo are made of: a model, data, loaders, and one step of training."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from countoff.torch import Countoff
from integration_tests.digits import own_rank

FEATURES = 8
CLASSES = 4


def network(seed: int = 7) -> torch.nn.Sequential:
    """A small network with dropout, alike on all ranks, so that a random number too many changes its weights."""
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    layers = torch.nn.Linear(FEATURES, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, CLASSES)
    torch.set_rng_state(state)
    return torch.nn.Sequential(*layers)


def ddp(seed: int = 7) -> DistributedDataParallel:
    """The network in DDP. Collective: every rank must call it."""
    return DistributedDataParallel(network(seed))


def sgd(model: torch.nn.Module, learning_rate: float = 0.1) -> torch.optim.SGD:
    """Its optimizer."""
    return torch.optim.SGD(model.parameters(), lr=learning_rate)


def tensors(samples: int = 64, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """So many inputs and labels, alike on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, FEATURES, generator=generator)
    return inputs, torch.randint(0, CLASSES, (samples,), generator=generator)


def dataset(samples: int = 64, seed: int = 1) -> TensorDataset:
    """The same as a map-style dataset."""
    return TensorDataset(*tensors(samples, seed))


def sharded(samples: int = 64, batch_size: int = 4, *, seed: int = 1, data: Any = None, **more: Any) -> Any:
    """A loader over so many samples of all ranks together, divided among them by a DistributedSampler.

    Args:
        samples: Samples of all ranks together.
        batch_size: Samples of one rank per batch.
        seed: Of the samples.
        data: A dataset in place of these samples.
        more: Arguments of the DataLoader.
    """
    data = dataset(samples, seed) if data is None else data
    return with_workers(data, batch_size=batch_size, sampler=DistributedSampler(data), **more)


def with_workers(data: Any, **arguments: Any) -> Any:
    """A DataLoader whose workers, if it has any, are forked: another forkserver would import everything again."""
    context = "fork" if arguments.get("num_workers") else None
    return DataLoader(data, multiprocessing_context=context, **arguments)


def own_batches(batches: int = 8, *, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of this rank alone, of four samples each."""
    inputs, labels = tensors(batches * 4, seed * 100 + own_rank())
    return list(zip(inputs.split(4), labels.split(4), strict=True))


class Listed:
    """A loader of the user's own: a class with batches, and with a length."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = list(batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Unsized:
    """A loader of the user's own, without a length."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = list(batches)

    def __iter__(self) -> Iterator[Any]:
        yield from self.batches


class Bucketed(BatchSampler):
    """A batch sampler of the user's own, which does without the constructor of its base class.

    Args:
        samples: Samples of all ranks together.
        divides: Whether it has every second batch; else it has all, and a framework divides them.
    """

    def __init__(self, samples: int, *, divides: bool = True) -> None:
        batches = [list(range(first, first + 4)) for first in range(0, samples, 4)]
        self.batches = batches[own_rank() :: 2] if divides else batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Shares(DistributedSampler[Any]):
    """A distributed sampler of the same kind, whose ranks read every second sample."""

    def __init__(self, samples: int) -> None:
        self.indices = range(own_rank(), samples, 2)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


class FractionalShares(DistributedSampler[Any]):
    """A distributed sampler that divides its samples by itself, and holds their number as a float."""

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.num_samples = self.total_size / self.num_replicas  # pyright: ignore[reportAttributeAccessIssue]

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, self.total_size, self.num_replicas))

    def __len__(self) -> int:
        return int(self.num_samples)


class Prefetching(DataLoader[Any]):
    """A loader of the same kind, around another one."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.inner = loader

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return iter(list(self.inner))

    def __len__(self) -> int:
        return len(self.inner)


def function_of_no_module(parameters: str, body: str) -> Any:
    """A function that was made by exec, whose `__module__` is None."""
    made: dict[str, Any] = {}
    exec(f"def function({parameters}):\n    {body}", made)
    return made["function"]


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """The loss of one batch."""
    inputs, labels = batch
    return torch.nn.functional.cross_entropy(model(inputs), labels)


def train_on(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> float:
    """One step of training; returns the loss."""
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def epochs_of(loader: Any, epochs: int = 2, start: int = 0) -> Iterator[int]:
    """Yields the numbers of the epochs, and tells each to the loader's sampler, as a script does."""
    for epoch in range(start, start + epochs):
        sampler = getattr(loader, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(epoch)
        yield epoch


def train(
    countoff: Countoff,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Any,
    epochs: int = 2,
    start: int = 0,
) -> list[int]:
    """Trains for some epochs, which are counted; returns the number of batches of each."""
    counts: list[int] = []
    for _ in epochs_of(loader, epochs, start):
        counts.append(0)
        for batch in countoff.train(loader):
            train_on(model, optimizer, batch)
            counts[-1] += 1
    return counts


@torch.no_grad()
def evaluate(model: torch.nn.Module, loader: Iterable[Any]) -> float:
    """The mean loss over a loader, of this rank."""
    model.eval()
    losses = [loss_of(model, batch).item() for batch in loader]
    model.train()
    return sum(losses) / max(1, len(losses))


def agreed(flag: bool) -> bool:
    """Whether any rank says so. Collective: every rank must call it."""
    votes = torch.tensor(float(flag))
    dist.all_reduce(votes)
    return votes.item() > 0

"""Loaders of torchdata that resume in mid-epoch, read by ranks that take the same number of batches."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from lightning.fabric import Fabric
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import countoff.accelerate
import countoff.torch
from integration_tests.fabric_jobs import flagged
from integration_tests.jobs import own_rank


def read(loader: Any, most: int | None = None) -> tuple[list[float], Any]:
    """The samples that a loop gets, and the loader's state after `most` of them."""
    found: list[float] = []
    for (batch,) in loader:
        found.append(batch.item())
        if len(found) == most:
            return found, loader.state_dict()
    return found, loader.state_dict()


def resumed(lengths: Sequence[int], saved_after: int, workers: int) -> list[Any]:
    """Reads a pass and the next one, uninterrupted and resumed in the middle of the first, with plain PyTorch.

    Returns:
        What both have read, without countoff's part in it and with it.
    """
    dist.init_process_group("gloo")

    def make() -> Any:
        share = TensorDataset(torch.arange(lengths[own_rank()]) + 1000.0 * own_rank())
        return StatefulDataLoader(
            share, batch_size=1, num_workers=workers, multiprocessing_context="fork" if workers else None
        )

    def watched(loader: Any) -> Any:
        return countoff.torch.attach(train=loader, uneven_train="stop")

    return both(make, watched, saved_after)


def resumed_with_accelerate(lengths: Sequence[int], saved_after: int) -> list[Any]:
    """The same with a loader that Accelerate has prepared."""
    accelerator = Accelerator(cpu=True)

    def make() -> Any:
        share = TensorDataset(torch.arange(lengths[own_rank()]) + 1000.0 * own_rank())
        return DataLoaderShard(share, batch_size=1, use_stateful_dataloader=True)

    def watched(loader: Any) -> Any:
        return countoff.accelerate.attach(accelerator, train=loader, uneven_train="stop")

    return both(make, watched, saved_after)


def both(make: Any, watched: Any, saved_after: int) -> list[Any]:
    with watched(loader := make()):
        whole, state = read(loader)
        whole += read(loader)[0]
    with watched(loader := make()):
        parts, state = read(loader, saved_after)
    loader = make()
    loader.load_state_dict(state)
    with watched(loader):
        parts += read(loader)[0]
        parts += read(loader)[0]
    return [whole, parts]


@dataclass
class Numbers:
    """A loader of the user's own: the numbers from where it is up to its end, and then from the first one again."""

    batches: int
    position: int = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        while self.position < self.batches:
            self.position += 1
            yield (torch.tensor(1000.0 * own_rank() + self.position - 1),)
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Source(Iterator[Any]):
    """The same numbers, as an iterator with a state."""

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.position = 0

    def __next__(self) -> tuple[torch.Tensor]:
        if self.position == self.batches:
            raise StopIteration
        self.position += 1
        return (torch.tensor(1000.0 * own_rank() + self.position - 1),)

    state_dict = Numbers.state_dict
    load_state_dict = Numbers.load_state_dict


Watching = Callable[[Any], contextlib.AbstractContextManager[Any]]
"""Takes a loader; a context with what the loop iterates in its place."""


@contextlib.contextmanager
def attached(loader: Any) -> Iterator[Any]:
    with countoff.torch.attach(train=loader, uneven_train="stop"):
        yield loader


@contextlib.contextmanager
def counted(loader: Any) -> Iterator[Any]:
    with countoff.torch.attach(uneven_train="stop") as handle:
        yield handle.counted(loader)


@contextlib.contextmanager
def set_up(loader: Any) -> Iterator[Any]:
    """The loader as Fabric has set it up, in a script that does not mention countoff."""
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    yield fabric.setup_dataloaders(loader, use_distributed_sampler=False)
    fabric.call("on_train_end")


def stateful(batches: int) -> Any:
    return StatefulDataLoader(TensorDataset(torch.arange(batches) + 1000.0 * own_rank()), batch_size=1)


def positions(loop: Any, loader: Any) -> list[Any]:
    """The states of a loader at each batch of a pass, and after it."""
    return [*(loader.state_dict() for _ in loop), loader.state_dict()]


SAVED: dict[str, tuple[Callable[[int], Any], Watching]] = {
    "attached": (stateful, attached),
    "counted": (stateful, counted),
    "set up by Fabric": (stateful, set_up),
    "own, attached": (Numbers, attached),
    "own, counted": (Numbers, counted),
    "own iterator, counted": (Source, counted),
}


def loaded_between_handles(length: int) -> dict[str, int]:
    """The state of a loader that was loaded after one handle has ended and before the next one's first pass."""
    loader = Numbers(length)
    with attached(loader) as loop:
        positions(loop, loader)
    loader.load_state_dict({"position": 3})
    with attached(loader):
        return loader.state_dict()


def saved(lengths: Sequence[int]) -> tuple[dict[str, list[list[list[float]]]], dict[str, int]]:
    """What runs get that resume after one, four and six batches of a pass, and after its end, in each pass.

    Every state is taken while the handle is open.
    """
    dist.init_process_group("gloo")
    own = lengths[own_rank()]
    found = {name: flagged("1", resumed_everywhere, (*case, own)) for name, case in SAVED.items()}
    return found, loaded_between_handles(own)


def resumed_everywhere(case: tuple[Callable[[int], Any], Watching, int]) -> list[list[list[float]]]:
    make, watching, length = case
    found: list[list[list[float]]] = []
    loader = make(length)
    with watching(loader) as loop:
        states = positions(loop, loader)
    for state in (states[0], states[3], states[5], states[-1]):
        resumed = make(length)
        resumed.load_state_dict(state)
        with watching(resumed) as loop:
            # A loader of one's own goes on where it was, so its next pass has what the look-ahead did not take.
            found.append([[batch.item() for (batch,) in loop] for _ in range(2 if make is stateful else 1)])
    return found

"""Loaders of torchdata that resume in mid-epoch, read by ranks that take the same number of batches."""

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
import countoff.fabric
import countoff.torch
from integration_tests.digits import own_rank


def read(fit: Any, loader: Any, most: int | None = None) -> tuple[list[float], Any]:
    """The samples that a loop gets, and the loader's state after `most` of them."""
    found: list[float] = []
    for (batch,) in fit.train(loader):
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

    return both(make, lambda: countoff.torch.Countoff(uneven_train="stop"), saved_after)


def resumed_with_accelerate(lengths: Sequence[int], saved_after: int) -> list[Any]:
    """The same with a loader that Accelerate has prepared."""
    accelerator = Accelerator(cpu=True)

    def make() -> Any:
        share = TensorDataset(torch.arange(lengths[own_rank()]) + 1000.0 * own_rank())
        return DataLoaderShard(share, batch_size=1, use_stateful_dataloader=True)

    return both(make, lambda: countoff.accelerate.Countoff(accelerator, uneven_train="stop"), saved_after)


def both(make: Callable[[], Any], begin: Callable[[], Any], saved_after: int) -> list[Any]:
    loader = make()
    with begin() as fit:
        whole, state = read(fit, loader)
        whole += read(fit, loader)[0]
    loader = make()
    with begin() as fit:
        parts, state = read(fit, loader, saved_after)
    loader = make()
    loader.load_state_dict(state)
    with begin() as fit:
        parts += read(fit, loader)[0]
        parts += read(fit, loader)[0]
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


def plain(loader: Any) -> tuple[Any, Any]:
    """What counts a loop over a loader, and the loader."""
    return countoff.torch.Countoff(uneven_train="stop"), loader


def set_up(loader: Any) -> tuple[Any, Any]:
    """The same of a loader that Fabric has set up."""
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    fit = countoff.fabric.Countoff(fabric, uneven_train="stop")
    return fit, fabric.setup_dataloaders(loader, use_distributed_sampler=False)


def stateful(batches: int) -> Any:
    return StatefulDataLoader(TensorDataset(torch.arange(batches) + 1000.0 * own_rank()), batch_size=1)


def positions(loop: Any, loader: Any) -> list[Any]:
    """The states of a loader at each batch of a pass, and after it."""
    return [*(loader.state_dict() for _ in loop), loader.state_dict()]


SAVED: dict[str, tuple[Callable[[int], Any], Callable[[Any], tuple[Any, Any]]]] = {
    "torchdata's": (stateful, plain),
    "set up by Fabric": (stateful, set_up),
    "own": (Numbers, plain),
    "own iterator": (Source, plain),
}


def saved(lengths: Sequence[int]) -> dict[str, list[list[list[float]]]]:
    """What runs get that resume after one, four and six batches of a pass, and after its end, in each pass.

    Every state is taken before the fit ends.
    """
    dist.init_process_group("gloo")
    return {name: resumed_everywhere(*case, lengths[own_rank()]) for name, case in SAVED.items()}


def resumed_everywhere(
    make: Callable[[int], Any], begin: Callable[[Any], tuple[Any, Any]], length: int
) -> list[list[list[float]]]:
    found: list[list[list[float]]] = []
    loader = make(length)
    fit, loop = begin(loader)
    with fit:
        states = positions(fit.train(loop), loader)
    for state in (states[0], states[3], states[5], states[-1]):
        resumed = make(length)
        resumed.load_state_dict(state)
        fit, loop = begin(resumed)
        with fit:
            # A loader of one's own goes on where it was, so its next pass has what the look-ahead did not take.
            found.append([[batch.item() for (batch,) in fit.train(loop)] for _ in range(2 if make is stateful else 1)])
    return found

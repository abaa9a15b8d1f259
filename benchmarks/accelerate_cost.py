"""Measures what one batch of a loader prepared by Accelerate costs, counted and bare.

On real ranks, with gloo and a store like torchrun's; with two ranks, countoff's threads run. The loop does nothing with
its batches, so this measures the loader itself: Accelerate's shard over torch's DataLoader, in this process. The clock
runs from the second batch of an epoch to the last but one, so the sync points of an epoch are not included. Bare and
counted epochs take turns within one process, so that other load on the machine affects both alike.

A real loop trains between two batches, and then little of what a loader needs is still in the processor's caches. So
there is a second measurement: one fetch after a training step. There a bare and a counted pass take turns with
every batch, because the time of a fetch itself varies by more than countoff takes.
"""

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import accelerate
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.ranks import on_ranks
from benchmarks.results import THREAD_TIME, WALL_TIME, Samples, Table, compared, progress
from countoff.accelerate import Countoff

BATCHES = 4000
STEPS = 500
BARE, COUNTED, UNREAD = "bare loader", "counted", "counted, `compare_data=False`"


class Numbers(Dataset[int]):
    """A dataset whose samples cost almost nothing."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def epoch_seconds(loader: Any, clock: Any) -> float:
    """Returns the seconds per batch inside one pass."""
    began = ended = 0.0
    for number, _ in enumerate(loader):
        if number == 1:
            began = clock()
        elif number == BATCHES - 2:
            ended = clock()
    return (ended - began) / (BATCHES - 3)


def costs(repeats: int) -> dict[str, dict[str, list[float]]]:
    """Returns seconds per batch, by clock and by whether the pass is counted."""
    accelerator = accelerate.Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Numbers(BATCHES * accelerator.num_processes), batch_size=1))
    clocks = {WALL_TIME: time.perf_counter, THREAD_TIME: time.thread_time}
    found = {name: {BARE: [], COUNTED: [], UNREAD: []} for name in clocks}
    for name, clock in clocks.items():
        for _ in range(repeats):
            found[name][BARE].append(epoch_seconds(loader, clock))
            for counted in (COUNTED, UNREAD):
                with Countoff(accelerator, compare_data=counted == COUNTED) as countoff:
                    found[name][counted].append(epoch_seconds(countoff.train(loader), clock))
            accelerator.wait_for_everyone()
    return found


def fetches(repeats: int) -> Samples:
    """Returns the seconds of single fetches after training steps, by whether the pass is counted."""
    accelerator = accelerate.Accelerator(cpu=True)
    size = STEPS * accelerator.num_processes
    loaders = [DataLoader(Numbers(size), batch_size=1) for _ in (BARE, COUNTED)]
    bare, counted = (accelerator.prepare(loader) for loader in loaders)
    step, samples, turns = training_step(accelerator), Samples({BARE: [], COUNTED: []}), random.Random(0)
    for _ in range(repeats):
        with Countoff(accelerator) as countoff:
            passes = {BARE: iter(bare), COUNTED: countoff.train(counted)}
            for number in range(STEPS):
                for name in turns.sample(list(passes), 2):
                    step()
                    began = time.perf_counter()
                    next(passes[name])
                    seconds = time.perf_counter() - began
                    if number:  # the first fetch begins the pass
                        samples[name].append(seconds)
            for batches in passes.values():
                next(batches, None)  # ends the pass
        accelerator.wait_for_everyone()
    return samples


def training_step(accelerator: accelerate.Accelerator) -> Callable[[], None]:
    """Returns a function that trains a small network on one batch."""
    network = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    network, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), 0.01))
    samples, targets = torch.randn(8, 16), torch.randn(8, 1)

    def step() -> None:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(network(samples), targets))
        optimizer.step()

    return step


def tables(quick: bool) -> Iterator[Table]:
    """Yields one table for each clock and number of ranks."""
    for world_size in (1, 2):
        progress(f"accelerate: {world_size} ranks")
        for clock, samples in on_ranks(costs, world_size, 3 if quick else 21)[0].items():
            title = f"A loader prepared by Accelerate, per batch, {clock}, ranks: {world_size}"
            yield compared(title, "µs", samples, against=BARE)
        progress(f"accelerate: {world_size} ranks, between training steps")
        title = (
            f"One fetch from a loader prepared by Accelerate, after a training step, {WALL_TIME}, ranks: {world_size}"
        )
        yield compared(title, "µs", on_ranks(fetches, world_size, 1 if quick else 11)[0], against=BARE)

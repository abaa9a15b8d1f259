"""Measures what one batch of a loader prepared by Accelerate costs, with countoff attached and without.

On real ranks, with gloo and a store like torchrun's; with two ranks, countoff's threads run. The loop does nothing with
its batches, so this measures the loader itself: Accelerate's shard over torch's DataLoader, in this process. The clock
runs from the second batch of an epoch to the last but one, so the marks of an epoch are not included. Bare and attached
epochs take turns within one process, so that other load on the machine affects both alike.
"""

import time
from collections.abc import Iterator
from typing import Any

import accelerate
from torch.utils.data import DataLoader, Dataset

from benchmarks.ranks import on_ranks
from benchmarks.results import THREAD_TIME, WALL_TIME, Table, compared, progress
from countoff.accelerate import attach

BATCHES = 4000
BARE, ATTACHED = "bare loader", "attached"


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
    """Returns seconds per batch, by clock and by whether countoff is attached."""
    accelerator = accelerate.Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Numbers(BATCHES * accelerator.num_processes), batch_size=1))
    clocks = {WALL_TIME: time.perf_counter, THREAD_TIME: time.thread_time}
    found = {name: {BARE: [], ATTACHED: []} for name in clocks}
    for name, clock in clocks.items():
        for _ in range(repeats):
            found[name][BARE].append(epoch_seconds(loader, clock))
            with attach(accelerator, train=loader):
                found[name][ATTACHED].append(epoch_seconds(loader, clock))
            accelerator.wait_for_everyone()
    return found


def tables(quick: bool) -> Iterator[Table]:
    """Yields one table for each clock and number of ranks."""
    for world_size in (1, 2):
        progress(f"accelerate: {world_size} ranks")
        for clock, samples in on_ranks(costs, world_size, 3 if quick else 21)[0].items():
            title = f"A loader prepared by Accelerate, per batch, {clock}, ranks: {world_size}"
            yield compared(title, "µs", samples, against=BARE)

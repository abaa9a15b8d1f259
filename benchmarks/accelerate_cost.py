"""What one batch of a loader that Accelerate has prepared costs with countoff attached, and without.

    python -m benchmarks.accelerate_cost           # about two minutes
    python -m benchmarks.accelerate_cost --quick   # fewer repeats

With real ranks (gloo, an agent's store, countoff's threads running where there are two). The loop does nothing with its
batches, so what is seen is the loader itself: Accelerate's shard over torch's DataLoader, in this process. Timed is the
inside of an epoch, from its second batch to its last but one; what an epoch's marks cost is no matter of batches.
Bare and attached epochs take turns within one process, so that a noisy minute hits both alike.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import accelerate
import torch
from torch.utils.data import DataLoader, Dataset

from countoff.accelerate import attach
from integration_tests.harness import run_ranks

BATCHES = 4000
BARE, ATTACHED = "bare loader", "attached"


class Numbers(Dataset[int]):
    """The cheapest samples there are."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def epoch_seconds(loader: Any, clock: Any) -> float:
    """Seconds per batch inside one pass."""
    began = ended = 0.0
    for number, _ in enumerate(loader):
        if number == 1:
            began = clock()
        elif number == BATCHES - 2:
            ended = clock()
    return (ended - began) / (BATCHES - 3)


def costs(repeats: int) -> dict[str, dict[str, list[float]]]:
    """Seconds per batch, by clock and by whether countoff is attached."""
    accelerator = accelerate.Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Numbers(BATCHES * accelerator.num_processes), batch_size=1))
    clocks = {"by the wall": time.perf_counter, "processor time of the training thread": time.thread_time}
    found = {name: {BARE: [], ATTACHED: []} for name in clocks}
    for name, clock in clocks.items():
        for _ in range(repeats):
            found[name][BARE].append(epoch_seconds(loader, clock))
            with attach(accelerator, train=loader):
                found[name][ATTACHED].append(epoch_seconds(loader, clock))
            accelerator.wait_for_everyone()
    return found


def print_table(title: str, samples: dict[str, list[float]]) -> None:
    base = statistics.median(samples[BARE])
    print(f"\n{title}\n")
    print(f"| what | median µs | quartiles | least | ÷ {BARE} | minus it, µs |")
    print("|---|---|---|---|---|---|")
    for name, values in samples.items():
        low, middle, high = (quartile * 1e6 for quartile in statistics.quantiles(values, n=4))
        print(
            f"| {name} | {middle:.3g} | {low:.3g} to {high:.3g} | {min(values) * 1e6:.3g} "
            f"| {middle / base / 1e6:.3f} | {middle - base * 1e6:+.3g} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="What one batch of a prepared loader costs.")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    repeats = 5 if parser.parse_args().quick else 21
    print(
        f"torch {torch.__version__}, accelerate {accelerate.__version__}, {BATCHES} batches, repeats: {repeats}, "
        f"load average {os.getloadavg()[0]:.1f}"
    )
    for world_size in (1, 2):
        with tempfile.TemporaryDirectory() as directory:
            results = run_ranks(costs, world_size, repeats, directory=Path(directory), deadline_seconds=600)
        for clock, samples in results[0].value.items():
            print_table(f"Per batch, {clock}, ranks: {world_size}", samples)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What one batch costs on the training thread, with countoff and without.

    python -m benchmarks.batch_cost           # everything, a few minutes
    python -m benchmarks.batch_cost --quick   # fewer repeats

Three questions, each answered with real ranks (gloo, an agent's store, countoff's threads running where there are two):

1. `Guard.batch()` beside a loop that does nothing and beside a method that adds 1.
2. Lightning's own dispatch of `on_train_batch_start`, called inside a real fit, to no callback, to one that overrides
   the same hooks and does nothing, and to `Countoff`.
3. Seconds per batch of whole epochs of a real fit with the same three, by the wall and in processor time of the
   training thread, which a busy machine disturbs less.

What is compared is measured in turns within one process, so that a noisy minute hits all alike.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch

from benchmarks import rank_jobs
from integration_tests.harness import run_ranks


def on_ranks(function: Callable[..., Any], world_size: int, *arguments: Any) -> Any:
    """What the function returned on rank 0."""
    with tempfile.TemporaryDirectory() as directory:
        results = run_ranks(function, world_size, *arguments, directory=Path(directory), deadline_seconds=600)
    return results[0].value


def print_table(title: str, unit: str, samples: rank_jobs.Samples, scale: float, against: str) -> None:
    base = statistics.median(samples[against])
    print(f"\n{title}\n")
    print(f"| what | median {unit} | quartiles | least | ÷ {against} | minus it, {unit} |")
    print("|---|---|---|---|---|---|")
    for name, values in samples.items():
        low, middle, high = (quartile * scale for quartile in statistics.quantiles(values, n=4))
        cells = [f"{middle:.3g}", f"{low:.3g} to {high:.3g}", f"{min(values) * scale:.3g}"]
        cells += [f"{middle / scale / base:.3f}", f"{middle - base * scale:+.3g}"]
        print(f"| {name} | " + " | ".join(cells) + " |")


def print_guard(world_size: int, repeats: int) -> None:
    samples = on_ranks(rank_jobs.guard_costs, world_size, repeats)
    print_table(f"`Guard.batch()`, ranks: {world_size}", "ns", samples, 1e9, rank_jobs.ADD)


def print_hooks(world_size: int, repeats: int) -> None:
    ways = "back to back", "64 at a time"
    for way, samples in zip(ways, on_ranks(rank_jobs.hook_costs, world_size, repeats), strict=True):
        title = f"Dispatch of `on_train_batch_start` by Lightning, {way}, ranks: {world_size}"
        print_table(title, "µs", samples, 1e6, rank_jobs.NO_OP)


def print_epochs(world_size: int, repeats: int) -> None:
    clocks = "by the wall", "processor time of the training thread"
    for clock, samples in zip(clocks, on_ranks(rank_jobs.epoch_costs, world_size, repeats), strict=True):
        title = f"Whole train epochs of `Trainer.fit`, per batch, {clock}, ranks: {world_size}"
        print_table(title, "µs", samples, 1e6, rank_jobs.NO_OP)


def main() -> int:
    parser = argparse.ArgumentParser(description="What one batch costs on the training thread.")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--only", choices=["guard", "hooks", "epochs"], help="one of the three questions")
    options = parser.parse_args()
    repeats = 5 if options.quick else 21
    versions = f"torch {torch.__version__}, lightning {lightning.__version__}"
    print(f"{versions}, repeats: {repeats}, load average {os.getloadavg()[0]:.1f}")
    for name, ask in {"guard": print_guard, "hooks": print_hooks, "epochs": print_epochs}.items():
        for world_size in (1, 2) if options.only in (None, name) else ():
            ask(world_size, repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())

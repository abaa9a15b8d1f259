"""What data identity costs the training thread: one fingerprint, and the question whether one is wanted.

    python -m benchmarks.fingerprint_cost

A fingerprint is taken of the first `fingerprint_batches` (2) batches of a train epoch; before every other batch an
adapter asks `guard.data.unread`. Medians; processor time is what a busy machine disturbs less.
"""

import os
import statistics
import sys
import time
import timeit
from collections.abc import Callable
from typing import Any

import torch

from countoff.core import Guard, Settings
from countoff.core.fingerprint import fingerprint, substance

REPEATS = 200
BATCHES: dict[str, Callable[[], Any]] = {
    "32×3×224×224 float32": lambda: torch.rand(32, 3, 224, 224),
    "the same, channels last": lambda: torch.rand(32, 3, 224, 224).contiguous(memory_format=torch.channels_last),
    "8×4096 int64 tokens": lambda: torch.randint(0, 50_000, (8, 4096)),
    "tokens, mask and labels of 8×512": lambda: {
        name: torch.randint(0, 50_000, (8, 512)) for name in ("input_ids", "attention_mask", "labels")
    },
    "4×64 float32 and 4 labels": lambda: [torch.rand(4, 64), torch.randint(0, 10, (4,))],
}


def medians(function: Callable[[], object]) -> tuple[float, float]:
    """Microseconds of one call, by the wall and in processor time of this thread."""
    walls, processors = [], []
    for _ in range(REPEATS):
        wall, processor = time.perf_counter(), time.thread_time()
        function()
        processors.append(time.thread_time() - processor)
        walls.append(time.perf_counter() - wall)
    return statistics.median(walls) * 1e6, statistics.median(processors) * 1e6


def main() -> int:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, repeats: {REPEATS}, load average {os.getloadavg()[0]:.1f}\n")
    print("| fingerprint of | median µs | µs of processor time |")
    print("|---|---|---|")
    for name, make in BATCHES.items():
        batch = make()
        wall, processor = medians(lambda batch=batch: fingerprint(batch))
        print(f"| {name} | {wall:.0f} | {processor:.0f} |")
    excerpts = [found.excerpt for found in (fingerprint(torch.rand(32, 3, 224, 224)) for _ in range(2)) if found]
    wall, processor = medians(lambda: substance(excerpts))
    print(f"| telling data from filling, once per epoch | {wall:.0f} | {processor:.0f} |")
    guard = Guard(Settings(), rank=0, world_size=1)
    calls = 100_000
    asked = statistics.median(timeit.repeat("data.unread", globals={"data": guard.data}, number=calls, repeat=21))
    print(f"\nEvery other batch: {asked / calls * 1e9:.0f} ns, for asking `guard.data.unread`.")
    return 0


if __name__ == "__main__":
    sys.exit(main())

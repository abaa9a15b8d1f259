"""Measures what data identity costs the training thread: one fingerprint, and the test whether one is due.

countoff takes a fingerprint of the first `fingerprint_batches` (2) batches of a train epoch. Before every other batch
an adapter reads `guard.data.fingerprints_due`. CPU time is less sensitive to other load on the machine than wall time.
"""

import time
import timeit
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.results import WALL_TIME, Table, compared, in_turns
from countoff.core import Guard, Settings
from countoff.core.data.fingerprint import distinct_bytes, fingerprint

SMALL = "4×64 float32 and 4 labels"
DISTINCT = "counting distinct bytes, once per epoch"
BATCHES: dict[str, Callable[[], Any]] = {
    "32×3×224×224 float32": lambda: torch.rand(32, 3, 224, 224),
    "the same, channels last": lambda: torch.rand(32, 3, 224, 224).contiguous(memory_format=torch.channels_last),
    "8×4096 int64 tokens": lambda: torch.randint(0, 50_000, (8, 4096)),
    "tokens, mask and labels of 8×512": lambda: {
        name: torch.randint(0, 50_000, (8, 512)) for name in ("input_ids", "attention_mask", "labels")
    },
    SMALL: lambda: [torch.rand(4, 64), torch.randint(0, 10, (4,))],
}


def tables(quick: bool) -> Iterator[Table]:
    """Yields the costs of a fingerprint for each kind of batch, of what happens once per epoch, and of the test."""
    torch.set_num_threads(1)
    repeats = 40 if quick else 200
    samples = {name: seconds(partial(fingerprint, make()), repeats) for name, make in BATCHES.items()}
    excerpts = [found.excerpt for found in (fingerprint(torch.rand(32, 3, 224, 224)) for _ in range(2)) if found]
    samples[DISTINCT] = seconds(lambda: distinct_bytes(excerpts), repeats)
    for column, clock in enumerate([WALL_TIME, "CPU time"]):
        one = {name: [pair[column] for pair in pairs] for name, pairs in samples.items()}
        yield compared(f"A fingerprint of a batch, {clock}", "µs", one, against=SMALL)
    data = Guard(Settings(), rank=0, world_size=1).data
    timers = {
        "`pass`": timeit.Timer("pass"),
        "`guard.data.fingerprints_due`": timeit.Timer("data.fingerprints_due", globals={"data": data}),
    }
    tests = in_turns(timers, repeats, 10_000)
    yield compared("The test before every other batch", "ns", tests, against="`pass`")


def seconds(function: Callable[[], object], repeats: int) -> list[tuple[float, float]]:
    """Returns the seconds of each call, in wall time and in CPU time of this thread."""
    measured = list[tuple[float, float]]()
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.thread_time()
        function()
        cpu = time.thread_time() - cpu
        measured.append((time.perf_counter() - wall, cpu))
    return measured

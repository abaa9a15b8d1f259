"""What data identity costs the training thread: one fingerprint, and the question whether one is wanted.

A fingerprint is taken of the first `fingerprint_batches` (2) batches of a train epoch; before every other batch an
adapter asks `guard.data.unread`. Processor time is what a busy machine disturbs less.
"""

import time
import timeit
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.results import Table, compared, in_turns
from countoff.core import Guard, Settings
from countoff.core.data.fingerprint import distinct_bytes, fingerprint

SMALL = "4×64 float32 and 4 labels"
FILLING = "telling data from filling, once per epoch"
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
    """One fingerprint of each kind of batch, what is done once per epoch, and the question before every other batch."""
    torch.set_num_threads(1)
    repeats = 40 if quick else 200
    samples = {name: seconds(partial(fingerprint, make()), repeats) for name, make in BATCHES.items()}
    excerpts = [found.excerpt for found in (fingerprint(torch.rand(32, 3, 224, 224)) for _ in range(2)) if found]
    samples[FILLING] = seconds(lambda: distinct_bytes(excerpts), repeats)
    for column, clock in enumerate(["by the wall", "processor time"]):
        one = {name: [pair[column] for pair in pairs] for name, pairs in samples.items()}
        yield compared(f"A fingerprint of a batch, {clock}", "µs", one, against=SMALL)
    asking = timeit.Timer("data.unread", globals={"data": Guard(Settings(), rank=0, world_size=1).data})
    nothing = timeit.Timer("pass")
    asked = in_turns({"`pass`": nothing, "`guard.data.unread`": asking}, repeats, 10_000)
    yield compared("Asking before every other batch", "ns", asked, against="`pass`")


def seconds(function: Callable[[], object], repeats: int) -> list[tuple[float, float]]:
    """Seconds of each call, by the wall and in processor time of this thread."""
    found = list[tuple[float, float]]()
    for _ in range(repeats):
        wall, processor = time.perf_counter(), time.thread_time()
        function()
        processor = time.thread_time() - processor
        found.append((time.perf_counter() - wall, processor))
    return found

"""Measures what data identity costs the training thread: fingerprints, and the record of what a sampler issues.

countoff takes a fingerprint of the first 2 batches of a train epoch. Before every other batch
an adapter reads `guard.data.fingerprints_due`. It keeps the indices of each batch that the train loader's sampler
issues, and sums them up on another thread. It looks at the first elements of a stream that the framework deals out,
once per fit. CPU time is less sensitive to other load on the machine than wall time.
"""

import contextlib
import time
import timeit
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from benchmarks.results import WALL_TIME, Table, compared, in_turns
from countoff._adapter.issued import Watch
from countoff.core import Guard, Settings
from countoff.core.checks.streams import ELEMENTS, FirstElements
from countoff.core.data.fingerprint import distinct_bytes, fingerprint

BARE = "torch's loader"
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
INDICES = "12 indices, in batches of 4"
STREAMS: dict[str, Callable[[], Any]] = {
    INDICES: lambda: ([[0, 1, 2, 3]] * 4, list),
    "12 samples of 64 float32 and a label": lambda: ([(torch.rand(64), number) for number in range(ELEMENTS)], None),
    "12 samples of tokens, mask and labels of 512": lambda: (
        [{name: torch.randint(0, 50_000, (512,)) for name in ("input_ids", "attention_mask", "labels")}] * ELEMENTS,
        None,
    ),
    "12 samples of 3×224×224 float32": lambda: (
        [(torch.rand(3, 224, 224), number) for number in range(ELEMENTS)],
        None,
    ),
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
    for column, clock in enumerate([WALL_TIME, "CPU time"]):
        one = {
            name: [pair[column] for pair in seconds(partial(first_elements, make()), repeats)]
            for name, make in STREAMS.items()
        }
        yield compared(f"The first elements of a stream, once per fit, {clock}", "µs", one, against=INDICES)
    behind = iter(FirstElements().follow(iter(range(10**9))))
    for _ in range(ELEMENTS + 1):
        next(behind)
    plain = iter(range(10**9))
    timers = {
        "`next` of the dataset's iterator": timeit.Timer("next(stream)", globals={"stream": plain}),
        "`next` behind the first elements": timeit.Timer("next(stream)", globals={"stream": behind}),
    }
    later = in_turns(timers, repeats, 10_000)
    yield compared("A later element of the stream", "ns", later, against="`next` of the dataset's iterator")
    data = Guard(Settings(), rank=0, world_size=1).data
    timers = {
        "`pass`": timeit.Timer("pass"),
        "`guard.data.fingerprints_due`": timeit.Timer("data.fingerprints_due", globals={"data": data}),
    }
    tests = in_turns(timers, repeats, 10_000)
    yield compared("The test before every other batch", "ns", tests, against="`pass`")
    rows: Any = range(32_768)  # as a dataset
    loader = DataLoader[int](
        rows, batch_size=64, sampler=DistributedSampler(rows, num_replicas=1, rank=0, shuffle=False)
    )
    asked: dict[str, list[float]] = {BARE: [], "the same, recorded": []}
    for _ in range(repeats):
        for name, measured in asked.items():
            measured.append(seconds_to_ask(loader, recorded=name != BARE))
    yield compared("The indices of a batch of 64, CPU time", "µs", asked, against=BARE)


def seconds_to_ask(loader: DataLoader[int], *, recorded: bool) -> float:
    """Returns the seconds per batch in which a loader's iterator asks the sampler for its indices, for a whole pass.

    The lists that are recorded end outside: in a fit, that is on the thread that sums them up.
    """
    watch = Watch(loader, lambda job: True) if recorded else None
    batches: Any = iter(loader)
    began = time.thread_time()
    with contextlib.suppress(StopIteration):
        while True:
            batches._next_index()
    ended = time.thread_time()
    if watch is not None:
        watch.release()
    return (ended - began) / len(loader)


def first_elements(stream: tuple[list[Any], Any]) -> None:
    """Looks at the first elements of a stream."""
    elements, seen = stream
    first = FirstElements()
    for _ in first.follow(iter(elements), seen):
        pass
    first.parts  # noqa: B018  (as the record needs it)


def seconds(function: Callable[[], object], repeats: int) -> list[tuple[float, float]]:
    """Returns the seconds of each call, in wall time and in CPU time of this thread."""
    measured = list[tuple[float, float]]()
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.thread_time()
        function()
        cpu = time.thread_time() - cpu
        measured.append((time.perf_counter() - wall, cpu))
    return measured

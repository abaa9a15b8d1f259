"""Measures what a trace (`trace_dir`) costs the training thread, and how large it becomes."""

import contextlib
import os
import tempfile
import time
import timeit
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.ranks import on_ranks
from benchmarks.results import Samples, Table, compared, in_turns, progress
from countoff.core import FitPlan, Guard, Settings
from integration_tests.constants import put
from integration_tests.digits import own_rank

WITHOUT, WITH = "no trace", "a trace"
_BATCHES_PER_SECOND = 10
_CALLS, _CHUNKS = 5_000, 20
_SPANS = 20


def tables(quick: bool) -> Iterator[Table]:
    """Yields the cost of a batch and of a span, each without and with a trace, and the size of a trace."""
    repeats = 3 if quick else 21
    for world_size in (1, 2):
        progress(f"trace: {world_size} ranks")
        batches = on_ranks(batch_costs, world_size, repeats)[0]
        yield compared(f"`Guard.batch()`, ranks: {world_size}", "ns", batches, against=WITHOUT)
    spans = on_ranks(span_costs, 1, repeats)[0]
    yield compared("The start and the end of a train epoch, ranks: 1", "µs", spans, against=WITHOUT)
    progress("trace: size")
    minutes = 0.25 if quick else 2.0
    rows = [{"rank": rank, **row} for rank, row in enumerate(on_ranks(size, 2, minutes))]
    yield Table(f"A trace at {_BATCHES_PER_SECOND} batches per second, ranks: 2", rows)


def batch_costs(repeats: int) -> Samples:
    """Returns seconds per `Guard.batch()` of two guards in turns."""
    with _guards() as guards:
        timers = {name: timeit.Timer("guard.batch()", globals={"guard": guard}) for name, guard in guards.items()}
        return in_turns(timers, repeats * _CHUNKS, _CALLS)


def span_costs(repeats: int) -> Samples:
    """Returns seconds per end and start of a train epoch of two guards in turns; with more ranks they would wait."""
    with _guards() as guards:
        timers = {name: timeit.Timer(lambda guard=guard: _span(guard)) for name, guard in guards.items()}
        return in_turns(timers, repeats * _CHUNKS, _SPANS)


@contextlib.contextmanager
def _guards() -> Iterator[dict[str, Guard]]:
    """Two guards in a train epoch, one without a trace and one with it."""
    world_size = _join()
    with tempfile.TemporaryDirectory() as directory:
        guards = {WITHOUT: _guard(None, world_size), WITH: _guard(directory, world_size)}
        for guard in guards.values():
            guard.fit_start(FitPlan())
            guard.train_start(0)
        yield guards
        for guard in guards.values():
            guard.train_end("stopped")
            guard.fit_end()
            guard.close()


def size(minutes: float) -> dict[str, Any]:
    """Returns how many bytes this rank's trace grows by per minute of one train epoch, and what it has beside that."""
    with tempfile.TemporaryDirectory() as directory:
        guard = _guard(directory, _join())
        guard.fit_start(FitPlan(batch_size=32, max_epochs=3), {"lightning": "2.5.0"})
        guard.train_start(0)
        path, began, batches = Path(directory) / f"rank-{own_rank():05d}.jsonl", time.monotonic(), 0
        time.sleep(1.0)  # the first lines are there then
        before = path.stat().st_size
        while time.monotonic() - began < 60 * minutes + 1.0:
            batches += 1
            guard.batch()
            guard.waited(0.00123)
            guard.step()
            time.sleep(max(0.0, began + 1.0 + batches / _BATCHES_PER_SECOND - time.monotonic()))
        per_minute = (path.stat().st_size - before) / minutes
        guard.train_end("stopped")
        guard.fit_end()
        guard.close()
        beside = path.stat().st_size - per_minute * minutes
    return {"bytes per minute": round(per_minute), "bytes of the first and the last lines": round(beside)}


def _join() -> int:
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
        return dist.get_world_size()
    return 1


def _guard(directory: str | None, world_size: int) -> Guard:
    put(TICK_BATCHES=10**12)
    settings = Settings.resolve(trace_dir=directory)
    return Guard(settings, rank=own_rank(), world_size=world_size, learning_rates=lambda: [0.1], framework="Lightning")


def _span(guard: Guard) -> None:
    guard.train_end("stopped")
    guard.train_start(0)

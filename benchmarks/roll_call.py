"""Measures the time from the first rank's call of `fit_start` until every rank has the answer, on 2 to 24 ranks."""

import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from benchmarks.ranks import on_ranks
from benchmarks.results import Table, progress, quartiles
from countoff.core import FitPlan, Guard, Settings


def roll_calls(repeats: int) -> list[tuple[float, float]]:
    """Returns when this rank called `fit_start` and when it returned, each time; all ranks share the clock."""
    dist.init_process_group("gloo")
    moments: list[tuple[float, float]] = []
    for _ in range(repeats):
        guard = Guard(Settings.resolve(), rank=dist.get_rank(), world_size=dist.get_world_size())
        dist.barrier()
        began = time.monotonic()
        guard.fit_start(FitPlan(batches_per_epoch=100, batch_size=32, dp_rank=dist.get_rank()), {"torch": "2"})
        moments.append((began, time.monotonic()))
        guard.fit_end()
        guard.close()
    dist.destroy_process_group()
    return moments


def tables(quick: bool) -> Iterator[Table]:
    """Yields one table, with a row for each number of ranks."""
    rows: list[dict[str, Any]] = []
    sizes, repeats = ((2,), 3) if quick else ((2, 4, 8, 24), 11)
    for world_size in sizes:
        progress(f"roll call: {world_size} ranks")
        by_rank = on_ranks(roll_calls, world_size, repeats)
        # Without the first time, which also imports modules.
        each = [list(zip(*moments, strict=True)) for moments in list(zip(*by_rank, strict=True))[1:]]
        from_first = quartiles([(max(ends) - min(begins)) * 1e3 for begins, ends in each])
        from_last = quartiles([(max(ends) - max(begins)) * 1e3 for begins, ends in each])
        row: dict[str, Any] = {
            "ranks": world_size,
            "times": len(each),
            "median ms from the first caller": from_first[1],
        }
        row |= {"lower quartile": from_first[0], "upper quartile": from_first[2]}
        rows.append(row | {"median ms from the last caller": from_last[1]})
    yield Table(
        "Roll call at fit start, real ranks",
        rows,
        ["Until the last rank's `fit_start` returns. It starts the threads and opens two connections per rank."],
    )

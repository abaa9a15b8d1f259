"""Measures what one pass over a loader costs: two ranks, a counted loader and two bare ones in turns, wall time.

A pass has costs that a batch has not: it opens and closes, and each of the two is compared between ranks. They are
small beside the noise of two ranks that compute on two cores. So a batch sleeps where an accelerator would compute, and
the ranks meet in an all_reduce.
"""

import time
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from benchmarks.ranks import on_ranks
from benchmarks.results import WALL_TIME, Samples, Table, compared, progress
from benchmarks.tool_jobs import COUNTOFF, NOTHING, Batches
from countoff.torch import Countoff

SIZES = 16, 64, 512
NOTHING_AGAIN = "nothing, once more"
"""The same as `NOTHING`: how far the two are apart is the machine's own noise."""
_BATCH_SECONDS = 0.0015
_WORLD_SIZE = 2


def tables(quick: bool) -> Iterator[Table]:
    """Yields one table for each number of batches per pass."""
    note = f"A batch sleeps {_BATCH_SECONDS * 1e3:g} ms, then {_WORLD_SIZE} ranks sum one number (gloo)."
    for batches in SIZES:
        progress(f"passes: {batches} batches")
        samples = on_ranks(in_turns, _WORLD_SIZE, batches, 5 if quick else 61)[0]
        title = f"A whole pass of {batches} batches, {WALL_TIME}"
        yield compared(title, "ms", samples, against=NOTHING, notes=[note])


def in_turns(batches: int, repeats: int) -> Samples:
    """Returns the seconds of whole passes over a counted loader and over two bare ones."""
    dist.init_process_group("gloo")
    loaders = {name: Batches(batches) for name in (NOTHING, COUNTOFF, NOTHING_AGAIN)}
    samples: Samples = {name: [] for name in loaders}
    with Countoff() as countoff:
        for repeat in range(repeats + 1):
            for name, loader in loaders.items():
                seconds = one_pass(countoff.train(loader) if name == COUNTOFF else loader)
                if repeat:  # the first is the warm-up
                    samples[name].append(seconds)
    return samples


def one_pass(loader: Iterable[torch.Tensor]) -> float:
    """Returns the seconds of one pass, until all ranks have ended theirs."""
    number, began = torch.zeros(1), time.perf_counter()
    for _ in loader:
        time.sleep(_BATCH_SECONDS)
        dist.all_reduce(number)
    dist.barrier()
    return time.perf_counter() - began

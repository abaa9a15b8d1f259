"""Measures what one batch costs on the training thread: the guard alone, and Lightning with and without countoff.

On real ranks, with gloo and a store like torchrun's; with two ranks, countoff's threads run. The variants take turns
within one process, so that other load on the machine affects all of them alike.
"""

from collections.abc import Iterator

from benchmarks import rank_jobs
from benchmarks.ranks import on_ranks
from benchmarks.results import NO_OP, NOTHING, THREAD_TIME, WALL_TIME, Table, compared, progress


def guard_tables(quick: bool) -> Iterator[Table]:
    """Compares `Guard.batch()` with an empty loop and with a method that adds 1."""
    for world_size in (1, 2):
        progress(f"guard: {world_size} ranks")
        samples = on_ranks(rank_jobs.guard_costs, world_size, repeats(quick))[0]
        yield compared(f"`Guard.batch()`, ranks: {world_size}", "ns", samples, against=rank_jobs.ADD)


def forward_tables(quick: bool) -> Iterator[Table]:
    """Compares a forward pass of a small DDP module that is counted with one that is not, and one with empty hooks."""
    for world_size in (1, 2):
        progress(f"forward passes: {world_size} ranks")
        samples = on_ranks(rank_jobs.forward_costs, world_size, repeats(quick))[0]
        yield compared(
            f"A forward pass of a DDP module of one layer, ranks: {world_size}", "µs", samples, against=NOTHING
        )


def lightning_tables(quick: bool) -> Iterator[Table]:
    """Compares Lightning's dispatch of a hook, and whole train epochs: bare, with a no-op callback, with `Countoff`."""
    for world_size in (1, 2):
        progress(f"lightning: dispatch, {world_size} ranks")
        ways = "back to back", "64 at a time"
        for way, samples in zip(ways, on_ranks(rank_jobs.hook_costs, world_size, repeats(quick))[0], strict=True):
            title = f"Lightning's dispatch of `on_train_batch_start`, {way}, ranks: {world_size}"
            yield compared(title, "µs", samples, against=NO_OP)
        progress(f"lightning: epochs, {world_size} ranks")
        clocks = WALL_TIME, THREAD_TIME
        for clock, samples in zip(clocks, on_ranks(rank_jobs.epoch_costs, world_size, repeats(quick))[0], strict=True):
            title = f"Whole train epochs of 64 batches in Lightning's `Trainer.fit`, per batch, {clock}"
            yield compared(f"{title}, ranks: {world_size}", "µs", samples, against=NO_OP)


def repeats(quick: bool) -> int:
    """Returns the number of rounds of samples."""
    return 3 if quick else 21

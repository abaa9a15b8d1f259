"""What one batch costs on the training thread: the guard alone, and Lightning with countoff beside a no-op callback.

With real ranks (gloo, an agent's store, countoff's threads running where there are two). What is compared is measured
in turns within one process, so that a noisy minute hits all alike.
"""

from collections.abc import Iterator

from benchmarks import rank_jobs
from benchmarks.ranks import on_ranks
from benchmarks.results import NO_OP, Table, compared, progress


def guard_tables(quick: bool) -> Iterator[Table]:
    """`Guard.batch()` beside a loop that does nothing and beside a method that adds 1."""
    for world_size in (1, 2):
        progress(f"guard: {world_size} ranks")
        samples = on_ranks(rank_jobs.guard_costs, world_size, repeats(quick))[0]
        yield compared(f"`Guard.batch()`, ranks: {world_size}", "ns", samples, against=rank_jobs.ADD)


def lightning_tables(quick: bool) -> Iterator[Table]:
    """Lightning's own dispatch of a hook inside a fit, and whole train epochs: bare, with a no-op, with `Countoff`."""
    for world_size in (1, 2):
        progress(f"lightning: dispatch, {world_size} ranks")
        ways = "back to back", "64 at a time"
        for way, samples in zip(ways, on_ranks(rank_jobs.hook_costs, world_size, repeats(quick))[0], strict=True):
            title = f"Lightning's dispatch of `on_train_batch_start`, {way}, ranks: {world_size}"
            yield compared(title, "µs", samples, against=NO_OP)
        progress(f"lightning: epochs, {world_size} ranks")
        clocks = "by the wall", "processor time of the training thread"
        for clock, samples in zip(clocks, on_ranks(rank_jobs.epoch_costs, world_size, repeats(quick))[0], strict=True):
            title = f"Whole train epochs of Lightning's `Trainer.fit`, per batch, {clock}, ranks: {world_size}"
            yield compared(title, "µs", samples, against=NO_OP)


def repeats(quick: bool) -> int:
    """Rounds of samples."""
    return 3 if quick else 21

"""Many short fits in one process: what it holds after them, and how long they take. Prints a table.

python -m integration_tests.fits 1000
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.optim.optimizer import _global_optimizer_post_hooks as step_hooks  # pyright: ignore[reportPrivateUsage]

from countoff.torch import Countoff
from integration_tests.harness import run_ranks
from integration_tests.loops import even_loader, model_and_optimizer, train_on


class Held(NamedTuple):
    """What a process holds, and the keys of the job's store."""

    threads: int
    descriptors: int
    hooks: int
    keys: int


class Look(NamedTuple):
    """A look at a process after so many fits."""

    fits: int
    held: Held
    resident_kib: int
    seconds: float


def fits_one_after_the_other(fits: int, every: int = 1) -> list[Look]:
    """What this rank holds after each so many fits, each with a model of its own."""
    dist.init_process_group("gloo")
    store: Any = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportAttributeAccessIssue]
    found, began = list[Look](), time.monotonic()
    for fit in range(1, fits + 1):
        model, optimizer = model_and_optimizer()
        with Countoff(model=model, optimizer=optimizer) as countoff:
            for batch in countoff.train(even_loader(16)):
                train_on(model, optimizer, batch)
        if fit % every:
            continue
        dist.barrier()
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
        held = Held(threading.active_count(), len(os.listdir("/proc/self/fd")), len(step_hooks), store.num_keys())
        found.append(Look(fit, held, resident, time.monotonic() - began))
        dist.barrier()
    return found


def main(fits: int) -> None:
    """Prints the table of rank 0."""
    print("| fits | threads | descriptors | hooks | keys | resident MiB | seconds |\n|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        how = {"directory": Path(directory), "deadline_seconds": 2.0 * fits}
        first, _ = run_ranks(fits_one_after_the_other, 2, fits, max(1, fits // 10), **how)
    for look in first.value:
        print("|", " | ".join(map(str, (look.fits, *look.held, look.resident_kib // 1024, round(look.seconds)))), "|")


if __name__ == "__main__":
    main(int(sys.argv[1]))

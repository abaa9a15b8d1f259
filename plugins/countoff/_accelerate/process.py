"""A process of Accelerate's, as its own API and the transformers Trainer use it."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from accelerate.scheduler import AcceleratedScheduler

from countoff.core import Verdict
from countoff.core.checks.framework import NOT_DISTRIBUTED

__all__ = ["not_distributed", "unwrapped", "unwrapped_scheduler"]

_DEPTH = 32

_RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
"""Where launchers tell a process its rank."""
warned: set[int] = set()
"""The processes, by pid, in which the warning was given: this one, or the one that it was forked from."""


def not_distributed(process: Any) -> Verdict | None:
    """Returns a warning if a launcher started several processes and Accelerate treats each as the only one.

    Only the launcher's rank 0 gets it, and only for its first fit.

    Args:
        process: An Accelerator or a PartialState.
    """
    launched = os.environ.get("WORLD_SIZE", "")
    known = process.num_processes
    if not launched.isdigit() or int(launched) == known or _launched_rank() != "0" or os.getpid() in warned:
        return None
    warned.add(os.getpid())
    sentence = (
        f"WORLD_SIZE is {launched}, and Accelerate has num_processes={known}: each process trains a model of its own, "
        "on all of the data."
    )
    return NOT_DISTRIBUTED.found(sentence)


def _launched_rank() -> str:
    return next((os.environ[name] for name in _RANKS if name in os.environ), "0")


def unwrapped(optimizer: Any) -> Any:
    """Returns the torch optimizer inside Accelerate's and DeepSpeed's wrappers."""
    innermost, inner = optimizer, optimizer
    with contextlib.suppress(Exception):  # of a property of the user's own
        for _ in range(_DEPTH):  # one of the user's may hold itself
            inner = inner.optimizer
            if hasattr(inner, "param_groups"):  # and is not the name of an algorithm
                innermost = inner
    return innermost


def unwrapped_scheduler(scheduler: Any) -> Any:
    """Returns the scheduler inside Accelerate's wrapper; any other scheduler as it is."""
    return scheduler.scheduler if isinstance(scheduler, AcceleratedScheduler) else scheduler

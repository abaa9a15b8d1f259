"""A process of Accelerate's, as its own API and the transformers Trainer use it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from countoff.core import Verdict
from countoff.core.verdict import Kind

__all__ = ["PROCESS_REMEDIES", "not_distributed", "unwrapped"]

PROCESS_REMEDIES: Mapping[Kind, str] = {
    "NotDistributed": (
        "start it with torchrun or accelerate launch on GPUs; on CPUs set ACCELERATE_USE_CPU=true for torchrun, or "
        "Accelerator(cpu=True)."
    ),
}


def not_distributed(process: Any) -> Verdict | None:
    """Returns a warning, on rank 0, if a launcher started several processes and Accelerate treats each as the only one.

    Args:
        process: An Accelerator or a PartialState.
    """
    launched = os.environ.get("WORLD_SIZE", "")
    known = process.num_processes
    if not launched.isdigit() or int(launched) == known or os.environ.get("RANK", "0") != "0":
        return None
    sentence = (
        f"WORLD_SIZE is {launched}, and Accelerate has num_processes={known}: each process trains a model of its own, "
        "on all of the data."
    )
    return Verdict("NotDistributed", sentence, time=time.time())


def unwrapped(optimizer: Any) -> Any:
    """Returns the torch optimizer inside Accelerate's and DeepSpeed's wrappers."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer

"""Where a rank of a test or of a command trains, and with which backend: what `run_ranks(device=…)` has told it.

- ``cpu``: on the CPU, with gloo.
- ``cuda``: on a GPU of its own, with NCCL.
- ``shared``: on GPU 0, which all ranks share, with gloo. NCCL refuses two ranks on one GPU.
"""

import os
from typing import Final, Literal

import torch
import torch.distributed as dist

Placement = Literal["cpu", "cuda", "shared"]
VARIABLE: Final = "TEST_PLACEMENT"


def placement() -> Placement:
    """Where this rank trains."""
    found = os.environ.get(VARIABLE, "cpu")
    if found == "cuda" or found == "shared":
        return found
    return "cpu"


def backend() -> Literal["gloo", "nccl"]:
    """The backend of this rank's process group."""
    return "nccl" if placement() == "cuda" else "gloo"


def own_device() -> torch.device:
    """The device of this rank's model and batches."""
    if placement() == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]) if placement() == "cuda" else 0)


def join() -> torch.device:
    """Makes the job's process group, and returns this rank's device. Collective: every rank must call it."""
    device = own_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend())
    return device


def lightning() -> dict[str, object]:
    """The arguments of Lightning's Trainer and Fabric for one node that place this rank."""
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    if placement() == "shared":
        raise ValueError("Lightning gives each rank a GPU of its own: a shared one is for plain loops")
    return {"accelerator": "gpu" if placement() == "cuda" else "cpu", "devices": ranks}

"""Where a rank of a test or of a command trains, and with which backend: what `run_ranks(device=…)` has told it.

- ``cpu``: on the CPU, with gloo.
- ``cuda``: on a GPU of its own, with NCCL. Where there are fewer GPUs than ranks, all share GPU 0 (`hosts_of`).
- ``shared``: on GPU 0, which all ranks share, with gloo.
"""

import argparse
import os
import warnings
from collections.abc import Iterable
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

Placement = Literal["cpu", "cuda", "shared"]
BACKENDS: Final[dict[Placement, Literal["gloo", "nccl"]]] = {"cpu": "gloo", "cuda": "nccl", "shared": "gloo"}
VARIABLE: Final = "TEST_PLACEMENT"


class DeviceError(ValueError):
    """The ranks of a job cannot train where they should."""


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """Gives a command the option ``--device``, for `choose_device`."""
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="cpu",
        help="where the ranks train: cpu, with gloo (the default); cuda, on a GPU each, with NCCL; or auto, which is "
        "cuda where there are enough GPUs. This has not been tried on several GPUs yet",
    )


def choose_device(wanted: str, ranks: int) -> Literal["cpu", "cuda"]:
    """Where the ranks of a command train on this machine: with ``auto`` on GPUs, if each rank can have one of its own.

    Raises:
        DeviceError: If `wanted` is ``cuda`` and there are fewer GPUs than ranks, or if it is none of the three.
    """
    if wanted == "cpu":
        return "cpu"
    if wanted not in ("auto", "cuda"):
        raise DeviceError(f"device must be one of auto, cpu, cuda, got {wanted!r}")
    gpus = torch.cuda.device_count()
    if wanted == "cuda" and gpus < ranks:
        raise DeviceError(
            f"device cuda needs a GPU for each of {ranks} ranks, and this machine has {gpus}: "
            "use fewer ranks, or device cpu or auto"
        )
    return "cuda" if gpus >= ranks else "cpu"


def placement() -> Placement:
    """Where this rank trains."""
    found = os.environ.get(VARIABLE, "cpu")
    if found == "cuda" or found == "shared":
        return found
    return "cpu"


def count_gpus() -> int:
    """The GPUs of this machine. That NVIDIA's library cannot say is no error here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.cuda.device_count()


def hosts_of(device: Placement, world_size: int) -> int:
    """The hosts that a job's environment has: 1, or one for each rank where ranks of NCCL must share GPU 0.

    NCCL refuses two ranks of one host on one GPU. So `NCCL_HOSTID` and the variables of torchrun give each rank a host
    of its own. Each takes its host's GPU 0, which is the same one here, and they talk over sockets.
    """
    return world_size if device == "cuda" and count_gpus() < world_size else 1


def environment(rank: int, hosts: int) -> dict[str, str]:
    """What a rank that is a host of its own tells NCCL; nothing where all ranks have one host."""
    return {} if hosts == 1 else {"NCCL_HOSTID": f"host-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def described(device: Placement, world_size: int) -> str:
    """The backend of a job, and whether its ranks share a GPU, in words."""
    backend = BACKENDS[device]
    return f"{backend}, one GPU" if device == "shared" or hosts_of(device, world_size) > 1 else backend


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
    dist.init_process_group(BACKENDS[placement()])
    return device


def ddp(model: torch.nn.Module) -> DistributedDataParallel:
    """The model on this rank's device, in DDP. Collective: every rank must call it."""
    device = own_device()
    return DistributedDataParallel(model.to(device), device_ids=[device] if device.type == "cuda" else None)


def moved(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a batch, on this rank's device."""
    device = own_device()
    return [each.to(device, non_blocking=True) for each in tensors]


def framework_uses_cpu() -> bool:
    """Whether a framework, which places its ranks itself, is to train on the CPU.

    Raises:
        ValueError: If all ranks share a GPU. A framework gives each a GPU of its own.
    """
    if placement() == "shared":
        raise ValueError("a framework gives each rank a GPU of its own: a shared one is for plain loops")
    return placement() == "cpu"


def accelerator() -> Literal["cpu", "gpu"]:
    """What Lightning calls an accelerator and Composer a device; the same errors as `framework_uses_cpu`."""
    return "cpu" if framework_uses_cpu() else "gpu"


def lightning() -> dict[str, Any]:
    """The arguments of Lightning's Trainer and Fabric that place this rank."""
    local, hosts = (int(os.environ[name]) for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"))
    return {"accelerator": accelerator(), "devices": local, "num_nodes": hosts}

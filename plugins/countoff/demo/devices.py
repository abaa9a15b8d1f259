"""Where the ranks of a job run: on the CPU with gloo, or on a GPU each with NCCL."""

from __future__ import annotations

from typing import Literal


class DeviceError(ValueError):
    """The ranks of a job cannot run where they should."""


def choose_device(wanted: str, ranks: int) -> Literal["cpu", "cuda"]:
    """Returns where the ranks of a job on this machine run.

    Args:
        wanted: ``cpu``, ``cuda``, or ``auto``: GPUs where each rank can have one of its own. Only ``cuda`` and ``auto``
            count the GPUs, which takes an import of torch.
        ranks: Ranks of the job on this machine.

    Raises:
        DeviceError: If `wanted` is ``cuda`` and there are fewer GPUs than ranks, or if it is none of the three.
    """
    if wanted == "cpu":
        return "cpu"
    if wanted not in ("auto", "cuda"):
        raise DeviceError(f"device must be one of auto, cpu, cuda, got {wanted!r}")
    import torch

    gpus = torch.cuda.device_count()
    if wanted == "cuda" and gpus < ranks:
        raise DeviceError(
            f"device cuda needs a GPU for each of {ranks} ranks, and this machine has {gpus}: "
            "use fewer ranks, or device cpu or auto"
        )
    return "cuda" if gpus >= ranks else "cpu"

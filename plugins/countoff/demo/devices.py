"""Where the ranks of a job run: on the CPU with gloo, or on a GPU each with NCCL."""

from __future__ import annotations

from typing import Literal, get_args

__all__ = ["DEVICES", "Device", "choose_device"]

Device = Literal["auto", "cpu", "cuda"]
DEVICES: tuple[str, ...] = get_args(Device)


def choose_device(wanted: str, ranks: int, gpus: int) -> Literal["cpu", "cuda"]:
    """Returns where the ranks of a job on this machine run.

    Args:
        wanted: ``cpu``, ``cuda``, or ``auto``: GPUs where each rank can have one of its own.
        ranks: Ranks of the job on this machine.
        gpus: GPUs of this machine, as `torch.cuda.device_count()` counts them.

    Raises:
        ValueError: If `wanted` is ``cuda`` and there are fewer GPUs than ranks, or if it is none of the three.

    Example:
        >>> choose_device("auto", ranks=4, gpus=8), choose_device("auto", ranks=4, gpus=2)
        ('cuda', 'cpu')
    """
    if wanted not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {wanted!r}")
    if wanted == "cuda" and gpus < ranks:
        raise ValueError(
            f"device cuda needs a GPU for each of {ranks} ranks, and this machine has {gpus}: use device cpu, or auto"
        )
    return "cuda" if wanted != "cpu" and gpus >= ranks else "cpu"

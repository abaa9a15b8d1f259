"""Where the ranks of a job run: on the CPU with gloo, or on a GPU each with NCCL."""

from __future__ import annotations

from typing import Final, Literal, get_args

__all__ = ["DEVICES", "DEVICE_HELP", "Device", "DeviceError", "choose_device", "device_here"]

Device = Literal["auto", "cpu", "cuda"]
DEVICES: tuple[str, ...] = get_args(Device)
DEVICE_HELP: Final = (
    "where the ranks train: cpu, with gloo (the default); cuda, on a GPU each, with NCCL; or auto, which is cuda where "
    "there are enough GPUs. cuda has not been tried on GPUs yet"
)
"""What a command says of its option ``--device``."""


class DeviceError(ValueError):
    """The ranks of a job cannot run where they should."""


def choose_device(wanted: str, ranks: int, gpus: int) -> Literal["cpu", "cuda"]:
    """Returns where the ranks of a job on this machine run.

    Args:
        wanted: ``cpu``, ``cuda``, or ``auto``: GPUs where each rank can have one of its own.
        ranks: Ranks of the job on this machine.
        gpus: GPUs of this machine, as `torch.cuda.device_count()` counts them.

    Raises:
        DeviceError: If `wanted` is ``cuda`` and there are fewer GPUs than ranks, or if it is none of the three.

    Example:
        >>> choose_device("auto", ranks=4, gpus=8), choose_device("auto", ranks=4, gpus=2)
        ('cuda', 'cpu')
    """
    if wanted not in DEVICES:
        raise DeviceError(f"device must be one of {', '.join(DEVICES)}, got {wanted!r}")
    if wanted == "cuda" and gpus < ranks:
        raise DeviceError(
            f"device cuda needs a GPU for each of {ranks} ranks, and this machine has {gpus}: "
            "use fewer ranks, or device cpu or auto"
        )
    return "cuda" if wanted != "cpu" and gpus >= ranks else "cpu"


def device_here(wanted: str, ranks: int) -> Literal["cpu", "cuda"]:
    """Returns where the ranks of a job on this machine run, with its GPUs counted.

    Args:
        wanted: As in `choose_device`. Only ``cuda`` and ``auto`` count GPUs, which takes an import of torch.
        ranks: Ranks of the job on this machine.

    Raises:
        DeviceError: As in `choose_device`.
    """
    if wanted not in ("cuda", "auto"):
        return choose_device(wanted, ranks, gpus=0)
    import torch

    return choose_device(wanted, ranks, torch.cuda.device_count())

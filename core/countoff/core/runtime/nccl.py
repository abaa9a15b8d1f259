"""Ends a wait for a kernel of NCCL that will never finish, so that the process need not be killed.

A collective of NCCL is a kernel. Python goes on once it is queued, and blocks later: where it reads a value from the
GPU, or saves a checkpoint. It returns when the communicators are aborted. `ProcessGroup.abort` does that (torch 2.6 and
newer; nvidia-resiliency-ext calls it too), and tells torch's own watchdog first, which then looks for errors of NCCL no
more and does not end the process (`ProcessGroupNCCL::abort` and `Watchdog::runLoop` in torch's ProcessGroupNCCL.cpp).

No error is raised where the main thread waits. What the aborted kernels should have written is incomplete, and kernels
that were queued behind them have run with that.
"""

from __future__ import annotations

import contextlib
import threading
import time

import torch
import torch.distributed as dist

from countoff.core.runtime.collectives import process_groups

_ABORT_SECONDS = 15.0
"""An abort that takes longer does not come to an end: one that works takes a second or so."""


class Abort:
    """An abort of all communicators of this process, under way on threads of its own.

    The groups are aborted beside one another: one after the other they can wait for each other
    (https://github.com/pytorch/pytorch/issues/119797).

    Args:
        groups: Those that use NCCL.
    """

    def __init__(self, groups: list[dist.ProcessGroup]) -> None:
        self._deadline = time.monotonic() + _ABORT_SECONDS
        self._threads = [threading.Thread(target=_abort, args=(group,), daemon=True) for group in groups]
        for thread in self._threads:
            thread.start()

    @property
    def under_way(self) -> bool:
        """Whether it has not come to an end, and may still do so."""
        return time.monotonic() < self._deadline and any(thread.is_alive() for thread in self._threads)


def is_used() -> bool:
    """Whether this process has communicators of NCCL, or may make them."""
    return bool(_groups())


def abort_communicators() -> Abort | None:
    """Begins to abort all communicators of NCCL in this process; None where it has none."""
    groups = _groups()
    return Abort(groups) if groups else None


def gpu_is_busy() -> bool:
    """Whether a GPU that this process uses has not done all that was queued on its default stream. It does not wait.

    Where NCCL waits for another rank, it stays busy.
    """
    if not torch.cuda.is_initialized():
        return False
    with contextlib.suppress(RuntimeError):  # an error of CUDA: whoever waits for the GPU gets it, and reports it
        # A GPU that this process does not use has no context, and must not get one.
        used = [device for device in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(device)]
        return not all(torch.cuda.default_stream(device).query() for device in used)
    return False


def _groups() -> list[dist.ProcessGroup]:
    with contextlib.suppress(Exception):  # torch does not promise all of these names; without them the process is ended
        return [group for group in process_groups() if "nccl" in dist.get_backend_config(group)]
    return []


def _abort(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(Exception):  # NCCL may refuse; the process is ended then
        group.abort()

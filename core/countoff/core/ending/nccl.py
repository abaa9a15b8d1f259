"""Ends a wait for a kernel of NCCL that will never finish, so that the process need not be killed.

A collective of NCCL is a kernel. Python goes on once it is queued, and blocks later: where it reads a value from the
GPU, or saves a checkpoint. It returns when the communicators are aborted. `ProcessGroup.abort` does that (torch 2.6 and
newer). It first tells torch's own watchdog to stop looking for errors of NCCL (`ProcessGroupNCCL::abort` and
`Watchdog::runLoop` in torch's ProcessGroupNCCL.cpp), so that it does not end the process.

No error is raised where the main thread waits. What the aborted kernels should have written is incomplete, and kernels
that were queued behind them have run with that.

torch's leaving can hold a process that a verdict has ended, and then abort it (`leave_without_torch`).
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time

import torch.distributed as dist

from countoff.core.liveness.collectives import process_groups

_ABORT_SECONDS = 15.0
"""An abort that takes longer does not come to an end: one that works takes a second or so."""
_left = False


class Abort:
    """An abort of all communicators of this process, under way on threads of its own.

    The groups are aborted beside one another: one after the other they can wait for each other
    (https://github.com/pytorch/pytorch/issues/119797).

    Args:
        groups: Those that use NCCL.
    """

    def __init__(self, groups: list[dist.ProcessGroup]) -> None:
        self._deadline = time.monotonic() + _ABORT_SECONDS
        self.threads = [threading.Thread(target=_abort, args=(group,), daemon=True) for group in groups]
        with contextlib.suppress(RuntimeError):  # no thread can be started: the process is ended then
            for thread in self.threads:
                thread.start()

    @property
    def under_way(self) -> bool:
        """Whether it has not come to an end, and may still do so."""
        return time.monotonic() < self._deadline and any(thread.is_alive() for thread in self.threads)


def is_used() -> bool:
    """Whether a process group of this process uses NCCL."""
    return bool(_groups())


def abort_communicators() -> Abort | None:
    """Begins to abort all communicators of NCCL in this process; None where it has none, or torch cannot."""
    groups = _groups()
    if groups and hasattr(dist.ProcessGroup, "abort"):
        return Abort(groups)
    return None


def leave_without_torch() -> None:
    """Lets this process end as soon as Python has ended, with the exit code that it has anyway; nothing without NCCL.

    The last thing a process group of NCCL does is to wait for torch's watchdog. A moment after the first rank has
    left, the watchdogs of the others see that its connections are closed. Each then sleeps for a minute and aborts its
    process: exit code -6 (`Watchdog::runLoop` and `~ProcessGroupNCCL` in ProcessGroupNCCL.cpp). So these groups are
    kept for ever, and the exit functions of C libraries, which need them ended, are left out: glibc's `_exit` comes
    before them. All that Python does at its end has been done by then. Another C library has no `on_exit`, and nothing
    is changed there.
    """
    global _left
    groups = _groups()
    if _left or not groups:
        return
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)  # called with the exit code
        for group in groups:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        _left = True


def _groups() -> list[dist.ProcessGroup]:
    """This process's groups that use NCCL."""
    with contextlib.suppress(Exception):  # torch does not promise all of these names; without them the process is ended
        return [group for group in process_groups() if "nccl" in dist.get_backend_config(group)]
    return []


def _abort(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(Exception):  # NCCL may refuse; the process is ended then
        group.abort()

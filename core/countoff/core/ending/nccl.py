"""Ends a wait for a kernel of NCCL that will never finish, so that the process need not be killed.

A collective of NCCL is a kernel. Python goes on once it is queued, and blocks later: where it reads a value from the
GPU, or saves a checkpoint. It returns when the communicators are aborted. `ProcessGroup.abort` does that (torch 2.6 and
newer). It first tells torch's own watchdog to stop looking for errors of NCCL (`ProcessGroupNCCL::abort` and
`Watchdog::runLoop` in torch's ProcessGroupNCCL.cpp), so that it does not end the process.

No error is raised where the main thread waits. What the aborted kernels should have written is incomplete, and kernels
that were queued behind them have run with that.

At the end of a process, torch's own clean-up can hold it for a minute and then abort it (`skip_torch_cleanup`).
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time

import torch.distributed as dist

from countoff.core.session.liveness.collectives import process_groups

_ABORT_SECONDS = 15.0
"""An abort that takes longer does not come to an end: one that works takes a second or so."""
_skipped = False
"""Whether this process skips torch's clean-up."""


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


def skip_torch_cleanup() -> None:
    """Lets this process end as soon as Python has ended, with its own exit code. Without NCCL it does nothing.

    When a process group of NCCL is freed, it waits for torch's watchdog. A moment after the first rank has ended, the
    watchdogs of the others see that its connections are closed. Each of them sleeps for a minute and then aborts its
    process: exit code -6 (`Watchdog::runLoop` and `~ProcessGroupNCCL` in ProcessGroupNCCL.cpp). So these groups are
    never freed. The exit functions of C libraries could meet the threads of these groups, so they are skipped: glibc's
    `_exit` is called before them. All that Python does at its end has been done by then. A C library without `on_exit`
    is left alone.
    """
    global _skipped
    groups = _groups()
    if _skipped or not groups:
        return
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)  # called with the exit code
        libc.on_exit(libc.fcloseall, None)  # called before that: what C libraries have printed is written
        for group in groups:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        _skipped = True


def _groups() -> list[dist.ProcessGroup]:
    """This process's groups that use NCCL."""
    with contextlib.suppress(Exception):  # torch does not promise all of these names; without them the process is ended
        return [group for group in process_groups() if "nccl" in dist.get_backend_config(group)]
    return []


def _abort(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(Exception):  # NCCL may refuse; the process is ended then
        group.abort()

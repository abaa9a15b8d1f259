"""Whether the process that hosts the job's store may open the connections of all ranks.

It is known to rank 0 where that process is its own, or one above it, as torchrun's is.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

__all__ = ["host_of", "lack_of_room"]

_PER_RANK = 2
"""Connections of countoff: those of a rank's writer and of its reader."""
_SPARE = 128
"""Files that the job may still open there."""
_LISTENS = "0A"


def host_of(port: int) -> int | None:
    """The pid of this process or of the one above it that listens on a port; None where that cannot be told."""
    with contextlib.suppress(OSError):
        sockets = set(_listening_on(port))
        for pid in _own_line():
            if sockets & set(_files(pid)):
                return pid
    return None


def lack_of_room(pid: int | None, ranks: int) -> str:
    """Why a process cannot hold the connections of so many ranks, in one line; empty if it can, or nobody knows.

    Args:
        pid: The process, which hosts the store.
        ranks: How many ranks are about to connect; 0 for none.
    """
    if pid is None or not ranks:
        return ""
    try:
        limit, _ = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        needed = len(os.listdir(f"/proc/{pid}/fd")) + _PER_RANK * ranks + _SPARE
    except (AttributeError, OSError):  # this is no Linux, or that process is another user's
        return ""
    if limit == resource.RLIM_INFINITY or needed <= limit:
        return ""
    return (
        f"the process that hosts the job's store (pid {pid}) may open {limit} files, and {ranks} ranks need {needed}: "
        f"raise its limit (`ulimit -n {needed}` before it starts)"
    )


def _listening_on(port: int) -> Iterator[str]:
    """The sockets of this network that listen on a port, as `_files` names them."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/self/net/{name}", encoding="ascii") as table:
            for row in (line.split() for line in table if f":{port:04X} " in line):
                if row[3] == _LISTENS and row[1].endswith(f":{port:04X}"):
                    yield f"socket:[{row[9]}]"


def _own_line() -> Iterator[int]:
    """This process and those above it, as far as this user may look into them."""
    pid = os.getpid()
    while pid > 0:
        yield pid
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            pid = int(stat.read().rpartition(")")[2].split()[1])


def _files(pid: int) -> Iterator[str]:
    """What a process has open."""
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since
            yield os.readlink(f"/proc/{pid}/fd/{name}")

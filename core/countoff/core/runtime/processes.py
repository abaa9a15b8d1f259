"""Processes of the same host: whether they are alive, without asking anybody.

``/proc/<pid>/stat`` shows at once whether a process is gone or stopped. For a rank on another host there are only its
heartbeats. Where there is no ``/proc``, heartbeats decide for all ranks.
"""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from typing import Any

from countoff.core.protocol.records import parse_count

_GONE = ("Z", "X", "x")


@dataclass(frozen=True)
class Process:
    """A rank's process, told apart from a later one with the same pid by the time at which it began."""

    rank: int
    pid: int
    began: int

    @classmethod
    def own(cls, rank: int) -> Process:
        """The process of this rank."""
        return cls(rank, os.getpid(), _stat(os.getpid())[1])

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Process:
        """Reads what another rank wrote about itself.

        Raises:
            KeyError, ValueError: If it is not that.
        """
        return cls(parse_count(record["rank"]), parse_count(record["pid"]), parse_count(record["began"]))

    def state(self) -> str:
        """`alive`, `stopped` or `gone`; `alive` where it cannot be told.

        >>> Process.own(0).state()
        'alive'
        """
        if not self.began:
            return "alive"
        letter, began = _stat(self.pid)
        if began != self.began or letter in _GONE:
            return "gone"
        return "stopped" if letter == "T" else "alive"


def _stat(pid: int) -> tuple[str, int]:
    """State letter and start time in clock ticks since boot; ("", 0) if there is no such process or no /proc."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[19])


def began_at() -> float:
    """When this process began, in seconds since the epoch; now, where there is no /proc."""
    ticks = _stat(os.getpid())[1]
    if not ticks:
        return time.time()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def host_id() -> str:
    """Equal for two processes that see each other's pids: same boot, same pid namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
            return f"{boot.read().strip()[:13]}-{os.readlink('/proc/self/ns/pid')[5:-1]}"
    except OSError:
        return platform.node()

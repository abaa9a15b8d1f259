"""Processes of the same host: whether they are alive, without asking anybody.

``/proc/<pid>/stat`` shows at once whether a process is gone or stopped, and a pidfd (Linux 5.3) wakes whoever waits for
that. For a rank on another host there are only its heartbeats. Where there is no ``/proc``, heartbeats decide for all
ranks.
"""

from __future__ import annotations

import contextlib
import os
import platform
import select
import threading
import time
from collections.abc import Iterable
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
        return cls(rank, os.getpid(), _own_beginning())

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Process:
        """Reads what another rank wrote about itself.

        Raises:
            KeyError, ValueError: If it is not that.
        """
        return cls(parse_count(record["rank"]), parse_count(record["pid"]), parse_count(record["began"]))

    def to_json(self) -> dict[str, int]:
        """What `from_json` reads."""
        return {"rank": self.rank, "pid": self.pid, "began": self.began}

    def state(self) -> str:
        """`alive`, `stopped` or `gone`; `alive` where it cannot be told.

        >>> Process.own(0).state()
        'alive'
        """
        if not self.began:
            return "alive"
        try:
            letter, began = process_stat(self.pid)
        except OSError:  # this process may open no more descriptors, for example
            return "alive"
        if began != self.began or letter in _GONE:
            return "gone"
        return "stopped" if letter == "T" else "alive"


class Deaths:
    """Wakes a thread as soon as a process has ended. All but `wake` is for that thread alone.

    Where this process may open no more descriptors, nothing ends a wait before its time.
    """

    def __init__(self) -> None:
        self._poll = select.poll()
        self.wakes = self.waker = -1
        with contextlib.suppress(OSError):
            self.wakes, self.waker = os.pipe()
            self._poll.register(self.wakes, select.POLLIN)
        self._lock = threading.Lock()
        self._woken = False  # the pipe holds one byte at most, so that no write waits
        self._known: set[Process] = set()
        self.watched: set[int] = set()

    def watch(self, processes: Iterable[Process]) -> None:
        """Watches these processes too. One that has ended already, or cannot be watched, is never reported."""
        for process in processes:
            if process in self._known:
                continue
            self._known.add(process)
            with contextlib.suppress(OSError, AttributeError):  # it has ended; no pidfd before Linux 5.3, or elsewhere
                descriptor = os.pidfd_open(process.pid)
                self.watched.add(descriptor)
                self._poll.register(descriptor, select.POLLIN)

    def wait(self, seconds: float) -> bool:
        """Waits until a watched process ends, at most so long; returns whether one has ended. `wake` ends it too."""
        ended = False
        for descriptor, event in self._poll.poll(1000 * seconds):
            if event & select.POLLNVAL:  # the user's code has closed what it has not opened
                self._poll.unregister(descriptor)
                self.watched.discard(descriptor)
            elif descriptor == self.wakes:
                with self._lock, contextlib.suppress(OSError):
                    self._woken = False
                    os.read(self.wakes, 1)
            else:  # it would be reported for ever
                self._poll.unregister(descriptor)
                self.watched.discard(descriptor)
                os.close(descriptor)
                ended = True
        return ended

    def wake(self) -> None:
        """Ends a wait, the one under way or the next one; from any thread."""
        with self._lock, contextlib.suppress(OSError):
            if not self._woken:
                self._woken = True
                os.write(self.waker, b"w")

    def close(self) -> None:
        """Closes all descriptors; `wake` does nothing then."""
        with self._lock:
            self._woken = True
            for descriptor in (*self.watched, self.wakes, self.waker):
                with contextlib.suppress(OSError):
                    os.close(descriptor)


def process_stat(pid: int) -> tuple[str, int]:
    """State letter and start time in clock ticks since boot; ("", 0) if there is no such process or no /proc.

    A process whose first thread has ended is a zombie while its other threads go on: that one sleeps.

    Raises:
        OSError: If that cannot be told.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "", 0
    letter, threads = fields[0], int(fields[17])
    return "S" if letter == "Z" and threads > 1 else letter, int(fields[19])


def _own_beginning() -> int:
    """When this process began, as `process_stat` has it; 0 where it cannot be told."""
    try:
        return process_stat(os.getpid())[1]
    except OSError:
        return 0


def began_at() -> float:
    """When this process began, in seconds since the epoch; now, where there is no /proc."""
    ticks = _own_beginning()
    if not ticks:
        return time.time()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def host_id() -> str:
    """Equal for two processes that see each other's pids: same boot, same pid namespace.

    Where that cannot be told, it is that of this process alone: heartbeats decide then.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
            return f"{boot.read().strip()[:13]}-{os.readlink('/proc/self/ns/pid')[5:-1]}"
    except OSError:
        return f"{platform.node()}-{os.urandom(6).hex()}"

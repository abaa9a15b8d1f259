"""What a job leaves behind: processes, threads, connections, shared memory."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from countoff.core import Verdict
from countoff.core.ending import shutdown
from integration_tests.digits import own_rank
from integration_tests.faults.rank_behavior import stamp
from integration_tests.harness import tell

_SHARED_MEMORY = Path("/dev/shm")
_SECONDS_TO_LEAVE = 12.0  # an orphaned worker of a loader looks for its parent every 5 s


def watch_own_leaving() -> None:
    """Has this rank write down what is left of countoff when the interpreter ends, after countoff's own leaving."""
    connections = store_connections()

    def look() -> None:
        threads = [thread.name for thread in threading.enumerate() if "countoff" in thread.name]
        left = {"threads": threads, "connections": max(0, store_connections() - connections)}
        Path(f"left-{own_rank()}").write_text(json.dumps(left), encoding="utf-8")

    atexit.register(look)


def store_connections() -> int:
    """This process's open connections to the port of the job's store."""
    port = f":{int(os.environ['MASTER_PORT']):04X}"
    inodes = {
        fields[9]
        for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6")
        if os.path.exists(table)
        for fields in (line.split() for line in Path(table).read_text().splitlines()[1:])
        if fields[2].endswith(port)
    }
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{descriptor}").removeprefix("socket:").strip("[]") in inodes
    return found


def stamp_verdicts() -> None:
    """Makes this rank record when countoff first prints, and how soon every rank knew, and tell the test."""
    write: Any = sys.stderr.write
    print_verdict = shutdown.print_verdict
    spoken: list[str] = []

    def recorded(state: Any, verdict: Verdict, *reporter: Any) -> None:
        if verdict.spread_seconds is not None and not state.printing:
            Path(f"spread-{own_rank()}").write_text(str(verdict.spread_seconds), encoding="utf-8")
        print_verdict(state, verdict, *reporter)

    def stamped(text: str) -> int:
        first = "countoff: " in text and not spoken
        if first:
            spoken.append(text)
            stamp("said")
        written = write(text)
        if first:
            tell("verdict")
        return written

    shutdown.print_verdict = recorded
    setattr(sys.stderr, "write", stamped)  # noqa: B010  (the stream's own attribute, which a type checker protects)


def shared_memory() -> set[str]:
    """Names in shared memory, but those of NCCL, Streaming and joblib: what a killed process leaves of them is its own.

    It may be of another job on this machine, which was killed meanwhile.
    """
    names = os.listdir(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else ()
    return {name for name in names if not re.match(r"nccl-|\d{6}_|sem\.loky-", name)}


def left_behind(directory: Path, pids: Collection[int], shared_before: Collection[str]) -> list[str]:
    """What is left of a job whose ranks have ended, in words; nothing if all is well.

    Args:
        directory: The ranks' working directory.
        pids: Those of the ranks, each of which led a session of its own.
        shared_before: Names in shared memory before the job.
    """
    found: list[str] = []
    for file in sorted(directory.glob("left-*")):
        left = json.loads(file.read_text())
        found += [f"rank {file.name[5:]}: thread {name}" for name in left["threads"]]
        if left["connections"]:
            found.append(f"rank {file.name[5:]}: {left['connections']} connections to the store")
    patience = time.monotonic() + _SECONDS_TO_LEAVE
    while (alive := _of_sessions(pids)) and time.monotonic() < patience:
        threading.Event().wait(0.05)
    found += [f"process {pid} of rank {rank}" for pid, rank in alive]
    while (names := _abandoned(shared_memory() - set(shared_before))) and time.monotonic() < patience:
        threading.Event().wait(0.05)
    return found + [f"/dev/shm/{name}" for name in sorted(names)]


def _of_sessions(pids: Collection[int]) -> list[tuple[int, int]]:
    """Living processes of the ranks' sessions, with the rank's place in `pids`."""
    ranks = {pid: rank for rank, pid in enumerate(pids)}
    found: list[tuple[int, int]] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[3]) in ranks and fields[0] not in "ZX":
                found.append((int(stat.parent.name), ranks[int(fields[3])]))
    return found


def _abandoned(names: Iterable[str]) -> set[str]:
    """Those of the names that no living process has mapped: other jobs on this machine have theirs."""
    found: dict[str, str] = {}
    for name in names:
        with contextlib.suppress(OSError):
            found[str((_SHARED_MEMORY / name).stat().st_ino)] = name
    for maps in Path("/proc").glob("[0-9]*/maps") if found else ():
        with contextlib.suppress(OSError):
            for line in maps.read_text(errors="replace").splitlines():
                if "/dev/shm/" in line:  # perhaps under the name that it had when it was mapped
                    found.pop(line.split()[4], None)
    return set(found.values())

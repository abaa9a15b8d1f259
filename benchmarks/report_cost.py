"""How long `countoff report` takes, how much memory, and how large its page is, for traces of jobs that never ran."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.results import Table

_TICK_SECONDS, _EPOCH_TICKS, _BATCHES = 5, 360, 50
_CALL = """
import re, sys, time
from pathlib import Path
from countoff.core.trace.reader import read
from countoff.report import render
begin = time.perf_counter()
trace = read(sys.argv[1:])
between = time.perf_counter()
page = render(trace)
end = time.perf_counter()
most = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
print(between - begin, end - between, most / 1024, len(page.encode()) / 1e6)
"""


def tables(quick: bool) -> list[Table]:
    """Returns one row per size of job; the largest writes a trace of 2 GB into the directory for temporary files."""
    sizes = [(8, 1), (256, 1)] if quick else [(8, 1), (256, 8), (4_096, 8)]
    notes = [
        f"Ranks at {_BATCHES / _TICK_SECONDS:.0f} batches per second with a learning rate that changes at every step; "
        "one of them has a slow loader in every third epoch. In a process of its own, without its start."
    ]
    return [Table("A report", [_row(ranks, hours) for ranks, hours in sizes], notes)]


def _row(ranks: int, hours: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as directory:
        size = write(Path(directory), ranks, hours)
        command = [sys.executable, "-c", _CALL, directory]
        told = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ).stdout
    reading, drawing, memory, page = map(float, told.split())
    return {
        "ranks": ranks,
        "hours": hours,
        "trace, MB": size / 1e6,
        "read, s": reading,
        "drawn, s": drawing,
        "memory, MB": memory,
        "page, MB": page,
    }


def write(directory: Path, ranks: int, hours: int) -> int:
    """Writes the trace of a job; returns its bytes."""
    usual, slow = (_text(ranks, hours, slow=each) for each in (False, True))
    for rank in range(ranks):
        text = (slow if rank == 5 else usual).replace("RANK", str(rank)).replace("HOST", f"node{rank // 8}")
        (directory / f"rank-{rank:05}.jsonl").write_text(text)
    return sum(file.stat().st_size for file in directory.iterdir())


def _text(ranks: int, hours: int, *, slow: bool) -> str:
    """The trace of one rank, in which `RANK` and `HOST` stand for its own."""
    ticks = hours * 3_600 // _TICK_SECONDS
    lines: list[str] = []

    def add(kind: str, at: int, **values: object) -> None:
        record = {"k": kind, "t": 1_750_000_000.0 + at * _TICK_SECONDS, **values}
        lines.append(json.dumps(record, separators=(",", ":")))

    add("begin", 0, v=1, rank="RANK", world=ranks, host="HOST", pid=1, framework="torch", run={}, versions={}, plan={})
    for first in range(0, ticks, _EPOCH_TICKS):
        epoch = first // _EPOCH_TICKS
        waits = 1.0 if slow and epoch % 3 == 0 else 0.1
        add("open", first, span=f"train epoch {epoch}")
        last = min(_EPOCH_TICKS, ticks - first)
        for tick in range(1, last + 1):
            batches = {"b": tick * _BATCHES, "s": (first + tick) * _BATCHES}
            add(
                "tick",
                first + tick,
                **batches,
                lr=[round(1 - (first + tick) / (ticks + 1), 8)],
                l=round(tick * waits, 3),
            )
        total = {"b": last * _BATCHES, "s": (first + last) * _BATCHES, "l": round(last * waits, 3)}
        add("close", first + last, span=f"train epoch {epoch}", why="exhausted", **total)
    add("end", ticks, how="finished")
    return "\n".join([*lines, ""])

"""How long `countoff report` takes, how much memory, how large its page is, and how soon a browser shows it.

The traces are those of simulated ranks; see `simulated_traces`.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import simulated_traces
from benchmarks.results import Table, progress
from tests.browser import chromium, is_installed

_LOADS, _DRAW_SECONDS = 5, 60.0
_CALL = """
import re, sys, time
from pathlib import Path
from countoff.report.reader import read
from countoff.report.page import render
begin = time.perf_counter()
trace = read([sys.argv[1]])
between = time.perf_counter()
page = render(trace)
end = time.perf_counter()
Path(sys.argv[2]).write_text(page, "utf-8")
most = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
print(between - begin, end - between, most / 1024, len(page.encode()) / 1e6)
"""
_SHOWN = """
const done = arguments[0];
requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now())));
"""


def tables(quick: bool) -> list[Table]:
    """Returns one row per size of job; the largest writes a trace of 2 GB into the directory for temporary files."""
    sizes = [(8, 1), (64, 1)] if quick else [(8, 1), (256, 8), (4_096, 8)]
    notes = [
        f"Simulated ranks at {simulated_traces.BATCHES_PER_SECOND} batches per second, with a learning rate that "
        f"changes at every step and a checkpoint in each epoch; rank {simulated_traces.SLOW_RANK} has a slow loader in "
        "every third one. Reading and drawing: in a process of its own, without its start. Chromium: the median of "
        f"{_LOADS} loads, from the request of the file until the page has answered to a second frame."
    ]
    return [Table("A report", [_row(ranks, hours) for ranks, hours in sizes], notes)]


def _row(ranks: int, hours: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as directory:
        place, page = Path(directory, "trace"), Path(directory, "page.html")
        place.mkdir()
        progress(f"report: {ranks} ranks write for {hours} h")
        size = simulated_traces.write(place, ranks, 2 * hours)
        progress(f"report: {ranks} ranks are read")
        command = [sys.executable, "-c", _CALL, str(place), str(page)]
        told = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ).stdout
        seconds = shown(page) if is_installed() else None
    reading, drawing, memory, page_size = map(float, told.split())
    return {
        "ranks": ranks,
        "hours": hours,
        "trace, MB": size / 1e6,
        "read, s": reading,
        "drawn, s": drawing,
        "memory, MB": memory,
        "page, MB": page_size,
        "in Chromium, s": "no Chromium" if seconds is None else seconds,
    }


def shown(page: Path) -> float:
    """Seconds until a page is drawn in Chromium.

    Args:
        page: The file.
    """
    with tempfile.TemporaryDirectory() as profile, chromium(Path(profile)) as browser:
        browser.set_script_timeout(_DRAW_SECONDS)
        browser.get("about:blank")
        return statistics.median(_load(browser, page) for _ in range(_LOADS)) / 1e3


def _load(browser: Any, page: Path) -> float:
    browser.get(page.as_uri())
    return browser.execute_async_script(_SHOWN)

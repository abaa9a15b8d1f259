"""The result of every benchmark: a table of numbers, printed as markdown or written as JSON."""

import json
import os
import platform
import statistics
import sys
import time
import timeit
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

Samples = dict[str, list[float]]
"""Seconds, by the name of what was measured."""

NOTHING, NO_OP, COUNTOFF = "no callback", "no-op callback", "`Countoff`"
WALL_TIME, THREAD_TIME = "wall time", "CPU time of the training thread"


@dataclass(frozen=True)
class Table:
    """The result of one benchmark.

    Attributes:
        title: What was measured.
        rows: Column names to values, the same names in every row; numbers are in the unit that the name gives.
        notes: Sentences to print under the table.
    """

    title: str
    rows: Sequence[Mapping[str, Any]]
    notes: Sequence[str] = field(default_factory=list)

    def markdown(self) -> str:
        columns = list(dict.fromkeys(name for row in self.rows for name in row))
        lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        lines += [f"| {' | '.join(text_of(row.get(name)) for name in columns)} |" for row in self.rows]
        return "\n".join([f"**{self.title}**", "", *lines, *(f"\n{note}" for note in self.notes)])


def compared(title: str, unit: str, samples: Samples, *, against: str, notes: Sequence[str] = ()) -> Table:
    """Returns a table of medians and quartiles, each compared with one of the rows.

    Args:
        title: What was measured.
        unit: Unit of the printed numbers: s, ms, µs or ns.
        samples: Seconds, by the name of what was measured.
        against: The name of the row that the others are compared with.
        notes: Sentences to print under the table.
    """
    scale = {"s": 1.0, "ms": 1e3, "µs": 1e6, "ns": 1e9}[unit]
    _, base, _ = quartiles([value * scale for value in samples[against]])
    rows: list[dict[str, Any]] = []
    for name, values in samples.items():
        low, middle, high = quartiles([value * scale for value in values])
        row = {"what": name, f"median {unit}": middle, "lower quartile": low, "upper quartile": high}
        rows.append(row | {f"÷ {against}": middle / base, f"minus it, {unit}": middle - base})
    return Table(title, rows, notes)


def in_turns(timers: Mapping[str, timeit.Timer], repeats: int, calls: int, pause_seconds: float = 0.0) -> Samples:
    """Returns seconds per call of each timer, by name.

    It takes a short sample of each timer in turn, so that other load on the machine affects all of them alike.

    Args:
        timers: What is measured, by name.
        repeats: Samples of each; one more round before them is the warm-up.
        calls: Calls per sample.
        pause_seconds: Seconds to sleep after each sample.
    """
    samples: Samples = {name: [] for name in timers}
    for repeat in range(repeats + 1):
        for name, timer in timers.items():
            seconds = timer.timeit(calls) / calls
            if repeat:
                samples[name].append(seconds)
            if pause_seconds:
                time.sleep(pause_seconds)
    return samples


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns lower quartile, median and upper quartile; for a single value, three times that value."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def text_of(value: Any) -> str:
    """Returns the text of a cell: three significant digits of a float, all of an integer, "" for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def environment() -> dict[str, Any]:
    """Returns what the numbers depend on: versions, number of processors, load."""
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "time": time.strftime("%Y-%m-%d %H:%M"),
    }


def report(tables: Iterator[Table], path: Path | None) -> list[Table]:
    """Prints each table as soon as it is ready; also writes all tables so far to the JSON file, if there is one."""
    before, finished = environment(), list[Table]()
    print(" · ".join(f"{name} {value}" for name, value in before.items()), flush=True)
    for table in tables:
        finished.append(table)
        print(f"\n{table.markdown()}", flush=True)
        if path is not None:
            path.write_text(
                json.dumps({"began": before, "ended": environment(), "tables": list(map(asdict, finished))}, indent=1)
            )
    return finished


def progress(text: str) -> None:
    """Prints on stderr what is being measured."""
    print(f"… {text}", file=sys.stderr, flush=True)

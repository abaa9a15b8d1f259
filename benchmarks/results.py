"""The one shape of result of all benchmarks: a table of numbers, printed as markdown or kept as JSON."""

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

Samples = Mapping[str, Sequence[float]]

NOTHING, NO_OP, COUNTOFF = "no callback", "no-op callback", "`Countoff`"


@dataclass(frozen=True)
class Table:
    """What one benchmark has found.

    Attributes:
        title: What was measured, of whom.
        rows: Column names to values, the same names in every row; numbers in the unit that the name says.
        notes: Sentences that belong under it.
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
    """Medians and quartiles of what was measured in turns, each beside one of them.

    Args:
        title: What was measured.
        unit: What the samples, which are in seconds, are printed in: s, ms, µs or ns.
        samples: Seconds, by what they are of.
        against: The name of the one that the others are held against.
        notes: Sentences that belong under the table.
    """
    scale = {"s": 1.0, "ms": 1e3, "µs": 1e6, "ns": 1e9}[unit]
    _, base, _ = quartiles([value * scale for value in samples[against]])
    rows: list[dict[str, Any]] = []
    for name, values in samples.items():
        low, middle, high = quartiles([value * scale for value in values])
        row = {"what": name, f"median {unit}": middle, "lower quartile": low, "upper quartile": high}
        rows.append(row | {f"÷ {against}": middle / base, f"minus it, {unit}": middle - base})
    return Table(title, rows, notes)


def in_turns(
    timers: Mapping[str, timeit.Timer], repeats: int, calls: int, breath: float = 0.0
) -> dict[str, list[float]]:
    """Seconds per call of each timer, by name: a short sample of each, in turns, so that a noisy minute hits all alike.

    Args:
        timers: What is measured, by name.
        repeats: Samples of each; a first round beside them only warms up.
        calls: Calls per sample.
        breath: Seconds of rest after each sample.
    """
    samples: dict[str, list[float]] = {name: [] for name in timers}
    for repeat in range(repeats + 1):
        for name, timer in timers.items():
            seconds = timer.timeit(calls) / calls
            if repeat:
                samples[name].append(seconds)
            if breath:
                time.sleep(breath)
    return samples


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile; of one value, three times itself."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def text_of(value: Any) -> str:
    """A cell: three significant digits of a float, all of an integer, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def circumstances() -> dict[str, Any]:
    """What the numbers depend on: versions, processors, and how busy they are."""
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "time": time.strftime("%Y-%m-%d %H:%M"),
    }


def report(tables: Iterator[Table], path: Path | None) -> list[Table]:
    """Prints each table as it comes, and keeps all as JSON in the file, if there is one, after each."""
    before, found = circumstances(), list[Table]()
    print(" · ".join(f"{name} {value}" for name, value in before.items()), flush=True)
    for table in tables:
        found.append(table)
        print(f"\n{table.markdown()}", flush=True)
        if path is not None:
            path.write_text(
                json.dumps({"began": before, "ended": circumstances(), "tables": list(map(asdict, found))}, indent=1)
            )
    return found


def progress(text: str) -> None:
    """Says on stderr how far it is."""
    print(f"… {text}", file=sys.stderr, flush=True)

"""``countoff top``: what the ranks of a job are doing, read from its trace while it runs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import datetime, timezone
from typing import Any

from rich.console import Console
from rich.text import Text

from countoff.core import formats
from countoff.core.words import runs_of
from countoff.report.document import verdict_or_none
from countoff.report.top.picture import Picture
from countoff.report.top.rows import Row
from countoff.report.top.screen import whole_terminal
from countoff.report.top.watch import Look, WatchedJob

COLUMNS = (
    "time",
    "ranks",
    "hosts",
    "span",
    "fewest_batches",
    "most_batches",
    "batches_per_second",
    "loader_share",
    "learning_rate",
    "age_seconds",
    "note",
)
"""The columns of lines in a pipe."""
_LEAST_SECONDS, _MOST_SECONDS = 0.2, 3_600.0
_REST = 4
"""Between looks at many files, so many times as long passes as a look takes."""
_EXTRA = "pip install 'countoff[prometheus]'"


def top(chosen: argparse.Namespace) -> int:
    """Shows what ranks are doing until the job ends or the user leaves.

    Returns:
        The exit code: 0; 1 if the job has ended with a verdict or an exception, or a package is not installed; or 130
            after Ctrl-C.

    Raises:
        ValueError: If a directory cannot be read, an option is out of its domain, or nothing can be served at an
            address; the message is one line.
    """
    if not _LEAST_SECONDS <= chosen.every <= _MOST_SECONDS:  # NaN is in no domain, either
        domain = f"from {_LEAST_SECONDS:g} to {_MOST_SECONDS:g}"
        raise ValueError(f"--every must be a number of seconds {domain}, got {chosen.every:g}")
    if chosen.prometheus is not None:
        return _serve(chosen)
    console = Console(highlight=False)
    on_terminal = sys.stdout.isatty() and console.is_terminal and not console.is_dumb_terminal
    job = WatchedJob(chosen.directories, once=chosen.once or chosen.json)
    try:
        if chosen.json:
            look = _only_look(job)
            print(json.dumps(_as_json(look), indent=2))
            return int(look.failed)
        if chosen.once:
            return _once(job, console if on_terminal else None)
        return _on_screen(job, console, chosen.every) if on_terminal else _in_lines(job, chosen.every)
    except KeyboardInterrupt:
        return 130


def _serve(chosen: argparse.Namespace) -> int:
    """Serves metrics until Ctrl-C; returns the exit code.

    Raises:
        ValueError: As `top`.
    """
    if chosen.once or chosen.json:
        raise ValueError("--prometheus goes on until Ctrl-C, so it does not go with --once and --json")
    try:
        from countoff.report.top.exporter import serve
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("prometheus_client"):
            raise
        print(f"countoff: --prometheus needs prometheus-client: {_EXTRA}", file=sys.stderr)
        return 1
    try:
        serve(WatchedJob(chosen.directories, once=False), chosen.directories, chosen.prometheus, chosen.every, _REST)
    except KeyboardInterrupt:
        return 130


def _only_look(job: WatchedJob) -> Look:
    """Returns what there is to see at this moment.

    Raises:
        ValueError: If that is nothing.
    """
    waits = "without --once or --json, countoff top waits for it"
    if job.absent:
        raise ValueError(f"there is no directory {job.absent}; {waits}")
    look = job.look()
    if not look.rows:
        problem = f" ({look.problem})" if look.problem else ""
        raise ValueError(f"there is no trace in {job.name}{problem}; {waits}")
    return look


def _once(job: WatchedJob, console: Console | None) -> int:
    look = _only_look(job)
    if console is None:
        _Lines().print(look)
    else:
        console.print(Picture(look))
        if look.farewell:
            print(look.farewell)
    return int(look.failed)


def _on_screen(job: WatchedJob, console: Console, every: float) -> int:
    with whole_terminal(console) as screen:
        screen.show(Text(f"reading {job.name}…"))
        look, seconds = _timed(job)
        while not look.farewell:
            screen.show(Picture(look, is_whole=True))
            if "q" in screen.wait(max(every, _REST * seconds)).lower():
                return 0
            look, seconds = _timed(job)
    print(look.farewell)
    return int(look.failed)


def _in_lines(job: WatchedJob, every: float) -> int:
    lines = _Lines()
    while True:
        look, seconds = _timed(job)
        lines.print(look)
        if look.farewell:
            return int(look.failed)
        time.sleep(max(every, _REST * seconds))


def _timed(job: WatchedJob) -> tuple[Look, float]:
    begin = time.monotonic()
    return job.look(), time.monotonic() - begin


def _as_json(look: Look) -> dict[str, Any]:
    """A look as JSON types, with the keys that docs/seeing.md describes."""
    return {
        "format": formats.JSON_OUTPUT,
        "job": look.heading,
        "time": time.time(),
        "world_size": sum(len(row.ranks) for row in look.rows),
        "ended": bool(look.farewell),
        "failed": look.failed,
        "verdict": verdict_or_none(look.verdict),
        "warnings": [each.to_dict() for each in look.warnings],
        "problem": look.problem or None,
        "rows": [
            {
                "ranks": row.ranks,
                "hosts": row.hosts,
                "span": row.where,
                "fewest_batches": row.batches[0] if row.batches else None,
                "most_batches": row.batches[1] if row.batches else None,
                "batches_per_second": row.batches_per_second,
                "loader_share": row.loader_share,
                "learning_rates": row.learning_rates,
                "age_seconds": row.age_seconds,
                "note": row.note,
            }
            for row in look.rows
        ],
    }


class _Lines:
    """Prints looks as lines: a line per row, whose columns are set off by tabs. Lines with a # are no rows."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def print(self, look: Look) -> None:
        """Prints one look."""
        if look.rows:
            self._say("\t".join(COLUMNS))
        else:
            self._say(look.heading)
        if look.is_over:
            self._say("this run has ended; waiting for the next one")
        if look.problem:
            self._say(f"cannot be read: {look.problem}")
        if look.warning is not None:
            self._say(look.warning.headline)
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        for row in look.rows:
            print(now, *_cells_of_line(row), sep="\t")
        for line in look.farewell.splitlines():
            print(f"# {line}")
        sys.stdout.flush()

    def _say(self, text: str) -> None:
        """Prints a line that is no row, once."""
        if text not in self._said:
            self._said.add(text)
            print(f"# {text}")


def _cells_of_line(row: Row) -> tuple[str, ...]:
    fewest, most = row.batches or ("", "")
    return (
        ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs_of(row.ranks)),
        ",".join(row.hosts),
        row.where,
        str(fewest),
        str(most),
        _digits(row.batches_per_second),
        _digits(row.loader_share),
        ",".join(f"{rate:.6g}" for rate in row.learning_rates),
        "" if row.age_seconds is None else f"{row.age_seconds:.1f}",
        row.note,
    )


def _digits(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 1_000 else f"{value:.0f}"

"""``countoff top``: what the ranks of a job are doing, read from its trace while it runs."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from countoff.core.verdict import Verdict
from countoff.core.words import count_of, listed, number_of, plain, runs_of
from countoff.report.facts import duration
from countoff.report.live import LiveRanks, Row
from countoff.report.model import Run, Trace
from countoff.report.reader import Reader
from countoff.report.screen import whole_terminal

__all__ = ["COLUMNS", "top"]

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
_TABLE_SECONDS = 5.0
"""The verdict's table of ranks comes so late at most."""
_MISSING_SECONDS = 10.0
"""After the last line of all that have ended, how long other ranks may take to begin."""
_OVER_SECONDS = 10.0
"""A run that had ended so long before the first look is an earlier one: its directory is used again."""
_RECORDS = 20_000
"""Ticks that are kept: rates need the last few."""
_RATES, _WARNING_LINES = 3, 4
_NAMES: tuple[str, ...] = ("ranks", "host", "span", "batch", "batches/s", "loader", "learning rate", "age", "note")
"""The columns of the table on a terminal."""
_NUMBERS = {"batch", "batches/s", "loader", "age"}
_LEFT_OUT = ("learning rate", "host", "age", "loader", "batches/s", "batch")
"""The columns that a narrow terminal leaves out, the least useful first. Ranks and what they are doing always stay."""
_NOTE = len("slow loader")
"""Cells that are kept free for a note, so that no column comes and goes with it. An exception may be longer."""
_ENDLESS = 10_000
"""Cells of a line on which everything has room."""


class Look(NamedTuple):
    """What one look at the trace has shown.

    Attributes:
        heading: Which job it is, or what there is to wait for.
        rows: What its ranks are doing; empty while there is nothing to read.
        warning: The verdict, or else the last warning.
        problem: The first file that could not be read, and why; empty if there is none.
        farewell: What is left to say when the job has ended; empty while it goes on.
        failed: Whether it has ended with a verdict, or a rank with an exception.
        is_over: Whether this run had ended before the first look, so that the next one is waited for.
    """

    heading: str
    rows: Sequence[Row] = ()
    warning: Verdict | None = None
    problem: str = ""
    farewell: str = ""
    failed: bool = False
    is_over: bool = False


def top(chosen: argparse.Namespace) -> int:
    """Shows what ranks are doing until the job ends or the user leaves.

    Returns:
        The exit code: 0, or 1 if the job has ended with a verdict or an exception, or 130 after Ctrl-C.

    Raises:
        ValueError: If a directory cannot be read, or a number is out of its domain; the message is one line.
    """
    if not _LEAST_SECONDS <= chosen.every <= _MOST_SECONDS:  # NaN is in no domain, either
        domain = f"from {_LEAST_SECONDS:g} to {_MOST_SECONDS:g}"
        raise ValueError(f"--every must be a number of seconds {domain}, got {chosen.every:g}")
    console = Console(highlight=False)
    on_terminal = sys.stdout.isatty() and console.is_terminal and not console.is_dumb_terminal
    job = _Job(chosen.directories, once=chosen.once)
    try:
        if chosen.once:
            return _once(job, console if on_terminal else None)
        return _on_screen(job, console, chosen.every) if on_terminal else _in_lines(job, chosen.every)
    except KeyboardInterrupt:
        return 130


class _Job:
    """A job, as its trace shows it from look to look.

    Args:
        directories: Where its ranks write.
        once: Whether there is one look only, which waits for nothing: neither the table of a verdict nor the next run.
    """

    def __init__(self, directories: Sequence[str], *, once: bool) -> None:
        self.name = plain(" ".join(directories))
        self._directories = directories
        self._once = once
        self._table_seconds = 0.0 if once else _TABLE_SECONDS
        self._over: int | None = None
        self._reader: Reader | None = None
        self._live = LiveRanks()
        self._verdict_since: float | None = None

    @property
    def absent(self) -> str:
        """The first directory that does not exist; empty if all do."""
        return next((plain(each) for each in self._directories if not os.path.lexists(each)), "")

    def look(self) -> Look:
        """Reads what is new.

        Raises:
            ValueError: If a directory cannot be read.
        """
        if self._reader is None:
            if self.absent:
                return Look(f"waiting for {self.absent}…")
            self._reader = Reader(self._directories, most_records=_RECORDS)
        trace = self._reader.read()
        problem = next(iter(trace.problems), "")
        if not trace.runs:
            return Look(f"waiting for the first line of a rank in {self.name}…", problem=problem)
        run, now = trace.runs[-1], time.time()
        rows = self._live.rows(run, now)
        goes_on = any(fit.settings.get("on_divergence") == "warn" for fit in run.fits.values())
        verdict = trace.verdict
        warning = verdict or next(reversed(run.warnings), None)
        if self._over is None:
            ended = _endings(run).total() == len(run.fits) or (verdict is not None and not goes_on)
            is_over = not self._once and ended and now - run.end > _OVER_SECONDS
            self._over = len(trace.runs) if is_over else 0
        if len(trace.runs) == self._over:
            ago = f", ended {duration(now - run.end)} ago; waiting for the next run"
            return Look(_heading(self.name, trace, run) + ago, rows, warning, problem, is_over=True)
        farewell = self._farewell(run, None if goes_on else verdict, now)
        failed = bool(farewell) and (verdict is not None or "failed" in _endings(run))
        return Look(_heading(self.name, trace, run), rows, warning, problem, farewell, failed)

    def _farewell(self, run: Run, verdict: Verdict | None, now: float) -> str:
        """What is left to say when the job has ended; empty while it goes on."""
        endings = _endings(run)
        ended = endings.total() == len(run.fits) and (not run.missing or now - run.end > _MISSING_SECONDS)
        if verdict is not None:
            if self._verdict_since is None:
                self._verdict_since = time.monotonic()
            waited = time.monotonic() - self._verdict_since
            return verdict.render() if verdict.rows or ended or waited >= self._table_seconds else ""
        if not ended:
            return ""
        how = ", ".join(f"{count} {word}" for word, count in endings.most_common())
        missing = f"; {count_of(len(run.missing), 'rank')} left no trace" if run.missing else ""
        return f"countoff: no verdict: {count_of(len(run.fits), 'rank')} ended ({how}){missing}"


def _endings(run: Run) -> Counter[str]:
    return Counter(fit.ending.how for fit in run.fits.values() if fit.ending is not None)


def _heading(name: str, trace: Trace, run: Run) -> str:
    framework = next((f"{fit.framework}, " for fit in run.fits.values() if fit.framework), "")
    hosts = f" on {count_of(len(run.hosts), 'host')}" if len(run.hosts) > 1 else ""
    number = f", run {len(trace.runs)}" if len(trace.runs) > 1 else ""
    begun = datetime.fromtimestamp(run.begin).strftime("%Y-%m-%d %H:%M:%S")
    return f"{name}: {framework}{count_of(run.world_size, 'rank')}{hosts}{number}, begun {begun}"


def _once(job: _Job, console: Console | None) -> int:
    if job.absent:
        raise ValueError(f"there is no directory {job.absent}; without --once, countoff top waits for it")
    look = job.look()
    if not look.rows:
        problem = f" ({look.problem})" if look.problem else ""
        raise ValueError(f"there is no trace in {job.name}{problem}; without --once, countoff top waits for it")
    if console is None:
        _Lines().print(look)
    else:
        console.print(_Picture(look))
        if look.farewell:
            print(look.farewell)
    return int(look.failed)


def _on_screen(job: _Job, console: Console, every: float) -> int:
    with whole_terminal(console) as screen:
        screen.show(Text(f"reading {job.name}…"))
        look, seconds = _timed(job)
        while not look.farewell:
            screen.show(_Picture(look, is_whole=True))
            if "q" in screen.wait(max(every, _REST * seconds)).lower():
                return 0
            look, seconds = _timed(job)
    print(look.farewell)
    return int(look.failed)


def _in_lines(job: _Job, every: float) -> int:
    lines = _Lines()
    while True:
        look, seconds = _timed(job)
        lines.print(look)
        if look.farewell:
            return int(look.failed)
        time.sleep(max(every, _REST * seconds))


def _timed(job: _Job) -> tuple[Look, float]:
    begin = time.monotonic()
    return job.look(), time.monotonic() - begin


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


@dataclass(frozen=True)
class _Picture:
    """A look as a table, in the size that the terminal has when it is painted.

    Attributes:
        look: The look.
        is_whole: Whether it has the whole terminal, and must fit in; then keys are read.
    """

    look: Look
    is_whole: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        look, width = self.look, options.max_width
        below: list[Text] = []
        if look.warning is not None:
            text = f"{_clock(look.warning.time)}{look.warning.headline}"
            below.append(_cut(text, _WARNING_LINES * width, "yellow"))
        if look.problem:
            below.append(_cut(f"cannot be read: {look.problem}", width, "yellow"))
        if self.is_whole:
            below.append(Text("q leaves", style="dim"))
        yield _cut(look.heading, width, "bold")
        yield Text()
        if look.rows:
            rows = look.rows
            if self.is_whole:
                lines = options.size.height - 5 - sum(len(text.wrap(console, width)) for text in below)
                rows = _rows_in(lines, rows, console, options)
            yield _table(rows, console, options)
            if folded := look.rows[len(rows) :]:
                ranks = sum(len(row.ranks) for row in folded)
                yield Text(f"… and {count_of(len(folded), 'row')} more, of {count_of(ranks, 'rank')}")
            yield Text()
        yield from below


def _cut(text: str, cells: int, style: str) -> Text:
    line = Text(text, style=style)
    line.truncate(cells, overflow="ellipsis")
    return line


def _rows_in(lines: int, rows: Sequence[Row], console: Console, options: ConsoleOptions) -> Sequence[Row]:
    """The first rows, as many as a table of so many lines has; one at least."""
    rows = rows[: max(1, lines - 1)]
    while len(rows) > 1 and len(console.render_lines(_table(rows, console, options), options)) > lines:
        rows = rows[:-1]
    return rows


def _table(rows: Sequence[Row], console: Console, options: ConsoleOptions) -> Table:
    """Rows with as many columns as fit. What is left has the whole text of its cells, but for a long note."""
    endless = options.update(max_width=_ENDLESS)
    for left_out in range(len(_LEFT_OUT) + 1):
        names = [name for name in _NAMES if name not in _LEFT_OUT[:left_out]]
        least = console.measure(_columns(names, rows, _NOTE), options=endless).maximum
        if least <= options.max_width:
            return _columns(names, rows, _NOTE + options.max_width - least)
    return _columns([name for name in _NAMES if name not in _LEFT_OUT], rows, _NOTE)


def _columns(names: Sequence[str], rows: Sequence[Row], note: int) -> Table:
    """These columns of rows; ranks and span have several lines where they must, and a note as many cells at most."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in names:
        table.add_column(
            name,
            justify="right" if name in _NUMBERS else "left",
            no_wrap=name not in ("ranks", "span"),
            overflow="ellipsis" if name == "note" else "fold",
            min_width=_NOTE if name == "note" else None,
            max_width=note if name == "note" else None,
        )
    for row in rows:
        cells = dict(zip(_NAMES, _cells(row), strict=True))
        table.add_row(*(Text(cells[name]) for name in names), style="bold" if row.note else None)
    return table


def _cells(row: Row) -> tuple[str, ...]:
    fewest, most = row.batches or (0, 0)
    batches = f"{fewest:,}" if fewest == most else f"{fewest:,}–{most:,}"
    more = ", …" if len(row.learning_rates) > _RATES else ""
    return (
        listed(row.ranks),
        row.hosts[0] if len(row.hosts) == 1 else count_of(len(row.hosts), "host") if row.hosts else "",
        row.where,
        batches if row.batches else "",
        "" if row.batches_per_second is None else number_of(row.batches_per_second),
        "" if row.loader_share is None else f"{row.loader_share:.0%}",
        ", ".join(number_of(rate, 4) for rate in row.learning_rates[:_RATES]) + more,
        "" if row.age_seconds is None else duration(math.floor(row.age_seconds)),
        row.note,
    )


def _clock(seconds: float) -> str:
    """The time of day of a warning, as this host has it; empty if it is no time."""
    try:
        return f"{datetime.fromtimestamp(seconds):%H:%M:%S} " if seconds > 0 else ""
    except (OverflowError, ValueError, OSError):
        return ""

"""A job as its trace shows it, from look to look."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from countoff.core.verdict import Verdict
from countoff.core.words import count_of, plain
from countoff.report.model import Run, Trace
from countoff.report.reader import Reader
from countoff.report.top.rows import ENDINGS, LiveRanks, Row
from countoff.report.words import duration

_TABLE_SECONDS = 5.0
"""The verdict's table of ranks comes so late at most."""
_MISSING_SECONDS = 10.0
"""After the last line of all that have ended, how long other ranks may take to begin."""
_OVER_SECONDS = 10.0
"""A run that had ended so long before the first look is an earlier one: its directory is used again."""
_RECORDS = 20_000
"""Ticks that are kept: rates need the last few."""


class Look(NamedTuple):
    """What one look at the trace has shown.

    Attributes:
        heading: Which job it is, or what there is to wait for.
        rows: What its ranks are doing; empty while there is nothing to read.
        verdict: The verdict; None if there is none.
        warnings: Each warning once, the last one at the end.
        problem: The first file that could not be read, and why; empty if there is none.
        farewell: What is left to say when the job has ended; empty while it goes on.
        failed: Whether it has ended with a verdict, or a rank with an exception.
        is_over: Whether this run had ended before the first look, so that the next one is waited for.
    """

    heading: str
    rows: Sequence[Row] = ()
    verdict: Verdict | None = None
    warnings: Sequence[Verdict] = ()
    problem: str = ""
    farewell: str = ""
    failed: bool = False
    is_over: bool = False

    @property
    def warning(self) -> Verdict | None:
        """The verdict, or else the last warning."""
        return self.verdict or next(reversed(self.warnings), None)


class WatchedJob:
    """A job, as its trace shows it from look to look.

    Args:
        directories: Where its ranks write.
        once: Whether there is one look only, which waits for nothing: neither the table of a verdict nor the next run.

    Attributes:
        name: The directories, as text.
        trace: What the last look has read; None before there is a directory. The next look changes it.
    """

    def __init__(self, directories: Sequence[str], *, once: bool) -> None:
        self.name = plain(" ".join(directories))
        self._directories = directories
        self._once = once
        self._table_seconds = 0.0 if once else _TABLE_SECONDS
        self._over: int | None = None
        self._reader: Reader | None = None
        self.trace: Trace | None = None
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
        self.trace = trace = self._reader.read()
        problem = next(iter(trace.problems), "")
        if not trace.runs:
            return Look(f"waiting for the first line of a rank in {self.name}…", problem=problem)
        run, now = trace.runs[-1], time.time()
        rows = self._live.rows(run, now)
        goes_on = any(fit.settings.get("on_divergence") == "warn" for fit in run.fits.values())
        verdict = trace.verdict
        said = verdict, run.warnings
        if self._over is None:
            ended = _endings(run).total() == len(run.fits) or (verdict is not None and not goes_on)
            is_over = not self._once and ended and now - run.end > _OVER_SECONDS
            self._over = len(trace.runs) if is_over else 0
        if len(trace.runs) == self._over:
            ago = f", ended {duration(now - run.end)} ago; waiting for the next run"
            return Look(_heading(self.name, trace, run) + ago, rows, *said, problem, is_over=True)
        farewell = self._farewell(run, None if goes_on else verdict, now)
        failed = bool(farewell) and (verdict is not None or "failed" in _endings(run))
        return Look(_heading(self.name, trace, run), rows, *said, problem, farewell, failed)

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
        ended_as = [f"{count_of(count, 'rank')} {_ended(how, count)}" for how, count in endings.most_common()]
        missing = [f"{count_of(len(run.missing), 'rank')} left no trace"] if run.missing else []
        return f"countoff: no verdict: {'; '.join([*ended_as, *missing])}"


def _endings(run: Run) -> Counter[str]:
    return Counter(fit.ending.how for fit in run.fits.values() if fit.ending is not None)


def _ended(how: str, ranks: int) -> str:
    """How ranks have ended, as the rest of a sentence."""
    said = ENDINGS[how]
    return f"{'was' if ranks == 1 else 'were'} {said}" if said.startswith("ended") else said


def _heading(name: str, trace: Trace, run: Run) -> str:
    framework = next((f"{fit.framework}, " for fit in run.fits.values() if fit.framework), "")
    hosts = f" on {count_of(len(run.hosts), 'host')}" if len(run.hosts) > 1 else ""
    number = f", run {len(trace.runs)}" if len(trace.runs) > 1 else ""
    begun = datetime.fromtimestamp(run.begin).strftime("%Y-%m-%d %H:%M:%S")
    return f"{name}: {framework}{count_of(run.world_size, 'rank')}{hosts}{number}, begun {begun}"

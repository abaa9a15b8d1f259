"""Reads traces. All in them is untrusted: what is not as it should be is skipped and counted, and never fails."""

from __future__ import annotations

import errno
import math
import os
import stat
from collections.abc import Iterator, Sequence

from countoff.core import formats
from countoff.core.checks.stalled import STALLED
from countoff.core.messages import plain
from countoff.core.trace.format import COUNTED, INCIDENT_FILE, STACKS, parse_name
from countoff.report.model import Incident, Run, Trace
from countoff.report.reader.kinds import take_last_counts
from countoff.report.reader.processes import share_clocks
from countoff.report.reader.rank_trace import RankTrace
from countoff.report.reader.record import MOST_RANKS, Record
from countoff.report.reader.runs import runs_of

_MOST_RECORDS, _FEWEST_PER_RANK, _MOST_PER_RANK = 400_000, 100, 20_000
"""Ticks that are kept: of all ranks together, and of each rank at least and at most. As many spans are kept."""
_CHUNK_BYTES = 1 << 20
_INCIDENT_BYTES = 1 << 27
"""The size of an incident that is read. It has a few lines per rank."""


def read(directories: Sequence[str]) -> Trace:
    """Reads the traces in these directories, as one job.

    Args:
        directories: The directories that the ranks wrote to; several if hosts wrote to their own, or for several runs.

    Raises:
        ValueError: If one of them is not a directory that can be read.
    """
    return Reader(directories).read()


class Reader:
    """Reads traces, and later what has been appended to them.

    Args:
        directories: As for `read`.
        most_records: Ticks that are kept in memory, of all ranks together, and as many spans.
    """

    def __init__(self, directories: Sequence[str], *, most_records: int = _MOST_RECORDS) -> None:
        self._trace = Trace(directories=list({os.path.realpath(each): each for each in directories}.values()))
        self._most_records = most_records
        self._ranks: dict[tuple[str, int], RankTrace] = {}
        self._offsets: dict[tuple[str, int, int, int], int] = {}

    def read(self) -> Trace:
        """Reads what is new since the last call. Returns the same trace each time, brought up to date.

        Raises:
            ValueError: If a directory cannot be read.
        """
        self._trace.problems.clear()
        found = [file for directory in self._trace.directories for file in self._files(directory)]
        ranks = {(directory, rank) for directory, rank, _ in found}
        limit = min(_MOST_PER_RANK, max(_FEWEST_PER_RANK, self._most_records // max(1, len(ranks))))
        for directory, rank, path in found:
            if (directory, rank) not in self._ranks:
                self._ranks[directory, rank] = RankTrace(directory, rank)
            try:
                self._append(self._ranks[directory, rank], path, limit)
            except OSError as error:
                self._trace.problems.append(f"{plain(path)}: {error.strerror or type(error).__name__}")
        for each in self._ranks.values():
            each.settle()
        share_clocks([process for each in self._ranks.values() for process in each.processes])
        self._trace.runs = runs_of([fit for each in self._ranks.values() for fit in each.fits])
        for run in self._trace.runs:
            _take_stalls(run)
        self._trace.skipped = sum(each.skipped for each in self._ranks.values())
        beyond = {(each.directory, each.beyond) for each in self._ranks.values() if each.beyond}
        self._trace.problems += [f"{plain(directory)}: {why}" for directory, why in sorted(beyond)]
        self._trace.incidents = [found for each in self._trace.directories if (found := self._incident(each))]
        return self._trace

    def _incident(self, directory: str) -> Incident | None:
        """What a verdict has left in a directory, beside the files of ranks."""
        path = os.path.join(directory, INCIDENT_FILE)
        found = Record.parse(_start_of(path))
        if found is None:
            if os.path.lexists(path):
                self._trace.problems.append(f"{plain(path)}: it cannot be read")
            return None
        if why := formats.beyond(found.count("format"), formats.VERDICT_FILE):
            self._trace.problems.append(f"{plain(path)}: {why}")
            return None
        rows = {row.get("rank"): row for row in found.rows(COUNTED, MOST_RANKS)}
        for rank, fit in self._trace.runs[-1].fits.items() if self._trace.runs else ():
            if rank in rows and fit.verdict and fit.directory == directory:
                take_last_counts(fit, [rows[rank]])
        stacks = [
            (ranks, each.text("state"), each.texts("frames"))
            for each in found.records(STACKS, MOST_RANKS)
            if (ranks := each.ranks("ranks"))
        ]
        return Incident(found.verdict(0.0), stacks)

    def _files(self, directory: str) -> Iterator[tuple[str, int, str]]:
        """The files of ranks in a directory, each with its directory and rank, in the order in which to read them."""
        try:
            names = os.listdir(directory)
        except OSError as error:
            raise ValueError(f"{plain(directory)} cannot be read: {error.strerror}") from None
        found: list[tuple[int, float, str]] = []
        for name in names:
            parsed = parse_name(name)
            if parsed and parsed[0] < MOST_RANKS:
                found.append((parsed[0], parsed[1] or math.inf, name))
        for rank, _, name in sorted(found):
            yield directory, rank, os.path.join(directory, name)

    def _append(self, trace: RankTrace, path: str, limit: int) -> None:
        """Reads what a file has more than before. A file that was renamed meanwhile is known by its inode."""
        now = _regular(os.lstat(path))
        key = trace.directory, trace.rank, now.st_dev, now.st_ino
        offset = self._offsets.get(key, 0)
        if now.st_size < offset:  # somebody has emptied it
            offset = 0
        if now.st_size > offset:
            trace.expect(now.st_size - offset, limit)
            with open(path, "rb", buffering=0, opener=_open_regular) as file:
                file.seek(offset)
                self._offsets[key] = offset + trace.feed(iter(lambda: file.read(_CHUNK_BYTES), b""), limit)


def _take_stalls(run: Run) -> None:
    """Gives each rank its counts in the table of a stall, which only one of them has recorded."""
    for stall in run.warnings:
        for fit in run.fits.values() if stall.kind == STALLED.name else ():
            take_last_counts(fit, stall.rows)


def _open_regular(path: str, flags: int) -> int:
    """Opens a regular file: a link may lead to a file that must not come into a page, and a pipe would block.

    Raises:
        OSError: If it is none.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        _regular(os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _regular(status: os.stat_result) -> os.stat_result:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    return status


def _start_of(path: str) -> bytes:
    try:
        with open(path, "rb", opener=_open_regular) as file:
            return file.read(_INCIDENT_BYTES)
    except OSError:
        return b""

"""Reads traces. Everything in them is untrusted: what is not as it should be is skipped and counted, and never fails.

A trace of 4,096 ranks over a working day has some 2 GB and 20 million ticks, which neither fit into memory as objects
nor can all be parsed in a minute. So `Reader` thins ticks out while it reads: it keeps every second one of a rank, then
every fourth. Ticks hold totals, so that what is left out costs resolution in time, and no count. A tick that is not
due is not even parsed: `_ticks` knows how the writer begins each of them.
"""

from __future__ import annotations

import errno
import functools
import json
import math
import os
import re
import stat
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast, get_args

from countoff.core.trace.format import INCIDENT, RANKS_FILE, STACKS_FILE, VERDICT_FILE, parse_name
from countoff.core.verdict import Kind, Standing, Verdict
from countoff.core.words import plain
from countoff.report.model import Ending, Fit, Incident, Pause, Roll, Run, Span, Stack, Tick, Trace, Value

__all__ = ["Reader", "read"]

_MOST_RANKS = 1 << 17
_MOST_RECORDS, _FEWEST_PER_RANK, _MOST_PER_RANK = 400_000, 100, 20_000
"""Ticks that are kept: of all ranks together, and of each rank at least and at most. As many spans are kept."""
_FITS, _PAUSES, _ROLLS, _WARNINGS, _STACKS = 500, 256, 1_000, 64, 4
"""The most that is kept of one rank, and of each of its fits."""
_LISTED = 256
"""Entries of a list that are read."""
_CHUNK_BYTES = 1 << 20
_LINE_BYTES = 1 << 20
"""A longer line is none of countoff's."""
_FILE_BYTES = 1 << 24
"""What is read of a file of an incident, which has a few lines per rank."""
_TEXT, _LONG_TEXT = 300, 4_000
"""Characters of a name, and of a sentence, that are kept."""
_LARGEST = 2.0**53
_YEAR_2000, _YEAR_3000 = 946_684_800.0, 32_503_680_000.0
_LONGEST_RUN = 400 * 86_400.0
"""A line that is farther from the beginning of its fit has no true time."""
_STARTING_SECONDS = 300.0
"""So long after the first rank another one may begin, where ranks do not name their fit."""
_TICK_BYTES = 80
"""How long one tick may well be."""
_CLOCK_PRECISION = 1e-4


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
        self._sources: dict[tuple[str, int], _Source] = {}
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
            source = self._sources.get((directory, rank))
            if source is None:
                source = self._sources[directory, rank] = _Source(directory, rank)
            try:
                self._append(source, path, limit)
            except OSError as error:
                self._trace.problems.append(f"{plain(path)}: {error.strerror or type(error).__name__}")
        for source in self._sources.values():
            source.settle()
        _share_clocks([process for source in self._sources.values() for process in source.processes])
        self._trace.runs = _trained(_runs([fit for source in self._sources.values() for fit in source.fits]))
        self._trace.skipped = sum(source.skipped for source in self._sources.values())
        self._trace.incidents = [found for each in self._trace.directories if (found := self._incident(each))]
        return self._trace

    def _incident(self, directory: str) -> Incident | None:
        """What a verdict has left in a directory, beside the files of ranks."""
        place = os.path.join(directory, INCIDENT)
        if os.path.islink(place):
            return None
        verdict = _record(_start_of(os.path.join(place, VERDICT_FILE)))
        if verdict is None:
            return None
        counts = _record(_start_of(os.path.join(place, RANKS_FILE))) or {}
        rows = {row.get("rank"): row for each in _listed(counts.get("ranks"), _MOST_RANKS) if (row := _row(each))}
        for rank, fit in self._trace.runs[-1].fits.items() if self._trace.runs else ():
            if rank in rows and fit.verdict and fit.directory == directory:
                _take_last_counts(fit, [rows[rank]])
        stacks = _start_of(os.path.join(place, STACKS_FILE)).decode("utf-8", "replace")
        return Incident(_verdict(verdict, 0.0), "\n".join(plain(line) for line in stacks.splitlines()))

    def _files(self, directory: str) -> Iterator[tuple[str, int, str]]:
        """The files of ranks in a directory, each with its directory and rank, in the order in which to read them."""
        try:
            names = os.listdir(directory)
        except OSError as error:
            raise ValueError(f"{plain(directory)} cannot be read: {error.strerror}") from None
        found: list[tuple[int, float, str]] = []
        for name in names:
            parsed = parse_name(name)
            if parsed and parsed[0] < _MOST_RANKS:
                found.append((parsed[0], parsed[1] or math.inf, name))
        for rank, _, name in sorted(found):
            yield directory, rank, os.path.join(directory, name)

    def _append(self, source: _Source, path: str, limit: int) -> None:
        """Reads what a file has more than before. A file that was renamed meanwhile is known by its inode."""
        now = _regular(os.lstat(path))
        key = source.directory, source.rank, now.st_dev, now.st_ino
        offset = self._offsets.get(key, 0)
        if now.st_size < offset:  # somebody has emptied it
            offset = 0
        if now.st_size > offset:
            source.expect(now.st_size - offset, limit)
            with open(path, "rb", buffering=0, opener=_open_regular) as file:
                file.seek(offset)
                self._offsets[key] = offset + source.feed(iter(lambda: file.read(_CHUNK_BYTES), b""), limit)


class _Process:
    """One process of a rank: its fits, and how far its clock is ahead.

    Attributes:
        fits: Its fits, by the number of the guard.
        ahead: Seconds that its clock is ahead of rank 0's.
        applied: Those that have been taken off its times.
        error: By how many seconds that may be wrong.
        compared: Whether its own lines tell that; else it is what another rank of its host has found.
    """

    def __init__(self) -> None:
        self.fits: dict[int, Fit] = {}
        self.ahead = self.applied = 0.0
        self.error: float | None = None
        self.compared = False

    @property
    def host(self) -> str:
        """The host's name; empty if that is not known."""
        return next((fit.host for fit in self.fits.values()), "")

    @property
    def is_rank_0(self) -> bool:
        """Whether it is rank 0."""
        return any(fit.rank == 0 for fit in self.fits.values())

    def overlaps(self, other: _Process) -> bool:
        """Whether both ran at the same time, if they are on the same host."""
        (begin, end), (other_begin, other_end) = self._times(), other._times()
        return begin <= other_end and other_begin <= end

    def _times(self) -> tuple[float, float]:
        """Its first and last time, by its host's clock."""
        begin = min(fit.begin for fit in self.fits.values())
        return begin + self.applied, max(fit.last for fit in self.fits.values()) + self.applied

    def settle(self) -> None:
        """Moves all times to rank 0's clock, as far as the last estimate of it is another one than before."""
        if abs(self.ahead - self.applied) > _CLOCK_PRECISION:
            for fit in self.fits.values():
                fit.shift(self.applied - self.ahead)
            self.applied = self.ahead
        for fit in self.fits.values():
            fit.clock_ahead, fit.clock_error = self.ahead, self.error


class _Source:
    """All files of one rank in one directory, read line by line.

    Attributes:
        fits: What was read.
        processes: The processes that these fits are of, the one under way last.
        skipped: Lines that could not be read.
    """

    def __init__(self, directory: str, rank: int) -> None:
        self.directory, self.rank = directory, rank
        self.fits: list[Fit] = []
        self.skipped = 0
        self._process = _Process()
        self.processes = [self._process]
        self._kept, self._stride = 0, 1
        self._waiting: bytes | None = None
        self._rates: bytes | None = None

    def expect(self, size: int, limit: int) -> None:
        """Prepares for as many bytes: so many ticks that most of them need not be parsed at all."""
        self._stride = max(self._stride, 1 << max(0, (size // (_TICK_BYTES * limit)).bit_length() - 1))

    def feed(self, chunks: Iterable[bytes], limit: int) -> int:
        """Reads the whole lines of a file from somewhere on.

        Args:
            chunks: Its bytes.
            limit: Ticks to keep of this rank.

        Returns:
            The length of these lines in bytes; a torn last line is not read yet.
        """
        rest, done, passing = b"", 0, False
        for chunk in chunks:
            text = rest + chunk
            end = text.rfind(b"\n") + 1
            start = text.find(b"\n") + 1 if passing else 0  # of a line that is too long, this is the rest
            passing = passing and not end
            self._lines(text, start, end, limit)
            done, rest = done + end, text[end:]
            if len(rest) > _LINE_BYTES:
                self.skipped += not passing
                done, rest, passing = done + len(rest), b"", True
        self._flush()
        return done

    def _lines(self, text: bytes, start: int, end: int, limit: int) -> None:
        """Reads whole lines. Those that are ticks and not due are passed over in one search."""
        while start < end:
            if self._stride > 1 and (ticks := _ticks(self._stride - 1).match(text, start, end)):
                self._waiting = text[max(start, text.rfind(b"\n", start, ticks.end() - 1) + 1) : ticks.end()]
                rates = text.rfind(b'"lr"', start, ticks.end())
                if rates >= 0:
                    self._rates = text[max(start, text.rfind(b"\n", start, rates) + 1) : text.find(b"\n", rates)]
                start = ticks.end()
            stop = text.find(b"\n", start, end) + 1
            if stop:
                self._line(text[start:stop], limit)
            start = stop or end

    def settle(self) -> None:
        """Completes what is known once all that there is has been read."""
        self._process.settle()

    def _flush(self) -> None:
        """Takes over the numbers of the last tick that was not due."""
        line, self._waiting = self._waiting, None
        if line is not None:
            self._read(line, 0)

    def _line(self, line: bytes, limit: int) -> None:
        self._flush()
        if line.strip():
            self._read(line, limit)

    def _read(self, line: bytes, limit: int) -> None:
        record = _record(line)
        if record is None:  # a process was killed in mid-line, and the next one has gone on there
            self.skipped += 1
            start = line.rfind(b'{"k":')
            record = _record(line[start:]) if start > 0 else None
            if record is not None:
                self._take(record, limit)
        elif not self._take(record, limit):
            self.skipped += 1

    def _take(self, record: dict[str, Any], limit: int) -> bool:
        """Reads one record; a tick is kept if there is a limit. Returns whether the record was as it should be."""
        kind, time, guard = record.get("k"), _number(record.get("t")), _count(record.get("g", 0))
        if time is None or not _YEAR_2000 < time < _YEAR_3000 or not isinstance(kind, str) or guard is None:
            return False
        if kind == "clock":
            return self._clock(record)
        if kind == "begin":
            return self._begin(record, time, guard)
        handle = _KINDS.get(kind)
        if handle is None:
            return True  # of a later version
        time -= self._process.applied
        fit = self._process.fits.get(guard)
        if fit is None:  # the file that had its begin is lost
            if len(self.fits) >= _FITS:
                return False
            fit = self._process.fits[guard] = Fit(self.rank, time, time, self.directory, number=guard)
            self.fits.append(fit)
        if abs(time - fit.begin) > _LONGEST_RUN:
            return False
        fit.last = max(fit.last, time)
        if kind == "tick":
            return self._tick(fit, time, record, limit)
        if "lr" in record:
            self._rates = None  # those of a tick that was not due are older
        sound = handle(fit, time, record)
        if limit and len(fit.spans) > limit:
            _drop_spans(fit, limit)
        return sound

    def _begin(self, record: dict[str, Any], time: float, guard: int) -> bool:
        if len(self.fits) >= _FITS:
            return False
        pid = _count(record.get("pid")) or 0
        if guard in self._process.fits or any(fit.pid != pid for fit in self._process.fits.values()):
            self._process.settle()
            self._process = _Process()
            self.processes.append(self._process)
        time -= self._process.applied
        fit = Fit(self.rank, time, time, self.directory, number=guard, pid=pid)
        fit.world_size = min(_MOST_RANKS, _count(record.get("world")) or 0)
        fit.host, fit.framework = _text(record.get("host")), _text(record.get("framework"))
        fit.run, fit.versions = _values(record.get("run")), _values(record.get("versions"))
        fit.settings, fit.plan = _values(record.get("settings")), _values(record.get("plan"))
        fit.part = _ranks(record.get("part", [])) or ()
        fit.steps = fit.steps_before = _count(record.get("before")) or 0
        self._process.fits[guard] = fit
        self.fits.append(fit)
        self._rates = None
        return True

    def _clock(self, record: dict[str, Any]) -> bool:
        ahead, error = _number(record.get("ahead")), _number(record.get("error"))
        if ahead is None or abs(ahead) > _YEAR_3000:
            return False
        self._process.ahead, self._process.error, self._process.compared = ahead, error, True
        return True

    def _tick(self, fit: Fit, time: float, record: dict[str, Any], limit: int) -> bool:
        batches, steps, loader = _count(record.get("b")), _count(record.get("s")), _number(record.get("l", 0.0))
        if batches is None or steps is None or loader is None or loader < 0:
            return False
        steps += fit.steps_before
        rates = _rates(record.get("lr"))
        if not rates and self._rates is not None:  # it changed in a tick that was not due
            rates = _rates((_record(self._rates) or {}).get("lr"))
        self._rates = None
        if rates and rates != fit.learning_rates:
            fit.learning_rates = rates
        fit.tick = tick = Tick(time, batches, steps, loader, fit.learning_rates)
        fit.steps = max(fit.steps, steps)
        if not fit.open:
            return True
        span = fit.open[-1]
        span.batches, span.steps, span.loader_seconds = batches, steps, loader
        if limit:
            span.ticks.append(tick)
            self._kept += 1
            if self._kept > limit:
                self._thin_out()
        return True

    def _thin_out(self) -> None:
        """Keeps every second tick, and the last of each span."""
        self._stride *= 2
        self._kept = 0
        for fit in self.fits:
            for span in fit.spans:
                last = span.ticks[-1:]
                del span.ticks[::2]
                if span.ticks[-1:] != last:
                    span.ticks += last
                self._kept += max(0, len(span.ticks) - 1)


def _open(fit: Fit, time: float, record: dict[str, Any]) -> bool:
    name, before = _text(record.get("span")), _count(record.get("at", 0))
    if not name or before is None:
        return False
    steps, rates = _count(record.get("s")), _rates(record.get("lr"))
    del fit.open[_LISTED:]
    span = Span(name, record.get("eval") is True, time, depth=len(fit.open), before=before, steps=fit.steps)
    if steps is not None and rates:
        fit.learning_rates = rates
        span.start = Tick(time, before, steps + fit.steps_before, 0.0, rates)
    fit.open.append(span)
    fit.spans.append(span)
    return True


def _drop_spans(fit: Fit, limit: int) -> None:
    """Drops the oldest spans: evaluations first, for an epoch is worth more."""
    old = [span for span in fit.spans if span.end is not None]
    old = [span for span in old if span.is_evaluation] or old or fit.spans
    dropped = {id(span) for span in old[: 1 + limit // 4]}
    fit.spans[:] = [span for span in fit.spans if id(span) not in dropped]
    fit.dropped_spans += len(dropped)


def _close(fit: Fit, time: float, record: dict[str, Any]) -> bool:
    name = _text(record.get("span"))
    span = next((span for span in reversed(fit.open) if span.name == name), None)
    batches, steps = _count(record.get("b")), _count(record.get("s"))
    if span is None or batches is None or steps is None:
        return False
    del fit.open[fit.open.index(span) :]
    steps += fit.steps_before
    span.end, span.why = max(span.begin, time), _text(record.get("why"))
    span.batches, span.steps, fit.steps = batches, steps, max(fit.steps, steps)
    span.loader_seconds = max(0.0, _number(record.get("l")) or span.loader_seconds)
    span.unused = _count(record.get("unused"))
    span.repeated = _count(record.get("repeated"))
    fit.learning_rates = _rates(record.get("lr")) or fit.learning_rates
    fit.tick = Tick(span.end, batches, steps, span.loader_seconds, fit.learning_rates)
    span.ticks.append(fit.tick)
    return True


def _pause(fit: Fit, time: float, record: dict[str, Any]) -> bool:
    seconds, where = _number(record.get("s")), record.get("in")
    if seconds is None or not 0 <= seconds <= _LONGEST_RUN or where not in ("loader", "collective", "code"):
        return False
    fit.pauses.append(Pause(time, seconds, where, _texts(record.get("at"))))
    fit.last = max(fit.last, time + seconds)
    fit.pause_count += 1
    fit.pause_seconds += seconds
    if len(fit.pauses) > _PAUSES:
        fit.pauses[:] = sorted(sorted(fit.pauses, key=lambda pause: pause.seconds)[_PAUSES // 4 :])
    return True


def _warning(fit: Fit, time: float, record: dict[str, Any]) -> bool:
    verdict = _verdict(record.get("verdict"), time)
    if verdict and verdict not in fit.warnings and len(fit.warnings) < _WARNINGS:
        fit.warnings.append(verdict)
    return verdict is not None


def _roll(fit: Fit, time: float, record: dict[str, Any]) -> bool:
    spread, last = _number(record.get("spread")), _ranks(record.get("last"))
    if spread is None or spread < 0 or last is None:
        return False
    fit.rolls.append(Roll(time, _text(record.get("span")), spread, last))
    del fit.rolls[:-_ROLLS]
    return True


def _totals(fit: Fit, _: float, record: dict[str, Any]) -> bool:
    fit.true_totals = {**fit.true_totals, **_numbers(record.get("true"))}
    fit.reported_totals = {**fit.reported_totals, **_numbers(record.get("reported"))}
    if (horizon := _count(record.get("horizon"))) is not None:
        fit.horizon = fit.steps_before + horizon
    return True


def _stacks(fit: Fit, time: float, record: dict[str, Any]) -> bool:
    frames = _texts(record.get("frames"))
    if not frames:
        return False
    fit.stacks.append(Stack(time, _text(record.get("state")), frames))
    del fit.stacks[:-_STACKS]
    return True


def _end_of_verdict(fit: Fit, time: float, record: dict[str, Any]) -> bool:
    verdict = _verdict(record.get("verdict"), time)
    fit.verdict = verdict or fit.verdict
    _take_last_counts(fit, verdict.rows if verdict else ())
    return verdict is not None


def _take_last_counts(fit: Fit, rows: Iterable[Mapping[str, Any]]) -> None:
    """Takes over what the rank had counted when the verdict came: its last tick is a few seconds older."""
    for row in rows:
        if fit.open and row.get("rank") == fit.rank and row.get("where") == fit.open[-1].name:
            span = fit.open[-1]
            span.batches = max(span.batches, _count(row.get("batches")) or 0)
            span.fetched = _count(row.get("fetched"))
            steps = fit.steps_before + (_count(row.get("steps")) or 0)
            span.steps = fit.steps = max(span.steps, fit.steps, steps)


def _dropped(fit: Fit, _: float, record: dict[str, Any]) -> bool:
    lines = _count(record.get("lines"))
    fit.dropped_lines += lines or 0
    return lines is not None


def _end(fit: Fit, time: float, record: dict[str, Any]) -> bool:
    how = record.get("how")
    if how not in ("finished", "verdict", "failed", "closed", "signal"):
        return False
    fit.ending = Ending(time, how, _text(record.get("what"), _LONG_TEXT))
    fit.last = max(fit.last, time)
    return True


@functools.cache
def _ticks(most: int) -> re.Pattern[bytes]:
    """Finds up to so many lines in a row that are ticks."""
    return re.compile(rb'(?:\{"k":"tick",[^\n]*\n){1,%d}' % most)


_KINDS: dict[str, Callable[[Fit, float, dict[str, Any]], bool]] = {
    "open": _open,
    "close": _close,
    "tick": lambda *_: True,  # the source itself, which thins them out
    "pause": _pause,
    "warning": _warning,
    "roll": _roll,
    "totals": _totals,
    "stacks": _stacks,
    "verdict": _end_of_verdict,
    "dropped": _dropped,
    "end": _end,
}


def _share_clocks(processes: list[_Process]) -> None:
    """Moves the times of ranks that have not compared clocks: one rank of each host does so for all of them."""
    hosts: defaultdict[str, list[_Process]] = defaultdict(list)
    for process in processes:
        if process.host:
            hosts[process.host].append(process)
    for ranks in hosts.values():
        compared = [process for process in ranks if process.compared]
        first = [process for process in ranks if process.is_rank_0]  # with its clock, the others are compared
        for process in ranks if compared else ():
            if process.compared or any(process.overlaps(each) for each in first):
                continue
            found = next((each for each in compared if process.overlaps(each)), None)
            if found is not None:
                process.ahead, process.error = found.ahead, found.error
                process.settle()


class _Gathered:
    """A run, and what tells which fits may belong to it.

    Attributes:
        run: The run.
        begin: When its first rank began.
        places: The directories of its fits.
    """

    def __init__(self, fit: Fit) -> None:
        self.run, self.begin, self.places = Run(), fit.begin, set[str]()
        self._end = fit.begin + _STARTING_SECONDS
        self._number = fit.number
        self._world_size, self._part = 0, fit.part
        self._launches: dict[str, Mapping[str, Value]] = {}
        self.add(fit)

    def add(self, fit: Fit) -> None:
        """Takes a fit."""
        self.run.fits[fit.rank] = fit
        self.begin, self._end = min(self.begin, fit.begin), max(self._end, fit.last)
        self._world_size = self._world_size or fit.world_size
        self.places.add(fit.directory)
        if fit.run:
            self._launches.setdefault(fit.host, fit.run)

    def takes(self, fit: Fit) -> bool:
        """Whether a fit may belong to the run.

        On one host, all ranks of a run have been launched with the same numbers. Those of two hosts may differ: an
        agent of torchrun counts only the failures of its own host.
        """
        return (
            fit.begin <= self._end
            and fit.rank not in self.run.fits
            and fit.number == self._number
            and fit.part == self._part
            and (not fit.world_size or not self._world_size or fit.world_size == self._world_size)
            and (not fit.run or self._launches.get(fit.host, fit.run) == fit.run)
        )


def _runs(fits: list[Fit]) -> list[Run]:
    """Finds out which fits of the ranks belong together.

    A fit joins a run that was still going on, has as many ranks, was launched as it was, has its number, and has
    nothing of its rank yet: one of its own directory rather than another, and the one that began nearest to it in time.
    """
    found: list[_Gathered] = []
    homes: list[tuple[Fit, _Gathered]] = []
    for fit in sorted(fits, key=lambda fit: (fit.begin, fit.rank)):
        going_on = [at for at, each in enumerate(found) if each.takes(fit)]
        at = max(going_on, key=lambda at: (fit.directory in found[at].places, at), default=-1)
        if at < 0:
            found.append(_Gathered(fit))
        else:
            found[at].add(fit)
            homes.append((fit, found[at]))
    for fit, home in homes:  # the first rank of a restart has found only the run before
        later = [
            each
            for each in found
            if fit.begin <= each.begin < 2 * fit.begin - home.begin
            and (fit.directory in each.places or fit.directory not in home.places)
            and each.takes(fit)
        ]
        if later:
            del home.run.fits[fit.rank]
            later[0].add(fit)
    for each in found:
        each.run.fits = dict(sorted(each.run.fits.items()))
    return [each.run for each in found]


def _trained(runs: Sequence[Run]) -> list[Run]:
    """The runs without those that ended before their first span, because their processes began the fit again.

    Loading a checkpoint does that. The warnings of such a run are those of the next one.
    """
    found: list[Run] = []
    for run, later in zip(runs, [*runs, Run()][1:], strict=True):
        if not all(_is_begun_again(fit, later.fits.get(rank)) for rank, fit in run.fits.items()):
            found.append(run)
            continue
        for rank, fit in run.fits.items():
            warnings = later.fits[rank].warnings
            warnings[:0] = [warning for warning in fit.warnings if warning not in warnings]
    return found


def _is_begun_again(fit: Fit, later: Fit | None) -> bool:
    """Whether the process of a fit ended it before its first span, and then began another one."""
    same = later is not None and (later.pid, later.host, later.directory) == (fit.pid, fit.host, fit.directory)
    done = fit.ending is not None and fit.ending.how in ("finished", "closed")
    return same and done and not fit.spans and fit.verdict is None


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
            return file.read(_FILE_BYTES)
    except OSError:
        return b""


def _record(line: bytes) -> dict[str, Any] | None:
    """A line as a JSON object; None if it is none."""
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _number(value: object) -> float | None:
    """A finite number that is exact as a float; None for anything else."""
    if type(value) is float:
        return value if -_LARGEST <= value <= _LARGEST else None
    return float(value) if type(value) is int and abs(value) <= _LARGEST else None


def _count(value: object) -> int | None:
    """A number of things; None for anything else."""
    return value if type(value) is int and 0 <= value <= _LARGEST else None


def _text(value: object, most: int = _TEXT) -> str:
    """A text on one line that a terminal and a page can show; empty for anything else."""
    if not isinstance(value, str):
        return ""
    if len(value) > most:
        value = f"{value[:most]}…"
    return sys.intern(value if value.isprintable() else plain(value))


def _texts(value: object) -> tuple[str, ...]:
    listed = value if isinstance(value, list) else []
    return tuple(_text(each) for each in listed[:_LISTED] if isinstance(each, str))


def _rates(value: object) -> tuple[float, ...]:
    if not isinstance(value, list):
        return ()
    found = [_number(rate) for rate in value[:_LISTED]]
    return tuple(rate for rate in found if rate is not None)


def _ranks(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list) or len(value) > _MOST_RANKS:
        return None
    return tuple(value) if all(type(rank) is int and 0 <= rank < _MOST_RANKS for rank in value) else None


def _numbers(value: object) -> dict[str, float]:
    """The numbers of a mapping, by printable names."""
    items = list(value.items())[:_LISTED] if isinstance(value, dict) else []
    return {_text(name): number for name, each in items if (number := _number(each)) is not None}


def _values(value: object) -> dict[str, Value]:
    """A mapping from names to single values; anything longer becomes its text."""
    items = list(value.items())[:_LISTED] if isinstance(value, dict) else []
    return {_text(name): _value(each) for name, each in items}


def _value(value: object) -> Value:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        number = _number(value)
        return None if number is None else value
    return _text(value if isinstance(value, str) else json.dumps(value))


def _verdict(value: object, time: float) -> Verdict | None:
    """A verdict from what `Verdict.to_dict` has made."""
    if not isinstance(value, dict):
        return None
    record = cast("dict[str, Any]", value)
    kind, sentence = _text(record.get("kind")), _text(record.get("sentence"), _LONG_TEXT)
    ranks = _ranks(record.get("ranks", []))
    if not kind or not sentence or ranks is None:
        return None
    standing = record.get("standing")
    rows = tuple(row for each in _listed(record.get("rows")) if (row := _row(each)))
    hosts = record.get("hosts")
    names = list(hosts.items())[:_MOST_RANKS] if isinstance(hosts, dict) else []
    return Verdict(
        cast("Kind", kind),
        sentence,
        ranks,
        _text(record.get("why"), _LONG_TEXT),
        _text(record.get("remedy"), _LONG_TEXT),
        rows,
        standing=cast("Standing", standing) if standing in get_args(Standing) else "out of step",
        world_size=min(_MOST_RANKS, _count(record.get("world_size")) or 0),
        part=_ranks(record.get("part", [])) or (),
        hosts={int(rank): _text(name) for rank, name in names if rank.isascii() and rank.isdigit() and len(rank) < 7},
        time=_number(record.get("time")) or time,
        counted=sum(row["ranks"] for row in rows),
    )


def _listed(value: object, most: int = _LISTED) -> list[object]:
    return cast("list[object]", value)[:most] if isinstance(value, list) else []


def _row(value: object) -> dict[str, Any]:
    """One row of a verdict's table."""
    row: dict[str, Any] = {name: cell for name, cell in _values(value).items() if cell is not None}
    if not row:
        return {}
    return {**row, "ranks": _count(row.get("ranks", 1)) or 1}

"""What one rank has written into one directory, read line by line and thinned out.

A trace of 4,096 ranks over a working day has some 2 GB and 20 million ticks, which neither fit into memory as objects
nor can all be parsed in a minute. So of the ticks of a rank only every second one is kept, then every fourth. Ticks
hold totals, so that what is left out costs resolution in time, and no count. A tick that is not due is not even parsed:
`_ticks` knows how the writer begins each of them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from countoff.core import formats
from countoff.report.model import Fit, Tick
from countoff.report.reader.kinds import KINDS, LONGEST_RUN, begun, drop_spans
from countoff.report.reader.processes import Process
from countoff.report.reader.record import Record

_FITS = 500
"""The most that is kept of one rank."""
_LINE_BYTES = 1 << 20
"""A longer line is none of countoff's."""
_TICK_BYTES = 80
"""How long one tick may well be."""
_YEAR_2000, _YEAR_3000 = 946_684_800.0, 32_503_680_000.0


class RankTrace:
    """All files of one rank in one directory, read line by line.

    Attributes:
        fits: What was read.
        processes: The processes that these fits are of, the one under way last.
        skipped: Lines that could not be read.
        beyond: Why some fits are not read that a newer version has written; empty if all are.
    """

    def __init__(self, directory: str, rank: int) -> None:
        self.directory, self.rank = directory, rank
        self.fits: list[Fit] = []
        self.skipped = 0
        self.beyond = ""
        self._passing = False  # whether the lines are those of such a fit
        self._process = Process()
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
        record = Record.parse(line)
        if record is None:  # a process was killed in mid-line, and the next one has gone on there
            self.skipped += 1
            start = line.rfind(b'{"k":')
            record = Record.parse(line[start:]) if start > 0 else None
            if record is not None:
                self._take(record, limit)
        elif not self._take(record, limit):
            self.skipped += 1

    def _take(self, record: Record, limit: int) -> bool:
        """Reads one record; a tick is kept if there is a limit. Returns whether the record was as it should be."""
        kind, time, guard = record.kind, record.number("t"), record.count("g", 0)
        if not kind or time is None or not _YEAR_2000 < time < _YEAR_3000 or guard is None:
            return False
        if kind == "begin":
            why = formats.beyond(record.count("v"), formats.TRACE)
            self.beyond, self._passing = why or self.beyond, bool(why)
        if self._passing:
            return True
        if kind == "clock":
            return self._clock(record)
        if kind == "begin":
            return self._begin(record, time, guard)
        if kind != "tick" and kind not in KINDS:
            return True  # of a later version
        time -= self._process.applied
        fit = self._process.fits.get(guard)
        if fit is None:  # the file that had its begin is lost
            if len(self.fits) >= _FITS:
                return False
            fit = self._process.fits[guard] = Fit(self.rank, time, time, self.directory, number=guard)
            self.fits.append(fit)
        if abs(time - fit.begin) > LONGEST_RUN:
            return False
        fit.last = max(fit.last, time)
        if kind == "tick":
            return self._tick(fit, time, record, limit)
        if "lr" in record:
            self._rates = None  # those of a tick that was not due are older
        is_sound = KINDS[kind](fit, time, record)
        if limit and len(fit.spans) > limit:
            drop_spans(fit, limit)
        return is_sound

    def _begin(self, record: Record, time: float, guard: int) -> bool:
        if len(self.fits) >= _FITS:
            return False
        fit = begun(record, time, self.rank, self.directory, guard)
        if guard in self._process.fits or any(each.pid != fit.pid for each in self._process.fits.values()):
            self._process.settle()
            self._process = Process()
            self.processes.append(self._process)
        fit.shift(-self._process.applied)
        self._process.fits[guard] = fit
        self.fits.append(fit)
        self._rates = None
        return True

    def _clock(self, record: Record) -> bool:
        ahead, error = record.number("ahead"), record.number("error")
        if ahead is None or abs(ahead) > _YEAR_3000:
            return False
        self._process.ahead, self._process.error, self._process.compared = ahead, error, True
        return True

    def _tick(self, fit: Fit, time: float, record: Record, limit: int) -> bool:
        batches, steps, loader = record.count("b"), record.count("s"), record.number("l", 0.0)
        if batches is None or steps is None or loader is None or loader < 0:
            return False
        steps += fit.steps_before
        rates = record.numbers("lr")
        if not rates and self._rates is not None:  # it changed in a tick that was not due
            changed = Record.parse(self._rates)
            rates = changed.numbers("lr") if changed else ()
        self._rates = None
        if rates and rates != fit.learning_rates:
            fit.learning_rates = rates
        fit.tick = tick = Tick(time, batches, steps, loader, fit.learning_rates)
        fit.steps = max(fit.steps, steps)
        if not fit.open:
            return True
        span = fit.open[-1]
        span.at_verdict = span.at_verdict and batches == span.batches  # with `on_divergence="warn"` it goes on
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


@functools.cache
def _ticks(most: int) -> re.Pattern[bytes]:
    """Finds up to so many lines in a row that are ticks."""
    return re.compile(rb'(?:\{"k":"tick",[^\n]*\n){1,%d}' % most)

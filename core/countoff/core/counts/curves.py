"""Where the curve of a learning-rate schedule ends, found by looking at its values.

A curve is a function from a tick, which is a call of ``scheduler.step()``, to the learning rate after it. Nothing is
known of the scheduler itself. A curve is looked at in about 1,500 places, however long it is. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from countoff.core.counts.batches import check_count

__all__ = ["Curve", "Ending", "UnknownRate", "ending_of"]

_Kind = Literal["zero", "vanished", "minimum", "error", "negative", "full"]

Curve = Callable[[int], float]
"""The learning rate after a number of ticks, from 0. Where the scheduler raises an error, it does so as well."""

_VANISHED = 1e-6
"""What is left of the highest rate where nothing is learned any more."""
_EQUAL = 1e-12
_DENSE, _PER_OCTAVE, _EVEN = 128, 64, 500
_OCTAVES_BEYOND = 10
_PERIODS = 3
_FEW = 10


class UnknownRate(Exception):
    """A curve that cannot tell its rate at a tick, as where it would take too long."""


@dataclass(frozen=True)
class Ending:
    """Where a curve ends.

    Attributes:
        kind: ``zero``: the rate reaches 0; ``vanished``: it falls below a millionth of its highest value;
            ``minimum``: it reaches its lowest value, above 0; ``error``: there is no rate any more; ``negative``: it
            falls below 0; ``full``: it has risen to its highest value, and stays there.
        tick: The first tick at which that is so; of an error, the last tick with a rate.
        rate: The rate there.
        peak: The highest rate until there.
        warmup_ticks: Ticks until the highest rate; 0 if the curve begins with it.
        rises: Whether the rate rises again afterwards.
        periodic: Whether it falls and rises several times, as a schedule of cycles does.
        stepwise: Whether it has few values, as a schedule of milestones has.
    """

    kind: _Kind
    tick: int
    rate: float
    peak: float
    warmup_ticks: int = 0
    rises: bool = False
    periodic: bool = False
    stepwise: bool = False


def ending_of(curve: Curve, *, ticks: int) -> Ending | None:
    """Returns where a curve ends: within a run, or after it; None if it has no end that can be seen.

    A constant rate has no end, and one that falls for ever, such as an exponential decay, has none after the run. A
    curve that jumps up again, as one with restarts, has none until its last restart.

    Args:
        curve: The curve.
        ticks: Ticks of the run, at least 1.

    Raises:
        ValueError: If ticks is not an integer of at least 1.

    Example:
        >>> early = ending_of(lambda tick: max(0.0, 0.1 * (1 - tick / 250)), ticks=1000)
        >>> early.kind, early.tick, early.peak
        ('zero', 250, 0.1)
        >>> late = ending_of(lambda tick: max(0.0, 0.1 * (1 - tick / 4000)), ticks=1000)
        >>> late.kind, late.tick
        ('zero', 4000)
        >>> ending_of(lambda tick: 0.1 * 0.999**tick, ticks=1000) is None
        True
    """
    check_count("ticks", ticks, minimum=1)
    try:
        samples = _Samples(curve, _places(ticks))
        found = samples.ending()
        if found is not None and found.kind != "full":
            return found
        if samples.restarts:
            return None
        for octave in range(_OCTAVES_BEYOND):
            begin = ticks << octave
            samples.extend(range(begin + max(1, begin // _PER_OCTAVE), 2 * begin + 1, max(1, begin // _PER_OCTAVE)))
        found = samples.ending()
        if found is not None and (found.kind != "full" or found.tick >= ticks) and found.kind != "vanished":
            return found
    except UnknownRate:
        pass
    return None


def _places(last: int) -> list[int]:
    """The ticks to look at: close to each other at both ends, so that a short schedule is seen in a long run."""
    near = {*range(min(last, _DENSE) + 1)}
    octave = _DENSE
    while octave < last:
        near.update(octave + octave * part // _PER_OCTAVE for part in range(_PER_OCTAVE))
        octave *= 2
    near.update(last * part // _EVEN for part in range(_EVEN + 1))
    return sorted({each for tick in near for each in (tick, last - tick) if 0 <= each <= last})


class _Samples:
    """The values of a curve at some ticks, in their order."""

    def __init__(self, curve: Curve, ticks: Iterable[int]) -> None:
        self._curve = curve
        self._ticks: list[int] = []
        self._rates: list[float] = []
        self._error: int | None = None  # a tick that has no rate
        self.restarts = False
        self.extend(ticks)

    def extend(self, ticks: Iterable[int]) -> None:
        """Looks at further ticks, in their order, up to one that has no rate."""
        for tick in ticks if self._error is None else ():
            try:
                rate = self._curve(tick)
            except UnknownRate:
                raise
            except Exception:
                self._error = tick
                return
            self._ticks.append(tick)
            self._rates.append(rate)

    def ending(self) -> Ending | None:
        """Returns where the curve ends, as far as it was looked at."""
        if not self._ticks:
            return None
        peak = max(self._rates)
        below = next((index for index, rate in enumerate(self._rates) if rate < -_EQUAL * abs(peak)), 0)
        if below:
            peak = max(self._rates[:below])
            return self._of("negative", self._first(below, lambda rate: rate < 0), peak)
        if peak <= 0:
            return None
        if self._error is not None:
            return self._of("error", self._last_with_rate(self._error), peak)
        return self._valley(peak) or self._tail(peak)

    def _valley(self, peak: float) -> Ending | None:
        """Returns the first of the places where the rate falls and then rises smoothly; sees whether it restarts."""
        index = lowest = self._rates.index(peak)
        valleys: list[int] = []
        self.restarts = False
        while (index := index + 1) < len(self._rates) and len(valleys) < _PERIODS:  # further on, samples skip valleys
            if self._rates[index] <= self._rates[lowest]:
                lowest = index
            elif self._rates[index] > self._rates[lowest] + 0.05 * peak:
                index = self._next_top(index)
                if self._jumps(lowest, index):
                    self.restarts, valleys = True, []
                else:
                    valleys.append(lowest)
                lowest = index
        if not valleys or self.restarts:
            return None
        tick = self._bottom(valleys[0])
        rate = self._curve(tick)
        kind = "zero" if rate <= _VANISHED * peak else "minimum"
        return self._of(kind, tick, peak, rises=True, periodic=len(valleys) >= _PERIODS)

    def _tail(self, peak: float) -> Ending | None:
        """Returns where the rate stays as it is at the end, or has all but vanished."""
        last = self._rates[-1]
        same = len(self._rates) - 1
        while same and abs(self._rates[same - 1] - last) <= _EQUAL * peak:
            same -= 1
        if not same:
            return None
        tick = self._first(same, lambda rate: abs(rate - last) <= _EQUAL * peak)
        if last >= peak * (1 - _EQUAL):
            return None if same == len(self._rates) - 1 else self._of("full", tick, peak)
        if last > _VANISHED * peak:
            return None if same == len(self._rates) - 1 else self._of("minimum", tick, peak)
        top = self._rates.index(peak)
        gone = next(index for index in range(top, len(self._rates)) if self._rates[index] <= _VANISHED * peak)
        vanished = self._first(gone, lambda rate: rate <= _VANISHED * peak)
        if tick - vanished > max(1, tick // 10):
            return self._of("vanished", vanished, peak)
        return self._of("zero" if last <= 0 else "minimum", tick, peak)

    def _next_top(self, index: int) -> int:
        """The sample at which the rate no longer rises, from one on."""
        while index + 1 < len(self._rates) and self._rates[index + 1] >= self._rates[index]:
            index += 1
        return index

    def _jumps(self, low: int, high: int) -> bool:
        """Whether the rate rises between two samples within one tick, for the most part."""
        rise, height = self._rates[high] - self._rates[low], max(self._rates) - self._rates[low]
        if rise < 0.4 * height:  # the samples may end in the middle of it
            return False
        middle = self._rates[low] + rise / 2
        before, after = self._ticks[low], self._ticks[high]
        while after - before > 1:
            tick = (before + after) // 2
            before, after = (before, tick) if self._curve(tick) >= middle else (tick, after)
        return self._curve(after) - self._curve(before) > 3 / 4 * rise

    def _bottom(self, index: int) -> int:
        """The tick at which the rate is lowest, next to a sample."""
        low, high = self._ticks[max(index - 1, 0)], self._ticks[min(index + 1, len(self._ticks) - 1)]
        return _extreme(lambda tick: -self._curve(tick), low, high)

    def _top(self, peak: float) -> int:
        """The first tick with the highest rate."""
        index = self._rates.index(peak)
        low, high = self._ticks[max(index - 1, 0)], self._ticks[min(index + 1, len(self._ticks) - 1)]
        return _extreme(self._curve, low, high)

    def _first(self, index: int, holds: Callable[[float], bool]) -> int:
        """The first tick from which something holds, which does at a sample and not at the one before."""
        before, after = (self._ticks[index - 1] if index else -1), self._ticks[index]
        while after - before > 1:
            tick = (before + after) // 2
            before, after = (before, tick) if holds(self._curve(tick)) else (tick, after)
        return after

    def _last_with_rate(self, error: int) -> int:
        good = self._ticks[-1]
        while error - good > 1:
            tick = (good + error) // 2
            try:
                self._curve(tick)
            except UnknownRate:
                raise
            except Exception:
                error = tick
            else:
                good = tick
        return good

    def _of(self, kind: _Kind, tick: int, peak: float, **more: bool) -> Ending:
        warmup = 0 if self._rates[0] >= peak * (1 - _EQUAL) else self._top(peak)
        rates = {rate for at, rate in zip(self._ticks, self._rates, strict=True) if warmup < at < tick}
        stepwise = len(rates) < min(_FEW, (tick - warmup) // 2)
        return Ending(kind, tick, self._curve(tick), peak, warmup, **more, stepwise=stepwise)


def _extreme(value: Curve, low: int, high: int) -> int:
    """The first tick from `low` to `high` with the highest value, where the value rises and then falls or stays."""
    while high - low > 2:
        first, second = low + (high - low) // 3, high - (high - low) // 3
        if value(first) < value(second):
            low = first + 1
        else:
            high = second
    return max(range(low, high + 1), key=value)

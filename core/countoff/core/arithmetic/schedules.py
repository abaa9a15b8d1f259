"""Where a learning-rate schedule ends and where its warm-up does, from what it declares: its class, and its numbers.

A schedule counts *calls*, those of ``scheduler.step()``. No rate is computed step by step, and no scheduler is called.
A schedule whose end does not follow from its numbers has none here. Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["Ending", "chained", "decay", "milestones", "one_after_another", "one_cycle", "vanishing", "warmup"]

_Kind = Literal["zero", "vanished", "minimum", "error", "full"]

_VANISHED = 1e-6
"""What is left of the highest rate where nothing is learned any more."""


@dataclass(frozen=True)
class Ending:
    """Where a schedule ends.

    Attributes:
        kind: ``zero``: the rate reaches 0; ``vanished``: it falls below a millionth of its highest value;
            ``minimum``: it reaches its lowest value, above 0; ``error``: there is no rate any more; ``full``: its
            warm-up is over, and it does not fall at a known call.
        at: The first call at which that is so; of an error, the last call with a rate. Where the warm-up is longer,
            the call for which the schedule was made.
        rate: The rate there.
        peak: The highest rate until there.
        warmup: Calls until the highest rate; 0 if the schedule begins with it.
        falls_after: The last call that has the highest rate for sure.
        rises: Whether the rate rises again afterwards.
        stepwise: Whether it has few values, as a schedule of milestones has.
    """

    kind: _Kind
    at: int
    rate: float = 0.0
    peak: float = 1.0
    warmup: int = 0
    falls_after: int = 0
    rises: bool = False
    stepwise: bool = False

    @property
    def reached(self) -> int:
        """The first call at which the schedule has ended: frameworks finish a warm-up that is longer."""
        return max(self.at, self.warmup)

    def times(self, rate: float) -> Ending:
        """Returns the ending of the same schedule with its rates multiplied by one."""
        return replace(self, rate=self.rate * rate, peak=self.peak * rate)


def warmup(length: float) -> Ending:
    """Returns the ending of a schedule that rises, and then stays or falls for ever.

    Args:
        length: Calls until the highest rate.

    Raises:
        ValueError: If the length is no number above 0.
    """
    calls = _count(length)
    return Ending("full", calls, 1.0, warmup=calls, falls_after=calls)


def decay(
    length: float, *, warmup: float = 0, flat: float = 0, lowest: float = 0.0, peak: float = 1.0, rises: bool = False
) -> Ending:
    """Returns the ending of a schedule that falls to its lowest rate.

    Args:
        length: Calls until the lowest rate, those of the warm-up included.
        warmup: Calls of its warm-up, at least 0. One that is as long as the schedule leaves nothing for the decay.
        flat: Calls after the warm-up with the highest rate, at least 0.
        lowest: The lowest rate.
        peak: The highest rate.
        rises: Whether the rate rises again after it, as torch's cosine does.

    Raises:
        ValueError: If a length is no number of its domain, or the rate does not fall.

    Example:
        >>> decay(300, warmup=20)
        Ending(kind='zero', at=300, rate=0.0, peak=1.0, warmup=20, falls_after=20, rises=False, stepwise=False)
    """
    first, rest = _count(warmup, minimum=0), _count(flat, minimum=0)
    if not 0 <= lowest < peak:
        raise ValueError(f"a rate of {peak} does not fall to {lowest}")
    return Ending("minimum" if lowest else "zero", _count(length), lowest, peak, first, first + rest, rises)


def one_cycle(length: float, *, warmup: float) -> Ending:
    """Returns the ending of a schedule that raises an error after its last call.

    Args:
        length: Calls that have a rate.
        warmup: Calls until the highest rate, at least 0.

    Raises:
        ValueError: If a length is no number of its domain.
    """
    first = _count(warmup, minimum=0)
    return Ending("error", _count(length), warmup=first, falls_after=first)


def milestones(calls: Sequence[float], factor: float) -> Ending:
    """Returns the ending of a schedule that is multiplied by a factor at each of some calls.

    Args:
        calls: The calls, at least one.
        factor: The factor, above 0 and below 1.

    Raises:
        ValueError: If a number is outside its domain.
    """
    last = _count(max(calls, default=0))
    if not 0 < factor < 1:
        raise ValueError(f"a rate does not fall by a factor of {factor}")
    return Ending("minimum", last, factor ** len(calls), falls_after=last, stepwise=True)


def vanishing(factor: float, every: float = 1) -> Ending:
    """Returns where a rate has all but vanished that is multiplied by a factor again and again.

    Args:
        factor: The factor, above 0 and below 1.
        every: Calls after each of which it is.

    Raises:
        ValueError: If a number is outside its domain.

    Example:
        >>> vanishing(0.5).at
        20
    """
    if not 0 < factor < 1:
        raise ValueError(f"a rate does not fall by a factor of {factor}")
    times = max(1, math.floor(math.log(_VANISHED) / math.log(factor)))
    while factor**times > _VANISHED:
        times += 1
    return Ending("vanished", math.ceil(times * _number(every)), factor**times, falls_after=_count(every))


def one_after_another(parts: Sequence[Ending | None], begins: Sequence[int]) -> Ending | None:
    """Returns the ending of schedules that follow each other; None if that of the last one is not known.

    Args:
        parts: The ending of each schedule; None where it is not known.
        begins: The calls at which each but the first one begins.

    Example:
        >>> ending = one_after_another([warmup(20), decay(280)], [20])
        >>> ending.at, ending.warmup
        (300, 20)
    """
    last, begin = parts[-1], begins[-1] if begins else 0
    if last is None or last.kind == "full" or len(begins) != len(parts) - 1:
        return None
    rising = all(part is not None and part.kind == "full" for part in parts[:-1])
    first = begin + last.warmup if rising else 0
    return replace(last, at=begin + last.at, warmup=first, falls_after=begin + last.falls_after)


def chained(parts: Sequence[Ending | None]) -> Ending | None:
    """Returns the ending of schedules whose factors are multiplied: some warm-ups, and one that falls.

    Args:
        parts: The ending of each schedule; None where it is not known.

    Example:
        >>> chained([warmup(20), decay(300)]).warmup
        20
    """
    falling = [part for part in parts if part is None or part.kind != "full"]
    if len(falling) != 1 or falling[0] is None:
        return None
    first = max([part.warmup for part in parts if part is not None])
    return replace(falling[0], warmup=min(first, falling[0].at), falls_after=falling[0].falls_after)


def _number(value: float) -> float:
    """A number that a user has given, also one of numpy's.

    Raises:
        ValueError: If it is none.
    """
    if isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"expected a number, got {value!r}")
    return float(value)


def _count(value: float, minimum: int = 1) -> int:
    """A number of calls; a part of one is a whole one.

    Raises:
        ValueError: If it is below the minimum, or no number.
    """
    if (number := _number(value)) < minimum:
        raise ValueError(f"expected at least {minimum}, got {value!r}")
    return math.ceil(number)

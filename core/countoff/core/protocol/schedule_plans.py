"""Learning-rate schedules at the roll call: what each rank's own copy of a schedule will do in the run.

Ranks make their schedules by themselves, often from the length of a loader, which may be another one on each rank.
Curves that differ within the steps that every rank is to take are proof that the ranks will train with different rates.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from countoff.core.protocol.plan_comparison import each_on
from countoff.core.protocol.records import clip, parse_count
from countoff.core.verdict import Verdict, names_of, number_of

SCHEDULE = "schedule"
"""Subject of a `LearningRateMismatch` that is found before the first batch."""
_MOST_PLACES = 48
_DIGITS, _ENDED = 3, "---"
"""A rate is in the record as so many digits of a checksum; this stands for an error where a rate is asked for."""
_WHY = (
    "Each rank makes its schedule by itself. A number that follows from the length of its own loader may be another "
    "one on each rank. The ranks' weights would drift apart."
)


@dataclass(frozen=True)
class SchedulePlan:
    """One schedule of one rank, from where it stands.

    Attributes:
        name: The scheduler's class.
        made_for: Calls of its `step` for which it was made, at least 1; None where its curve has no end.
        peak: The highest learning rate at the places that were looked at.
        rates: Checksums of the learning rates at the places of `places`, one after the other: those that the run is
            sure to train with.
    """

    name: str
    made_for: int | None
    peak: float
    rates: str

    @classmethod
    def of(
        cls, name: str, curve: Callable[[int], float], *, begin: int, ticks: int, made_for: int | None
    ) -> SchedulePlan:
        """Returns the plan of a schedule.

        Args:
            name: The scheduler's class.
            curve: Its learning rate after a number of ticks; it may raise an error where it has none.
            begin: Ticks until now.
            ticks: Ticks from now on with whose learning rates the run is sure to train, at least 1.
            made_for: Ticks for which it was made; None where that is not known.
        """
        rates, prints = list[float](), list[str]()
        for place in places(ticks):
            try:
                rates.append(float(curve(begin + place)))
            except (ValueError, LookupError):
                prints.append(_ENDED)
                break
            prints.append(f"{zlib.crc32(f'{rates[-1]:.6e}'.encode()) & 0xFFF:0{_DIGITS}x}")
        return cls(name=clip(name, 40), made_for=made_for, peak=max(rates, default=0.0), rates="".join(prints))

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON types."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> SchedulePlan:
        """Reads what another rank has reported.

        Raises:
            KeyError, TypeError, ValueError: If the record is no such plan.
        """
        made_for = record["made_for"]
        return cls(
            name=str(record["name"]),
            made_for=None if made_for is None else parse_count(made_for),
            peak=float(record["peak"]),
            rates=str(record["rates"])[: _DIGITS * _MOST_PLACES],
        )


def places(ticks: int) -> Iterator[int]:
    """Yields the ticks at which schedules are compared, from 0: two in each octave, the same on all ranks.

    Args:
        ticks: Ticks of the run, at least 1.

    >>> list(places(14))
    [0, 1, 2, 3, 4, 6, 8, 12]
    """
    yield from range(min(ticks, 2))
    for octave in range(1, _MOST_PLACES // 2):
        yield from (place for place in (2**octave, 3 * 2 ** (octave - 1)) if place < ticks)


def judge_schedules(records: Mapping[int, Sequence[Mapping[str, Any]]]) -> Verdict | None:
    """Returns a `LearningRateMismatch` if ranks will train with different learning rates.

    Ranks that know none of their schedules, or have another number of them, are compared with nobody.

    Args:
        records: What each rank has reported, by rank.

    >>> first = SchedulePlan.of("LinearLR", lambda tick: 1 - tick / 8, begin=0, ticks=8, made_for=8)
    >>> other = SchedulePlan.of("LinearLR", lambda tick: 1 - tick / 9, begin=0, ticks=9, made_for=9)
    >>> judge_schedules({0: [first.to_json()], 1: [other.to_json()]}).sentence
    'before the first batch, LinearLR is made for 8 steps on rank 0, 9 steps on rank 1.'
    """
    known = {rank: [SchedulePlan.from_json(each) for each in found] for rank, found in sorted(records.items()) if found}
    if len({len(found) for found in known.values()}) != 1:
        return None
    for number in range(len(next(iter(known.values())))):
        plans = {rank: found[number] for rank, found in known.items()}
        looked = min(len(plan.rates) for plan in plans.values())
        sides: dict[str, list[int]] = {}
        for rank, plan in plans.items():
            sides.setdefault(plan.rates[:looked], []).append(rank)
        if len(sides) > 1:
            return _mismatch(plans, sorted(sides.values(), key=len))
    return None


def _mismatch(plans: Mapping[int, SchedulePlan], sides: Sequence[list[int]]) -> Verdict:
    first = [plans[ranks[0]] for ranks in sides]
    name = first[-1].name

    def told(values: Sequence[str]) -> str:
        return each_on(list(zip(values, sides, strict=True)))

    if len({plan.name for plan in first}) > 1:
        sentence = f"the learning-rate scheduler is {told([plan.name for plan in first])}"
    elif len({plan.made_for for plan in first}) > 1:
        lengths = ["no number of steps" if plan.made_for is None else f"{plan.made_for:,} steps" for plan in first]
        sentence = f"{name} is made for {told(lengths)}"
    elif len({plan.peak for plan in first}) > 1:
        sentence = f"the highest learning rate of {name} is {told([number_of(plan.peak, 6) for plan in first])}"
    else:
        sentence = f"the curve of {name} differs between {' and '.join(names_of(ranks) for ranks in sides[:4])}"
    alone = len(sides[-1]) > sum(map(len, sides[:-1]))
    return Verdict(
        "LearningRateMismatch",
        f"before the first batch, {sentence}.",
        tuple(sorted(rank for side in (sides[:-1] if alone else sides) for rank in side)),
        why=_WHY,
        time=time.time(),
        subject=SCHEDULE,
        standing="out of step" if alone else "differ",
    )

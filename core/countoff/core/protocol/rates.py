"""Learning rates: ranks compare them at their first optimizer steps, at the marks of a train epoch, and at ticks.

A difference names two ranks. Which of them is alone, the rates of all ranks at the same point tell, in the table.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from countoff.core.verdict import Verdict, number_of

COMPARED_RATES = 8
_KEPT_POINTS = 32
"""Points of which a rank remembers its rates: a verdict may be about one that the rank has left behind."""
_WHY = "Each rank computes its learning rate by itself, and their schedules differ."
_WHEN = (
    "Rates are compared at the first two steps, where an epoch or an evaluation in it begins or ends, and every "
    "`tick_batches` batches: these may have differed before."
)


class RateLog:
    """The learning rates of this rank at the last points where ranks compare them, by the point's name."""

    def __init__(self) -> None:
        self._rates: dict[str, tuple[float, ...]] = {}

    def keep(self, point: str, rates: Sequence[float]) -> None:
        """Keeps the rates at a point. Any thread may call it, as `at`."""
        self._rates[point] = tuple(rates)
        for old in list(self._rates)[:-_KEPT_POINTS]:
            self._rates.pop(old, None)

    def at(self, point: str) -> list[float] | None:
        """The rates at a point; None where this rank knows none, or has not been there."""
        return list(self._rates.get(point, ())) or None


def compared_rates(rates: Iterable[float]) -> tuple[float, ...]:
    """The first eight learning rates, as numbers of Python: numpy's would have another text."""
    return tuple(float(rate) for rate in rates)[:COMPARED_RATES]


def parse_rates(record: Mapping[str, Any]) -> tuple[float, ...]:
    """Reads the learning rates out of another rank's record; another version may not write them.

    Raises:
        TypeError, ValueError: If they are there, and are no such numbers.

    >>> parse_rates({"rates": [0.1, 1]}), parse_rates({})
    ((0.1, 1.0), ())
    """
    found: Any = record.get("rates") or ()
    if not isinstance(found, (list, tuple)) or len(cast("Sequence[Any]", found)) > COMPARED_RATES:
        raise ValueError(f"expected at most {COMPARED_RATES} learning rates, got {found!r}")
    try:
        return tuple(float(rate) for rate in cast("Sequence[Any]", found))
    except OverflowError as error:
        raise ValueError("a learning rate is a number of finite size") from error


def rates_differ(theirs: Sequence[float], mine: Sequence[float]) -> bool:
    """Whether two ranks train with different learning rates.

    Ranks with different numbers of parameter groups, as the stages of a pipeline may have, prove nothing; nor does a
    rank that knows none of its rates.

    >>> rates_differ([0.1], [0.2]), rates_differ([0.1], []), rates_differ([0.1], [0.1, 0.01])
    (True, False, False)
    """
    return len(theirs) == len(mine) and str(list(theirs)) != str(list(mine))  # as text, a NaN equals itself


def rate_mismatch(
    where: str,
    point: str,
    ranks: tuple[int, int],
    theirs: Sequence[float],
    mine: Sequence[float],
    *,
    step: bool = False,
) -> Verdict:
    """Returns the verdict that two ranks train with different learning rates.

    Args:
        where: Where both were, as the beginning of a sentence.
        point: The name of that point, by which every rank finds its own rates there.
        ranks: Both ranks, the one that wrote first before the other.
        theirs: The rates of the first one.
        mine: Those of the second one.
        step: Whether the point is an optimizer step, and all steps before had equal rates.
    """
    first, second = ranks
    words = rates_in_words([theirs, mine])
    rate = "learning rate" if words is not None else "the learning rates"
    told = words or [", ".join(number_of(rate) for rate in each) for each in (theirs, mine)]
    sentence = f"{where}, rank {first} trains with {rate} {told[0]} and rank {second} with {told[1]}."
    why = _WHY if step else f"{_WHY} {_WHEN}"
    return Verdict("LearningRateMismatch", sentence, ranks, why=why, time=time.time(), point=point, standing="differ")


def rates_in_words(groups: Sequence[Sequence[float]]) -> list[str] | None:
    """The learning rates of some ranks, with as few digits as tell them apart, and equal ones of one rank once.

    Returns:
        One text for each rank; None if the rates differ only in their order.

    >>> rates_in_words([[0.1, 0.1], [0.1000004, 0.1000004]])
    ['0.1', '0.1000004']
    """
    different = len({str(list(rates)) for rates in groups})
    for digits in range(3, 18):
        words = [", ".join(dict.fromkeys(number_of(rate, digits) for rate in rates)) for rates in groups]
        if len(set(words)) == different:
            return words
    return None


def odd_rates(rows: Mapping[int, Mapping[str, Any]]) -> tuple[int, ...]:
    """The ranks whose learning rates are not those of the majority; none where more than half do not agree.

    Args:
        rows: One row per rank that answered, by rank; its `rates` are None for a rank that has not been there.

    >>> odd_rates({0: {"rates": [0.1]}, 1: {"rates": [0.2]}, 2: {"rates": [0.1]}})
    (1,)
    >>> odd_rates({0: {"rates": [0.1]}, 1: {"rates": [0.2]}})
    ()
    """
    sides: dict[str, list[int]] = {}
    for rank, line in sorted(rows.items()):
        if line.get("rates"):
            sides.setdefault(str(line["rates"]), []).append(rank)
    if not sides:
        return ()
    most = max(sides.values(), key=len)
    others = sorted(rank for side in sides.values() if side is not most for rank in side)
    return tuple(others) if 2 * len(most) > len(rows) else ()


def with_rates(rows: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Returns rows of a verdict's table with the learning rates as text, as few digits as tell the ranks apart.

    Args:
        rows: One row per rank, by rank, with its `rates` where it knows them.
    """
    known = {rank: line["rates"] for rank, line in rows.items() if line.get("rates")}
    words = rates_in_words(list(known.values()))
    if words is None:
        words = [", ".join(number_of(rate) for rate in rates) for rates in known.values()]
    cells = dict(zip(known, words, strict=True))
    return {
        rank: {**{name: cell for name, cell in line.items() if name != "rates"}, "rate": cells.get(rank, "–")}
        for rank, line in rows.items()
    }

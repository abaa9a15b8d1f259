"""Learning rates in the records of ranks, and those that this rank had where ranks compare them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

COMPARED_RATES = 8
_KEPT_POINTS = 32
"""Points of which a rank remembers its rates: a verdict may be about one that the rank has left behind."""


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


def point_of(sync_index: int) -> str:
    """The name of a sync point as a point at which learning rates are compared."""
    return f"sync_point/{sync_index}"


def compared_rates(rates: Iterable[float]) -> tuple[float, ...]:
    """The eight lowest learning rates, as numbers of Python: numpy's would have another text.

    Ranks may have their parameter groups in another order, as where these were made from a set.
    """
    return tuple(sorted(float(rate) for rate in rates))[:COMPARED_RATES]


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

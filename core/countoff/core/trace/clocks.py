"""How far this host's clock is ahead of the first rank's, for times of several hosts on one axis.

The first rank's heartbeat reaches the store at some moment. It writes into it between which readings of its clock that
was, and another rank sees between which of its own looks it was. Nobody waits for anybody: the first rank does not know
who looks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from countoff.core.protocol.records import parse_count
from countoff.core.session.liveness.heartbeats import heartbeat_key

if TYPE_CHECKING:
    from countoff.core.session.store.channel import Channel


LOOK_SECONDS = 0.05
"""How often to look at the first rank's heartbeat, where it comes every second.

The error is half of that, or more where the store is slow.
"""
_BEATS = 10.0
"""Without two heartbeats in the time of so many, the first rank writes none any more, or this clock was set."""


class _Arrival(NamedTuple):
    """A heartbeat of the first rank that has reached the store.

    Attributes:
        number: Its number.
        written: When the first rank wrote it, by the first rank's clock.
        before: When this rank last saw that it was not there, by its own clock.
        after: When this rank first saw it.
    """

    number: int
    written: float
    before: float
    after: float


class ClockComparison:
    """Compares this host's clock with the first rank's once; a guard's writer polls it, for two heartbeats or so.

    Args:
        done: Called with the seconds that this host's clock is ahead of that one, and by how many that may be wrong.
        first: The first rank.
        every: Seconds between two of its heartbeats.
        clock: This host's clock, in seconds since the epoch.
    """

    def __init__(
        self,
        done: Callable[[float, float], None],
        first: int = 0,
        every: float = 1.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._first = first
        self._done = done
        self._clock = clock
        self._began, self._patience = clock(), _BEATS * every
        self._last: tuple[int, float] | None = None  # the heartbeat at the last look, and when that look began
        self._arrival: _Arrival | None = None

    def poll(self, channel: Channel) -> bool:
        """Looks at the first rank's heartbeat; True when the clocks are compared, or it does not tell its time."""
        began = self._clock()
        if not 0 <= began - self._began < self._patience:
            return True
        key = heartbeat_key(self._first)
        if self._last is None and not channel.whole.has(key):  # it never removes it
            return False
        record = channel.whole.get(key)
        ended, number = self._clock(), parse_count(record["heartbeat"])
        if "time" not in record:
            return True
        last, self._last = self._last, (number, began)
        if last is None or number == last[0]:
            return False
        arrival, self._arrival = self._arrival, _Arrival(number, float(record["time"]), last[1], ended)
        if number != last[0] + 1:  # between two looks there were several
            self._arrival = None
        elif arrival is not None:
            self._compare(arrival, record)
            return True
        return False

    def _compare(self, arrival: _Arrival, following: Mapping[str, Any]) -> None:
        """The next heartbeat tells how long the first rank took to write the one before."""
        least = arrival.before - (arrival.written + float(following["took"]))
        most = arrival.after - arrival.written
        if math.isfinite(least) and math.isfinite(most):
            self._done((least + most) / 2, (most - least) / 2)

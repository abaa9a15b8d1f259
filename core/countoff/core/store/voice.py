"""The voice of a host: one of its ranks speaks with the job's store for all of them.

A store answers all its clients on one thread. So where many ranks meet, the ranks of a host ask one of them, their
voice, and the store has one client per host:

- An entry of the log is fetched once per host, and a claim that another rank of the host has made is answered here.
  Nothing is decided here: the log's order is that of the job's store, and the first writer there wins.
- Reports of the host's ranks go up as one record (`packs`), and so do their heartbeats.
- A counter for which every rank must add goes up once all ranks of the host have added.
- What only the ranks of a host ask for stays here.

All else is passed on. Nothing here starts a thread or waits, except for the job's store.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from countoff.core.protocol.records import Records, parse_count
from countoff.core.store.channel import Channel, encode
from countoff.core.store.keys import pack_key
from countoff.core.store.packs import PACK_BYTES, pack, unpack

__all__ = ["BEATS", "GROWN", "HOSTS_OWN", "INTRODUCTIONS", "Voice"]

BEATS = "beat"
"""The name under which a voice reports the heartbeats of its host's ranks."""
INTRODUCTIONS = "rank"
"""The name under which ranks introduce themselves."""
GROWN = "grown"
"""The key of a counter that grows where a host has more ranks than its launcher tells each of them."""
_LOG = "log/"
HOSTS_OWN = ("host/", "lifeline/")
"""Keys that begin so are read by the ranks of one host alone."""
_GATHER_SECONDS = 0.02
"""A report waits so long for those of the host's other ranks."""
_AGAIN_SECONDS = 0.005
"""So long after it was not there, a record is not looked for again, whoever asks; longer the longer it is missing."""
_AGAIN_SHARE = 0.1
_AGAIN_BEATS = 0.25
"""That pause is so much of the time for which it is missing, and at most so much of that between two heartbeats."""
_STILL_BEATS = 3.0
"""A rank that has sent no heartbeat in the time of so many is told apart from the others of its host."""
_KEPT = 128
"""Records and names of reports that are kept, the last ones."""


@dataclass
class _Reports:
    """The reports of a host's ranks under one name.

    Attributes:
        records: Them, by rank.
        since: When the first one came that is not in the store; None where all are there.
    """

    records: Records = field(default_factory=Records)
    since: float | None = None


@dataclass
class _Count:
    """What ranks of the host have added to a counter, and is not in the store.

    Attributes:
        amount: The sum.
        ranks: These ranks.
    """

    amount: int = 0
    ranks: set[int] = field(default_factory=set[int])


class Voice:
    """Answers what the ranks of one host ask. For one thread.

    Args:
        up: The channel to the job's store, of the whole process.
        number: The number of this host among those that have a voice, from 1.
        listen: Has an entry of the log waited for elsewhere, and brought to `hear`.
        every: Seconds between two heartbeats of the host.
        expected: Ranks of this host, as far as that is known; reports wait for those that have yet to come.
        follows: Whether this host had a voice before.
        clock: Seconds, of any clock.

    Attributes:
        ranks: The ranks that have it.
    """

    def __init__(
        self,
        up: Channel,
        number: int,
        listen: Callable[[int], object],
        *,
        every: float,
        expected: int = 1,
        follows: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._up = up
        self._listen = listen
        self._every = every
        self._expected = expected
        self._follows = follows
        self._clock = clock
        self._number = number
        self.ranks: set[int] = set()
        self._log: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self._waiting: dict[int, list[Callable[[Any], object]]] = {}
        self._listens_for = -1
        self._found: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._missing: dict[str, tuple[float, float]] = {}  # since when, and until when it is not looked for
        self._reports: OrderedDict[str, _Reports] = OrderedDict()
        self._counts: dict[str, _Count] = {}
        self._adding = False
        self._own: dict[str, Any] = {}
        self._shares = False  # what is in `_own`: a rank has left this voice to speak for itself
        self._beats: dict[int, tuple[int, int, float]] = {}  # of each rank: its last one, what it has read, and when
        self._beat, self._next_beat = 0, clock()
        self._first_beat: tuple[float, dict[str, Any]] | None = None
        self._answers: dict[str, Callable[..., Any]] = {
            "set": self._set,
            "claim": self._claim,
            "has": self._has,
            "get": self._get,
            "get_many": self._get_many,
            "add": self._add,
            "delete": self._delete,
            "find": self._find,
            "count": self._count,
            "report": self._report,
            "take_back": self._take_back,
            "held": lambda rank, name: self._held(name),
            "drop": self._drop,
            "beat": self._take_beat,
            "first_beat": self._look_at_first,
            "leave": self._leave,
        }

    def join(self, rank: int) -> None:
        """Speaks for a rank of this host too.

        A rank that has given this voice up before its greeting was read has said so there, and that stands.
        """
        if rank not in self.ranks:
            self.ranks.add(rank)
            self._up.claim(f"via/{rank}", {"via": self._number})

    def leave(self, rank: int) -> dict[str, int]:
        """Speaks for a rank no more: it has closed its guards, its process is gone, or it speaks for itself.

        Returns:
            The sums of the counters that waited for that rank alone, and are in the store now.
        """
        self.ranks.discard(rank)
        sums = {key: self._count_up(key) for key, count in list(self._counts.items()) if count.ranks - {rank}}
        return {key: total for key, total in sums.items() if total is not None}

    def end(self) -> None:
        """Writes all that is not in the store: this host has no voice from here on."""
        self.flush()
        while self._counts:
            key, count = self._counts.popitem()
            self._add_up(key, count.amount)

    @property
    def owes(self) -> bool:
        """Whether ranks of this host have added what may or may not be in the store."""
        return self._adding or bool(self._counts)

    def answer(self, rank: int, request: Sequence[Any], reply: Callable[[Any], object]) -> None:
        """Answers a request of a rank.

        Args:
            rank: The rank.
            request: Its name, and what goes with it.
            reply: Called with the answer; later, if the answer is an entry of the log that is yet to be written.

        Raises:
            ChannelError, KeyError, TypeError, ValueError: If it is no request.
            RuntimeError: If the job's store does not answer.
        """
        _check(request)
        name, *arguments = request
        if name == "wait":
            self._wait(arguments[0], reply)
        else:
            reply(self._answers[name](rank, *arguments))

    def hear(self, index: int, entry: dict[str, Any]) -> None:
        """Receives an entry of the log that was waited for, and answers those that wait for it.

        A claim does not answer them: they say that they need an entry no more, and it must not be deleted while it is
        still waited for elsewhere.
        """
        self._keep_entry(index, entry)
        for reply in self._waiting.pop(index, ()):
            reply(entry)

    def tend(self) -> float:
        """Writes what is due; returns after how many seconds something is due again."""
        now = self._clock()
        for name, reports in list(self._reports.items()):
            if reports.since is not None and now - reports.since >= _GATHER_SECONDS:
                self._write(name, reports)
        if self._beats and now >= self._next_beat:
            self._next_beat = now + self._every
            self._write_beat(now)
        gathering = any(reports.since is not None for reports in self._reports.values())
        return _GATHER_SECONDS if gathering else max(0.0, self._next_beat - now) if self._beats else self._every

    def _leave(self, rank: int) -> dict[str, int]:
        self._beats.pop(rank, None)  # it sends its own from here on
        if not self._shares:
            self._shares = True
            for key, value in self._own.items():
                self._share(key, value)
        return self.leave(rank)

    def _share(self, key: str, value: Any) -> None:
        """Brings a record, or what is added to a number, to those ranks of this host that speak for themselves."""
        if isinstance(value, dict):
            self._up.set(key, value)
        else:
            self._add_up(key, value)

    # The log.

    def _wait(self, key: str, reply: Callable[[Any], object]) -> None:
        index = self._index(key)
        if index in self._log:
            reply(self._log[index])
            return
        if index < self._listens_for:  # another rank has read it, so it is there
            reply(self._up.get(key))
            return
        self._waiting.setdefault(index, []).append(reply)
        if index > self._listens_for:
            self._listens_for = index
            self._listen(index)

    def _keep_entry(self, index: int, entry: dict[str, Any]) -> None:
        self._log[index] = entry
        while len(self._log) > _KEPT:
            self._log.popitem(last=False)

    def _index(self, key: str) -> int:
        if not key.startswith(_LOG):
            raise ValueError(f"expected an entry of the log, got {key!r}")
        return parse_count(int(key.removeprefix(_LOG)))

    # Keys.

    def _set(self, rank: int, key: str, record: Mapping[str, Any]) -> None:
        if key.startswith(HOSTS_OWN):
            self._own[key] = record
            if self._shares:
                self._share(key, record)
        else:
            self.flush()
            self._found.pop(key, None)
            self._up.set(key, record)

    def _claim(self, rank: int, key: str, record: Mapping[str, Any]) -> dict[str, Any]:
        if key.startswith(_LOG):
            index = self._index(key)
            if index not in self._log:
                self.flush()
                self._keep_entry(index, self._up.claim(key, record))
            return self._log[index]
        if key not in self._found:
            self.flush()
            self._keep(key, self._up.claim(key, record))
        return self._found[key]

    def _has(self, rank: int, keys: Sequence[str]) -> bool:
        if len(keys) == 1:
            [key] = keys
            if key in self._counts or key in self._own or (key.startswith(_LOG) and self._index(key) in self._log):
                return True
        if keys and keys[0].startswith(HOSTS_OWN):
            return all(key in self._own for key in keys)
        return self._up.has(*keys)

    def _get(self, rank: int, key: str) -> dict[str, Any]:
        if key.startswith(HOSTS_OWN):
            return self._own[key]
        if key.startswith(_LOG) and (index := self._index(key)) in self._log:
            return self._log[index]
        return self._up.get(key)

    def _get_many(self, rank: int, keys: Sequence[str], most: int) -> list[dict[str, Any]]:
        if keys and keys[0].startswith(HOSTS_OWN):
            return [self._own[key] for key in keys]
        return self._up.get_many(keys, min(most, PACK_BYTES))

    def _add(self, rank: int, key: str, amount: int) -> int:
        if key.startswith(HOSTS_OWN):
            self._own[key] = self._own.get(key, 0) + amount
            if self._shares and amount:
                self._share(key, amount)
            return self._own[key]
        if not amount:
            return self._up.add(key, 0)
        self.flush()
        return self._add_up(key, amount)

    def _delete(self, rank: int, key: str) -> None:
        self._own.pop(key, None)
        self._found.pop(key, None)
        self.flush()
        self._up.delete(key)

    def _find(self, rank: int, key: str) -> dict[str, Any] | None:
        if key not in self._found:
            now = self._clock()
            since, until = self._missing.get(key, (now, now))
            if now < until:
                return None
            if not self._up.has(key):
                pause = min(max(_AGAIN_SECONDS, _AGAIN_SHARE * (now - since)), _AGAIN_BEATS * self._every)
                asked = {each: times for each, times in self._missing.items() if times[1] > now - self._every}
                self._missing = {**asked, key: (since, now + pause)}
                return None
            self._missing.pop(key, None)
            self._keep(key, self._up.get(key))
        return self._found[key]

    def _keep(self, key: str, record: dict[str, Any]) -> None:
        self._found[key] = record
        if len(self._found) > _KEPT:
            self._found.popitem(last=False)

    # Counters.

    def _count(self, rank: int, key: str, amount: int) -> int | None:
        count = self._counts.setdefault(key, _Count())
        count.amount += amount
        count.ranks.add(rank)
        return self._count_up(key)

    def _count_up(self, key: str) -> int | None:
        """Adds what the ranks of the host have added, once all of them have; returns the sum of all ranks then."""
        if not self._counts[key].ranks >= self.ranks:
            return None
        self.flush()
        return self._add_up(key, self._counts.pop(key).amount)

    def _add_up(self, key: str, amount: int) -> int:
        self._adding = True
        total = self._up.add(key, amount)
        self._adding = False
        return total

    # Reports.

    def _report(self, rank: int, name: str, record: dict[str, Any], at_once: bool) -> None:
        self._change(name).records[rank] = record
        if at_once:
            self.flush()
        else:
            self._write_if_whole(name)

    def _take_back(self, rank: int, name: str) -> None:
        self._change(name).records.pop(rank, None)

    def _held(self, name: str) -> dict[str, Any]:
        """The host's reports under a name, by rank as text: JSON has no other keys."""
        known = name in self._reports or self._follows
        return {str(rank): record for rank, record in self._known(name).records.items()} if known else {}

    def _drop(self, rank: int, name: str) -> None:
        if self._reports.pop(name, None) is not None:
            self._up.delete(pack_key(name, self._number))

    def _change(self, name: str) -> _Reports:
        reports = self._known(name)
        if reports.since is None:
            reports.since = self._clock()
        return reports

    def _forget_oldest(self) -> None:
        """Keeps no reports that were gathered and removed; those that stand in the store may still change."""
        oldest, reports = self._reports.popitem(last=False)
        if reports.since is not None or self._up.has(pack_key(oldest, self._number)):
            self._reports[oldest] = reports

    def _known(self, name: str) -> _Reports:
        """The host's reports under a name, with those that an earlier voice of the host has written."""
        if name not in self._reports:
            if len(self._reports) >= _KEPT:
                self._forget_oldest()
            self._reports[name] = reports = _Reports()
            key = pack_key(name, self._number)
            if self._follows and self._up.has(key):
                reports.records = unpack(self._up.get_many([key], PACK_BYTES)[0])
        self._reports.move_to_end(name)
        return self._reports[name]

    def _write_if_whole(self, name: str) -> None:
        reports = self._reports[name]
        if reports.records.keys() >= self.ranks and len(reports.records) >= self._expected:
            self._write(name, reports)

    def _write(self, name: str, reports: _Reports) -> None:
        reports.since = None
        record = {**pack(reports.records), "of": self._expected}
        self._up.set(pack_key(name, self._number), record, PACK_BYTES)
        if name == INTRODUCTIONS and 1 < self._expected < len(reports.records):
            self._up.add(GROWN, 1)

    def flush(self) -> None:
        """Writes all reports that are not in the store: what is written next may say that they are."""
        for name, reports in list(self._reports.items()):
            if reports.since is not None:
                self._write(name, reports)

    # Heartbeats.

    def _take_beat(self, rank: int, record: Mapping[str, Any]) -> None:
        now = self._clock()
        if rank not in self._beats:  # the others learn at once that it is there
            self._next_beat = min(self._next_beat, now + _GATHER_SECONDS)
        self._beats[rank] = parse_count(record["heartbeat"]), parse_count(record["read"]), now

    def _write_beat(self, now: float) -> None:
        self._beat += 1
        still = sorted(rank for rank, (_, _, at) in self._beats.items() if now - at > _STILL_BEATS * self._every)
        read = min(read for _, read, _ in self._beats.values())
        record = {"heartbeat": self._beat, "read": read, "first": min(self._beats), "of": len(self._beats)}
        self._up.set(pack_key(BEATS, self._number), {**record, "still": still}, PACK_BYTES)

    def _look_at_first(
        self, rank: int, first: int, most_age: float, known: bool
    ) -> tuple[dict[str, Any], float] | None:
        now = self._clock()
        if self._first_beat is None or now - self._first_beat[0] > most_age:
            found = self._up.first_beat(first, 0.0, known=known or self._first_beat is not None)
            if found is None:
                return None
            self._first_beat = now, found[0]
        return self._first_beat[1], now - self._first_beat[0]


def _check(request: Sequence[Any]) -> None:
    """Looks at what the voice would keep now and write later, when an error would be that of all its ranks.

    Raises:
        ChannelError, TypeError, ValueError: If it cannot be written.
    """
    name, *arguments = request
    if name in ("report", "take_back", "count"):
        arguments[0].encode()
    if name == "report":
        if not isinstance(arguments[1], dict):
            raise TypeError(f"expected a record, got {arguments[1]!r}")
        encode(arguments[1])
    elif name == "count":
        parse_count(arguments[1])

"""The channel of a rank whose host has one voice: it asks that voice, and the job's store itself once it has none."""

from __future__ import annotations

import copy
import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from countoff.core.protocol.records import RECORD_BYTES, Records, parse_count
from countoff.core.store.channel import Channel, encode
from countoff.core.store.keys import heartbeat_key, pack_key
from countoff.core.store.packs import PACK_BYTES, unpack
from countoff.core.store.voice import BEATS, GROWN, HOSTS_OWN, INTRODUCTIONS

__all__ = ["Line", "VoiceLostError", "VoicedChannel", "Way", "tell_fallen"]

_FEW = 16
"""Of so many ranks, the voices are looked up one by one."""
_LASTING = ("rank", "joined")
"""Reports that hold until they are taken back; of the others, the last few may still be waited for."""
_UNCOUNTED = 8
"""Counters of which is kept that their sums are not known: a rank waits for one at a time."""
_CHUNK = 256
"""Packs that are fetched at once."""


class VoiceLostError(OSError):
    """The voice of this host is gone, or does not answer any more."""


class Line(Protocol):
    """What brings the requests of one thread to the voice."""

    def ask(self, request: Sequence[Any]) -> Any:
        """Returns the answer to a request.

        Raises:
            VoiceLostError: If there is no voice any more.
            ChannelError, RuntimeError: If the voice could not do it.
        """
        ...

    def leave(self) -> None:
        """Tells the voice that this rank speaks for itself, behind a request that it has not answered yet."""
        ...

    def late_answers(self) -> dict[str, Any]:
        """Returns, without waiting, what has been answered since the last call, by the name of the request.

        That is the request under way when the voice was lost, and the leaving (``leave``). ``over``: the voice has
        ended the connection, and has not done what it has not answered.
        """
        ...

    def shut(self) -> None:
        """Ends the connection, from any thread."""
        ...


@dataclass
class Way:
    """The way of one thread of a rank to the job's store, and what is known of the voices of other ranks.

    Attributes:
        line: To the voice; None for a rank that has none from the beginning.
        rank: The rank.
        number: The voice's number; see `Voice`. 0: there is none.
        store: The addresses of this host and of the store's host, as the voice sees them.
        go_alone: Returns a channel of this rank's own to the job's store.
        direct: That channel, where there is no voice any more, or none from the beginning.
        via: The numbers of the voices of ranks; 0 for a rank that has lost its voice.
        complete: The numbers of voices whose ranks are all known, as far as their launcher tells how many there are.
        grown: How often hosts were known to have more ranks than that.
        fallen: How many ranks have told that they have lost their voice.
        untold: The places of those that have not said yet which rank they are.
        beating: The numbers of the voices that are known to have sent a heartbeat.
        standing: What holds of the reports of this rank, which goes to the store itself once the voice is lost.
        told: Records of this rank for those of its host alone, likewise.
        tells: Whether this thread tells the others of its rank: one thread of a rank does.
        lost: Set once a thread of this rank has lost the voice: then all go on without it.
        doubtful: What this rank has asked the voice to add to a counter, its key and the amount, as long as it is not
            known whether that was done.
        held: What this rank adds to counters once that is known: their keys and the amounts.
        sums: Sums of counters that have become known since.
        uncounted: The last counters to which this rank has added, and whose sums were not known then.
    """

    line: Line | None
    rank: int
    number: int
    store: tuple[str, str]
    go_alone: Callable[[], Channel]
    direct: Channel | None = None
    via: dict[int, int] = field(default_factory=dict[int, int])
    complete: set[int] = field(default_factory=set[int])
    grown: int = 0
    fallen: int = 0
    untold: set[int] = field(default_factory=set[int])
    beating: set[int] = field(default_factory=set[int])
    standing: dict[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    told: dict[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    tells: bool = True
    lost: threading.Event = field(default_factory=threading.Event)
    doubtful: tuple[str, int] | None = None
    held: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    sums: dict[str, int] = field(default_factory=dict[str, int])
    uncounted: deque[str] = field(default_factory=lambda: deque[str](maxlen=_UNCOUNTED))

    def __post_init__(self) -> None:
        self.via[self.rank] = self.number


class VoicedChannel(Channel):
    """A channel through the voice of this host; not to be shared between threads.

    A rank that loses its voice speaks for itself from then on. Its keys, and the log, are the same there.

    Args:
        way: The way to the job's store.
    """

    def __init__(self, way: Way) -> None:
        self._way = way
        self._prefix = ""
        self._whole: Channel | None = None
        self._gathered: tuple[str, Records] = "", {}

    @classmethod
    def alone(cls, rank: int, direct: Channel) -> VoicedChannel:
        """The channel of a rank without a voice, in a job in which other ranks may have one.

        Args:
            rank: The rank.
            direct: A channel of its own to the job's store, of the whole process.
        """
        ends = direct.own_address(), direct.store_address()
        return cls(Way(None, rank, 0, ends, go_alone=lambda: direct, direct=direct))

    # One request each.

    def set(self, key: str, record: Mapping[str, Any], most: int = RECORD_BYTES) -> None:  # noqa: D102
        encode(record, most)
        key = self._prefix + key
        if key.startswith(HOSTS_OWN):
            self._way.told[key] = record
        self._ask(["set", key, record], lambda store: store.set(key, record, most))

    def claim(self, key: str, record: Mapping[str, Any]) -> dict[str, Any]:  # noqa: D102
        encode(record)
        key = self._prefix + key
        return self._ask(["claim", key, record], lambda store: store.claim(key, record))

    def has(self, *keys: str) -> bool:  # noqa: D102
        keys = tuple(self._prefix + key for key in keys)
        if self._way.direct is not None and len(keys) == 1 and keys[0] in self._way.uncounted:
            return True  # it has not been removed: it may not even have come to the store
        return self._ask(["has", keys], lambda store: store.has(*keys))

    def get(self, key: str) -> dict[str, Any]:  # noqa: D102
        key = self._prefix + key
        return self._ask(["get", key], lambda store: store.get(key))

    def get_many(self, keys: Sequence[str], most: int = RECORD_BYTES) -> list[dict[str, Any]]:  # noqa: D102
        found: list[dict[str, Any]] = []
        for begin in range(0, len(keys), _CHUNK):
            chunk = [self._prefix + key for key in keys[begin : begin + _CHUNK]]
            found += self._ask(["get_many", chunk, most], lambda store, chunk=chunk: store.get_many(chunk, most))
        return found

    def wait(self, key: str) -> dict[str, Any]:  # noqa: D102
        key = self._prefix + key
        return self._ask(["wait", key], lambda store: store.wait(key))

    def add(self, key: str, amount: int) -> int:  # noqa: D102
        key = self._prefix + key
        return self._ask(["add", key, amount], lambda store: store.add(key, amount))

    def delete(self, key: str) -> None:  # noqa: D102
        key = self._prefix + key
        self._ask(["delete", key], lambda store: store.delete(key))

    def find(self, key: str) -> dict[str, Any] | None:  # noqa: D102
        key = self._prefix + key
        return self._ask(["find", key], lambda store: store.find(key))

    def count(self, key: str, amount: int) -> int | None:  # noqa: D102
        way, key = self._way, self._prefix + key
        if way.doubtful is not None:  # ranks add to counters in one order, and what was done last may not be done
            way.held.append((key, amount))
            total = None
        else:
            total = self._ask(["count", key, amount], lambda store: store.count(key, amount))
        if total is None:
            way.uncounted.append(key)
        return total

    def late_counts(self) -> dict[str, int]:  # noqa: D102
        way = self._way
        if way.direct is not None and way.line is not None:
            answers = way.line.late_answers()
            if way.doubtful is not None and "count" in answers:
                if answers["count"] is not None:
                    way.sums[way.doubtful[0]] = parse_count(answers["count"])
                way.doubtful = None
            elif way.doubtful is not None and answers.get("over"):
                way.held.insert(0, way.doubtful)
                way.doubtful = None
            if way.doubtful is None and way.held and not way.sums:  # one after the other: each may end a block
                key, amount = way.held.pop(0)
                way.sums[key] = way.direct.add(key, amount)
            way.sums |= {str(key): parse_count(total) for key, total in answers.get("leave", {}).items()}
        if way.sums:
            way.uncounted = deque((key for key in way.uncounted if key not in way.sums), way.uncounted.maxlen)
        own = [key for key in way.sums if key.startswith(self._prefix)]
        return {key.removeprefix(self._prefix): way.sums.pop(key) for key in own}

    def own_address(self) -> str:  # noqa: D102
        return self._way.store[0]

    def store_address(self) -> str:  # noqa: D102
        return self._way.store[1]

    def keep_alive(self, seconds: float) -> None:
        """Does nothing: the voice keeps its own connections alive."""

    def at(self, prefix: str) -> VoicedChannel:  # noqa: D102
        part = copy.copy(self)
        part._prefix += prefix
        part._whole = self.whole
        part._gathered = "", {}
        return part

    def shut(self) -> None:  # noqa: D102
        if self._way.line is not None:
            self._way.line.shut()
        if self._way.direct is not None:
            self._way.direct.shut()

    def release(self) -> None:  # noqa: D102
        if self._way.line is not None:
            self._way.line.shut()
        if self._way.direct is not None:
            self._way.direct.release()

    # Reports.

    def report(self, name: str, rank: int, record: Mapping[str, Any], *, at_once: bool = False) -> None:  # noqa: D102
        encode(record)
        way, name = self._way, self._prefix + name
        way.standing.pop(name, None)
        way.standing[name] = record
        passing = [each for each in way.standing if each.rpartition("/")[2] not in _LASTING]
        if len(passing) > _FEW:
            del way.standing[passing[0]]
        self._ask(["report", name, record, at_once], lambda store: store.report(name, rank, record))

    def take_back(self, name: str, rank: int) -> None:  # noqa: D102
        way, name = self._way, self._prefix + name
        way.standing.pop(name, None)
        self._ask(["take_back", name], lambda store: store.take_back(name, rank))

    def has_reports(self, name: str, ranks: Sequence[int]) -> bool:  # noqa: D102
        found = self._gather(name, ranks, whole=True)
        self._gathered = name, found
        return len(found) == len(ranks)

    def reports(self, name: str, ranks: Sequence[int]) -> Records:  # noqa: D102
        gathered, self._gathered = self._gathered, ("", {})  # a caller has just asked whether they are there
        if gathered[0] == name and gathered[1].keys() == set(ranks):
            return gathered[1]
        return self._gather(name, ranks, whole=False)

    def forget(self, name: str, ranks: Sequence[int]) -> None:  # noqa: D102
        by_voice, alone = self._by_voice(ranks)
        if by_voice.pop(self._way.number, None):
            key = pack_key(self._prefix + name, self._way.number)
            self._ask(["drop", self._prefix + name], lambda store: store.delete(key))
        for voice in by_voice:
            self.delete(pack_key(name, voice))
        for rank in alone:
            self.delete(f"{name}/{rank}")

    def _gather(self, name: str, ranks: Sequence[int], *, whole: bool) -> Records:
        """What these ranks have reported under a name; with `whole`, nothing if one of them is known to have not."""
        by_voice, alone = self._by_voice(ranks)
        found: Records = {}
        own = by_voice.pop(self._way.number, ()) if self._way.direct is None else ()
        if own:
            held: dict[str, Any] = self._ask(["held", self._prefix + name], lambda _: {})
            found |= {rank: held[str(rank)] for rank in own if str(rank) in held}
            if whole and len(found) < len(own):
                return {}
        keys = {rank: f"{name}/{rank}" for rank in alone}
        there = _existing(self, keys, whole=whole)
        found |= dict(zip(there, self.get_many([keys[rank] for rank in there]), strict=True))
        if whole and len(there) < len(keys):
            return {}
        packs = {voice: pack_key(name, voice) for voice in by_voice}
        voices = _existing(self, packs, whole=whole)
        for voice, record in zip(voices, self.get_many([packs[voice] for voice in voices], PACK_BYTES), strict=True):
            wanted, records = set(by_voice[voice]), unpack(record)
            found |= {rank: records[rank] for rank in records if rank in wanted}
        return {} if whole and len(found) < len(ranks) else dict(sorted(found.items()))

    # Voices.

    def _by_voice(self, ranks: Sequence[int]) -> tuple[dict[int, list[int]], list[int]]:
        """These ranks by the number of their voice, and those that are not known to have one."""
        self._look_for_fallen(ranks)
        via = self._way.via
        unknown = [rank for rank in ranks if rank not in via]
        if 0 < len(unknown) <= _FEW:  # none of them has lost its voice, so a record that this host has read is right
            found = {rank: self.whole.find(f"via/{rank}") for rank in unknown}
            via.update((rank, parse_count(record["via"])) for rank, record in found.items() if record is not None)
        elif unknown:
            self._read_all_voices()
        by_voice: defaultdict[int, list[int]] = defaultdict(list)
        for rank in ranks:
            by_voice[via.get(rank, 0)].append(rank)
        return by_voice, by_voice.pop(0, [])

    def _look_for_fallen(self, ranks: Sequence[int]) -> bool:
        """Learns which of these ranks have lost their voice, and of all others if there are many.

        Such a rank has none again at this place, whatever that voice may write later.

        Returns:
            Whether any rank of the job has lost its voice.
        """
        way, whole = self._way, self.whole
        fallen = whole.add("fallen", 0)
        if fallen == way.fallen and not way.untold:
            return fallen > 0
        if len(ranks) <= _FEW:  # all ranks may have fallen at once, and each may ask for a few others then
            keys = {rank: f"via/{rank}" for rank in ranks}
            there = _existing(whole, keys)
            found = whole.get_many([keys[rank] for rank in there])
            way.via.update(zip(there, (parse_count(record["via"]) for record in found), strict=True))
            return True
        way.untold |= set(range(way.fallen + 1, fallen + 1))
        way.fallen = fallen
        keys = {place: f"fallen/{place}" for place in sorted(way.untold)}
        there = _existing(whole, keys)  # a rank may die before it has said which one it is
        way.untold -= set(there)
        way.via.update((parse_count(told["rank"]), 0) for told in whole.get_many([keys[place] for place in there]))
        return True

    def _read_all_voices(self) -> None:
        """Learns which ranks have which voice, as far as they have introduced themselves."""
        way, whole = self._way, self.whole
        if (grown := whole.add(GROWN, 0)) != way.grown:
            way.grown = grown
            way.complete.clear()
        voices = set(range(1, whole.add("voices", 0) + 1)) - way.complete
        keys = {voice: pack_key(INTRODUCTIONS, voice) for voice in sorted(voices)}
        there = _existing(whole, keys)
        for voice, record in zip(there, whole.get_many([keys[each] for each in there], PACK_BYTES), strict=True):
            ranks = unpack(record)
            if 1 < parse_count(record["of"]) <= len(ranks):  # 1: the launcher does not tell how many a host has
                way.complete.add(voice)
            for rank in ranks:
                way.via.setdefault(rank, voice)

    def ranks_with(self, rank: int) -> list[int] | None:
        """The ranks that have the voice of a rank, ascending; None if it is not known to have one."""
        by_voice, _ = self._by_voice([rank])
        for voice in by_voice:
            key = pack_key(INTRODUCTIONS, voice)
            if self.whole.has(key):
                return sorted(unpack(self.whole.get_many([key], PACK_BYTES)[0]))
        return None

    # Heartbeats.

    def beat(self, rank: int, record: Mapping[str, Any]) -> None:  # noqa: D102
        self._ask(["beat", record], lambda store: store.beat(rank, record))

    def first_beat(self, first: int, most_age: float, *, known: bool) -> tuple[dict[str, Any], float] | None:  # noqa: D102
        request = ["first_beat", first, most_age, known]
        found = self._ask(request, lambda store: store.first_beat(first, most_age, known=known))
        return None if found is None else (found[0], float(found[1]))

    def beats(self, ranks: Sequence[int], *, known: bool) -> Records:  # noqa: D102
        some_have_fallen = self._look_for_fallen(ranks)
        beating = self._way.beating
        keys = {voice: pack_key(BEATS, voice) for voice in range(1, self.add("voices", 0) + 1)}
        # No voice removes its heartbeat: once it has sent one, there is nothing to look for first.
        beating |= set(_existing(self, {voice: key for voice, key in keys.items() if voice not in beating}))
        voices = sorted(beating)
        records = self.get_many([keys[voice] for voice in voices], PACK_BYTES)
        found: Records = {parse_count(record["first"]): record for record in records}
        if sum(parse_count(record["of"]) for record in records) < len(ranks) or some_have_fallen:
            by_voice, alone = self._by_voice(ranks)
            found = {}
            for voice, record in zip(voices, records, strict=True):  # which may not know yet who has left it
                if of := by_voice.get(voice):
                    first = record["first"] if record["first"] in of else min(of)
                    found[first] = {**record, "of": min(record["of"], len(of))}
            keys = {rank: heartbeat_key(rank) for rank in alone}
            there = _existing(self, keys)
            found |= dict(zip(there, self.get_many([keys[rank] for rank in there]), strict=True))
        return found

    def is_still(self, rank: int, heartbeat: int) -> bool:  # noqa: D102
        by_voice, _ = self._by_voice([rank])
        for voice in by_voice:
            record = self.get_many([pack_key(BEATS, voice)], PACK_BYTES)[0]
            return record["heartbeat"] == heartbeat or rank in record["still"]
        return super().is_still(rank, heartbeat)

    # The voice.

    def _ask(self, request: Sequence[Any], alone: Callable[[Channel], Any]) -> Any:
        """Returns the voice's answer, or the store's own where there is no voice any more."""
        way = self._way
        if way.direct is None and way.line is not None:
            try:
                if not way.lost.is_set():
                    return way.line.ask(request)
                self._go_alone(way.line)
            except VoiceLostError:
                self._go_alone(way.line)
                if request[0] == "count":
                    # The voice may add it once it goes on. Twice would tell of a rank that has not come.
                    way.doubtful = request[1], request[2]
                    return None
        assert way.direct is not None
        return alone(way.direct)

    def _go_alone(self, line: Line) -> None:
        """Speaks for itself from here on, with all of this rank's threads, and lets the others know."""
        way = self._way
        way.lost.set()
        direct = way.go_alone()
        if not way.tells:
            line.shut()
            way.direct = direct
            return
        line.leave()
        for name, record in way.standing.items():
            direct.report(name, way.rank, record)
        for key, record in way.told.items():
            direct.set(key, record)
        tell_fallen(direct, way.rank)
        way.via[way.rank] = 0
        way.direct = direct


def _existing(channel: Channel, keys: Mapping[int, str], *, whole: bool = False) -> list[int]:
    """Which of these keys exist, by what they are about; with `whole`, none if one of them does not."""
    if not keys or channel.has(*keys.values()):
        return list(keys)
    if whole or len(keys) == 1:
        return []
    # Those that are missing mostly stand beside one another: the last ones to come. So it asks for halves.
    each = iter(keys.items())
    half = dict(itertools.islice(each, len(keys) // 2))
    return [*_existing(channel, half), *_existing(channel, dict(each))]


def tell_fallen(direct: Channel, rank: int) -> None:
    """Tells the others that a rank speaks for itself from here on, though a voice may say that it speaks for it.

    Args:
        direct: A channel of the rank's own to the job's store, of the whole process.
        rank: The rank.
    """
    direct.set(f"via/{rank}", {"via": 0})
    direct.set(f"fallen/{direct.add('fallen', 1)}", {"rank": rank})

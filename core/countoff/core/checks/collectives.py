"""Do ranks issue the same collectives? `CollectivesDiffer`.

A collective that one rank leaves out, or issues alone, need not hang: it pairs with the next one of the same kind and
size (pytorch#138322), and from there on each collective of that rank meets another one of its peers. Nothing fails, and
what is trained is wrong.

Torch counts what a rank issues in each process group. These numbers may differ in healthy programs: one rank may issue
a collective before a batch and another one after it, a thread may issue its own, and what two ranks send to one another
counts too. So ranks compare how many collectives they issue from one tick to the next. A finding is a number that
differs in one such interval, after some in which it did not, and in none of as many after it. Only then all ranks of
the group are asked, by an entry of the log. A healthy job exchanges nothing but a few bytes more at a tick.

Once a difference is proved, ranks whose torch records gloo's collectives tell them from the interval in doubt on, in a
second record each. If these show the first one that does not pair, the warning quotes it. It waits for no longer than
`_RECORDED_SECONDS`, and not at all where the rank that asks has no such record itself.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from countoff.core.checks.check import Check, FitStart, Others, TickPart
from countoff.core.checks.plan import each_on
from countoff.core.protocol.counters import SpanCounters, TickPlace
from countoff.core.protocol.records import Reason, Records, parse_count, parse_rank
from countoff.core.verdict import Cause, Verdict, VerdictKind
from countoff.core.words import clip, count_of, names_of, ranks_by

if TYPE_CHECKING:
    from countoff.core.state import State

__all__ = [
    "COLLECTIVES_DIFFER",
    "CollectiveCheck",
    "Interval",
    "Issued",
    "Question",
    "Recorded",
    "Trail",
    "first_unpaired",
    "judge_collectives",
]

COLLECTIVES_DIFFER = VerdictKind(
    "CollectivesDiffer",
    "a rank has left out a collective that the others issued, or has issued one alone",
    causes={
        "": Cause(
            "A collective has no name: it pairs with the next one of its kind that the other ranks issue. From there "
            "on, what these ranks exchange belongs to different places of the program, or they wait for ever.",
            "look for a collective that not every rank reaches: an all_reduce of a metric, a barrier, a log or a "
            "checkpoint behind a condition that only some ranks meet. Let every rank reach it, or give the ranks that "
            "do a process group of their own. Where the numbers are to differ: levels={'CollectivesDiffer': 'off'}.",
        )
    },
)
LEAST = 2
"""Intervals without a difference that a finding has at least on both sides of the one that differs."""
_LATE = 4
"""A thread of one rank may issue its collective as many intervals later than that of another rank."""
_MOST = 16
"""Intervals without a difference after which no more are waited for. A later return of it is taken for another one."""
_KEPT = 24
"""Intervals that a rank keeps, and tells where it is asked: in some 400 of the 1,024 bytes of a record."""
_MOST_GROUPS = 4
_UNANSWERED = 8
_RECORDED_SECONDS = 5.0
"""So long a proved finding waits for what the other ranks have recorded."""
_RECORDED_BYTES = 900
"""What a rank tells of its recorded collectives takes so many of the 1,024 bytes of a record."""
_NAMES = "0123456789abcdefghijklmnopqrstuvwxyz"
_NAME_LENGTH = 80
_SURE = 4
"""Collectives after the first that does not pair which must show the same shift."""


class Issued(NamedTuple):
    """What this rank has issued in one process group.

    Attributes:
        number: Collectives of this rank so far.
        ranks: The group's ranks, ascending.
        group: The group, as the end of a sentence.
        counts_messages: Whether what two ranks send to one another counts for each of them, as with gloo. With NCCL,
            it counts only where it is batched (`startCoalescing` in torch's ProcessGroupNCCL.cpp).
        made: Which group of this rank it is, where one of the same name has been made again.
    """

    number: int
    ranks: tuple[int, ...]
    group: str
    counts_messages: bool
    made: int = 0


class Interval(NamedTuple):
    """What a rank does between two ticks, by the one that ends it; equal on all ranks.

    Attributes:
        opened: Index of the mark that opened the train epoch of that tick.
        batch: The batch of that tick.
    """

    opened: int
    batch: int


class Recorded(NamedTuple):
    """Collectives of one rank in one process group that torch has recorded, one after the other.

    Attributes:
        first: Number of the first one, among those that pair with one another: equal numbers meet.
        names: Each in words, with its line of code.
    """

    first: int
    names: tuple[str, ...]

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Recorded:
        """Reads the record of another rank.

        Raises:
            KeyError, TypeError, ValueError: If it is no such record.
        """
        names = {each: clip(str(name), _NAME_LENGTH) for each, name in zip(_NAMES, record["names"], strict=False)}
        return cls(parse_count(record["first"]), tuple(names[each] for each in record["order"]))

    def to_json(self) -> dict[str, Any]:
        """As many of them as a record has room for, as JSON types."""
        names: dict[str, str] = {}
        order, room = "", _RECORDED_BYTES
        for name in (clip(each, _NAME_LENGTH) for each in self.names):
            if name not in names:
                room -= len(json.dumps(name)) + 1
            room -= 1
            if room < 0 or (name not in names and len(names) == len(_NAMES)):
                break
            order += names.setdefault(name, _NAMES[len(names) : len(names) + 1])
        return {"first": self.first, "names": list(names), "order": order}


class Question(NamedTuple):
    """A question to all ranks of a group, as an entry of the log: what did you issue in each of your intervals?

    Attributes:
        group: The group's key.
        interval: The one that is in doubt.
        last: The last one that the rank knows which asks: the others answer once they know it too.
        rank: The rank that asks.
        proved: Whether the difference is proved, and the question is what is recorded from that interval on.
    """

    group: str
    interval: Interval
    last: Interval
    rank: int
    proved: bool = False

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], ranks: Sequence[int]) -> Question:
        """Reads the log's entry of another rank.

        Raises:
            KeyError, TypeError, ValueError: If it is no such entry.
        """
        group = entry["group"]
        if not (isinstance(group, str) and len(group) <= 64):
            raise ValueError(f"expected a short text, got {group!r:.80}")
        interval, last = (Interval(*map(parse_count, entry[key])) for key in ("interval", "last"))
        return cls(group, interval, last, parse_rank(entry["rank"], ranks), entry.get("proved") is True)

    def to_json(self) -> dict[str, Any]:
        """The log's entry; `from_json` is its inverse."""
        told = {"group": self.group, "interval": list(self.interval), "last": list(self.last), "rank": self.rank}
        return {"type": "collectives", **told, **({"proved": True} if self.proved else {})}

    @property
    def name(self) -> str:
        """Under what the answers lie in the store."""
        return (
            f"{'recorded' if self.proved else 'collectives'}/{self.group}/{self.interval.opened}.{self.interval.batch}"
        )


class Trail:
    """What one rank has issued in one process group, interval by interval, and where another rank issued otherwise.

    Attributes:
        numbers: The rank's own numbers in the last intervals, oldest first.
        begins: How many collectives this rank had issued before each of these intervals.
        mixed: Those of these intervals in which an epoch began or an evaluation was: ranks may begin them at other
            places of their programs.
        doubted: The one interval in which another rank had another number; None while there is none.
        place: That interval, in words.
    """

    def __init__(self) -> None:
        self.numbers: dict[Interval, int] = {}
        self.begins: dict[Interval, int] = {}
        self.mixed: set[Interval] = set()
        self.doubted: Interval | None = None
        self.place = ""
        self._same_before = self._same_after = 0
        self._given_up = False

    def keep(self, interval: Interval, number: int, *, begin: int = 0, mixed: bool = False) -> None:
        """Keeps this rank's own number."""
        self.numbers[interval], self.begins[interval] = number, begin
        if mixed:
            self.mixed.add(interval)
        for old in list(self.numbers)[:-_KEPT]:
            del self.numbers[old], self.begins[old]
            self.mixed.discard(old)

    def is_suspect(self, interval: Interval, same: bool, place: str = "") -> bool:
        """Takes whether another rank had the same number; returns whether the ranks of the group are to be asked now.

        A difference that comes back, or is made up for, is part of the program. One that comes at regular intervals
        comes back after as many as there were before the first one, so no fewer are waited for, up to `_MOST`.
        """
        if self._given_up:
            return False
        if not same:
            again = self.doubted is not None or interval in self.mixed
            self._given_up = again or self._same_before < LEAST
            self.doubted, self.place = interval, place
        elif self.doubted is None:
            self._same_before += 1
        else:
            self._same_after += 1
        return same and self.doubted is not None and self._same_after > min(max(self._same_before, _LATE), _MOST)

    def give_up(self) -> None:
        """Looks for nothing any more."""
        self._given_up = True

    def answer(self, doubted: Interval) -> dict[str, Any]:
        """The numbers, as JSON types; without that of the interval in doubt where it is mixed here."""
        mixed = self.mixed & {doubted}
        return {"numbers": [[*each, number] for each, number in self.numbers.items() if each not in mixed]}


class CollectiveCheck(Check):
    """Compares how many collectives ranks issue between two ticks.

    Args:
        state: This rank's state.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._others: Others | None = None
        self._last: Mapping[str, Issued] = {}
        self._last_tick: Interval | None = None
        self._mixed = False
        self._groups: Mapping[str, Issued] = {}
        self._trails: dict[str, Trail] = {}
        self._asked: set[str] = set()
        self._unanswered: list[Question] = []
        self._found: Verdict | None = None

    def fit_started(self, start: FitStart, others: Others | None) -> None:  # noqa: D102
        if others is not None and self._state.settings.levels.get(COLLECTIVES_DIFFER.name) != "off":
            self._others = others
            self._state.readers["collectives"] = self._read

    def span_opening(self, span: SpanCounters) -> None:  # noqa: D102
        self._mixed = True
        if self._others is not None and not span.evaluation:
            self._others.find_groups()

    def span_closing(self, span: SpanCounters, reason: Reason, *, orderly: bool) -> None:  # noqa: D102
        self._mixed = True

    def tick(self, span: SpanCounters) -> Callable[[TickPlace], TickPart | None] | None:  # noqa: D102
        if self._others is None or span.guess:
            return None  # batches may be counted on another thread than that of the collectives
        mixed, self._mixed = self._mixed, False
        return partial(self._part, self._others, self._others.issued(), mixed)

    def _part(
        self, others: Others, issued: Callable[[], Mapping[str, Issued]], mixed: bool, at: TickPlace
    ) -> TickPart | None:
        """Makes the part of a tick; `_last` and `_last_tick` are those of the tick before. Runs on the speaker thread.

        Args:
            others: The other ranks.
            issued: Tells what this rank had issued at the tick.
            mixed: Whether an epoch began or an evaluation was since the tick before.
            at: Where the tick is.
        """
        groups, interval = dict(itertools.islice(issued().items(), _MOST_GROUPS)), Interval(at.opened, at.batch)
        last, begin = self._last, self._last_tick
        self._last, self._last_tick = groups, interval
        others.find_groups()  # for the next tick
        same = [key for key, each in groups.items() if key in last and last[key].made == each.made]
        if not same or begin is None:
            return None
        numbers = {key: groups[key].number - last[key].number for key in same}

        def compare(standing: Mapping[str, Any], ranks: tuple[int, int]) -> None:
            del ranks
            place = f"between batches {begin.batch} and {at.batch} of {at.span}"
            theirs = standing.get("issued")
            if not isinstance(theirs, Mapping) or standing.get("issued_since") != list(begin):
                theirs = {}  # of another version, or of a rank with other ticks
            self._groups = groups
            self._trails = {key: self._trails.get(key) or Trail() for key in numbers}
            for key, number in numbers.items():
                trail = self._trails[key]
                trail.keep(interval, number, begin=last[key].number, mixed=mixed)
                if key in theirs and trail.is_suspect(interval, theirs[key] == number, place):
                    self._ask(key, trail, interval)
            waiting, self._unanswered = self._unanswered, []
            for question in waiting:
                self._answer(question)

        return TickPart({"issued": numbers, "issued_since": list(begin)}, compare)

    def _ask(self, group: str, trail: Trail, last: Interval) -> None:
        """Asks all ranks of a group, unless another rank has asked first. Runs on the speaker thread."""
        trail.give_up()
        if self._others is not None and trail.doubted is not None:
            question = Question(group, trail.doubted, last, self._state.rank)
            speaker = self._others.speaker
            speaker.hand(speaker.append(question.to_json(), lambda: group in self._asked))

    def _read(self, entry: Mapping[str, Any]) -> Callable[[], None]:
        """Reads the question of a rank; returns what it does. Called for each such entry of the log.

        Raises:
            KeyError, TypeError, ValueError: If it is no question.
        """
        question = Question.from_json(entry, self._state.ranks)

        def answer_once() -> None:
            if question.proved:
                if self._others is not None:
                    self._others.speaker.hand(lambda _: self._tell_recorded(question))
            elif question.group not in self._asked and self._others is not None:
                self._asked.add(question.group)
                self._others.speaker.hand(lambda _: self._answer(question))

        return answer_once

    def _answer(self, question: Question) -> None:
        """Tells what this rank has issued, once it knows as much as a finding needs. Runs on the speaker thread."""
        issued, trail, others = self._groups.get(question.group), self._trails.get(question.group), self._others
        if issued is None or trail is None or others is None:  # of a group to which this rank does not belong
            return
        trail.give_up()
        if max(trail.numbers) < question.last:
            self._unanswered = [*self._unanswered[-_UNANSWERED:], question]
            return
        told = trail.answer(question.interval)
        others.speaker.hand(lambda channel: channel.report(question.name, self._state.rank, told))
        if question.rank != self._state.rank:
            return

        def gathered(records: Records, missing: list[int]) -> None:
            if not missing:
                self._decide(question, trail.place, issued, records)

        deadline = time.monotonic() + self._state.settings.deadline_seconds
        others.speaker.gather(question.name, issued.ranks, deadline, gathered)

    def _decide(self, question: Question, place: str, issued: Issued, records: Records) -> None:
        """Finds what is proved, with what is recorded if this rank has it. Runs on the speaker thread."""
        answers = {rank: numbers_of(record) for rank, record in records.items()}
        found, others = judge_collectives(place, question.interval, answers, issued), self._others
        if found is None or others is None:
            return
        if self._recorded(question) is None:
            self._state.find(found)
            return
        self._found, asked = found, question._replace(proved=True)
        numbers = {rank: numbers[question.interval] for rank, numbers in answers.items()}

        def gathered(records: Records, missing: list[int]) -> None:
            sentence = ""
            if not missing:
                with contextlib.suppress(KeyError, TypeError, ValueError):  # a rank without a recorder tells nothing
                    told = {rank: Recorded.from_json(record) for rank, record in records.items()}
                    sentence = first_unpaired(numbers, told)
            self._state.find(replace(found, sentence=f"{found.sentence} {sentence}".rstrip()))

        others.speaker.hand(others.speaker.append(asked.to_json(), lambda: False))
        others.speaker.gather(asked.name, issued.ranks, time.monotonic() + _RECORDED_SECONDS, gathered)

    def _recorded(self, question: Question) -> Recorded | None:
        trail, others = self._trails.get(question.group), self._others
        begin = None if trail is None else trail.begins.get(question.interval)
        return None if begin is None or others is None else others.recorded(question.group, begin)

    def _tell_recorded(self, question: Question) -> None:
        """Tells what this rank has recorded, once a difference is proved. Runs on the speaker thread."""
        others, issued = self._others, self._groups.get(question.group)
        if others is None or issued is None:  # of a group to which this rank does not belong
            return
        recorded = self._recorded(question)
        told = {} if recorded is None else recorded.to_json()
        others.speaker.hand(lambda channel: channel.report(question.name, self._state.rank, told))

    def settle(self) -> None:  # noqa: D102
        if self._found is not None:  # what is recorded may come too late now; a warning is given once
            self._state.find(self._found)


def numbers_of(record: Mapping[str, Any]) -> dict[Interval, int]:
    """Reads another rank's numbers out of its record.

    Raises:
        KeyError, TypeError, ValueError: If there are none.
    """
    found: dict[Interval, int] = {}
    for opened, batch, number in record["numbers"][:_KEPT]:
        found[Interval(parse_count(opened), parse_count(batch))] = parse_count(number)
    return found


def judge_collectives(
    place: str, doubted: Interval, answers: Mapping[int, Mapping[Interval, int]], issued: Issued
) -> Verdict | None:
    """Returns a `CollectivesDiffer` if it is proved; None if what ranks have told has another explanation.

    It is proved where all ranks have issued the same in each interval that all know, but for the one in doubt, and
    where messages between two ranks cannot be the cause (`_may_be_messages`).

    Args:
        place: The interval in doubt, in words.
        doubted: The same.
        answers: The numbers of each rank of the group, by rank.
        issued: The group.

    Example:
        >>> told = {Interval(1, batch): 65 for batch in (16, 24, 40, 48)}
        >>> answers = {rank: {**told, Interval(1, 32): 64 if rank == 3 else 65} for rank in range(4)}
        >>> everyone = Issued(0, (0, 1, 2, 3), "in the group of all ranks", counts_messages=True)
        >>> judge_collectives("between batches 24 and 32 of train epoch 0", Interval(1, 32), answers, everyone).sentence
        'between batches 24 and 32 of train epoch 0, rank 3 issued 1 collective fewer than ranks 0–2 in the group of \
all ranks.'
    """
    known = set.intersection(*(set(numbers) for numbers in answers.values()))
    if doubted not in known or any(
        len({numbers[each] for numbers in answers.values()}) > 1 for each in known - {doubted}
    ):
        return None
    if sum(each < doubted for each in known) < LEAST or sum(each > doubted for each in known) < LEAST:
        return None
    numbers = {rank: answers[rank][doubted] for rank in sorted(answers)}
    sides = ranks_by(numbers)
    if len(sides) == 1 or _may_be_messages(numbers, sides, counted=issued.counts_messages):
        return None
    (most, others), few = sides[-1], sides[:-1]
    if 2 * len(others) <= len(numbers):
        told = each_on([(str(number), ranks) for number, ranks in sides])
        sentence = f"ranks issued different numbers of collectives {issued.group}: {told}"
        named, standing = sorted(numbers), "differ"
    else:
        odd = [(_compared(number, most), ranks) for number, ranks in few]
        who = ", ".join(f"{names_of(ranks)} issued {difference}" for difference, ranks in odd[:4])
        sentence = f"{who} than {names_of(others)} {issued.group}"
        named, standing = sorted(rank for _, ranks in few for rank in ranks), "out of step"
    return COLLECTIVES_DIFFER.found(f"{place}, {sentence}.", named, standing=standing)


def first_unpaired(numbers: Mapping[int, int], recorded: Mapping[int, Recorded]) -> str:
    """Returns a sentence about the first collectives that do not pair; empty if the records do not show them.

    They show them where all ranks have recorded the same up to there, and from there on the ranks that have issued
    fewer have recorded what the others have after as many collectives as they have issued more.

    Args:
        numbers: How many each rank of the group has issued in the interval in doubt.
        recorded: What each has recorded from there on.

    Example:
        >>> gradients, metric = "all_reduce of [650] at train.py:8", "barrier at train.py:9"
        >>> all_of_them = Recorded(64, (gradients, metric) * 5)
        >>> left_out = Recorded(64, (gradients, metric, gradients, *(gradients, metric) * 3))
        >>> first_unpaired({0: 65, 1: 65, 2: 64}, {0: all_of_them, 1: all_of_them, 2: left_out})
        'From there on, rank 2 issued all_reduce of [650] at train.py:8 where ranks 0, 1 issued barrier at train.py:9.'
    """
    sides = ranks_by(numbers)
    if len(sides) != 2 or set(recorded) != set(numbers):
        return ""
    first = max(each.first for each in recorded.values())
    rows = {rank: each.names[first - each.first :] for rank, each in recorded.items()}
    length = min(map(len, rows.values()))
    rows = {rank: names[:length] for rank, names in rows.items()}
    if any(len({rows[rank] for rank in ranks}) > 1 for _, ranks in sides):
        return ""
    (few, fewer), (many, more) = sorted((number, rows[ranks[0]]) for number, ranks in sides)
    shift = many - few
    at = next((place for place, pair in enumerate(zip(fewer, more, strict=True)) if len(set(pair)) > 1), length)
    rest = more[at + shift :]
    if len(rest) < _SURE or fewer[at : at + len(rest)] != rest:
        return ""
    (_, odd), (_, others) = sides
    told = [f"{names_of(ranks)} issued {rows[ranks[0]][at]}" for ranks in (odd, others)]
    return f"From there on, {told[0]} where {told[1]}."


def _compared(number: int, most: int) -> str:
    return f"{count_of(abs(number - most), 'collective')} {'fewer' if number < most else 'more'}"


def _may_be_messages(numbers: Mapping[int, int], sides: Sequence[tuple[int, Sequence[int]]], *, counted: bool) -> bool:
    """Whether collectives of all ranks, and messages between two of them, may add up to these numbers.

    Collectives add the same to each rank. A message that is counted adds one to two ranks, so all messages add an even
    number; of an odd number of ranks, that excludes nothing. With NCCL a batch of messages adds one to each rank that
    has one: then only a rank that differs alone is told from that.

    >>> sides = ranks_by({0: 66, 1: 66, 2: 65, 3: 65})
    >>> [_may_be_messages({0: 66, 1: 66, 2: 65, 3: 65}, sides, counted=counted) for counted in (True, False)]
    [True, True]
    """
    if len(numbers) == 2:
        return False
    if not counted:
        return sum(len(ranks) for _, ranks in sides[:-1]) != 1
    return len(numbers) % 2 == 1 or sum(numbers.values()) % 2 == 0

"""Was each sample read once in a train epoch, by one rank? `NotReadOnce`.

A sampler that deals a dataset out to the ranks issues an index for each sample that is read. Over a whole epoch, each
rank sums up a hash of every index that its loop has read, and subtracts those of its own part of ``range(rows)``. The
sums of all ranks add up to 0 if each sample was read once, in whatever order and by whichever rank. The number of
indices and the plan's arithmetic tell how many samples are read twice or left out on purpose, to make ranks even. Where
some are, the sums tell nothing, and each rank also tells for up to 65,536 samples whether it has read them. So it does
of a part of an epoch, behind a resume or before the loop leaves it: no sample may be read more than once there either.

Where an epoch is found to be wrong, the first rank asks the others once more: each tells which samples it has read.

Nothing is claimed of a sampler that is not known to issue each index once, or of ranks that do not share one dataset.
"""

from __future__ import annotations

import base64
import functools
import math
import operator
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from countoff.core.checks.check import Check, FitStart, Others, RankState
from countoff.core.checks.data import in_one_epoch, same_order
from countoff.core.messages import count_of, names_of
from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.records import Reason, Records, parse_count, parse_rank
from countoff.core.protocol.resume_record import Place
from countoff.core.verdict import Cause, Verdict, VerdictKind

__all__ = [
    "COUNTED",
    "LOOKED_AT",
    "MOST_ROWS",
    "NOT_READ_ONCE",
    "SKIPPED",
    "EpochReads",
    "Marks",
    "Once",
    "Reading",
    "data_ranks",
    "judge_once",
    "judge_skipped",
    "reads_once",
    "step_between",
]

SKIPPED = "skipped"
"""Subject of a `NotReadOnce` of an epoch that has skipped as many batches as the epoch in which the run resumed."""

NOT_READ_ONCE = VerdictKind(
    "NotReadOnce",
    "the samplers of the ranks deal one dataset out, and an epoch has not read each sample once",
    ends=False,
    causes={
        "": Cause(
            "Each rank reads its share of one order, so the order must be the same on all ranks.",
            "let every rank call set_epoch(epoch) on its sampler before each pass, with the same epoch: a call on rank "
            "0 alone gives it another order.\n"
            "let all ranks shuffle alike: with the same seed, or with a generator that has the same state.\n"
            "if it is meant: levels={'NotReadOnce': 'off'}.",
        ),
        SKIPPED: Cause(
            "Batches are skipped in the epoch in which the run resumes. In a later epoch nobody has read them.",
            "skip batches only in the epoch of the checkpoint: before the next one, take the whole loader again, or "
            "let a sampler of your own begin again with its first batch.\n"
            "if it is meant: levels={'NotReadOnce': 'off'}.",
        ),
    },
)
"""**Cause.** The ranks read their shares of different orders. Or `skip_first_batches` is called in each epoch, not only
in the one in which the run resumes, or a sampler keeps the place of the checkpoint. What the plan repeats or leaves out
to make the ranks even is no finding.

**Fix.** Call `set_epoch` with the same epoch on every rank, and shuffle with the same seed.

[Each sample once](data-identity.md#each-sample-once) says for which loaders this is known.
"""
LOOKED_AT = 1 << 16
"""Samples of which a rank tells at the end of an epoch whether it has read them, at most: a bit for each."""
COUNTED = 1 << 21
"""Samples of which a rank knows, until an epoch is judged, whether it has read them, at most: two bits for each."""
_MODULUS = 1 << 64
MOST_ROWS = 1 << 31
"""Of a dataset with as many rows or more, nothing is told."""
_NAMED = 3
_KEPT = 2
"""Epochs of which it is known: another rank may begin the next one before the first rank has judged the last one."""
_SURE = 8.0
"""So many standard deviations more than the plan leaves out or repeats are no chance."""


class Reading(NamedTuple):
    """What one rank tells of a train epoch.

    Attributes:
        rows: Rows of the dataset that is dealt out to all ranks.
        samples: Samples that this rank has read.
        difference: The sum of the hashes of what it has read, minus that of its part of all rows, modulo 2**64, where
            the sums tell all; else 0.
        repeated: Samples that all ranks read once more on purpose, by the plan.
        dropped: Samples that no rank reads on purpose, by the plan.
        dp_rank: The dp_rank of this rank.
        part: Whether this run has read a part of the epoch: it has resumed in the middle of it, or has left it.
        seen: Which of the first `LOOKED_AT` samples of `Marks` it has read, where the sums do not tell all; else 0.
    """

    rows: int
    samples: int
    difference: int
    repeated: int
    dropped: int
    dp_rank: int = 0
    part: bool = False
    seen: int = 0

    @property
    def is_exact(self) -> bool:
        """Whether each sample is to be read exactly once: then the sums tell all."""
        return self.repeated == self.dropped == 0 and not self.part

    @property
    def tells_all(self) -> bool:
        """Whether what all ranks tell proves of each sample that it was read, or not, as planned."""
        return not self.part and (self.is_exact or self.rows <= LOOKED_AT)

    @classmethod
    def from_json(cls, record: Mapping[str, Any], ranks: Any) -> Reading:
        """Reads what another rank has told; that may be anything.

        Args:
            record: The record.
            ranks: Those that `dp_rank` may be one of.

        Raises:
            KeyError, TypeError, ValueError: If it is something else.
        """
        rows, samples, repeated, dropped = (
            parse_count(record[name], MOST_ROWS) for name in ("rows", "samples", "repeated", "dropped")
        )
        difference, place = int(str(record["difference"])[:16], 16), parse_rank(record["dp_rank"], ranks)
        told = cls(rows, samples, difference, repeated, dropped, place, record["part"] is True)
        return told if told.is_exact else told._replace(seen=_unpacked(record["seen"], min(rows, LOOKED_AT)))

    def to_json(self) -> dict[str, Any]:
        """What is told of it, as JSON types."""
        seen = {} if self.is_exact else {"seen": _packed(self.seen, min(self.rows, LOOKED_AT))}
        return {**self._asdict(), "difference": f"{self.difference % _MODULUS:x}", "seen": "", **seen}


class Marks(NamedTuple):
    """Which samples one rank has read in a train epoch, of `COUNTED` ones that are spread over the dataset.

    Attributes:
        seen: Those that it has read: bit ``n`` stands for row ``n * step_between(rows)``, modulo the number of rows.
        twice: Those that it has read more than once, likewise.
    """

    seen: int
    twice: int

    @classmethod
    def from_json(cls, record: Mapping[str, Any], rows: int) -> Marks:
        """Reads what another rank has told; that may be anything.

        Args:
            record: The record.
            rows: Rows of the dataset.

        Raises:
            KeyError, TypeError, ValueError, zlib.error: If it is something else.
        """
        looked = min(rows, COUNTED)
        return cls(_unpacked(record["seen"], looked), _unpacked(record["twice"], looked))

    def to_json(self, rows: int) -> dict[str, Any]:
        """What is told of it, as JSON types."""
        return {name: _packed(bits, min(rows, COUNTED)) for name, bits in self._asdict().items()}


def _packed(bits: int, looked: int) -> str:
    """Bits as a text."""
    return base64.b64encode(zlib.compress(bits.to_bytes(-(-looked // 8), "little"))).decode()


def _unpacked(text: Any, looked: int) -> int:
    """Reads bits that another rank has told; that may be anything.

    Raises:
        TypeError, ValueError, zlib.error: If it is something else.
    """
    size = -(-looked // 8)
    found = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), size + 1)
    if len(found) != size:
        raise ValueError(f"expected the bits of {looked} samples, got {len(found)} bytes")
    return int.from_bytes(found, "little")


class EpochReads(Protocol):
    """What one rank reads in one train epoch, as its loader's sampler issues it."""

    @property
    def skipped(self) -> int:
        """Batches of the epoch before the first one that was issued."""
        ...

    @property
    def first(self) -> str:
        """Digest of the indices of the first batch that was recorded; empty if it is not known."""
        ...

    def reading(self, batches: int) -> Callable[[], tuple[Reading, Marks] | None] | None:
        """Returns what tells of the epoch, on another thread; None where nothing does.

        Args:
            batches: Batches of the epoch that the fit has counted.
        """
        ...

    def place(self, batches: int) -> Place | None:
        """Returns what has been issued around a place in the epoch; None if it is not known.

        Args:
            batches: Batches of the epoch before the place.
        """
        ...

    def goes_on(self, place: Place, position: int, *, again: bool = False) -> bool | None:
        """Returns whether a resumed epoch goes on in the order that it had before a checkpoint; None if nothing tells.

        Args:
            place: That of the checkpoint.
            position: Batches of the epoch that are not trained on again.
            again: Whether the loop has taken these from the loader, and passed over them.
        """
        ...


class Once(Check):
    """Compares what the ranks have read in each train epoch.

    Args:
        state: This rank's state.
        explained: Returns whether a finding that comes earlier is the cause of one of these. Known on the first rank.
        repeats_order: Returns whether this rank has read the epoch that closes in the order of the one before it; None
            if that is not known.
        goes_on: Returns whether another run has read some of the open train epoch, before the checkpoint.

    Attributes:
        reads: What this rank reads in the open train epoch. An adapter sets it when the epoch has given its first
            batch; None where nothing tells it.
        position: Batches of the open train epoch that this fit has not read.
    """

    def __init__(
        self,
        state: RankState,
        explained: Callable[[], bool] = lambda: False,
        repeats_order: Callable[[], bool | None] = lambda: None,
        goes_on: Callable[[], bool] = lambda: False,
    ) -> None:
        self.reads: EpochReads | None = None
        self.position = 0
        self._state = state
        self._explained, self._repeats_order, self._goes_on = explained, repeats_order, goes_on
        self._others: Others | None = None
        self._is_off = False
        self._dp_ranks = range(state.world_size)
        self._marks: dict[int, tuple[Marks, int]] = {}
        self._last = ""  # the name of the last report that tells what was read

    def fit_started(self, start: FitStart, others: Others | None) -> None:  # noqa: D102
        degree, settings = start.plan.dp_degree, self._state.settings
        self._others = others if settings.compare_data else None
        self._is_off = settings.levels.get(NOT_READ_ONCE.name) == "off"
        self._dp_ranks = range(self._state.world_size if degree is None else degree)
        if self._others is not None:
            self._others.answer(NOT_READ_ONCE.name, self._answer)

    def span_opened(self, span: SpanCounters, epoch: int | None) -> None:  # noqa: D102
        if epoch is None:
            return
        self.reads, self.position = None, span.started

    def span_closing(self, span: SpanCounters, reason: Reason, *, orderly: bool) -> None:  # noqa: D102
        if span.evaluation or not span.compared or self._others is None:
            return
        reads, self.reads = self.reads, None
        make = None if reads is None or self._is_off else reads.reading(span.started)
        again, opened, name = self._repeats_order(), span.opened, f"once/{span.opened}"
        measured, self._last = not self._goes_on(), "" if make is None else name

        def record() -> Mapping[str, Any]:
            told = None if make is None else make()
            return {"again": again, "epoch": span.name, **({} if told is None else self._told(opened, *told))}

        def judge(records: Records) -> list[Verdict | None]:
            return [self._judge(span.name, opened, records, measured=measured)]

        self._others.report(name, record, judge)

    def settle(self) -> None:  # noqa: D102
        if self._others is not None and self._last:  # the first rank may ask what this one has read
            self._others.settle_report(self._last)
            self._others.settle_question(NOT_READ_ONCE.name)

    def _told(self, opened: int, reading: Reading, marks: Marks) -> Mapping[str, Any]:
        """What is told of an epoch; which samples this rank has read is kept for a question about it."""
        self._marks = {key: self._marks[key] for key in sorted(self._marks)[1 - _KEPT :]}
        self._marks[opened] = marks, reading.rows
        seen = 0 if reading.is_exact else marks.seen & ((1 << LOOKED_AT) - 1)
        return reading._replace(seen=seen).to_json()

    def _answer(self, question: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Answers the first rank, which has found that an epoch is wrong."""
        marks, rows = self._marks.get(question["opened"], (None, 0))
        return None if marks is None else marks.to_json(rows)

    def _judge(self, span: str, opened: int, records: Records, *, measured: bool) -> Verdict | None:
        if not in_one_epoch(span, records):
            return None
        again = [rank for rank, record in sorted(records.items()) if record.get("again") is True]
        others = [rank for rank, record in sorted(records.items()) if record.get("again") is False]
        told = {rank: record for rank, record in records.items() if "rows" in record}
        if len(told) == len(self._state.ranks) and not self._explained():
            readings = {rank: Reading.from_json(record, self._dp_ranks) for rank, record in told.items()}
            each = data_ranks(readings, len(self._dp_ranks))
            if each and not reads_once(each):
                kept = f"{names_of(again)} kept the order of the train epoch before, and {names_of(others)} did not"
                self._ask(span, opened, each, kept if again and others else "")
                return None
            if each and measured and self._state.observer is not None and all(one.tells_all for one in each.values()):
                first = next(iter(each.values()))
                self._state.observer.read_once(span, first.rows, first.repeated, first.dropped)
        return same_order(span, again, others) if again else None

    def _ask(self, span: str, opened: int, readings: Mapping[int, Reading], kept: str) -> None:
        """Asks which samples each rank has read."""
        rows = next(iter(readings.values())).rows

        def judge(records: Records) -> Verdict:
            marks = {rank: Marks.from_json(records[rank], rows) for rank in readings if rank in records}
            found = judge_once(span, readings, marks)
            return replace(found, sentence=f"{found.sentence.removesuffix('.')}: {kept}.") if kept else found

        if self._others is not None:
            self._others.ask(NOT_READ_ONCE.name, {"opened": opened}, self._state.ranks, judge)


def step_between(rows: int) -> int:
    """Returns how far apart the samples lie that are looked at: about 0.618 of the dataset, and coprime with it.

    So they are spread over it evenly, and no share of every n-th sample has more of them than another one.

    Args:
        rows: Rows of the dataset, at least 1.

    >>> step_between(65_536), step_between(1_000_000)
    (1, 618033)
    """
    if rows <= LOOKED_AT:
        return 1
    step = int(rows * 0.6180339887498949)
    while math.gcd(step, rows) != 1:
        step += 1
    return step


def data_ranks(readings: Mapping[int, Reading], dp_degree: int) -> dict[int, Reading]:
    """Returns what each data rank has read: of ranks that read the same, the first one counts.

    Nothing if a share is missing, or if the ranks do not share one dataset.

    Args:
        readings: What each rank has read.
        dp_degree: Shares into which the data is cut.
    """
    of: dict[int, int] = {}
    for rank in sorted(readings):
        of.setdefault(readings[rank].dp_rank, rank)
    each = {rank: readings[rank] for rank in of.values()}
    plans = {(one.rows, one.repeated, one.dropped) for one in each.values()}
    return each if len(of) == dp_degree and len(plans) == 1 else {}


def reads_once(readings: Mapping[int, Reading]) -> bool:
    """Returns whether all ranks together have read each sample once, but for what the plan repeats or leaves out.

    Of a part of an epoch: no sample more than once.

    Args:
        readings: What each data rank has read.

    Example:
        >>> one = Reading(rows=4, samples=2, difference=3, repeated=0, dropped=0)
        >>> reads_once({0: one, 1: one._replace(difference=2**64 - 3, dp_rank=1)}), reads_once({0: one, 1: one})
        (True, False)
    """
    first = next(iter(readings.values()))
    marks = {rank: Marks(each.seen, 0) for rank, each in readings.items()}
    if _repeated(marks).bit_count() > _most(first.repeated, first.rows):
        return False
    if any(each.part for each in readings.values()):
        return True
    if sum(each.samples for each in readings.values()) != first.rows + first.repeated - first.dropped:
        return False
    if first.is_exact:
        return sum(each.difference for each in readings.values()) % _MODULUS == 0
    return _unread(marks, min(first.rows, LOOKED_AT)).bit_count() <= _most(first.dropped, first.rows)


def judge_once(span: str, readings: Mapping[int, Reading], marks: Mapping[int, Marks]) -> Verdict:
    """Returns the `NotReadOnce` about ranks that have not read each sample once in a train epoch.

    Args:
        span: Name of the epoch.
        readings: What each data rank has read.
        marks: Which samples, as far as the ranks have told.

    Example:
        >>> one = Reading(rows=4, samples=2, difference=5, repeated=0, dropped=0)
        >>> marks = {0: Marks(0b0011, 0), 1: Marks(0b1001, 0)}
        >>> print(judge_once("train epoch 1", {0: one, 1: one._replace(dp_rank=1)}, marks).sentence)
        in train epoch 1, 1 of 4 samples was read by no rank (row 2), and 1 more than once (row 0, by ranks 0, 1).
    """
    first, part = next(iter(readings.values())), any(each.part for each in readings.values())
    looked = min(first.rows, COUNTED) if len(marks) == len(readings) else 0
    unread, repeated = 0 if part else _unread(marks, looked), _repeated(marks) if looked else 0
    by = sorted(rank for rank, each in marks.items() if (each.seen & repeated) | each.twice) if looked else []
    if unread or repeated:
        said = _in_words(first, looked, unread, repeated, by)
    elif part:
        said = f"some of {count_of(first.rows, 'sample')} were read more than once"
    else:  # only the sum, or the number, tells
        samples = sum(each.samples for each in readings.values())
        said = f"{samples} samples were read of a dataset of {first.rows}, and not each of them once"
    where = f"the part of {span} that this run has read" if part else span
    return NOT_READ_ONCE.found(f"in {where}, {said}.", tuple(by or readings), standing="differ")


def _in_words(first: Reading, looked: int, unread: int, repeated: int, by: Sequence[int]) -> str:
    """What was read by no rank, and what more than once, by which ranks, of the samples that are looked at."""
    rows, extra, missing = first.rows, repeated.bit_count(), unread.bit_count()
    whole = count_of(rows, "sample") if looked == rows else f"{looked} samples that were looked at (of {rows})"

    def planned(samples: int) -> str:
        exact = looked == rows and not first.part
        return f"; {samples} {'' if exact else 'of all '}as planned" if samples else ""

    parts: list[str] = []
    if missing:
        verb = "was" if missing == 1 else "were"
        parts.append(f"{missing} of {whole} {verb} read by no rank ({_rows(unread, rows)}{planned(first.dropped)})")
    if extra:
        subject = str(extra) if missing else f"{extra} of {whole} {'was' if extra == 1 else 'were'} read"
        parts.append(f"{subject} more than once ({_rows(repeated, rows)}, by {names_of(by)}{planned(first.repeated)})")
    return ", and ".join(parts)


def judge_skipped(span: str, batches: int) -> Verdict:
    """Returns a `NotReadOnce`: a train epoch behind the one in which a run resumed has skipped as many batches.

    Args:
        span: Name of the epoch.
        batches: How many, of each rank.
    """
    sentence = (
        f"{span} has skipped its first {count_of(batches, 'batch')} on each rank, like the epoch in which the run "
        "resumed."
    )
    return NOT_READ_ONCE.found(sentence, subject=SKIPPED)


def _unread(marks: Mapping[int, Marks], looked: int) -> int:
    """The samples that no rank has read, of so many that are looked at."""
    seen = functools.reduce(operator.or_, (each.seen for each in marks.values()), 0)
    return ~seen & ((1 << looked) - 1)


def _repeated(marks: Mapping[int, Marks]) -> int:
    """The samples that were read more than once, by one rank or by several, of those that are looked at."""
    seen = repeated = 0
    for each in marks.values():
        repeated |= each.twice | (seen & each.seen)
        seen |= each.seen
    return repeated


def _most(planned: int, rows: int) -> float:
    """How many of the samples that are looked at may be among those that the plan repeats, or leaves out."""
    if rows <= LOOKED_AT:
        return planned
    share = planned * LOOKED_AT / rows
    return min(float(planned), share + _SURE * math.sqrt(share) + _SURE)


def _rows(bits: int, rows: int) -> str:
    """Some samples, by their rows, in words."""
    step = step_between(rows)
    found = sorted(place * step % rows for place, bit in enumerate(reversed(f"{bits:b}")) if bit == "1")
    named = ", ".join(map(str, found[:_NAMED])) + (", …" if len(found) > _NAMED else "")
    return f"{'row' if len(found) == 1 else 'rows'} {named}"

"""Was each sample read once in a train epoch, by one rank? `NotReadOnce`.

A sampler that deals a dataset out to the ranks issues an index for each sample that is read. Over a whole epoch, each
rank sums up a hash of every index that its loop has read, and subtracts those of its own part of ``range(rows)``. The
sums of all ranks add up to 0 if each sample was read once, in whatever order and by whichever rank. The number of
indices and the plan's arithmetic tell how many samples are read twice or left out on purpose, to make ranks even. Where
some are, and to say what was read twice, each rank also tells for up to 2,048 samples whether it has read them.

Nothing is claimed of a sampler that is not known to issue each index once, of a pass that did not begin with the first
batch or did not end with the last one, or of ranks that do not share one dataset.
"""

from __future__ import annotations

import base64
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from countoff.core.checks.check import Check, FitStart, Others
from countoff.core.checks.data import in_one_epoch, same_order
from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.records import Reason, Records, parse_count, parse_rank
from countoff.core.verdict import Cause, Verdict, VerdictKind
from countoff.core.words import count_of, names_of

if TYPE_CHECKING:
    from countoff.core.state import State

__all__ = [
    "LOOKED_AT",
    "MOST_ROWS",
    "NOT_READ_ONCE",
    "SKIPPED",
    "EpochReads",
    "Once",
    "Place",
    "Reading",
    "judge_once",
    "judge_skipped",
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
            "skip batches only in the epoch of the checkpoint: before the next one, take the whole loader again.\n"
            "if it is meant: levels={'NotReadOnce': 'off'}.",
        ),
    },
)
LOOKED_AT = 2048
"""Samples of which each rank tells whether it has read them, at most: two bits for each in a record of 1 KiB."""
_MODULUS = 1 << 64
MOST_ROWS = 1 << 31
"""Of a dataset with as many rows or more, nothing is told."""
_NAMED = 3
_SURE = 8.0
"""So many standard deviations more than the plan leaves out or repeats are no chance."""


class Reading(NamedTuple):
    """What one rank has read in a whole train epoch.

    Attributes:
        rows: Rows of the dataset that is dealt out to all ranks.
        samples: Samples that this rank has read.
        difference: The sum of the hashes of what it has read, minus that of its part of all rows, modulo 2**64.
        seen: The samples that are looked at and that it has read: bit ``n`` stands for row ``n * step_between(rows)``,
            modulo `rows`.
        twice: Those that it has read more than once, likewise.
        repeated: Samples that all ranks read once more on purpose, by the plan.
        dropped: Samples that no rank reads on purpose, by the plan.
        dp_rank: The dp_rank of this rank.
    """

    rows: int
    samples: int
    difference: int
    seen: int
    twice: int
    repeated: int
    dropped: int
    dp_rank: int = 0

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
        difference = int(str(record["difference"])[:16], 16)
        seen, twice = _parse_bits(record["seen"]), _parse_bits(record["twice"])
        return cls(rows, samples, difference, seen, twice, repeated, dropped, parse_rank(record["dp_rank"], ranks))

    def to_json(self) -> dict[str, Any]:
        """What is told of it, as JSON types."""
        size = -(-min(self.rows, LOOKED_AT) // 8)
        bits = {
            name: base64.b64encode(each.to_bytes(size, "little")).decode()
            for name, each in (("seen", self.seen), ("twice", self.twice))
        }
        return {**self._asdict(), "difference": f"{self.difference % _MODULUS:x}", **bits}


class Place(NamedTuple):
    """What a loader's sampler has issued around the place of a checkpoint in an epoch, as one rank tells it.

    Attributes:
        rows: Rows of the dataset; None if that is not known.
        batches: Batches of the epoch before the checkpoint.
        order: Digest of the indices of all of these, in their order; empty if some are not known.
        ahead: Digests of the indices of single batches: the last one of these, and the next ones that the loader has
            fetched ahead, by their numbers in the epoch, from 1.
        first: Digest of the indices of the epoch's first batch; empty if that is not known.
    """

    rows: int | None
    batches: int
    order: str
    ahead: Mapping[int, str]
    first: str = ""

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Place:
        """Reads it out of a checkpoint; that may be anything.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: If it is something else.
        """
        rows = None if record["rows"] is None else parse_count(record["rows"])
        ahead = {int(number): str(digest) for number, digest in record["ahead"].items()}
        return cls(rows, parse_count(record["batches"]), str(record["order"]), ahead, str(record["first"]))

    def to_json(self) -> dict[str, Any]:
        """The place as JSON types; `from_json` is its inverse."""
        return {**self._asdict(), "ahead": {str(number): digest for number, digest in self.ahead.items()}}


class EpochReads(Protocol):
    """What one rank reads in one train epoch, as its loader's sampler issues it."""

    @property
    def skipped(self) -> int:
        """Batches of the epoch before the first one that was issued."""
        ...

    def reading(self, batches: int) -> Callable[[], Reading | None] | None:
        """Returns what makes the reading of the epoch, on another thread; None where that is not of a whole epoch.

        Args:
            batches: Batches of the epoch that the loop has taken, with those before a resume.
        """
        ...

    def place(self, batches: int) -> Place | None:
        """Returns what has been issued around a place in the epoch; None if it is not known.

        Args:
            batches: Batches of the epoch before the place.
        """
        ...

    def goes_on(self, place: Place, position: int) -> bool | None:
        """Returns whether a resumed epoch goes on in the order that it had before a checkpoint; None if nothing tells.

        Args:
            place: That of the checkpoint.
            position: Batches of the epoch that are not trained on again.
        """
        ...


class Once(Check):
    """Compares what the ranks have read in each whole train epoch.

    Args:
        state: This rank's state.
        explained: Returns whether a finding that comes earlier is the cause of one of these. Known on the first rank.
        repeats_order: Returns whether this rank has read the epoch that closes in the order of the one before it.

    Attributes:
        reads: What this rank reads in the open train epoch. An adapter sets it when the epoch has given its first
            batch; None where nothing tells it.
        position: Batches of the open train epoch that this fit has not read.
    """

    def __init__(
        self,
        state: State,
        explained: Callable[[], bool] = lambda: False,
        repeats_order: Callable[[], bool] = lambda: False,
    ) -> None:
        self.reads: EpochReads | None = None
        self.position = 0
        self._state = state
        self._explained, self._repeats_order = explained, repeats_order
        self._others: Others | None = None
        self._dp_ranks = range(state.world_size)

    def fit_started(self, start: FitStart, others: Others | None) -> None:  # noqa: D102
        degree = start.plan.dp_degree
        self._others = others if self._state.settings.compare_data else None
        self._dp_ranks = range(self._state.world_size if degree is None else degree)

    def span_opened(self, span: SpanCounters, epoch: int | None) -> None:  # noqa: D102
        if epoch is None:
            return
        self.reads, self.position = None, span.started

    def span_closing(self, span: SpanCounters, reason: Reason, *, orderly: bool) -> None:  # noqa: D102
        if span.evaluation or not span.compared or self._others is None:
            return
        reads, self.reads = self.reads, None
        make, again = None if reads is None else reads.reading(span.started), self._repeats_order()

        def record() -> Mapping[str, Any]:
            reading = None if make is None else make()
            return {"again": again, "epoch": span.name, **({} if reading is None else reading.to_json())}

        self._others.report(f"once/{span.opened}", record, lambda records: [self._judge(span.name, records)])

    def _judge(self, span: str, records: Records) -> Verdict | None:
        if not in_one_epoch(span, records):
            return None
        again = [rank for rank, record in sorted(records.items()) if record.get("again") is True]
        others = [rank for rank in sorted(records) if rank not in again]
        told = {rank: record for rank, record in records.items() if "rows" in record}
        found = None
        if len(told) == len(self._state.ranks) and not self._explained():  # each has read a known, whole epoch
            readings = {rank: Reading.from_json(record, self._dp_ranks) for rank, record in told.items()}
            found = judge_once(span, readings, dp_degree=len(self._dp_ranks))
        if found is None or not again:
            return same_order(span, again, others) if again else found
        kept = f"{names_of(again)} kept the order of the train epoch before, and {names_of(others)} did not"
        return replace(found, sentence=f"{found.sentence.removesuffix('.')}: {kept}." if others else found.sentence)


def step_between(rows: int) -> int:
    """Returns how far apart the samples lie that are looked at: about 0.618 of the dataset, and coprime with it.

    So they are spread over it evenly, and no share of every n-th sample has more of them than another one.

    Args:
        rows: Rows of the dataset, at least 1.

    >>> step_between(2048), step_between(60_000)
    (1, 37087)
    """
    if rows <= LOOKED_AT:
        return 1
    step = int(rows * 0.6180339887498949)
    while math.gcd(step, rows) != 1:
        step += 1
    return step


def judge_once(span: str, readings: Mapping[int, Reading], *, dp_degree: int) -> Verdict | None:
    """Returns a `NotReadOnce` if the ranks have not read each sample once in a train epoch, as far as that is proven.

    Args:
        span: Name of the epoch.
        readings: What each rank has read.
        dp_degree: Shares into which the data is cut. Ranks of one dp_rank read the same, and the first one counts.

    Example:
        >>> one = Reading(rows=4, samples=2, difference=0, seen=0b0011, twice=0, repeated=0, dropped=0)
        >>> other = one._replace(seen=0b1001, difference=5, dp_rank=1)
        >>> print(judge_once("train epoch 1", {0: one, 1: other}, dp_degree=2).sentence)
        in train epoch 1, 1 of 4 samples was read by no rank (row 2), and 1 more than once (row 0, by ranks 0, 1).
        >>> judge_once("train epoch 1", {0: one, 1: other._replace(seen=0b1100, difference=0)}, dp_degree=2) is None
        True
    """
    of: dict[int, int] = {}
    for rank in sorted(readings):
        of.setdefault(readings[rank].dp_rank, rank)
    first = readings[min(readings)]
    each = {rank: readings[rank] for rank in of.values()}
    if len(of) != dp_degree or any(
        (one.rows, one.repeated, one.dropped) != (first.rows, first.repeated, first.dropped) for one in each.values()
    ):
        return None
    unread, repeated = _unread(each), _repeated(each)
    if _is_as_planned(each, unread.bit_count(), repeated.bit_count()):
        return None
    by = sorted(rank for rank, one in each.items() if (one.seen & repeated) | one.twice)
    sentence = f"in {span}, {_in_words(each, unread, repeated, by)}."
    return NOT_READ_ONCE.found(sentence, tuple(by or each), standing="differ")


def _is_as_planned(readings: Mapping[int, Reading], missing: int, extra: int) -> bool:
    """Whether all ranks together have read each sample once, but for what the plan repeats or leaves out.

    Args:
        readings: What each data rank has read.
        missing: How many of the samples that are looked at no rank has read.
        extra: How many of them were read more than once.
    """
    first = next(iter(readings.values()))
    samples = sum(each.samples for each in readings.values())
    if samples != first.rows + first.repeated - first.dropped:
        return False
    if first.repeated == first.dropped == 0:
        return sum(each.difference for each in readings.values()) % _MODULUS == 0
    return extra <= _most(first.repeated, first.rows) and missing <= _most(first.dropped, first.rows)


def _in_words(readings: Mapping[int, Reading], unread: int, repeated: int, by: Sequence[int]) -> str:
    """What was read by no rank, and what more than once, by which ranks, as far as the samples are looked at."""
    rows = next(iter(readings.values())).rows
    extra, missing, looked = repeated.bit_count(), unread.bit_count(), min(rows, LOOKED_AT)
    if not extra and not missing:  # only the sum, or the number, tells
        samples = sum(each.samples for each in readings.values())
        return f"{samples} samples were read of a dataset of {rows}, and not each of them once"
    whole = count_of(rows, "sample") if looked == rows else f"{looked} samples that were looked at (of {rows})"
    parts: list[str] = []
    if missing:
        verb = "was" if missing == 1 else "were"
        parts.append(f"{missing} of {whole} {verb} read by no rank ({_rows(unread, rows)})")
    if extra:
        subject = str(extra) if missing else f"{extra} of {whole} {'was' if extra == 1 else 'were'} read"
        parts.append(f"{subject} more than once ({_rows(repeated, rows)}, by {names_of(by)})")
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


def _unread(readings: Mapping[int, Reading]) -> int:
    """The samples that are looked at and that no rank has read."""
    looked = min(next(iter(readings.values())).rows, LOOKED_AT)
    seen = functools.reduce(operator.or_, (each.seen for each in readings.values()))
    return ~seen & ((1 << looked) - 1)


def _repeated(readings: Mapping[int, Reading]) -> int:
    """The samples that are looked at and that were read more than once, by one rank or by several."""
    seen = repeated = 0
    for each in readings.values():
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
    found = sorted(place * step % rows for place in range(LOOKED_AT) if bits >> place & 1)
    named = ", ".join(map(str, found[:_NAMED])) + (", …" if len(found) > _NAMED else "")
    return f"{'row' if len(found) == 1 else 'rows'} {named}"


def _parse_bits(value: object) -> int:
    if not isinstance(value, str) or len(value) > LOOKED_AT // 4:
        raise ValueError(f"expected the bits of {LOOKED_AT} samples, got {value!r:.40}")
    return int.from_bytes(base64.b64decode(value, validate=True)[: LOOKED_AT // 8], "little")

"""The ledger: ranks agree on the order of marks without ever waiting for one another.

All ranks write to one log. Entry *n* exists once and is the same for everybody, because it is written by a
compare-and-set that lets the first writer win. A rank appends what the log does not say yet (its next mark, the
count at which its loader will end, a notice, the end), and compares its own marks with those that stand. Nothing
here does I/O or starts a thread: entries come in through `Ledger.receive`, own marks through `Ledger.reach`, and
both answer with a `Finding` when the ranks cannot both be right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, cast, get_args

from countoff.core.protocol.counters import SpanCounters

MarkKind = Literal["fit_start", "train_start", "eval_start", "eval_end", "train_end", "fit_end"]
Reason = Literal["", "exhausted", "stopped", "exited"]
_MEMORY = 64  # marks kept for the question who is with whom
_PATIENCE = 1024  # own marks that may wait for the log's answer, which never comes where nobody listens


@dataclass(frozen=True)
class Mark:
    """A point that every rank passes, with the counts that must be equal there.

    Attributes:
        kind: What opens or closes.
        span: The span it opens or closes, in words.
        at: Batches started in the span in which the mark stands (for `eval_start`, the train span around it).
        reason: For a closing, whether the loader was `exhausted`, the pass was `stopped` (a limit, a break, early
            stopping), or the rank `left` the job in its middle; for `eval_start`, `exhausted` if the train loader is
            known to hold nothing more.
        steps: Optimizer steps applied since the fit began.
        chain: Hash of the batches after which they were applied.
        counts: Batches per loader of a closed evaluation, if it read more than one.
        rank: Who wrote it.
        time: Seconds since the epoch at which that rank passed it, by its own clock.
    """

    kind: MarkKind
    span: str
    at: int = 0
    reason: Reason = ""
    steps: int = 0
    chain: int = 0
    counts: tuple[int, ...] = ()
    rank: int = 0
    time: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The mark as JSON types; `from_json` is its inverse."""
        return {**asdict(self), "counts": list(self.counts)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Mark:
        """Reads a mark that another rank wrote.

        Raises:
            KeyError, TypeError, ValueError: If the record is not a mark.
        """
        return cls(
            kind=cast("MarkKind", one_of(record["kind"], get_args(MarkKind))),
            span=str(record["span"]),
            at=parse_count(record["at"]),
            reason=cast("Reason", one_of(record["reason"], get_args(Reason))),
            steps=parse_count(record["steps"]),
            chain=parse_count(record["chain"]),
            counts=tuple(parse_count(count) for count in record["counts"]),
            rank=parse_count(record["rank"]),
            time=float(record["time"]),
        )


def parse_count(value: object, below: int = 1 << 53) -> int:
    """A count out of the store, which is open to everybody.

    Raises:
        ValueError: If it is no integer from 0 up to, but not including, `below`.
    """
    if type(value) is not int or not 0 <= value < below:
        raise ValueError(f"expected a whole number below {below}, got {value!r}")
    return value


def one_of(value: object, known: tuple[str, ...]) -> str:
    """A word out of the store.

    Raises:
        ValueError: If it is none of the known ones.
    """
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"expected one of {known}, got {value!r}")
    return value


@dataclass(frozen=True)
class Divergence:
    """Two ranks that cannot both be right: the mark that stands, and what this rank counted instead.

    Attributes:
        kind: `UnevenBatches` or `StepMismatch`.
        standing: The mark (or announced closing) of the other rank.
        count: Batches this rank has in hand in that span, or optimizer steps for a `StepMismatch`.
        own: This rank's own mark in that place, if it has reached it.
        evaluation: Whether only the lengths of an evaluation differ, which may be legitimate.
        mark_index: Number of the mark in dispute; of the one that opened the span where a closing was only announced.
        announced: Whether it was only announced.
        asked: Whether the last batch of the count has been asked for, and may not come.
    """

    kind: Literal["UnevenBatches", "StepMismatch"]
    standing: Mark
    count: int
    own: Mark | None = None
    evaluation: bool = False
    mark_index: int = field(default=-1, compare=False)
    announced: bool = field(default=False, compare=False)
    requested: bool = False


@dataclass
class LogView:
    """One rank's view of the log.

    Attributes:
        read: Entries of the log read so far; the next one is entry number `read`.
        next: This rank's next mark, as a number counted from 0 in the order of passing.
    """

    read: int = 0
    next: int = 0
    _standing: dict[int, Mark] = field(default_factory=dict[int, Mark])
    _pending: dict[int, Mark] = field(default_factory=dict[int, Mark])
    _announced: dict[int, Mark] = field(default_factory=dict[int, Mark])
    _muted: set[int] = field(default_factory=set[int])
    _passed: dict[int, Mark] = field(default_factory=dict[int, Mark])
    _heard: dict[int, Mark] = field(default_factory=dict[int, Mark])

    def reach(self, mark: Mark) -> tuple[int, Divergence | None]:
        """Passes this rank's next mark and compares it with what stands there, if anything does yet.

        Returns:
            The mark's number, and what is wrong.
        """
        number = self.next
        self.next += 1
        for old in [slot for slot in self._standing if slot < number]:
            del self._standing[old]
        self._pending[number] = self._passed[number] = mark
        self._pending.pop(number - _PATIENCE, None)
        self._passed.pop(number - _MEMORY, None)
        return number, self._settle(number)

    def stands(self, number: int) -> bool:
        """Whether somebody's mark of this number is known."""
        return number in self._standing or (number < self.next and number not in self._pending)

    def receive_mark(self, number: int, mark: Mark, spans: Iterable[SpanCounters]) -> Divergence | None:
        """Takes a mark from the log. A later entry for a number that stands already changes nothing.

        Args:
            number: The mark's number.
            mark: What the first rank wrote there.
            spans: This rank's open spans, outermost first.
        """
        if number not in self._standing and (number >= self.next or number in self._pending):
            self._standing[number] = mark
        self._heard.setdefault(number, mark)
        self._heard.pop(number - _MEMORY, None)
        return self._settle(number) if number < self.next else self.prove(spans)

    def receive_announcement(self, opened: int, mark: Mark, spans: Iterable[SpanCounters]) -> Divergence | None:
        """Takes the count at which a rank's loader will end, told while its last batch is in hand.

        Args:
            opened: Number of the mark that opened the span.
            mark: The closing to come.
            spans: This rank's open spans, outermost first.
        """
        self._announced.setdefault(opened, mark)
        for old in [slot for slot in self._announced if slot < opened - 8]:
            del self._announced[old]
        return self.prove(spans)

    def announced(self, opened: int) -> bool:
        """Whether the end of the span opened by that mark has been announced."""
        return opened in self._announced

    def is_behind(self, spans: Iterable[SpanCounters]) -> bool:
        """Whether others have told of a place that this rank has yet to reach, so that every batch may be a proof."""
        return self.next in self._standing or any(tally.opened in self._announced for tally in spans)

    def prove(self, spans: Iterable[SpanCounters]) -> Divergence | None:
        """Applies the one rule that needs no time-out.

        A rank whose next mark is still *i* has diverged if it has started more batches than mark *i* stands at,
        or, where the loader was exhausted there, if it has more than that in hand; where the rank stopped, if it has
        asked for more.
        """
        innermost: SpanCounters | None = None
        for tally in spans:
            if tally.silent:
                continue
            innermost = tally
            promise = self._announced.get(tally.opened)
            if promise is not None and tally.fetched > promise.at and tally.opened not in self._muted:
                promised = Divergence("UnevenBatches", promise, tally.fetched, evaluation=tally.evaluation)
                return replace(promised, mark_index=tally.opened, announced=True)
        mark = self._standing.get(self.next)
        if mark is None or innermost is None or innermost.opened in self._muted:
            return None
        held = innermost.fetched if mark.reason == "exhausted" else max(innermost.started, innermost.requested)
        if held <= mark.at:
            return None
        uneven = mark.kind == "eval_end" and mark.reason != "exited" and innermost.evaluation
        requested = held > innermost.fetched
        return Divergence("UnevenBatches", mark, held, evaluation=uneven, mark_index=self.next, requested=requested)

    def side(self, rank: int, mark_index: int, announced: bool, spans: Iterable[SpanCounters]) -> bool | None:
        """Whether this rank has counted as the mark in dispute says; None if it has not got there, or has forgotten.

        Args:
            rank: This rank.
            mark_index: As in the finding.
            announced: As in the finding.
            spans: This rank's open spans, outermost first.
        """
        spans = list(spans)
        standing, own = self._heard.get(mark_index), self._passed.get(mark_index)
        if announced:
            standing, own = self._announced.get(mark_index), self._closed(mark_index)
        if standing is None:
            return None
        if standing.rank == rank:
            return True  # it may have announced a closing that it has yet to come to
        if own is not None and own.reason != standing.reason and (announced or _by_a_limit(own, standing)):
            return None  # one stopped there by a limit: what else its loader held nobody knows
        if own is not None:
            return own.at == standing.at if announced else compare(standing, own) is None
        ending = next((tally for tally in spans if announced and tally.opened == mark_index and tally.ends), None)
        if ending is not None:
            return ending.started == standing.at
        proof = self.prove(spans)
        return False if proof is not None and (proof.mark_index, proof.announced) == (mark_index, announced) else None

    def _closed(self, opened: int) -> Mark | None:
        """This rank's own mark that closed the span opened by mark `opened`."""
        span = self._passed[opened].span if opened in self._passed else None
        later = [self._passed[number] for number in sorted(self._passed) if number > opened]
        return next((mark for mark in later if mark.span == span and mark.kind.endswith("_end")), None)

    def first_ahead(self) -> Mark | None:
        """The mark that comes next for this rank, if another has passed it."""
        return self._standing.get(self.next)

    def leaver(self) -> Mark | None:
        """Where a rank stopped its last train epoch, if it has then ended the fit and this rank has not.

        It may have done so by a return, a `sys.exit` or an exception that was caught; its peers only lose it.
        """
        standing = self._standing.items()
        ended = {mark.rank for number, mark in standing if number >= self.next and mark.kind == "fit_end"}
        closings = [mark for _, mark in sorted(self._heard.items()) if mark.kind == "train_end"]
        return next((mark for mark in closings[-1:] if mark.reason == "stopped" and mark.rank in ended), None)

    def mute(self, spans: Iterable[SpanCounters]) -> None:
        """Accepts that the evaluations open on this rank are uneven, so that each is found once."""
        self._muted.update(tally.opened for tally in spans if tally.evaluation)

    def _settle(self, number: int) -> Divergence | None:
        standing, own = self._standing.get(number), self._pending.get(number)
        if standing is None or own is None:
            return None
        del self._pending[number]
        if number < self.next - 1:
            self._standing.pop(number, None)
        divergence = compare(standing, own)
        return None if divergence is None else replace(divergence, mark_index=number)


def _by_a_limit(own: Mark, standing: Mark) -> bool:
    """Whether a limit closed one rank's span at the very count at which the other's loader was exhausted."""
    return own.at == standing.at and {own.reason, standing.reason} == {"exhausted", "stopped"}


def compare(standing: Mark, own: Mark) -> Divergence | None:
    """Compares this rank's mark with the one that stands in its place.

    >>> compare(Mark("train_end", "train epoch 0", at=4), Mark("train_end", "train epoch 0", at=4)) is None
    True
    >>> compare(Mark("train_end", "train epoch 0", at=4), Mark("train_end", "train epoch 0", at=5)).kind
    'UnevenBatches'
    """
    if standing.reason == own.reason == "exited":
        return None  # they leave together, wherever a signal has met each of them
    if standing.kind != own.kind or standing.span != own.span:
        return Divergence("UnevenBatches", standing, own.at, own)
    if standing.at != own.at or standing.counts != own.counts:
        shorter = own.kind == "eval_end" and "exited" not in (standing.reason, own.reason)
        return Divergence("UnevenBatches", standing, own.at, own, evaluation=shorter)
    if (standing.steps, standing.chain) != (own.steps, own.chain):
        return Divergence("StepMismatch", standing, own.steps, own)
    return None

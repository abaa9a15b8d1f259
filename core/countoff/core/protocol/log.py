"""One rank's view of the shared log, by which ranks agree on the order of marks without ever waiting for one another.

All ranks write to one log in the job's store. Entry *n* exists once and is the same for everybody, because it is
written by a compare-and-set, in which the first writer wins. A rank appends what the log does not hold yet (its next
mark, the count at which its loader will end, a warning, a verdict), and compares its own marks with those in the log.

Nothing here does I/O or starts a thread. Entries come in through `LogView.receive_mark` and
`LogView.receive_announcement`, own marks through `LogView.reach`. Each returns a `Divergence` when two ranks cannot
both be right.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.records import Mark
from countoff.core.protocol.rule import Divergence, beyond_announcement, beyond_mark, compare_marks

_KEPT_MARKS = 64
"""Marks that are kept to tell, after a verdict, which ranks agree with the mark in dispute."""
_KEPT_PENDING = 1024
"""Own marks that may wait for the log's answer, which never comes where no rank writes."""
_KEPT_ANNOUNCEMENTS = 8


@dataclass
class LogView:
    """What one rank knows of the log, and what it has passed itself.

    Attributes:
        next: Index of this rank's next mark, counted from 0 in the order of passing.
    """

    next: int = 0
    _standing: dict[int, Mark] = field(default_factory=dict[int, Mark])  # in the log, and not yet compared
    pending: dict[int, Mark] = field(default_factory=dict[int, Mark])  # passed here, and not yet compared
    _announced: dict[int, Mark] = field(default_factory=dict[int, Mark])
    _accepted: set[int] = field(default_factory=set[int])  # evaluations found uneven, by the mark that opened them
    _passed: dict[int, Mark] = field(default_factory=dict[int, Mark])
    _received: dict[int, Mark] = field(default_factory=dict[int, Mark])
    _muted: bool = False

    def mute(self) -> None:
        """Compares no marks from here on: ranks that differ have been accepted, so their later marks differ too."""
        self._muted = True

    def reach(self, mark: Mark) -> tuple[int, Divergence | None]:
        """Passes this rank's next mark and compares it with the one in the log, if that is known.

        Returns:
            The mark's index, and what is wrong.
        """
        index = self.next
        self.next += 1
        for old in [each for each in self._standing if each < index]:
            del self._standing[old]
        self.pending[index] = self._passed[index] = mark
        self.pending.pop(index - _KEPT_PENDING, None)
        self._passed.pop(index - _KEPT_MARKS, None)
        return index, self._compare(index)

    def stands(self, index: int) -> bool:
        """Whether the log is known to hold a mark of this index."""
        return index in self._standing or (index < self.next and index not in self.pending)

    def receive_mark(self, index: int, mark: Mark, spans: Iterable[SpanCounters]) -> Divergence | None:
        """Receives a mark from the log. A later entry of the same index changes nothing.

        Args:
            index: The mark's index.
            mark: What the first rank wrote there.
            spans: This rank's open spans, outermost first.
        """
        if index not in self._standing and (index >= self.next or index in self.pending):
            self._standing[index] = mark
        self._received.setdefault(index, mark)
        self._received.pop(index - _KEPT_MARKS, None)
        return self._compare(index) if index < self.next else self.prove(spans)

    def receive_announcement(self, opened: int, closing: Mark, spans: Iterable[SpanCounters]) -> Divergence | None:
        """Receives the count at which a rank's loader will end, announced while that rank holds its last batch.

        Args:
            opened: Index of the mark that opened the span.
            closing: The closing mark to come.
            spans: This rank's open spans, outermost first.
        """
        self._announced.setdefault(opened, closing)
        for old in [index for index in self._announced if index < opened - _KEPT_ANNOUNCEMENTS]:
            del self._announced[old]
        return self.prove(spans)

    def announced(self, opened: int) -> int | None:
        """The batch that was announced as the last one of the span that this mark opened; None if none was."""
        closing = self._announced.get(opened)
        return None if closing is None else closing.at

    def is_behind(self, spans: Iterable[SpanCounters]) -> bool:
        """Whether other ranks have written a point that this rank has yet to reach; every batch may then be a proof."""
        if self._muted:
            return False
        return self.next in self._standing or any(span.opened in self._announced for span in spans)

    def prove(self, spans: Iterable[SpanCounters]) -> Divergence | None:
        """Applies the rule to this rank's counters and everything that other ranks have written ahead of it.

        Args:
            spans: This rank's open spans, outermost first.
        """
        if self._muted:
            return None
        innermost: SpanCounters | None = None
        for span in spans:
            if not span.compared:
                continue
            innermost = span
            closing = self._announced.get(span.opened)
            if closing is not None and span.opened not in self._accepted:
                divergence = beyond_announcement(closing, span)
                if divergence is not None:
                    return divergence
        mark = self._standing.get(self.next)
        if mark is None or innermost is None or innermost.opened in self._accepted:
            return None
        return beyond_mark(mark, self.next, innermost)

    def side(self, rank: int, mark_index: int, announced: bool, spans: Iterable[SpanCounters]) -> bool | None:
        """Whether this rank agrees with the disputed mark; None if unreached or evicted.

        Args:
            rank: This rank.
            mark_index: As in the divergence.
            announced: As in the divergence.
            spans: This rank's open spans, outermost first.
        """
        spans = list(spans)
        if announced:
            standing, own = self._announced.get(mark_index), self._closing_of(mark_index)
        else:
            standing, own = self._received.get(mark_index), self._passed.get(mark_index)
        if standing is None:
            return None
        if standing.rank == rank:
            return True  # it may have announced a closing that it has yet to reach
        if own is not None:
            if own.reason != standing.reason and (announced or _limited_at_the_same_count(own, standing)):
                return None  # a limit stopped one of them: nobody knows what else its loader held
            return own.at == standing.at if announced else _agree(standing, own)
        ending = next((span for span in spans if announced and span.opened == mark_index and span.ends), None)
        if ending is not None:
            return ending.started == standing.at
        proof = self.prove(spans)
        return False if proof is not None and (proof.mark_index, proof.announced) == (mark_index, announced) else None

    def first_ahead(self) -> Mark | None:
        """The mark that comes next for this rank, if another rank has passed it."""
        return self._standing.get(self.next)

    def exited_alone(self) -> Mark | None:
        """Where a rank left its last train epoch, if that rank has then ended the fit and this rank has not.

        It may have done so by a `return`, a `sys.exit` or an exception that was caught. Its peers only lose it.
        """
        standing = self._standing.items()
        ended = {mark.rank for index, mark in standing if index >= self.next and mark.kind == "fit_end"}
        closings = [mark for _, mark in sorted(self._received.items()) if mark.kind == "train_end"]
        early = ("stopped", "exited")
        return next((mark for mark in closings[-1:] if mark.reason in early and mark.rank in ended), None)

    def ended_first(self) -> int | None:
        """The rank that has ended the fit where this rank has not; None if there is none."""
        ahead = (mark for index, mark in self._standing.items() if index >= self.next and mark.kind == "fit_end")
        return next((mark.rank for mark in ahead if mark.reason != "interrupted"), None)

    def accept_uneven(self, spans: Iterable[SpanCounters]) -> None:
        """Accepts that the evaluations open on this rank are uneven, so that each one is found only once."""
        self._accepted.update(span.opened for span in spans if span.evaluation)

    def _closing_of(self, opened: int) -> Mark | None:
        """This rank's own mark that closed the span opened by mark `opened`."""
        span = self._passed[opened].span if opened in self._passed else None
        later = [self._passed[index] for index in sorted(self._passed) if index > opened]
        return next((mark for mark in later if mark.span == span and mark.kind.endswith("_end")), None)

    def _compare(self, index: int) -> Divergence | None:
        standing, own = self._standing.get(index), self.pending.get(index)
        if standing is None or own is None:
            return None
        del self.pending[index]
        if index < self.next - 1:
            self._standing.pop(index, None)
        return None if self._muted else compare_marks(standing, own, index)


def _agree(standing: Mark, own: Mark) -> bool:
    """Whether two marks have the same counts. Other micro-batches are a warning, and other rates another dispute."""
    divergence = compare_marks(standing, own)
    return divergence is None or divergence.micro_batches or divergence.kind == "LearningRateMismatch"


def _limited_at_the_same_count(own: Mark, standing: Mark) -> bool:
    """Whether a limit closed one rank's span at exactly the count at which the other rank's loader was exhausted."""
    return own.at == standing.at and {own.reason, standing.reason} == {"exhausted", "stopped"}

"""One rank's view of the shared log, by which ranks agree on the order of sync points, and never wait for one another.

All ranks write to one log in the job's store. Entry *n* exists once and is the same for everybody, because it is
written by a compare-and-set: the first rank that writes it wins. A rank appends what the log does not hold yet (its
next sync point, the count at which its loader will end, a warning, a verdict), and compares its own sync points with
those in the log.

Nothing here does I/O or starts a thread. Entries come in through `LogView.receive_sync_point` and
`LogView.receive_announcement`, own sync points through `LogView.reach`. Each returns a `Divergence` when two ranks
cannot both be right.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.records import SyncPoint
from countoff.core.protocol.rule import Divergence, beyond_announcement, beyond_sync_point, compare_sync_points

_KEPT_SYNC_POINTS = 64
"""Sync points that are kept to tell, after a verdict, which ranks agree with the sync point in dispute."""
_KEPT_PENDING = 1024
"""Own sync points that may wait for the log's answer, which never comes where no rank writes."""
_KEPT_ANNOUNCEMENTS = 8


@dataclass
class LogView:
    """What one rank knows of the log, and what it has passed itself.

    Attributes:
        next: Index of this rank's next sync point, counted from 0 in the order of passing.
    """

    next: int = 0
    _logged: dict[int, SyncPoint] = field(default_factory=dict[int, SyncPoint])  # in the log, and not yet compared
    pending: dict[int, SyncPoint] = field(default_factory=dict[int, SyncPoint])  # passed here, and not yet compared
    _announced: dict[int, SyncPoint] = field(default_factory=dict[int, SyncPoint])
    _accepted: set[int] = field(default_factory=set[int])  # uneven evaluations, by the sync point that opened them
    _passed: dict[int, SyncPoint] = field(default_factory=dict[int, SyncPoint])
    _received: dict[int, SyncPoint] = field(default_factory=dict[int, SyncPoint])
    _muted: bool = False

    def mute(self) -> None:
        """Compares no sync points from here on: ranks that differ are accepted, so their later ones differ too."""
        self._muted = True

    def reach(self, sync_point: SyncPoint) -> tuple[int, Divergence | None]:
        """Passes this rank's next sync point and compares it with the one in the log, if that is known.

        Returns:
            The sync point's index, and what is wrong.
        """
        index = self.next
        self.next += 1
        for old in [each for each in self._logged if each < index]:
            del self._logged[old]
        self.pending[index] = self._passed[index] = sync_point
        self.pending.pop(index - _KEPT_PENDING, None)
        self._passed.pop(index - _KEPT_SYNC_POINTS, None)
        return index, self._compare(index)

    def is_logged(self, index: int) -> bool:
        """Whether the log is known to hold a sync point of this index."""
        return index in self._logged or (index < self.next and index not in self.pending)

    def receive_sync_point(self, index: int, sync_point: SyncPoint, spans: Iterable[SpanCounters]) -> Divergence | None:
        """Receives a sync point from the log. A later entry of the same index changes nothing.

        Args:
            index: The sync point's index.
            sync_point: What the first rank wrote there.
            spans: This rank's open spans, outermost first.
        """
        if index not in self._logged and (index >= self.next or index in self.pending):
            self._logged[index] = sync_point
        self._received.setdefault(index, sync_point)
        self._received.pop(index - _KEPT_SYNC_POINTS, None)
        return self._compare(index) if index < self.next else self.prove(spans)

    def receive_announcement(self, opened: int, closing: SyncPoint, spans: Iterable[SpanCounters]) -> Divergence | None:
        """Receives the count at which a rank's loader will end, announced while that rank holds its last batch.

        Args:
            opened: Index of the sync point that opened the span.
            closing: The sync point that will close it.
            spans: This rank's open spans, outermost first.
        """
        self._announced.setdefault(opened, closing)
        for old in [index for index in self._announced if index < opened - _KEPT_ANNOUNCEMENTS]:
            del self._announced[old]
        return self.prove(spans)

    def announced(self, opened: int) -> int | None:
        """The batch that was announced as the last one of the span that this sync point opened; None if none was."""
        closing = self._announced.get(opened)
        return None if closing is None else closing.at

    def is_behind(self, spans: Iterable[SpanCounters]) -> bool:
        """Whether other ranks have written what this rank has yet to reach; every batch may then be a proof."""
        if self._muted:
            return False
        return self.next in self._logged or any(span.opened in self._announced for span in spans)

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
        sync_point = self._logged.get(self.next)
        if sync_point is None or innermost is None or innermost.opened in self._accepted:
            return None
        return beyond_sync_point(sync_point, self.next, innermost)

    def side(self, rank: int, sync_index: int, announced: bool, spans: Iterable[SpanCounters]) -> bool | None:
        """Whether this rank agrees with the disputed sync point; None if unreached or evicted.

        Args:
            rank: This rank.
            sync_index: As in the divergence.
            announced: As in the divergence.
            spans: This rank's open spans, outermost first.
        """
        spans = list(spans)
        if announced:
            logged, own = self._announced.get(sync_index), self._closing_of(sync_index)
        else:
            logged, own = self._received.get(sync_index), self._passed.get(sync_index)
        if logged is None:
            return None
        if logged.rank == rank:
            return True  # it may have announced a closing that it has yet to reach
        if own is not None:
            if own.reason != logged.reason and (announced or _limited_at_the_same_count(own, logged)):
                return None  # a limit stopped one of them: nobody knows what else its loader held
            return own.at == logged.at if announced else _agree(logged, own)
        ending = next((span for span in spans if announced and span.opened == sync_index and span.ends), None)
        if ending is not None:
            return ending.started == logged.at
        proof = self.prove(spans)
        return False if proof is not None and (proof.sync_index, proof.announced) == (sync_index, announced) else None

    def first_ahead(self) -> SyncPoint | None:
        """The sync point that comes next for this rank, if another rank has passed it."""
        return self._logged.get(self.next)

    def exited_alone(self) -> SyncPoint | None:
        """Where a rank left its last train epoch, if that rank has then ended the fit and this rank has not.

        It may have done so by a `return`, a `sys.exit` or an exception that was caught. Its peers only lose it.
        """
        logged = self._logged.items()
        ended = {sync_point.rank for index, sync_point in logged if index >= self.next and sync_point.kind == "fit_end"}
        closings = [sync_point for _, sync_point in sorted(self._received.items()) if sync_point.kind == "train_end"]
        early = ("stopped", "exited")
        return next(
            (sync_point for sync_point in closings[-1:] if sync_point.reason in early and sync_point.rank in ended),
            None,
        )

    def ended_first(self) -> int | None:
        """The rank that has ended the fit where this rank has not; None if there is none."""
        ahead = (
            sync_point
            for index, sync_point in self._logged.items()
            if index >= self.next and sync_point.kind == "fit_end"
        )
        return next((sync_point.rank for sync_point in ahead if sync_point.reason != "interrupted"), None)

    def accept_uneven(self, spans: Iterable[SpanCounters]) -> None:
        """Accepts that the evaluations open on this rank are uneven, so that each one is found only once."""
        self._accepted.update(span.opened for span in spans if span.evaluation)

    def _closing_of(self, opened: int) -> SyncPoint | None:
        """This rank's own sync point that closed the span opened by sync point `opened`."""
        span = self._passed[opened].span if opened in self._passed else None
        later = [self._passed[index] for index in sorted(self._passed) if index > opened]
        return next(
            (sync_point for sync_point in later if sync_point.span == span and sync_point.kind.endswith("_end")), None
        )

    def _compare(self, index: int) -> Divergence | None:
        logged, own = self._logged.get(index), self.pending.get(index)
        if logged is None or own is None:
            return None
        del self.pending[index]
        if index < self.next - 1:
            self._logged.pop(index, None)
        return None if self._muted else compare_sync_points(logged, own, index)


def _agree(logged: SyncPoint, own: SyncPoint) -> bool:
    """Whether two sync points have the same counts. Micro-batches are a warning, and rates another dispute."""
    divergence = compare_sync_points(logged, own)
    return divergence is None or divergence.micro_batches or divergence.kind == "LearningRateMismatch"


def _limited_at_the_same_count(own: SyncPoint, logged: SyncPoint) -> bool:
    """Whether a limit closed one rank's span at exactly the count at which the other rank's loader was exhausted."""
    return own.at == logged.at and {own.reason, logged.reason} == {"exhausted", "stopped"}

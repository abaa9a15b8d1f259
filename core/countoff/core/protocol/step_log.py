"""After which batches a rank's last optimizer steps came, for a verdict's table: sync points and ticks have a hash."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.records import Records, parse_count

__all__ = ["Apart", "StepLog", "first_apart"]

_KEPT = 256
"""Steps that are kept of a train epoch; a tick is at most 64 batches old, and answered some batches later."""
_RUNS = 8
_SPANS = 2
"""Train epochs in a record: at the end of one, some ranks have begun the next."""


class Apart(NamedTuple):
    """A batch after which one rank has stepped, and another one has not."""

    batch: int
    stepped: int
    other: int

    @property
    def in_words(self) -> str:
        """What the ranks did, as the end of a sentence.

        >>> Apart(4, 0, 1).in_words
        'rank 0 stepped after batch 4, and rank 1 did not'
        """
        return f"rank {self.stepped} stepped after batch {self.batch}, and rank {self.other} did not"

    @classmethod
    def from_json(cls, record: Any) -> Apart | None:
        """Reads what another rank has written; None if it is nothing of the kind."""
        numbers = cast("list[object]", record) if isinstance(record, list) else []
        return cls(*map(parse_count, numbers)) if len(numbers) == len(cls._fields) else None


class StepLog:
    """The batches of this rank's last optimizer steps, by train epoch. Only the training thread writes it."""

    def __init__(self) -> None:
        self._epochs: deque[_Epoch] = deque(maxlen=_SPANS)

    def begin(self, span: SpanCounters) -> None:
        """A train epoch begins."""
        self._epochs.append(_Epoch(span, span.started, deque(maxlen=_KEPT)))

    def step(self, span: SpanCounters) -> None:
        """An optimizer step was applied, the first one after the batches started so far."""
        if not self._epochs or self._epochs[-1].span is not span:
            self._epochs.append(_Epoch(span, max(0, span.started - 1), deque(maxlen=_KEPT)))
        self._epochs[-1].steps.append(span.started)

    def to_json(self, opened: Sequence[SpanCounters]) -> list[list[Any]]:
        """The log as JSON types: of each epoch its first sync point, between which batches it is whole, and its steps.

        Args:
            opened: The spans that are open: in these, a step may still follow the batch started last.
        """
        return [each.to_json(is_open=any(each.span is span for span in opened)) for each in self._epochs.copy()]


@dataclass
class _Epoch:
    span: SpanCounters
    begun: int
    steps: deque[int]

    def to_json(self, *, is_open: bool) -> list[Any]:
        steps, until = list(self.steps.copy()), max(0, self.span.started - is_open)
        runs = _runs_of(steps)
        after = steps[0] if len(steps) == _KEPT else self.begun
        if len(runs) > _RUNS:
            runs = runs[-_RUNS:]
            after = runs[0][0]
        return [self.span.opened, after, until, runs]


def _runs_of(steps: Iterable[int]) -> list[list[int]]:
    """Batches in order as runs of evenly spaced ones: the first, the last and the distance.

    >>> _runs_of([2, 4, 6, 7, 8])
    [[2, 6, 2], [7, 8, 1]]
    """
    runs: list[list[int]] = []
    for batch in steps:
        if runs and (runs[-1][0] == runs[-1][1] or batch - runs[-1][1] == runs[-1][2]):
            runs[-1] = [runs[-1][0], batch, batch - runs[-1][1]]
        else:
            runs.append([batch, batch, 1])
    return runs


def first_apart(rows: Records, ranks: Sequence[int]) -> Apart | None:
    """Returns the first batch that is known to have an optimizer step on one of two ranks alone.

    Args:
        rows: The rows of the verdict's table, by rank.
        ranks: Two ranks.
    """
    one, other = (_parse(rows[rank]) if rank in rows else {} for rank in ranks)
    for opened in sorted(one.keys() & other.keys()):
        (after, until, steps), (later, earlier, others) = one[opened], other[opened]
        differ = [batch for batch in steps ^ others if max(after, later) < batch <= min(until, earlier)]
        if differ:
            batch = min(differ)
            first, second = ranks if batch in steps else reversed(ranks)
            return Apart(batch, first, second)
    return None


def _parse(row: Mapping[str, Any]) -> dict[int, tuple[int, int, set[int]]]:
    """The epochs in a row, by the sync points that opened them; another version may not write them.

    Raises:
        KeyError, TypeError, ValueError: If they are there, and are none.
    """
    found: dict[int, tuple[int, int, set[int]]] = {}
    for opened, after, until, runs in list(row.get("stepped", ()))[:_SPANS]:
        steps = [range(parse_count(a), parse_count(b) + 1, parse_count(by) or 1) for a, b, by in runs[:_RUNS]]
        parse_count(sum(map(len, steps)), _KEPT + 1)
        batches = {batch for each in steps for batch in each}
        found[parse_count(opened)] = parse_count(after), parse_count(until), batches
    return found

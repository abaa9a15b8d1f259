"""Work inside a batch: how many micro-batches one rank ran for each of its optimizer steps.

The training thread adds 1 to the span's counter for each micro-batch. What is compared is made at each step. Where the
ranks hold the shards of one model, its forward passes are counted instead: there, one without a backward pass is a
collective too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from countoff.core.protocol.counters import SpanCounters, hash_step
from countoff.core.protocol.records import COUNTED_STEPS, MicroCounts


class StepWork(NamedTuple):
    """The micro-batches of a rank's current batch.

    Attributes:
        span: Name of the train epoch.
        first: The first batch of the step to which the current batch belongs.
        last: The current batch.
        since: Micro-batches since the last step.
        ran: Micro-batches of that step, if it was applied after the current batch; else 0.
    """

    span: str
    first: int
    last: int
    since: int
    ran: int


class PassWork(NamedTuple):
    """The forward passes of a sharded model in a rank's last step, and since then.

    Attributes:
        span: Name of the train epoch.
        done: First and last batch of the last step in it, and the passes of that step; empty while there is none.
        begun: First and last batch since then, and the passes begun in them. The first one is after the last one where
            no batch has begun since that step.
    """

    span: str
    done: tuple[int, ...]
    begun: tuple[int, ...]


@dataclass(slots=True)
class MicroBatchLog:
    """The micro-batches of this rank's optimizer steps, since the fit began and since they were last compared.

    Attributes:
        sharded: Whether the forward passes of a sharded model are counted instead.
        running: Whether such a pass runs now.
    """

    sharded: bool = False
    running: bool = False
    _hash: int = 0
    _any: bool = False
    _steps: int = 0
    _since: int = 0
    _span: SpanCounters | None = None
    _counted: int = 0
    _stepped: int = 0
    _has_stepped: bool = False  # in this span
    _open: bool = False  # whether another optimizer may still step in the batch of the last step
    _count: int = 0
    _first: int = 0
    _counts: list[int] = field(default_factory=list[int])
    _batches: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def begin(self, span: SpanCounters) -> None:
        """A train epoch begins; what was run before it belongs to no step."""
        self._close_step()
        self._span, self._counted, self._stepped = span, self._count_in(span), span.started
        self._has_stepped = False

    def step(self, span: SpanCounters) -> None:
        """An optimizer step was applied, the first one after the batches started so far."""
        self._close_step()
        if self._span is not span:
            self.begin(span)
        self._steps += 1
        self._open, self._first = True, min(self._stepped + 1, span.started)
        self._stepped, self._has_stepped = span.started, True
        counted = self._count_in(span)
        self._count, self._counted = counted - self._counted, counted

    def step_again(self, span: SpanCounters) -> None:
        """Another optimizer has stepped after the same batches: its micro-batches belong to the same step."""
        if self._open and self._span is span:
            counted = self._count_in(span)
            self._count += counted - self._counted
            self._counted = counted

    def work(self) -> StepWork | None:
        """Returns what this rank has run; None where no micro-batches are counted. For a thread that only looks."""
        span = self._span
        if span is None or self.sharded or not span.micro_batches:
            return None
        since = span.micro_batches - self._counted
        if self._stepped == span.started:
            return StepWork(span.name, self._first, self._stepped, since, self._count)
        return StepWork(span.name, self._stepped + 1, span.started, since, 0)

    def pass_work(self) -> PassWork | None:
        """Returns the passes of a sharded model; None where none are counted. For a thread that only looks."""
        span = self._span
        if span is None or not self.sharded:
            return None
        done = (self._first, self._stepped, self._count) if self._has_stepped else ()
        return PassWork(
            span.name, done, (self._stepped + 1, span.started, span.passes - self._counted + int(self.running))
        )

    def take(self) -> MicroCounts:
        """Returns what is to be compared now; the steps that it names begin anew with the next one."""
        self._close_step()
        name = self._span.name if self._span is not None else ""
        since, self._since = self._since, self._steps
        counts, batches = tuple(self._counts), tuple(self._batches)
        self._counts, self._batches = [], []
        return MicroCounts(self._hash if self._any else 0, since, counts, batches, name, self.sharded)

    def _count_in(self, span: SpanCounters) -> int:
        return span.passes if self.sharded else span.micro_batches

    def _close_step(self) -> None:
        if not self._open or self._span is None:
            return
        self._open = False
        self._any = self._any or self._count > 0
        self._hash = hash_step(self._hash, self._count)
        if len(self._counts) < COUNTED_STEPS:
            self._counts.append(self._count)
            self._batches.append((self._first, self._stepped))

"""What happens to one guard, as lines of its rank's trace.

The training thread hands over a line at the start and at the end of a span, and nothing in between: the trace's thread
reads the counters by itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from countoff.core import formats
from countoff.core.at_exit import at_exit
from countoff.core.checks.check import FitStart, Listener, Others
from countoff.core.ending import shutdown, verdict_file
from countoff.core.messages import plain
from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.evidence import Evidence
from countoff.core.protocol.records import Reason, Records
from countoff.core.session.liveness import hosts, stacks
from countoff.core.session.state import State
from countoff.core.settings import Settings
from countoff.core.trace import incident, writer
from countoff.core.trace.clocks import LOOK_SECONDS, ClockComparison
from countoff.core.trace.format import PAUSE_SECONDS, TICK_SECONDS
from countoff.core.verdict import Verdict

if TYPE_CHECKING:
    from countoff.core.session.store.channel import Channel
    from countoff.core.session.threads.writer import Writer
    from countoff.core.trace.writer import Line

_REPORTED = "reported_"
"""What the names of metrics begin with that a framework has reported."""
_USUAL_TIMES = 3
"""A pause is also longer than so many of the usual batches: where each takes seconds, none of them is a pause."""
_USUAL_BATCHES = 15
"""The usual batch is the median of so many looks."""
_CLOCK_SECONDS = 60.0
"""How often the clocks of hosts are compared."""
_CLOCK_APART_SECONDS = 0.01
"""A rank compares so much later than the rank before it: rank 0's store must not be asked by all hosts at once."""
_FLUSH_SECONDS = 0.5
"""A process that ends by a signal waits so long for its trace."""
_OVERSLEPT_SECONDS = 2 * writer.LOOK_SECONDS
"""A look that comes so late does not know when a pause before it ended."""


class Recorder(Listener):
    """Writes what happens to one guard into the trace of its rank.

    Args:
        state: The guard's state.
        number: Number of the guard in this process; equal on all ranks.
        directory: The directory of the trace.
        rates: Returns the learning rates in force; called on the trace's thread.
        totals: Returns the true totals and the reported ones as known by now, likewise.
        horizon: Returns the optimizer steps after which the learning-rate schedule ends, likewise; None: not known.
        framework: The framework's name; empty where it is not known.
    """

    def __init__(
        self,
        state: State,
        number: int,
        directory: str,
        rates: Callable[[], Sequence[float]] | None = None,
        totals: Callable[[], Mapping[str, float]] = dict[str, float],
        horizon: Callable[[], int | None] = lambda: None,
        framework: str = "",
    ) -> None:
        self._state = state
        self._number = number
        self._directory = directory
        self._rates = rates
        self._totals = totals
        self._horizon = horizon
        self._framework = framework
        self._last_totals: tuple[Mapping[str, float], int | None] = {}, None
        self._last_rates: list[float | None] | None = None
        self._failure = ""
        self._begun = self._finished = self._ended = False
        self._next_tick = self._next_clock = 0.0
        self.span: SpanCounters | None = None  # the innermost one by the lines so far; of the trace's thread
        self._guard_writer: Writer | None = None  # where there are other ranks
        self._counted_off = False
        self._versions: Mapping[str, str] = {}
        self._rows: Records = {}
        self._stacks: Records = {}
        self._flight_record: incident.FlightRecord | None = None
        self.pauses = Pauses(state.evidence)
        self._cancel: Callable[[], None] | None = at_exit(self.closed)
        # Last: its thread may look at this recorder before it returns.
        self.writer = writer.join(self, directory, state.rank, self._warn)

    # Told by the guard, on the training thread.

    def met(self, writer: Writer) -> None:
        """Takes the guard's writer, where there are other ranks."""
        self._guard_writer = writer

    def fit_started(self, start: FitStart, others: Others | None) -> None:  # noqa: D102
        state, plan = self._state, start.plan
        self._versions = {**verdict_file.versions(), **start.versions}
        line = self.line(
            "begin",
            v=formats.TRACE,
            rank=state.rank,
            world=state.world_size,
            host=hosts.own_name(),
            pid=os.getpid(),
            **({"framework": self._framework} if self._framework else {}),
            **({"part": list(state.part)} if state.part else {}),
            **({"before": plan.steps_before} if plan.steps_before else {}),
            run=verdict_file.run(),
            versions=self._versions,
            settings=changed(state.settings),
            plan={
                name: value for name, value in plan.to_json().items() if value is not None and type(value) is not dict
            },
        )

        def begin() -> list[Line]:
            self._begun = True  # on the trace's thread: no line of its own comes before this one
            return [line]

        if self._is_own:
            self.writer.put(begin)

    def counted_off(self) -> None:
        """Lets the trace tell, once a minute, how far this host's clock is ahead of rank 0's, if that is another host.

        The lowest rank of a host tells it for all of them.
        """
        self._next_clock = time.monotonic() + self._state.rank * _CLOCK_APART_SECONDS % _CLOCK_SECONDS
        self._counted_off = True

    def span_opening(self, span: SpanCounters) -> None:  # noqa: D102
        more = {"eval": True} if span.evaluation else {"at": span.started} if span.started else {}
        rates, steps = self.read_rates(), {"s": self._state.steps}
        self._move(
            span,
            self.line("open", span=span.name, **more),
            lambda: {**steps, **changed} if (changed := self.changed_rates(rates)) else {},
        )

    def span_closing(self, span: SpanCounters, reason: Reason, *, orderly: bool) -> None:  # noqa: D102
        content = {"span": span.name, "why": reason, **self._counts(span)}
        if span.unused is not None:
            content["unused"] = span.unused.batches
        outer = next((each for each in reversed(self._state.spans) if each is not span), None)
        rates = self.read_rates()
        self._move(outer, self.line("close", **content), lambda: self.changed_rates(rates))

    def _move(self, innermost: SpanCounters | None, line: Line, more: Callable[[], Line] = dict[str, Any]) -> None:
        """Puts a line of a span's start or end. A tick before it is of the span before, and one after it of the next.

        The state's spans change at another moment: a rank waits for the others between the line and that.
        """

        def move() -> list[Line]:
            self.span = innermost
            return [{**line, **more()}]

        if self._is_own:
            self.writer.put(move)

    def fit_ended(self) -> None:  # noqa: D102
        self._finished = True  # as its loop meant it to

    def failed_alone(self, error: BaseException) -> None:
        """Keeps the exception; `sys.exit()` is none. Where other ranks are told of it, the verdict tells it."""
        if isinstance(error, SystemExit) and not error.code:
            return
        self._failure = self._failure or shutdown.in_words(error)

    def closed(self) -> None:
        """Waits until the trace is written, 1.5 s at most; a second call does nothing."""
        if self._cancel is None:
            return
        deadline = time.monotonic() + writer.CLOSE_SECONDS
        cancel, self._cancel = self._cancel, None
        cancel()
        state = self._state
        self._failure = self._failure or self._failed()
        ended = state.end is not None and state.settings.on_divergence == "raise"
        self._end("failed" if self._failure else "verdict" if ended else "finished" if self._finished else "closed")
        writer.leave(self, self.writer)
        record = self._flight_record
        if record is not None and not record.wait(deadline - time.monotonic()):
            sentence = f"the incident in {self._directory!r} is without NCCL's flight record: NCCL does not answer"
            shutdown.print_line(state.rank, sentence)

    # Called by other threads.

    def warned(self, warning: Verdict) -> None:
        """This rank has printed a warning."""
        self._put("warning", verdict=warning.to_dict())

    def rolled(self, span: str, closed: Mapping[int, float]) -> None:
        """Rank 0 knows when each rank has closed a span.

        Args:
            span: The span's name.
            closed: When each rank did, by rank.
        """
        last = max(closed.values())
        ranks = sorted(rank for rank, at in closed.items() if at == last)
        self._put("roll", span=span, spread=round(last - min(closed.values()), 6), last=ranks)

    def read_once(self, span: str, rows: int, repeated: int, dropped: int) -> None:
        """Rank 0 knows that each sample was read once in a train epoch, but for what the plan has; see `Observer`."""
        planned = {name: value for name, value in (("repeated", repeated), ("dropped", dropped)) if value}
        self._put("once", span=span, rows=rows, **planned)

    def stood_still(self) -> None:
        """This rank takes part in a stall, or has a verdict: where its main thread is."""
        with contextlib.suppress(Exception):  # evidence only: the verdict is printed without it
            place = stacks.thread(self._state.evidence.trainer)
            self._put("stacks", state=place.state, frames=place.stack)

    def posted(self, channel: Channel) -> None:
        """Posts where this rank's main thread is, for the incident; see `Observer`."""
        with contextlib.suppress(Exception):  # evidence only: the verdict is printed without it
            self._stacks = {
                self._state.rank: incident.post_stack(channel, self._state.rank, self._state.evidence.trainer)
            }

    def gathered(self, channel: Channel, rows: Records) -> None:
        """Keeps what the ranks had when the verdict came, for the incident; see `Observer`."""
        self._rows = rows
        if self._stacks and rows:
            with contextlib.suppress(Exception):  # evidence only: whatever the store does, the verdict is printed
                self._stacks = incident.read_stacks(channel, list(rows))

    def concluded(self, verdict: Verdict, *, whole: bool) -> None:
        """This rank is about to print the verdict; see `Observer`."""
        self._put("verdict", verdict=verdict.to_dict())
        self.stood_still()
        if self._state.settings.on_divergence == "raise":
            self._failure = self._failure or self._failed()
            self._end("failed" if self._failure else "verdict")
            self._leave_incident(verdict, whole=whole)

    def ended_by(self, signal: str) -> None:
        """This process is about to end by a signal; see `Observer`."""
        if not self._ended:
            self._failure = signal
            self._end("signal")
        self.writer.flush(_FLUSH_SECONDS)
        if self._flight_record is not None:
            self._flight_record.wait(_FLUSH_SECONDS)

    def _leave_incident(self, verdict: Verdict, *, whole: bool) -> None:
        """Has the incident written, where this rank is the one that does, and what only this rank knows of it."""
        state, directory, found = self._state, self._directory, self._stacks
        with contextlib.suppress(Exception):  # evidence only
            found = found or {state.rank: incident.stack_record(state.evidence.trainer)}

        def write() -> list[Line]:
            if whole and not incident.is_others(directory, state.rank, state.ranks[0], verdict):
                incident.write(directory, verdict, rank=state.rank, rows=self._rows, found=found)
            self._flight_record = incident.FlightRecord(directory, state.rank)
            return []

        self.writer.put(write)

    def look(self, now: float) -> list[Line]:
        """Returns a tick, if one is due, and a pause that has ended; called on the trace's thread."""
        state, lines = self._state, list[Any]()
        if not self._begun or self._finished or self._ended:
            return lines
        span = self.span
        lines += self._pause(self.pauses.look(now, span, state.steps))
        if self._counted_off and now >= self._next_clock and state.end is None:
            self._compare_clock(now)
        if now >= self._next_tick:
            lines += self._changed_totals()
            if span is not None:
                lines.append(self.line("tick", **self._counts(span), **self.changed_rates(self.read_rates())))
            self._next_tick = now + TICK_SECONDS
        return lines

    def _compare_clock(self, now: float) -> None:
        writer, state = self._guard_writer, self._state
        if writer is None:
            return
        heartbeats = writer.session.heartbeats
        if heartbeats.all_registered and min(heartbeats.neighbours, default=-1) == state.rank and not state.leads:
            self._next_clock = now + _CLOCK_SECONDS
            every = heartbeats.seconds
            writer.poll_every(ClockComparison(self._clocks_compared, state.ranks[0], every), LOOK_SECONDS * every)

    def _clocks_compared(self, ahead: float, error: float) -> None:
        self._put("clock", ahead=round(ahead, 6), error=round(error, 6))

    def _pause(self, pause: _Pause | None) -> list[Line]:
        if pause is None:
            return []
        return [self.line("pause", t=pause.began, s=round(pause.seconds, 3), **pause.where)]

    def _counts(self, span: SpanCounters) -> dict[str, Any]:
        return {"b": span.started, "s": self._state.steps, "l": round(span.loader_seconds, 3)}

    def read_rates(self) -> list[float | None] | None:
        """The learning rates in force; None if they are not known."""
        with contextlib.suppress(Exception):  # the training thread may change its optimizers in this moment
            return [_short(rate) for rate in self._rates()] if self._rates is not None else None
        return None

    def changed_rates(self, rates: list[float | None] | None) -> dict[str, Any]:
        """Learning rates as a line has them, if they are not those of the line before; on the trace's thread."""
        if not rates or rates == self._last_rates:
            return {}
        self._last_rates = rates
        return {"lr": rates}

    def _changed_totals(self) -> list[Line]:
        """The totals, if they are not those of the line before; on rank 0, or on every rank where plans differ."""
        totals = self._last_totals
        with contextlib.suppress(Exception):  # the training thread may be changing them
            totals = dict(self._totals()), self._horizon()
        end = self._state.end
        plans_differ = end is not None and end.kind == "PlanMismatch"
        if not (self._state.leads or plans_differ) or totals == self._last_totals:
            return []
        self._last_totals = totals
        named = {name.removeprefix("countoff/"): value for name, value in totals[0].items()}
        true = {name: value for name, value in named.items() if not name.startswith(_REPORTED)}
        reported = {name.removeprefix(_REPORTED): value for name, value in named.items() if name.startswith(_REPORTED)}
        horizon = {} if totals[1] is None else {"horizon": totals[1]}
        return [self.line("totals", true=true, reported=reported, **horizon)]

    def _failed(self) -> str:
        failure = self._state.failure
        return "" if failure is None else failure.event.removeprefix("raised ")

    def _end(self, how: Literal["finished", "verdict", "failed", "closed", "signal"]) -> None:
        if self._is_own:
            self.writer.put(self._changed_totals)
            if how != "finished":  # what a program does after its last span is no pause
                self.writer.put(lambda: self._pause(self.pauses.open(time.monotonic())))
            self._put("end", how=how, **({"what": plain(self._failure)} if self._failure else {}))
            self._ended = True

    def _put(self, kind: str, **content: Any) -> None:
        if self._is_own:
            self.writer.put(self.line(kind, **content))

    @property
    def _is_own(self) -> bool:
        """Whether the fit goes on, in this process; a process that was forked off it has no writer."""
        return not self._ended and os.getpid() == self._state.pid

    def line(self, kind: str, t: float | None = None, **content: Any) -> Line:
        """Returns a line of this fit's trace.

        Args:
            kind: Its kind.
            t: When it happened, in seconds since the epoch; None: now.
            content: What it says.
        """
        number = {"g": self._number} if self._number else {}
        return {"k": kind, "t": writer.timestamp(t), **number, **content}

    def _warn(self, why: str) -> None:
        sentence = f"the trace in {self._directory!r} ends here: {plain(why)}; training goes on"
        shutdown.print_line(self._state.rank, sentence)


@dataclasses.dataclass(frozen=True)
class _Pause:
    """A time in which no batch began.

    Attributes:
        began: When it began, in seconds since the epoch.
        seconds: How long it was.
        where: Where the main thread was, as a line has it.
    """

    began: float
    seconds: float
    where: dict[str, Any]


class Pauses:
    """Finds the pauses of a fit by looking at its counters every now and then.

    Args:
        evidence: Which thread trains.
    """

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._progress: object = None
        self.span: SpanCounters | None = None
        self._batches = 0
        self._since = self._looked = time.monotonic()
        self.where: dict[str, Any] | None = None
        self._usual: deque[float] = deque(maxlen=_USUAL_BATCHES)

    def look(self, now: float, span: SpanCounters | None, steps: int) -> _Pause | None:
        """Returns the pause that has ended since the last look, if one has.

        Args:
            now: The time, by `time.monotonic()`.
            span: The innermost open span.
            steps: Optimizer steps of the fit.
        """
        batches = 0 if span is None else span.started
        progress = id(span), batches, steps
        pause = None
        if progress != self._progress:
            if self.where is not None:
                pause = self.open(self._looked if now - self._looked > _OVERSLEPT_SECONDS else now)
            if span is self.span and batches > self._batches:
                self._usual.append((now - self._since) / (batches - self._batches))
            self._progress, self._since, self.where = progress, now, None
            self.span, self._batches = span, batches
        elif self.where is None and now - self._since > max(PAUSE_SECONDS, _USUAL_TIMES * self._usual_seconds()):
            place = stacks.thread(self._evidence.trainer)
            self.where = {"in": place.state, "at": list(place.frames)}
        self._looked = now
        return pause

    def open(self, now: float) -> _Pause | None:
        """Returns the pause that lasts at a time, by `time.monotonic()`."""
        if self.where is None:
            return None
        return _Pause(time.time() - (time.monotonic() - self._since), now - self._since, self.where)

    def _usual_seconds(self) -> float:
        return statistics.median_low(self._usual) if self._usual else 0.0


def changed(settings: Settings) -> dict[str, Any]:
    """The settings that are not the default ones; those that may hold secrets are left out."""
    defaults = Settings()
    values = settings.without_secrets()
    return {name: value for name, value in values.items() if value != getattr(defaults, name)}


def _short(rate: float) -> float | None:
    """A learning rate with as many digits as a reader can use; None where it is no number.

    >>> _short(0.1 * 3), _short(float("nan"))
    (0.3, None)
    """
    return float(f"{rate:.6g}") if math.isfinite(rate) else None

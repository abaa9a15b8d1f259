"""What a trace says, as values: runs of a job, and in each run what one rank has recorded.

All times are in seconds since the epoch on the clock of rank 0's host. All texts are printable and of bounded length,
all numbers are finite: `reader` has checked them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import mode
from typing import NamedTuple

from countoff.core.verdict import Verdict
from countoff.report.ranks import ranks_by

Value = str | int | float | bool | None


class Tick(NamedTuple):
    """How far a rank was at one moment.

    Attributes:
        time: The moment.
        batches: Batches of the span.
        steps: Optimizer steps of the training.
        loader_seconds: Seconds waited for the loader in this span.
        learning_rates: One for each parameter group; empty if none is known.
    """

    time: float
    batches: int
    steps: int
    loader_seconds: float
    learning_rates: tuple[float, ...]


@dataclass(slots=True)
class Span:
    """One train epoch or one evaluation of a rank.

    Attributes:
        name: Its name, the same on all ranks: ``train epoch 0``.
        is_evaluation: Whether it is an evaluation.
        begin: When it was opened.
        end: When it was closed; None if it is open, or was when the process ended.
        why: Why it was closed: ``exhausted``, ``stopped`` or ``exited``; empty while it is open.
        depth: Spans that were open around it.
        before: Batches of this span before a resume, which another run has counted.
        batches: Batches of this span, as far as known.
        steps: Optimizer steps of the training until then.
        loader_seconds: Seconds waited for the loader.
        at_verdict: Whether the table of a verdict has these counts, which are later than those of the last tick.
        fetched: Batches that it had fetched when a verdict came; None if no verdict tells.
        unused: Batches that were left in the loader; None if not known.
        start: How far the rank was at its begin, where the learning rates had changed; else None.
        ticks: How far the rank was meanwhile, thinned out where the trace is long.
    """

    name: str
    is_evaluation: bool
    begin: float
    end: float | None = None
    why: str = ""
    depth: int = 0
    before: int = 0
    batches: int = 0
    steps: int = 0
    loader_seconds: float = 0.0
    at_verdict: bool = False
    fetched: int | None = None
    unused: int | None = None
    start: Tick | None = None
    ticks: list[Tick] = field(default_factory=list)

    @property
    def last(self) -> float:
        """When it ended, or the last that is known of it."""
        if self.end is not None:
            return self.end
        return self.ticks[-1].time if self.ticks else self.begin

    @property
    def read(self) -> int:
        """Batches of this span, without those before a resume."""
        return max(0, self.batches - self.before)

    @property
    def points(self) -> list[Tick]:
        """How far the rank was, from the begin on."""
        return [self.start or Tick(self.begin, self.before, 0, 0.0, ()), *self.ticks]

    @property
    def is_measured(self) -> bool:
        """Whether the waits for the loader are known; some frameworks do not tell them of evaluations."""
        return not self.is_evaluation or self.loader_seconds > 0


class Pause(NamedTuple):
    """A time of more than a second without a batch.

    Attributes:
        begin: When it began.
        seconds: How long it was.
        where: ``loader``, ``collective`` or ``code``.
        frames: Where the main thread was, innermost first.
    """

    begin: float
    seconds: float
    where: str
    frames: tuple[str, ...]


class Stack(NamedTuple):
    """Where a rank's main thread was.

    Attributes:
        time: When.
        state: What the rank did, as ``collective``.
        frames: The frames, innermost first; none where the stack could not be had.
    """

    time: float
    state: str
    frames: tuple[str, ...]


class Roll(NamedTuple):
    """One roll call, as rank 0 has seen it.

    Attributes:
        time: When.
        span: The span in which it was.
        spread_seconds: Seconds from the first rank to the last.
        last: The ranks that came last.
    """

    time: float
    span: str
    spread_seconds: float
    last: tuple[int, ...]


class ReadOnce(NamedTuple):
    """A train epoch in which all ranks have read each sample once, as rank 0 has measured.

    Attributes:
        span: The epoch's name.
        rows: Samples of the dataset.
        repeated: Those that were read once more, as planned.
        dropped: Those that were left out, as planned.
    """

    span: str
    rows: int
    repeated: int
    dropped: int


class Ending(NamedTuple):
    """How a fit has ended.

    Attributes:
        time: When.
        how: ``finished``, ``verdict``, ``failed``, ``closed`` or ``signal``.
        what: More about it, as the exception or the signal; may be empty.
    """

    time: float
    how: str
    what: str


@dataclass(slots=True)
class Fit:
    """What one rank has recorded of one fit. A restarted process, or a second fit in a process, is another one.

    Attributes:
        rank: The rank.
        begin: When the fit began; the time of the first line if that is not known.
        last: The time of the last line.
        directory: Where its trace is.
        number: Number of the fit in its process, from 0; equal on all ranks.
        world_size: Ranks of the job, or of the part of it that is compared; 0 if that is not known.
        part: Which ranks these are, if they are a part of the job.
        host: The host's name; empty if that is not known.
        pid: Process on that host; 0 if that is not known.
        framework: The name of the framework; empty if that is not known.
        run: How a scheduler names this run.
        versions: Versions of Python, countoff, torch and the framework.
        settings: The settings that are not the default.
        plan: The known values of the fit's plan.
        clock_error: By how many seconds this host's clock may still differ from rank 0's; None if that is not known.
        spans: The spans in the order in which they were opened.
        dropped_spans: Spans that were left out of `spans` because there are too many.
        dropped_batches: Batches of those of them that are train epochs, without those before a resume.
        dropped_loader_seconds: Seconds waited for the loader in all of them.
        dropped_span_seconds: Seconds in those of them that were not inside of another one.
        dropped_lines: Lines that the rank could not write, because its file system was too slow.
        open: The spans that are open, the innermost last.
        steps_before: Optimizer steps before the checkpoint from which the fit resumes.
        steps: Optimizer steps of the training: those of the fit, and those before it.
        tick: The last tick.
        learning_rates: The last ones; empty if none are known.
        pauses: The pauses, only the longest if there are many.
        pause_seconds: Seconds of all pauses.
        warnings: Each warning once.
        rolls: Roll calls; rank 0 records them.
        read_once: Train epochs in which each sample was read once; rank 0 records them.
        true_totals: Totals of the run that are true, by the name of the metric.
        reported_totals: The same as the framework reports them.
        horizon: Steps of the training after which the learning-rate schedule would have ended; None if that is not
            known.
        stacks: The last stacks of the main thread.
        verdict: The verdict that this rank has received.
        ending: How it left; None if it was killed, or still runs.
    """

    rank: int
    begin: float
    last: float
    directory: str = ""
    number: int = 0
    world_size: int = 0
    part: tuple[int, ...] = ()
    host: str = ""
    pid: int = 0
    framework: str = ""
    run: Mapping[str, Value] = field(default_factory=dict)
    versions: Mapping[str, Value] = field(default_factory=dict)
    settings: Mapping[str, Value] = field(default_factory=dict)
    plan: Mapping[str, Value] = field(default_factory=dict)
    clock_error: float | None = None
    spans: list[Span] = field(default_factory=list)
    dropped_spans: int = 0
    dropped_batches: int = 0
    dropped_loader_seconds: float = 0.0
    dropped_span_seconds: float = 0.0
    dropped_lines: int = 0
    open: list[Span] = field(default_factory=list)
    steps_before: int = 0
    steps: int = 0
    tick: Tick | None = None
    learning_rates: tuple[float, ...] = ()
    pauses: list[Pause] = field(default_factory=list)
    pause_seconds: float = 0.0
    warnings: list[Verdict] = field(default_factory=list)
    rolls: list[Roll] = field(default_factory=list)
    read_once: list[ReadOnce] = field(default_factory=list)
    true_totals: Mapping[str, float] = field(default_factory=dict)
    reported_totals: Mapping[str, float] = field(default_factory=dict)
    horizon: int | None = None
    stacks: list[Stack] = field(default_factory=list)
    verdict: Verdict | None = None
    ending: Ending | None = None

    @property
    def end(self) -> float:
        """The time of the last line; of a fit that has finished, the end of its last span.

        A loop of the user's own that is not closed has finished when its program ends, which may be much later.
        """
        if self.ending is None or self.ending.how != "finished":
            return self.last
        return next((span.last for span in reversed(self.spans) if not span.depth), self.last)

    @property
    def batches(self) -> int:
        """Batches of all train epochs of the fit."""
        return self.dropped_batches + sum(span.read for span in self.spans if not span.is_evaluation)

    @property
    def loader_seconds(self) -> float:
        """Seconds waited for the loader in all its spans."""
        return self.dropped_loader_seconds + sum(span.loader_seconds for span in self.spans)

    @property
    def span_seconds(self) -> float:
        """Seconds in train epochs and evaluations."""
        return self.dropped_span_seconds + sum(span.last - span.begin for span in self.spans if not span.depth)

    def shift(self, seconds: float) -> None:
        """Adds as many seconds to all times."""
        self.begin += seconds
        self.last += seconds
        for span in self.spans:
            span.begin += seconds
            span.end = None if span.end is None else span.end + seconds
            span.start = span.start and span.start._replace(time=span.start.time + seconds)
            span.ticks[:] = [tick._replace(time=tick.time + seconds) for tick in span.ticks]
        self.pauses[:] = [pause._replace(begin=pause.begin + seconds) for pause in self.pauses]
        self.rolls[:] = [roll._replace(time=roll.time + seconds) for roll in self.rolls]
        self.stacks[:] = [stack._replace(time=stack.time + seconds) for stack in self.stacks]
        self.tick = self.tick and self.tick._replace(time=self.tick.time + seconds)
        self.ending = self.ending and self.ending._replace(time=self.ending.time + seconds)


@dataclass(slots=True)
class Run:
    """One fit of the job on all its ranks.

    Attributes:
        fits: What each rank has recorded, by rank, in ascending order.
    """

    fits: dict[int, Fit] = field(default_factory=dict)

    @property
    def steps_before(self) -> int:
        """Optimizer steps before the checkpoint from which the run resumes; 0 if it begins a training."""
        return max((fit.steps_before for fit in self.fits.values()), default=0)

    @property
    def begin(self) -> float:
        """When the first rank began."""
        return min((fit.begin for fit in self.fits.values()), default=0.0)

    @property
    def end(self) -> float:
        """When the last rank had ended, or the time of its last line."""
        return max((fit.end for fit in self.fits.values()), default=0.0)

    @property
    def world_size(self) -> int:
        """Ranks of the job, or of its part, as most ranks say; never fewer than the trace has."""
        if part := self._part:
            return len(part)
        said = [fit.world_size for fit in self.fits.values() if fit.world_size]
        return max(max(self.fits, default=-1) + 1, mode(said) if said else 0)

    @property
    def missing(self) -> list[int]:
        """Ranks of which the trace has nothing."""
        return [rank for rank in self._part or range(self.world_size) if rank not in self.fits]

    @property
    def _part(self) -> tuple[int, ...]:
        return next((fit.part for fit in self.fits.values()), ())

    @property
    def hosts(self) -> dict[str, tuple[int, ...]]:
        """Ranks by host, as far as hosts are known."""
        return ranks_by({rank: fit.host for rank, fit in self.fits.items() if fit.host})

    @property
    def horizons(self) -> list[int]:
        """The steps after which learning-rate schedules would have ended, as far as ranks know them."""
        return sorted({fit.horizon for fit in self.fits.values() if fit.horizon})

    @property
    def verdict(self) -> Verdict | None:
        """The verdict, with the table of ranks if a rank has recorded that."""
        found = [fit.verdict for fit in self.fits.values() if fit.verdict is not None]
        return min(found, key=lambda verdict: (not verdict.rows, verdict.time), default=None)

    @property
    def warnings(self) -> list[Verdict]:
        """Each warning once, in the order of time."""
        found: dict[tuple[str, str], Verdict] = {}
        for fit in self.fits.values():
            for warning in fit.warnings:
                found.setdefault((warning.kind, warning.sentence), warning)
        return sorted(found.values(), key=lambda warning: warning.time)


@dataclass(slots=True)
class Incident:
    """What a job that a verdict ended has left beside its trace.

    Attributes:
        verdict: The verdict, if the file has one.
        stacks: Where the main threads of ranks were: the ranks, their state, the frames; fewest ranks first.
    """

    verdict: Verdict | None = None
    stacks: list[tuple[tuple[int, ...], str, tuple[str, ...]]] = field(default_factory=list)


@dataclass(slots=True)
class Trace:
    """All that was read.

    Attributes:
        directories: Where it was read.
        runs: The runs in the order of time: more than one after a restart, or where a process trains twice. A fit
            that was begun again from a checkpoint before it had trained is none.
        skipped: Lines that could not be read.
        problems: Files that could not be read, and why.
        incidents: What directories have of a verdict, beside the files of ranks.
    """

    directories: list[str]
    runs: list[Run] = field(default_factory=list)
    skipped: int = 0
    problems: list[str] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict | None:
        """The verdict of the last run; None if that has none."""
        if self.runs and (found := self.runs[-1].verdict):
            return found
        left = [incident.verdict for incident in self.incidents if incident.verdict]
        begin = self.runs[-1].begin if self.runs else 0.0
        return next((verdict for verdict in left if verdict.time >= begin), None)

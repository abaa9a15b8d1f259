"""What follows from a trace: which ranks behaved alike, who is slow, how much each counted, and where they differ.

Pure functions from a run to values. They find what is worth a look, and accuse nobody: only a verdict does.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from countoff.core.trace.format import COMPARED_LIMITS, COMPARED_PLAN, COMPARED_SETTINGS, SILENT_SECONDS
from countoff.core.words import count_of, names_of
from countoff.report.model import Fit, Run, Span, Trace, Value
from countoff.report.ranks import odd_ranks, ranks_by

_TOLD_FAILURES, _TOLD_CHARACTERS = 2, 200
"""Different failures that a headline tells, and characters of each."""
_NOISE_SECONDS = 0.01
"""Ranks that are no farther apart come at the same time."""
_SLOW_SECONDS, _SLOW_SHARE, _SLOW_TIMES = 1.0, 0.05, 1.5
"""A rank waits longer than others if it is by this many seconds, this share of the span, and as many times as long."""


class Key(NamedTuple):
    """One span of all ranks: its name, and how many spans of this name came before it."""

    name: str
    number: int

    def __str__(self) -> str:
        return f"{self.name} ({self.number + 1})" if self.number else self.name


@dataclass(frozen=True)
class RankClass:
    """Ranks that behaved alike.

    Attributes:
        ranks: The ranks, ascending.
        reasons: Why they are not like most others; empty for these.
        fit: What the first of them has recorded; None if none of them has left a trace.
        hosts: The names of their hosts.
    """

    ranks: tuple[int, ...]
    reasons: tuple[str, ...]
    fit: Fit | None
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class Pace:
    """Who was slow in one span.

    Attributes:
        key: The span.
        is_evaluation: Whether it is an evaluation.
        seconds: Its length, as half of the ranks had it that have closed it; if none has, how long it lasted at least.
        closed: Whether a rank has closed it.
        spread_seconds: Seconds from the first rank at its end to the last; None with fewer than two ranks at its end.
        last: The rank that was last at its end; None if the spread is no more than clocks and noise explain.
        measured: Whether the waits for the loader were measured; some frameworks do not tell them of evaluations.
        waited: The rank whose loader waited longest.
        waited_seconds: Seconds that it waited.
        median_seconds: Seconds that half of the other ranks waited at least.
        slow: Ranks that waited clearly longer than most.
        paused: The rank with the longest pause in its own code or its loader, not in a collective; None without one.
        pause_seconds: Seconds of that pause.
        pause_is_odd: Whether it is clearly longer than the longest ones of most ranks.
    """

    key: Key
    is_evaluation: bool
    seconds: float
    closed: bool
    spread_seconds: float | None
    last: int | None
    measured: bool
    waited: int
    waited_seconds: float
    median_seconds: float
    slow: tuple[int, ...]
    paused: int | None
    pause_seconds: float
    pause_is_odd: bool


@dataclass(frozen=True)
class HostPace:
    """What one host's ranks have waited.

    Attributes:
        host: The host's name.
        ranks: Its ranks.
        loader_seconds: Seconds that one of its ranks waited for its loader, on average.
        loader_share: The same as a share of the time in train epochs and evaluations.
        last: Spans at whose end one of its ranks was the last.
        pause_seconds: Seconds of pauses of one of its ranks, on average.
    """

    host: str
    ranks: tuple[int, ...]
    loader_seconds: float
    loader_share: float
    last: int
    pause_seconds: float


class Counts(NamedTuple):
    """What one rank has counted in one span; None: not known."""

    batches: int
    steps: int
    unused: int | None
    repeated: int | None
    closed: bool
    fetched: int | None = None


@dataclass(frozen=True)
class CountsRow:
    """The counts of one span, one cell per class of ranks.

    Attributes:
        key: The span.
        cells: What each class has counted; None if it has no such span.
        odd: Whether the cell differs from what most ranks have counted.
    """

    key: Key
    cells: tuple[Counts | None, ...]
    odd: tuple[bool, ...]


@dataclass(frozen=True)
class CountsTable:
    """Counts per span and class of ranks.

    Attributes:
        classes: The ranks of each column; those with other counts than most come first.
        rows: The spans.
    """

    classes: tuple[tuple[int, ...], ...]
    rows: tuple[CountsRow, ...]


class PlanRow(NamedTuple):
    """A value of the plan in which ranks differ.

    Attributes:
        name: The name of the value, as ``batch_size``.
        groups: Each value as text, and the ranks that have it; those of the fewest ranks first.
    """

    name: str
    groups: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def sentence(self) -> str:
        """The values and whose they are."""
        parts = [f"{value} on {names_of(ranks)}" for value, ranks in self.groups[:4]]
        return f"{self.name}: {'; '.join(parts)}{'; …' if len(self.groups) > 4 else ''}"


class Totals(NamedTuple):
    """The totals of a class of ranks.

    Attributes:
        ranks: The ranks that have told them. Where the plans of all ranks agree, rank 0 tells them for all.
        true: The totals that are true, by metric.
        reported: Those that the framework reports.
    """

    ranks: tuple[int, ...]
    true: Mapping[str, float]
    reported: Mapping[str, float]

    @property
    def rows(self) -> list[tuple[str, float | None, float | None]]:
        """Each metric, its true number and the reported one; None: not known."""
        return [(name, self.true.get(name), self.reported.get(name)) for name in {**self.true, **self.reported}]


@dataclass(frozen=True)
class Parting:
    """A place where the counts of ranks part.

    Attributes:
        time: When the first rank had reached its last batch or step of this span.
        key: The span.
        noun: What was counted: ``batch`` or ``step``.
        groups: Each number, and the ranks that have it; the smallest number first.
    """

    time: float
    key: Key
    noun: str
    groups: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def sentence(self) -> str:
        """The two numbers and whose they are."""
        parts = [f"{names_of(ranks)}: {count_of(number, self.noun)}" for number, ranks in self.groups[:4]]
        more = "; …" if len(self.groups) > 4 else ""
        return f"the ranks' counts begin to differ in {self.key}: {'; '.join(parts)}{more}"


def headline(trace: Trace) -> str:
    """What happened, in one line: the verdict, or how much was trained without one, and which ranks did not finish.

    >>> headline(Trace(directories=[]))
    'no verdict: 0 epochs, 0 ranks, 0 s'
    """
    if (verdict := trace.verdict) is not None:
        return verdict.headline
    epochs = {key for run in trace.runs for key, spans in spans_of(run).items() if not _any(spans).is_evaluation}
    ranks = max((run.world_size for run in trace.runs), default=0)
    seconds = sum(run.end - run.begin for run in trace.runs)
    earlier = any(run.verdict for run in trace.runs[:-1])
    where = f"no verdict in run {len(trace.runs)} of {len(trace.runs)}" if earlier else "no verdict"
    trained = f"{where}: {count_of(len(epochs), 'epoch')}, {count_of(ranks, 'rank')}, {duration(seconds)}"
    return "; ".join([trained, *(_unfinished(trace.runs[-1]) if trace.runs else ())])


def is_healthy(trace: Trace) -> bool:
    """Whether all ranks of the last run have finished without a verdict."""
    if trace.verdict is not None or not trace.runs or trace.runs[-1].missing:
        return False
    return all(fit.ending is not None and fit.ending.how == "finished" for fit in trace.runs[-1].fits.values())


def _unfinished(run: Run) -> Iterator[str]:
    """Which ranks have failed, left, were ended by a signal, or have no end."""
    endings = {rank: fit.ending for rank, fit in run.fits.items()}
    ends = ranks_by({rank: ending and ending.how for rank, ending in endings.items()})
    failed = ranks_by({rank: end.what for rank, end in endings.items() if end and end.how == "failed"})
    for what, ranks in list(failed.items())[:_TOLD_FAILURES]:
        cut = what if len(what) <= _TOLD_CHARACTERS else f"{what[:_TOLD_CHARACTERS]}…"
        yield f"{names_of(ranks)} failed{f': {cut}' if cut else ''}"
    if others := [rank for ranks in list(failed.values())[_TOLD_FAILURES:] for rank in ranks]:
        yield f"{count_of(len(others), 'other rank')} failed"
    if left := ends.get("closed"):
        yield f"{names_of(left)} left before the end"
    if signalled := ends.get("signal"):
        signals = " and ".join(sorted({ending.what for rank in signalled if (ending := endings[rank])}))
        yield f"{names_of(signalled)} {'was' if len(signalled) == 1 else 'were'} ended by {signals or 'a signal'}"
    if endless := ends.get(None):
        have = "has" if len(endless) == 1 else "have"
        named = f" ({names_of(endless)})" if len(endless) < len(run.fits) else ""
        yield f"{count_of(len(endless), 'rank')} {have} no end{named}: killed, or still running"
        yield from _ended_together(run, endless)


def _ended_together(run: Run, endless: Sequence[int]) -> Iterator[str]:
    """That all ranks of a run fell silent at the same time, as far as their ticks tell."""
    lasts = [run.fits[rank].last for rank in endless]
    if 1 < len(endless) == run.world_size and max(lasts) - min(lasts) < SILENT_SECONDS:
        yield (
            f"all ranks wrote their last lines within {duration(max(lasts) - min(lasts))}, and none wrote why: if they "
            "run no more, all were killed at once, as where a host or a container has no memory left"
        )


def title_of(trace: Trace) -> str:
    """The headline as a title, with what is worth a look.

    It is the verdict's sentence; or how much was trained, whether all ranks have finished, how many warnings there
    are, and the rank that was slowest, if one was clearly slower than most.
    """
    if (verdict := trace.verdict) is not None:
        return verdict.sentence[:1].upper() + verdict.sentence[1:]
    said = headline(trace)
    run = trace.runs[-1] if trace.runs else Run()
    endings = [fit.ending.how if fit.ending else "" for fit in run.fits.values()]
    if set(endings) == {"finished"} and not run.missing:
        said = f"finished: {said.partition(': ')[2]}"
    if run.warnings:
        said += f", {count_of(len(run.warnings), 'warning')}"
    paces = paces_of(run)
    if slow := {rank for pace in paces for rank in pace.slow}:
        shares = {rank: _loader_share(run.fits[rank]) for rank in slow}
        rank = max(shares, key=lambda rank: shares[rank])
        said += f"; rank {rank} waited {shares[rank]:.0%} of the time for its loader".replace("%", " %")
    paused = [pace for pace in paces if pace.pause_is_odd]
    if paused:
        longest = max(paused, key=lambda pace: pace.pause_seconds)
        said += f"; rank {longest.paused} paused for {duration(longest.pause_seconds)} in its own code"
    return said[:1].upper() + said[1:]


def _loader_share(fit: Fit) -> float:
    """The share of the time in train epochs that a rank waited for its loader."""
    spans = [span for span in fit.spans if not span.is_evaluation]
    seconds = sum(span.last - span.begin for span in spans)
    return min(1.0, sum(span.loader_seconds for span in spans) / seconds) if seconds > 0 else 0.0


def duration(seconds: float) -> str:
    """Seconds as a person says them, in at most two units.

    >>> duration(4321), duration(59.4), duration(0.25), duration(200_000)
    ('1 h 12 min', '59 s', '0.25 s', '2 d 7 h')
    """
    if seconds < 10:
        return f"{seconds:.2g} s" if seconds >= 0.1 or not seconds else f"{1000 * seconds:.2g} ms"
    whole = round(seconds)
    for above, unit, below, lower in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= above:
            rest = whole % above // below
            return f"{whole // above} {unit}" + (f" {rest} {lower}" if rest else "")
    return f"{whole} s"


def spans_of(run: Run) -> dict[Key, dict[int, Span]]:
    """The spans of a run, each with the ranks that were in it, in the order in which they began."""
    found: dict[Key, dict[int, Span]] = {}
    for rank, fit in run.fits.items():
        numbers: Counter[str] = Counter()
        for span in fit.spans:
            found.setdefault(Key(span.name, numbers[span.name]), {})[rank] = span
            numbers[span.name] += 1
    return dict(sorted(found.items(), key=lambda item: min(span.begin for span in item[1].values())))


def classes_of(run: Run) -> list[RankClass]:
    """Sorts ranks into classes that behaved alike: the odd ones first, most ranks last.

    Ranks behave alike if they have counted the same, ended the same way, and were in the same kind of place at a stall.
    Those that are slow or named by the verdict are apart. Ranks that have left no trace are a class.
    """
    reasons = _reasons(run)
    groups = ranks_by(
        {
            rank: (reasons.get(rank), *((span.name, _closed_counts(span)) for span in fit.spans))
            for rank, fit in run.fits.items()
        }
    )
    found = [
        RankClass(ranks, reasons.get(ranks[0], ()), run.fits[ranks[0]], _hosts(run, ranks)) for ranks in groups.values()
    ]
    if missing := run.missing:
        found.append(RankClass(tuple(missing), ("no trace",), None, ()))
    named = run.verdict.ranks if run.verdict else ()
    return sorted(found, key=lambda each: (each.ranks[0] not in named, not each.reasons, len(each.ranks), each.ranks))


def _reasons(run: Run) -> dict[int, tuple[str, ...]]:
    """Why ranks are not like most others."""
    found: defaultdict[int, list[str]] = defaultdict(list)
    verdict, end = run.verdict, run.end
    for rank in verdict.ranks if verdict and len(verdict.ranks) < run.world_size else ():
        found[rank].append("named by the verdict")
    for rank in odd_ranks({rank: fit.ending and fit.ending.how for rank, fit in run.fits.items()}):
        ending = run.fits[rank].ending
        found[rank].append(f"end: {ending.how}" if ending else "no end")
    for rank, fit in run.fits.items():
        # A rank outside of spans writes nothing, whatever the others do.
        if fit.ending is None and fit.open and end - fit.last > SILENT_SECONDS:
            found[rank].append("silent before the others")
    spans = spans_of(run)
    for rank in sorted({rank for table in spans.values() for rank in _odd_counts(table)}):
        found[rank].append("other counts")
    for rank in odd_ranks({rank: fit.stacks[-1].state for rank, fit in run.fits.items() if fit.stacks}):
        found[rank].append(f"last seen in {run.fits[rank].stacks[-1].state or 'an unknown place'}")
    slow: defaultdict[int, list[Key]] = defaultdict(list)
    for key, table in spans.items():
        for rank in slow_loaders(table):
            slow[rank].append(key)
    for rank, keys in slow.items():
        found[rank].append(f"slow loader in {keys[0]}" if len(keys) == 1 else "slow loader")
    return {rank: tuple(reasons) for rank, reasons in found.items()}


def _hosts(run: Run, ranks: Iterable[int]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(run.fits[rank].host for rank in ranks if run.fits[rank].host))


def slow_loaders(spans: Mapping[int, Span]) -> tuple[int, ...]:
    """The ranks that waited for their loader clearly longer than most in one span."""
    if len(spans) < 2:
        return ()
    least = _clearly_longer(spans, [span.loader_seconds for span in spans.values()])
    return tuple(rank for rank, span in spans.items() if span.loader_seconds > least)


def _clearly_longer(spans: Mapping[int, Span], seconds: Sequence[float]) -> float:
    """The seconds above which a rank's are clearly longer than those of most ranks in a span."""
    usual = median(seconds)
    length = median(span.last - span.begin for span in spans.values())
    return max(usual + _SLOW_SECONDS, usual + _SLOW_SHARE * length, _SLOW_TIMES * usual)


def paces_of(run: Run) -> list[Pace]:
    """Who was slow in each span, in the order in which they began."""
    found: list[Pace] = []
    pauses = _own_pauses(run)
    for key, spans in spans_of(run).items():
        ends = {rank: span.end for rank, span in spans.items() if span.end is not None}
        waited = max(spans, key=lambda rank: spans[rank].loader_seconds)
        others = [span.loader_seconds for rank, span in spans.items() if rank != waited]
        paused = {rank: pauses.get(id(span), 0.0) for rank, span in spans.items()}
        longest = max(paused, key=lambda rank: paused[rank])
        found.append(
            Pace(
                key,
                _any(spans).is_evaluation,
                _lasted(run, spans),
                bool(ends),
                max(ends.values()) - min(ends.values()) if len(ends) > 1 else None,
                _last(run, ends),
                spans[waited].is_measured,
                waited,
                spans[waited].loader_seconds,
                median(others) if others else 0.0,
                slow_loaders(spans),
                longest if paused[longest] else None,
                paused[longest],
                len(spans) > 1 and paused[longest] > _clearly_longer(spans, list(paused.values())),
            )
        )
    return found


def _last(run: Run, ends: Mapping[int, float]) -> int | None:
    """The rank that was last; None if it is not clear."""
    if len(ends) < 2:
        return None
    first, last = min(ends, key=lambda rank: ends[rank]), max(ends, key=lambda rank: ends[rank])
    fits = run.fits[first], run.fits[last]
    error = sum(fit.clock_error or 0.0 for fit in fits) if fits[0].host != fits[1].host else 0.0
    return last if ends[last] - ends[first] > max(_NOISE_SECONDS, error) else None


def _own_pauses(run: Run) -> dict[int, float]:
    """Seconds of the longest pause in a rank's own code or its loader, by the identity of the innermost span."""
    found: dict[int, float] = {}
    for fit in run.fits.values():
        begins = [span.begin for span in fit.spans]
        for pause in fit.pauses:
            if pause.where == "collective":
                continue
            for span in reversed(fit.spans[: bisect_right(begins, pause.begin)]):
                if span.end is None or pause.begin < span.end:
                    found[id(span)] = max(found.get(id(span), 0.0), pause.seconds)
                    break
                if not span.depth:
                    break
    return found


def _lasted(run: Run, spans: Mapping[int, Span]) -> float:
    """Seconds that a span lasted; if no rank has closed it, seconds that one of them was in it at least."""
    closed = [span.end - span.begin for span in spans.values() if span.end is not None]
    return median(closed) if closed else max(run.fits[rank].last - span.begin for rank, span in spans.items())


def hosts_of(run: Run, paces: Iterable[Pace]) -> list[HostPace]:
    """What the ranks of each host have waited, the one that waited longest first; not those without a name."""
    lasts = Counter(run.fits[pace.last].host for pace in paces if pace.last is not None)
    found: list[HostPace] = []
    for host, ranks in run.hosts.items():
        fits = [run.fits[rank] for rank in ranks]
        loader = sum(span.loader_seconds for fit in fits for span in fit.spans)
        inside = sum(span.last - span.begin for fit in fits for span in fit.spans if not span.depth)
        pauses = sum(fit.pause_seconds for fit in fits)
        share = loader / inside if inside else 0.0
        found.append(HostPace(host, ranks, loader / len(fits), share, lasts[host], pauses / len(fits)))
    return sorted(found, key=lambda each: (-each.loader_seconds, each.host))


def counts_of(run: Run) -> CountsTable:
    """What all ranks have counted in each span. Ranks with the same counts share a column.

    The counts of a span that was not closed are a few seconds old, so ranks that differ in them alone share one, too.
    """
    spans = spans_of(run)
    groups = ranks_by(
        {
            rank: tuple(_closed_counts(table[rank]) if rank in table else "no such span" for table in spans.values())
            for rank in run.fits
        }
    )
    odd = {key: _odd_counts(table) for key, table in spans.items()}
    odd_cells = Counter(rank for ranks in odd.values() for rank in ranks)
    classes = sorted(groups.values(), key=lambda ranks: (-odd_cells[ranks[0]], ranks))
    rows: list[CountsRow] = []
    for key, table in spans.items():
        firsts = [ranks[0] for ranks in classes]
        cells = tuple(_counts(table[rank]) if rank in table else None for rank in firsts)
        rows.append(CountsRow(key, cells, tuple(rank in odd[key] for rank in firsts)))
    return CountsTable(tuple(classes), tuple(rows))


def partings_of(run: Run) -> list[Parting]:
    """Where the counts of ranks begin to differ, the first place first.

    They differ in a span that ranks have closed after different numbers of batches, or of steps, and where one has read
    more batches than another has closed it with. A verdict about batches may come before any rank has closed the span:
    then it is what each had fetched that differs. Ranks that exit are not compared with each other: each is wherever a
    signal has reached it.
    """
    found: list[Parting] = []
    for key, spans in spans_of(run).items():
        known = _comparable(spans)
        if all(span.why == "exited" for span in known.values()):
            continue
        ends = [span.end for span in known.values() if span.end is not None]
        batches = _by_number({rank: _read(spans, span) for rank, span in known.items()})
        steps = _by_number({rank: span.steps for rank, span in known.items() if span.end is not None})
        if len(batches) > 1:
            found.append(Parting(min(ends), key, "batch", batches))
        elif len(steps) > 1 and any(span.why not in ("", "exited") for span in known.values()):
            found.append(Parting(min(ends), key, "step", steps))
    at_verdict = _parting_of_verdict(run)
    if at_verdict is not None and at_verdict.key not in {parting.key for parting in found}:
        found.append(at_verdict)
    return sorted(found, key=lambda parting: parting.time)


def _parting_of_verdict(run: Run) -> Parting | None:
    """Where ranks had fetched different numbers of batches in a span that none has closed, by the verdict's table."""
    verdict = run.verdict
    if verdict is None or verdict.kind != "UnevenBatches" or not verdict.rows:
        return None
    where = verdict.rows[0].get("where")
    keys = [key for key, spans in spans_of(run).items() if key.name == where and not _closed(spans)]
    fetched = {
        rank: row["fetched"]
        for row in verdict.rows
        if row.get("where") == where and isinstance(row.get("fetched"), int)
        for rank in _ranks_in(row.get("rank"), run)
    }
    groups = _by_number(fetched)
    if not keys or len(groups) < 2:
        return None
    return Parting(min(max(verdict.time, run.begin), run.end), keys[-1], "batch", groups)


def _closed(spans: Mapping[int, Span]) -> bool:
    return any(span.end is not None for span in spans.values())


def _ranks_in(cell: object, run: Run) -> list[int]:
    """The ranks of a run that a cell names, such as ``3`` or ``0, 4–7``."""
    pairs = re.findall(r"(\d{1,9})(?:–(\d{1,9}))?", str(cell))
    bounds = [(int(first), int(last or first)) for first, last in pairs]
    return [rank for rank in run.fits if any(first <= rank <= last for first, last in bounds)]


def _by_number(numbers: Mapping[int, int]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Ranks by their number, the smallest number first."""
    return tuple(sorted(ranks_by(numbers).items()))


def plan_differences_of(run: Run) -> list[PlanRow]:
    """In which values of the plan ranks differ that must not, as far as these are known."""
    known = {rank: fit for rank, fit in run.fits.items() if fit.plan}
    found: list[PlanRow] = []
    for name in (*COMPARED_PLAN, *COMPARED_LIMITS):
        values = {rank: fit.plan.get(name) for rank, fit in known.items() if not _may_differ(fit, name)}
        if name not in COMPARED_LIMITS:
            values = {rank: value for rank, value in values.items() if value is not None}
        found += _plan_row(name, values, "none")
    for name in COMPARED_SETTINGS:
        found += _plan_row(name, {rank: fit.settings.get(name) for rank, fit in known.items()}, "the default")
    return found


def _may_differ(fit: Fit, name: str) -> bool:
    """Whether ranks may differ in a value of the plan: in a length, where `uneven_train` makes them even."""
    even = fit.settings.get("uneven_train", "raise") != "raise" and fit.plan.get("why_equal_lengths") is None
    return even and name in ("batches_per_epoch", "proven_batches_per_epoch")


def _plan_row(name: str, values: Mapping[int, Value], absent: str) -> Iterator[PlanRow]:
    """What there is to say of a value: nothing where all ranks have the same one."""
    groups = ranks_by(values)
    if len(groups) > 1:
        texts = [(absent if value is None else str(value), ranks) for value, ranks in groups.items()]
        yield PlanRow(name, tuple(sorted(texts, key=lambda group: (len(group[1]), group[1]))))


def totals_of(run: Run) -> list[Totals]:
    """The totals that ranks have told, for each class of ranks with equal ones; those of the fewest ranks first."""
    groups = ranks_by(
        {
            rank: (*fit.true_totals.items(), None, *fit.reported_totals.items())
            for rank, fit in run.fits.items()
            if fit.true_totals or fit.reported_totals
        }
    )
    found = [
        Totals(ranks, run.fits[ranks[0]].true_totals, run.fits[ranks[0]].reported_totals) for ranks in groups.values()
    ]
    return sorted(found, key=lambda each: (len(each.ranks), each.ranks))


def stacks_of(run: Run) -> list[tuple[tuple[int, ...], str, tuple[str, ...]]]:
    """The last stacks of all ranks, equal ones together: the ranks, their state, the frames; fewest ranks first."""
    last = {rank: fit.stacks[-1] for rank, fit in run.fits.items() if fit.stacks}
    groups = ranks_by({rank: (stack.state, stack.frames) for rank, stack in last.items()})
    found = [(ranks, state, frames) for (state, frames), ranks in groups.items()]
    return sorted(found, key=lambda group: (len(group[0]), group[0]))


def _odd_counts(spans: Mapping[int, Span]) -> set[int]:
    """The ranks that have counted something else in a span than most."""
    closed = {rank: span for rank, span in spans.items() if span.end is not None}
    whole = {_counts(span) for span in closed.values() if span.why != "exited"}
    # Ranks that exit are not compared with each other: those that are like no rank that has not, count as the same.
    odd = odd_ranks({rank: found if (found := _counts(span)) in whole else None for rank, span in closed.items()})
    known = _comparable(spans)
    least = min((span.batches for span in known.values()), default=0)
    whole_least = any(span.batches == least and span.why != "exited" for span in known.values())
    compared = {
        rank: _read(spans, span) > least and (whole_least or span.why != "exited") for rank, span in known.items()
    }
    return odd | odd_ranks(compared)


def _comparable(spans: Mapping[int, Span]) -> dict[int, Span]:
    """The ranks whose batches in a span can be compared: they have closed it, or read more than one that has."""
    least = min((span.batches for span in spans.values() if span.end is not None), default=None)
    if least is None:
        return {}
    return {rank: span for rank, span in spans.items() if span.end is not None or _read(spans, span) > least}


def _read(spans: Mapping[int, Span], span: Span) -> int:
    """Batches that a rank has read: also one that it has only fetched, where another rank's data has run out.

    Where a span is closed for another reason, as a limit, ranks may have fetched a batch that none of them will use.
    """
    if span.end is not None or span.fetched is None or all(each.why != "exhausted" for each in spans.values()):
        return span.batches
    return max(span.batches, span.fetched)


def _closed_counts(span: Span) -> Counts | None:
    return _counts(span) if span.end is not None else None


def _counts(span: Span) -> Counts:
    fetched = span.fetched if span.end is None and (span.fetched or 0) > span.batches else None
    return Counts(span.batches, span.steps, span.unused, span.repeated, span.end is not None, fetched)


def _any(spans: Mapping[int, Span]) -> Span:
    return next(iter(spans.values()))

"""The facts of a run, each written once: as a value for a program, and as parts that people see.

`countoff report --json` prints the values, with the keys that docs/seeing.md describes. The page and `--text` show the
parts. A fact that is missing here is missing everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from countoff.core import formats
from countoff.core.messages import names_of
from countoff.core.verdict import Verdict
from countoff.report.facts.classes import RankClass, classes_of, classes_table
from countoff.report.facts.counts import CountsTable, counts_of, counts_table, first_divergences
from countoff.report.facts.paces import Pace, hosts_of, hosts_table, paces_of, slow_table
from countoff.report.facts.parts import Fact, Lines, Part, Stack
from countoff.report.facts.plans import plan_differences_of, plans_table, totals_of, totals_table
from countoff.report.facts.rates import rate_lines_of, rates_shown
from countoff.report.facts.reads import measured_of
from countoff.report.facts.stacks import stacks_of
from countoff.report.facts.stalls import stall_of
from countoff.report.facts.summary import headline, is_healthy
from countoff.report.model import Fit, Run, Trace
from countoff.report.words import clock


class Message(NamedTuple):
    """A verdict or a warning as it was printed.

    Attributes:
        verdict: What it says.
        is_warning: Whether the job went on after it.
        run: The number of its run, where that is not the last one of several.
    """

    verdict: Verdict
    is_warning: bool
    run: int = 0


def document(trace: Trace) -> dict[str, Any]:
    """All facts of a trace as JSON types."""
    return {
        "format": formats.JSON_OUTPUT,
        "headline": headline(trace),
        "healthy": is_healthy(trace),
        "verdict": verdict_or_none(trace.verdict),
        "stall": verdict_or_none(stall_of(trace)),
        "runs": [{fact.key: fact.value for fact in facts_of(trace, run)} for run in trace.runs],
        "skipped_lines": trace.skipped,
        "problems": trace.problems,
    }


def verdict_or_none(verdict: Verdict | None) -> dict[str, Any] | None:
    """A verdict with the keys of the verdict file; None if there is none."""
    return None if verdict is None else verdict.to_dict()


def messages_of(trace: Trace) -> list[Message]:
    """What ranks have printed: the verdict or the stall of the last run first, then those before it, then warnings."""
    worst = trace.verdict or stall_of(trace)
    found = [Message(worst, is_warning=False)] if worst else []
    before = list(enumerate(trace.runs, 1))
    found += [Message(run.verdict, is_warning=False, run=at) for at, run in before[:-1] if run.verdict]
    for at, run in before:
        number = at if at < len(trace.runs) else 0
        found += [Message(each, is_warning=True, run=number) for each in run.warnings if each is not worst]
    return found


def facts_of(trace: Trace, run: Run) -> list[Fact]:
    """The facts of a run of a trace, in the order in which they are shown."""
    paces, classes = paces_of(run), classes_of(run)
    return [
        Fact("world_size", run.world_size),
        Fact("begin", run.begin),
        Fact("seconds", run.end - run.begin),
        _resume(run),
        Fact("verdict", verdict_or_none(run.verdict)),
        Fact("warnings", [warning.to_dict() for warning in run.warnings]),
        _missing(run),
        _divergences(run),
        _ranks(run, classes),
        _spans(run, paces),
        _hosts(run, paces),
        _plans(run),
        _totals(run),
        _read_once(run),
        _rates(run),
        Fact("horizons", run.horizons),
        _stacks(trace, run),
    ]


def _resume(run: Run) -> Fact:
    before = run.steps_before
    said = f"It resumes after optimizer step {before:,}. Its steps go on from there; a verdict counts those since."
    return Fact("steps_before", before, [Lines([said])] if before else [])


def _missing(run: Run) -> Fact:
    said = f"No trace of {names_of(run.missing)}: not in these directories, or never written." if run.missing else ""
    return Fact("missing", run.missing, [Lines([said])] if said else [])


def _divergences(run: Run) -> Fact:
    found = first_divergences(run)
    value = [
        {
            "span": str(divergence.key),
            "counts": divergence.noun,
            "groups": [{"count": count, "ranks": ranks} for count, ranks in divergence.groups],
        }
        for divergence in found
    ]
    said = [f"{clock(divergence.time)} UTC: {divergence.sentence}" for divergence in found]
    return Fact("divergences", value, [Lines(said)] if said else [])


def _ranks(run: Run, classes: Sequence[RankClass]) -> Fact:
    reasons = {rank: each.reasons for each in classes for rank in each.ranks}
    value = [_rank(fit, reasons.get(rank, ())) for rank, fit in run.fits.items()]
    return Fact("ranks", value, [classes_table(run, classes)])


def _rank(fit: Fit, reasons: Sequence[str]) -> dict[str, Any]:
    """How far a rank got, and how it ended."""
    last = fit.spans[-1] if fit.spans else None
    return {
        "rank": fit.rank,
        "host": fit.host,
        "unlike_most": reasons,
        "span": last and last.name,
        "batches": last and last.batches,
        "steps": fit.steps,
        "learning_rates": fit.learning_rates,
        "loader_seconds": fit.loader_seconds,
        "pause_seconds": fit.pause_seconds,
        "last": fit.last,
        "end": fit.ending and {"how": fit.ending.how, "what": fit.ending.what, "time": fit.ending.time},
    }


def _spans(run: Run, paces: Sequence[Pace]) -> Fact:
    counts = counts_of(run)
    value = [_span(pace, counts, place) for place, pace in enumerate(paces)]
    return Fact("spans", value, [slow_table(paces), counts_table(counts)])


def _span(pace: Pace, counts: CountsTable, place: int) -> dict[str, Any]:
    """Who was slow in a span, and what each class of ranks has counted there."""
    row = counts.rows[place]
    cells = zip(counts.classes, row.cells, row.outlier, strict=True)
    loader = {
        "rank": pace.waited,
        "seconds": pace.waited_seconds,
        "median_seconds": pace.median_seconds,
        "slow": pace.slow,
    }
    pause = {"rank": pace.paused, "seconds": pace.pause_seconds, "outlier": pace.pause_is_outlier}
    return {
        "span": str(pace.key),
        "evaluation": pace.is_evaluation,
        "seconds": pace.seconds,
        "closed": pace.closed,
        "spread_seconds": pace.spread_seconds,
        "last": pace.last,
        "loader": loader if pace.measured else None,
        "pause": None if pace.paused is None else pause,
        "counts": [
            {"ranks": ranks, **cell._asdict(), "outlier": outlier} for ranks, cell, outlier in cells if cell is not None
        ],
    }


def _hosts(run: Run, paces: Sequence[Pace]) -> Fact:
    found = hosts_of(run, paces)
    value = [
        {
            "host": each.host,
            "ranks": each.ranks,
            "loader_seconds": each.loader_seconds,
            "loader_share": each.loader_share,
            "pause_seconds": each.pause_seconds,
            "spans_last": each.last,
        }
        for each in found
    ]
    return Fact("hosts", value, [hosts_table(found)] if len(found) > 1 else [])


def _plans(run: Run) -> Fact:
    found = plan_differences_of(run)
    value = [
        {"name": row.name, "groups": [{"value": each, "ranks": ranks} for each, ranks in row.groups]} for row in found
    ]
    return Fact("plan_differences", value, [plans_table(found)] if found else [])


def _totals(run: Run) -> Fact:
    found, measured = totals_of(run), dict[str, float]()
    for each in measured_of(run):
        measured |= each.totals
    value = [
        {
            "ranks": each.ranks,
            "true": dict(each.true),
            "reported": dict(each.reported),
            "measured": each.measured(measured),
        }
        for each in found
    ]
    one = len(found) == 1 and not plan_differences_of(run)
    return Fact("totals", value, [totals_table(each, measured, whose=not one) for each in found])


def _read_once(run: Run) -> Fact:
    found = measured_of(run)
    said = [f"{each.in_words[:1].upper()}{each.in_words[1:]}." for each in found]
    return Fact("read_once", [each._asdict() for each in found], [Lines(said)] if said else [])


def _rates(run: Run) -> Fact:
    lines = rate_lines_of(run)
    value = [{"ranks": line.ranks, "steps": line.steps, "rates": line.rates} for line in lines]
    return Fact("learning_rates", value, rates_shown(run, lines), "Learning rate")


def _stacks(trace: Trace, run: Run) -> Fact:
    """The stacks of a run; where its ranks have recorded none, those that the verdict has left beside the trace."""
    found = stacks_of(run)
    if not found and run is trace.runs[-1]:
        found = [group for incident in trace.incidents for group in incident.stacks]
    value = [{"ranks": ranks, "state": state, "frames": frames} for ranks, state, frames in found]
    parts: list[Part] = [
        Stack(frames or ["no stack: it could not be had"], f"{names_of(ranks)}{f': {state}' if state else ''}")
        for ranks, state, frames in found
    ]
    return Fact("stacks", value, parts, "Stacks")

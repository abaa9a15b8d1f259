"""What the page shows, for a program: the facts of a trace as JSON types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from countoff.core import formats
from countoff.core.verdict import Verdict
from countoff.report import facts
from countoff.report.facts.counts import Counts, CountsTable
from countoff.report.facts.paces import Pace
from countoff.report.model import Fit, Run, Trace

__all__ = ["document", "verdict_or_none"]


def document(trace: Trace) -> dict[str, Any]:
    """The facts of a trace as JSON types, with the keys that docs/seeing.md describes."""
    return {
        "format": formats.JSON_OUTPUT,
        "headline": facts.headline(trace),
        "healthy": facts.is_healthy(trace),
        "verdict": verdict_or_none(trace.verdict),
        "stall": verdict_or_none(facts.stall_of(trace)),
        "runs": [_run(run) for run in trace.runs],
        "skipped_lines": trace.skipped,
        "problems": trace.problems,
    }


def verdict_or_none(verdict: Verdict | None) -> dict[str, Any] | None:
    """A verdict with the keys of the verdict file; None if there is none."""
    return None if verdict is None else verdict.to_dict()


def _run(run: Run) -> dict[str, Any]:
    paces = facts.paces_of(run)
    counts = facts.counts_of(run)
    return {
        "world_size": run.world_size,
        "begin": run.begin,
        "seconds": run.end - run.begin,
        "steps_before": run.steps_before,
        "verdict": verdict_or_none(run.verdict),
        "warnings": [warning.to_dict() for warning in run.warnings],
        "missing": run.missing,
        "ranks": _ranks(run),
        "partings": [
            {
                "span": str(parting.key),
                "counts": parting.noun,
                "groups": [{"count": count, "ranks": ranks} for count, ranks in parting.groups],
            }
            for parting in facts.partings_of(run)
        ],
        "spans": [_span(pace, counts, place) for place, pace in enumerate(paces)],
        "hosts": [
            {
                "host": each.host,
                "ranks": each.ranks,
                "loader_seconds": each.loader_seconds,
                "loader_share": each.loader_share,
                "pause_seconds": each.pause_seconds,
                "spans_last": each.last,
            }
            for each in facts.hosts_of(run, paces)
        ],
        "plan_differences": [
            {"name": row.name, "groups": [{"value": value, "ranks": ranks} for value, ranks in row.groups]}
            for row in facts.plan_differences_of(run)
        ],
        "totals": [
            {"ranks": each.ranks, "true": dict(each.true), "reported": dict(each.reported)}
            for each in facts.totals_of(run)
        ],
        "horizons": run.horizons,
        "stacks": [{"ranks": ranks, "state": state, "frames": frames} for ranks, state, frames in facts.stacks_of(run)],
    }


def _ranks(run: Run) -> list[dict[str, Any]]:
    reasons = {rank: each.reasons for each in facts.classes_of(run) for rank in each.ranks}
    return [_rank(fit, reasons.get(rank, ())) for rank, fit in run.fits.items()]


def _rank(fit: Fit, reasons: Sequence[str]) -> dict[str, Any]:
    """How far a rank got, and how it ended."""
    last = fit.spans[-1] if fit.spans else None
    end = fit.ending
    return {
        "rank": fit.rank,
        "host": fit.host,
        "unlike_most": reasons,
        "span": None if last is None else last.name,
        "batches": None if last is None else last.batches,
        "steps": fit.steps,
        "learning_rates": fit.learning_rates,
        "loader_seconds": sum(span.loader_seconds for span in fit.spans),
        "pause_seconds": fit.pause_seconds,
        "last": fit.last,
        "end": None if end is None else {"how": end.how, "what": end.what, "time": end.time},
    }


def _span(pace: Pace, counts: CountsTable, place: int) -> dict[str, Any]:
    """Who was slow in a span, and what each class of ranks has counted there."""
    row = counts.rows[place]
    cells = zip(counts.classes, row.cells, row.odd, strict=True)
    return {
        "span": str(pace.key),
        "evaluation": pace.is_evaluation,
        "seconds": pace.seconds,
        "closed": pace.closed,
        "spread_seconds": pace.spread_seconds,
        "last": pace.last,
        "loader": {
            "rank": pace.waited,
            "seconds": pace.waited_seconds,
            "median_seconds": pace.median_seconds,
            "slow": pace.slow,
        }
        if pace.measured
        else None,
        "pause": None
        if pace.paused is None
        else {"rank": pace.paused, "seconds": pace.pause_seconds, "odd": pace.pause_is_odd},
        "counts": [_counts(ranks, cell, odd) for ranks, cell, odd in cells if cell is not None],
    }


def _counts(ranks: Sequence[int], counts: Counts, odd: bool) -> dict[str, Any]:
    return {"ranks": ranks, **counts._asdict(), "odd": odd}

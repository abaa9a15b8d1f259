"""What the page shows, as text: for where what draws it is not installed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from countoff._terminal import console
from countoff.core.verdict import Verdict
from countoff.core.words import count_of, names_of
from countoff.report import facts
from countoff.report.facts.counts import Counts
from countoff.report.facts.paces import slow_table
from countoff.report.facts.rates import rates_table
from countoff.report.model import Run, Trace
from countoff.report.words import duration, number

_FOLDED = 20
"""Rows and columns of a table."""
_ODD = "yellow"
"""The style of what is not as with most ranks."""


def print_facts(trace: Trace) -> None:
    """Prints what the page shows."""
    output = console()
    for each in _facts(trace):
        # As plain text: a trace is not to be trusted, and rich would read its own markup there.
        output.print(Text(each, overflow="fold") if isinstance(each, str) else each)


def print_worst(trace: Trace) -> None:
    """Prints the worst that happened: the verdict as it was printed, or else the headline."""
    console().print(_worst(trace))


def _worst(trace: Trace) -> Text:
    if verdict := trace.verdict:
        return _message(verdict, "bold red")
    style = "bold red" if facts.stall_of(trace) else "bold green" if facts.is_healthy(trace) else "bold"
    return Text(facts.headline(trace), style=style, overflow="fold")


def _message(verdict: Verdict, style: str) -> Text:
    """A verdict or a warning as it was printed, its first line in colour."""
    first, newline, rest = verdict.render().partition("\n")
    return Text.assemble((first, style), newline, rest, overflow="fold")


def _facts(trace: Trace) -> Iterator[Any]:
    """What the page shows, as lines and tables."""
    verdict = trace.verdict
    yield _worst(trace)
    for at, run in enumerate(trace.runs, 1):
        if len(trace.runs) > 1:
            seconds = duration(run.end - run.begin)
            resumed = f", resumes after optimizer step {run.steps_before:,}" if run.steps_before else ""
            yield _title(f"run {at} of {len(trace.runs)}: {count_of(run.world_size, 'rank')}, {seconds}{resumed}")
        if run.verdict and run.verdict is not verdict:
            yield _message(run.verdict, "bold red")
        yield from _run_facts(run)
    if trace.skipped:
        yield f"\n{count_of(trace.skipped, 'line')} could not be read"
    yield from trace.problems


def _run_facts(run: Run) -> Iterator[Any]:
    for warning in run.warnings:
        yield _message(warning, "yellow")
    if run.missing:
        yield f"no trace of {names_of(run.missing)}"
    yield from (parting.sentence for parting in facts.partings_of(run))
    ranks = []
    for each in facts.classes_of(run):
        fit = each.fit
        last = fit.spans[-1] if fit and fit.spans else None
        where = last.name if last else ""
        if last and (last.batches or last.end is not None):
            where += f", {count_of(last.batches, 'batch')}"
        how = ""
        if fit:
            how = ": ".join(filter(None, (fit.ending.how, fit.ending.what))) if fit.ending else "no end"
        reasons = Text("; ".join(each.reasons), style=_ODD)
        ranks.append([names_of(each.ranks), ", ".join(each.hosts[:3]), reasons, where, how])
    yield from _table("ranks that behaved alike", ["ranks", "hosts", "unlike most", "last", "end"], ranks)
    slow = slow_table(facts.paces_of(run))
    names = [column.name for column in slow.columns]
    yield from _table("who is slow", names, [[_marked(cell.text, cell.is_odd) for cell in row] for row in slow.rows])
    yield from _counts(run)
    apart = rates_table(run)
    columns, rows = [column.name for column in apart.columns], [[cell.text for cell in row] for row in apart.rows]
    yield from _table("the ranks' learning rates differ", columns, rows)
    rated = next((fit for fit in run.fits.values() if fit.learning_rates), None)
    points = [point for span in (rated.spans if rated else ()) for point in span.points]
    rates = [point.learning_rates[0] for point in points if point.learning_rates]
    if rates and not apart.rows:
        yield f"\nlearning rate: {rates[0]:.4g} at first, {max(rates):.4g} at most, {rates[-1]:.4g} at last"
    for horizon in run.horizons:
        yield f"the schedule would have ended at step {horizon:,}"
    for ranks_there, state, frames in facts.stacks_of(run)[:_FOLDED]:
        yield _title(f"stack of {names_of(ranks_there)}{f': {state}' if state else ''}")
        yield from (f"  {frame}" for frame in frames or ("no stack: it could not be had",))


def _counts(run: Run) -> Iterator[Any]:
    counts = facts.counts_of(run)
    columns = [names_of(ranks) for ranks in counts.classes[:_FOLDED]]
    rows = [
        [str(row.key), *(_cell(*pair) for pair in zip(row.cells, row.odd, strict=True))] for row in counts.known_rows
    ]
    yield from _table("batches and steps", ["span", *columns], [row[: 1 + _FOLDED] for row in rows])
    differences, totals = facts.plan_differences_of(run), facts.totals_of(run)
    for row in differences:
        yield f"the ranks' plans differ in {row.sentence}"
    for each in totals[:_FOLDED]:
        whose = f" of {names_of(each.ranks)}" if differences or len(totals) > 1 else ""
        table = [[name, number(true), number(reported)] for name, true, reported in each.rows]
        yield from _table(f"totals{whose}", ["total", "true", "reported"], table)


def _cell(counts: Counts | None, odd: bool) -> Text:
    if counts is None:
        return Text("–")
    fetched = "" if counts.fetched is None else f" ({counts.fetched:,} fetched)"
    least = "" if counts.closed else "≥ "
    return _marked(f"{'≠ ' if odd else ''}{least}{counts.batches:,} / {counts.steps:,}{fetched}", odd)


def _marked(text: str, odd: bool) -> Text:
    return Text(text, style=_ODD if odd else "")


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold", overflow="fold")


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> Iterator[str | Text | Table]:
    if not rows:
        return
    yield _title(title)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    for row in rows[:_FOLDED]:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    yield table
    if len(rows) > _FOLDED:
        yield f"… and {len(rows) - _FOLDED} more"

"""`countoff report`: a trace as a page, or as text where what draws the page is not installed."""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from countoff.core.words import count_of, names_of, plain
from countoff.report import facts
from countoff.report.model import Run, Trace
from countoff.report.reader import read

if TYPE_CHECKING:
    from rich.table import Table

_EXTRA = "pip install 'countoff[report]'"
_DRAWN_WITH = {"bokeh", "jinja2", "markupsafe", "numpy", "countoff"}
_PERFETTO = {"perfetto", "google"}
_PAGE = b'<meta name="generator" content="countoff report">'
"""By which a page of this command is known; page.html has it near its beginning."""
_FOLDED = 20
"""Rows and columns of a table of the text."""


def report(chosen: argparse.Namespace) -> int:
    """Writes the page, or the file for Perfetto, and prints what happened; or prints all as text.

    Returns:
        The exit code: 1 if what was asked for by `-o`, `--open` or `--perfetto` needs a package that is not installed.

    Raises:
        ValueError: If there is no trace, or a file cannot be written or is not to be replaced.
    """
    trace = read(chosen.directories)
    if not trace.runs:
        where = ", ".join(map(plain, chosen.directories))
        problems = f" ({'; '.join(trace.problems[:3])})" if trace.problems else ""
        raise ValueError(
            f"there is no trace in {where}{problems}: expected files like rank-00000.jsonl, which a job with "
            'trace_dir="…" writes'
        )
    if chosen.output:
        _page_of(chosen)  # refused before anything else is written
    if chosen.perfetto:
        try:
            from countoff.report.perfetto import write_perfetto
        except ModuleNotFoundError as error:
            if str(error.name).partition(".")[0] not in _PERFETTO:
                raise
            print(f"countoff: --perfetto needs Perfetto's package: {_EXTRA}", file=sys.stderr)
            return 1
        write_perfetto(trace, chosen.perfetto)
        wrote = f"wrote {plain(chosen.perfetto)}; open it at https://ui.perfetto.dev"
        if not (chosen.output or chosen.open):
            print(trace.verdict.render() if trace.verdict else facts.headline(trace))
            print(wrote)
            return 0
        print(wrote)
    try:
        from countoff.report.page import render
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in _DRAWN_WITH:
            raise
        _print_facts(trace)
        print(f"countoff: to see this as a page in a browser: {_EXTRA}", file=sys.stderr)
        return 1 if chosen.output or chosen.open else 0
    path = _page_of(chosen)
    try:
        path.write_text(render(trace), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{plain(str(path))} cannot be written: {error.strerror}") from None
    verdict = trace.verdict
    print(verdict.render() if verdict else facts.headline(trace))
    print(f"wrote {plain(str(path))}")
    if chosen.open:
        webbrowser.open(path.resolve().as_uri())
    return 0


def _page_of(chosen: argparse.Namespace) -> Path:
    """Returns where the page goes: where `-o` says, or else here, named after the first directory.

    Raises:
        ValueError: If something else than a page of this command is there, and `--force` is not given.
    """
    path = Path(chosen.output or f"{Path(chosen.directories[0]).resolve().name or 'report'}.html")
    # What has a name from `-o` may also be a pipe or a device, to which the page is written.
    kept = path.is_file() if chosen.output else os.path.lexists(path)
    if kept and not chosen.force and not _is_page(path):
        other = "name another file" if chosen.output else "name another file with -o"
        raise ValueError(
            f"{plain(str(path))} is there and is no page of countoff report: {other}, or replace it with --force"
        )
    return path


def _is_page(path: Path) -> bool:
    if not path.is_file():  # a pipe, which would make the reader wait, or a directory
        return False
    try:
        with path.open("rb") as file:
            return _PAGE in file.read(1024)
    except OSError:
        return False


def _print_facts(trace: Trace) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", 120)))
    for each in _facts(trace):
        # As plain text: a trace is not to be trusted, and rich would read its own markup there.
        console.print(Text(each, overflow="fold") if isinstance(each, str) else each)


def _facts(trace: Trace) -> Iterator[Any]:
    """What the page shows, as lines and tables."""
    verdict = trace.verdict
    yield verdict.render() if verdict else facts.headline(trace)
    for number, run in enumerate(trace.runs, 1):
        if len(trace.runs) > 1:
            seconds = facts.duration(run.end - run.begin)
            resumed = f", resumes after optimizer step {run.steps_before:,}" if run.steps_before else ""
            yield f"\nrun {number} of {len(trace.runs)}: {count_of(run.world_size, 'rank')}, {seconds}{resumed}"
        if run.verdict and run.verdict is not verdict:
            yield run.verdict.render()
        yield from _run_facts(run)
    if trace.skipped:
        yield f"\n{count_of(trace.skipped, 'line')} could not be read"
    yield from trace.problems


def _run_facts(run: Run) -> Iterator[Any]:
    for warning in run.warnings:
        yield warning.render()
    if run.missing:
        yield f"no trace of {names_of(run.missing)}"
    yield from (parting.sentence for parting in facts.partings_of(run))
    ranks = []
    for each in facts.classes_of(run):
        fit = each.fit
        last = fit.spans[-1] if fit and fit.spans else None
        where = f"{last.name}, {count_of(last.batches, 'batch')}" if last else ""
        how = ""
        if fit:
            how = ": ".join(filter(None, (fit.ending.how, fit.ending.what))) if fit.ending else "no end"
        ranks.append([names_of(each.ranks), ", ".join(each.hosts[:3]), "; ".join(each.reasons), where, how])
    yield from _table("ranks that behaved alike", ["ranks", "hosts", "unlike most", "last", "end"], ranks)
    yield from _table(
        "who is slow",
        [
            "span",
            "took",
            "first rank to last at its end",
            "last",
            "waited longest for its loader",
            "it waited",
            "the other ranks' median",
            "longest pause in its own code",
        ],
        [
            [
                str(pace.key),
                facts.duration(pace.seconds)
                if pace.closed
                else f"≥ {facts.duration(pace.seconds) if pace.seconds else ''}",
                "–" if pace.spread_seconds is None else facts.duration(pace.spread_seconds),
                "–" if pace.last is None else f"rank {pace.last}",
                f"rank {pace.waited}" if pace.waited_seconds else "–",
                facts.duration(pace.waited_seconds) + (" ≠" if pace.slow else "") if pace.measured else "–",
                facts.duration(pace.median_seconds) if pace.measured else "–",
                "–"
                if pace.paused is None
                else f"rank {pace.paused}: {facts.duration(pace.pause_seconds)}{' ≠' if pace.pause_is_odd else ''}",
            ]
            for pace in facts.paces_of(run)
        ],
    )
    yield from _counts(run)
    rated = next((fit for fit in run.fits.values() if fit.learning_rates), None)
    points = [point for span in (rated.spans if rated else ()) for point in span.points]
    rates = [point.learning_rates[0] for point in points if point.learning_rates]
    if rates:
        yield f"\nlearning rate: {rates[0]:.4g} at first, {max(rates):.4g} at most, {rates[-1]:.4g} at last"
    for horizon in {fit.horizon for fit in run.fits.values() if fit.horizon}:
        yield f"the schedule would have ended at step {horizon:,}"
    for ranks_there, state, frames in facts.stacks_of(run)[:_FOLDED]:
        yield f"\nstack of {names_of(ranks_there)}{f': {state}' if state else ''}"
        yield from (f"  {frame}" for frame in frames)


def _counts(run: Run) -> Iterator[Any]:
    counts = facts.counts_of(run)
    columns = [names_of(ranks) for ranks in counts.classes[:_FOLDED]]
    rows = [[str(row.key), *(_cell(*pair) for pair in zip(row.cells, row.odd, strict=True))] for row in counts.rows]
    yield from _table("batches and steps", ["span", *columns], [row[: 1 + _FOLDED] for row in rows])
    differences, totals = facts.plan_differences_of(run), facts.totals_of(run)
    for row in differences:
        yield f"the ranks' plans differ in {row.sentence}"
    for each in totals[:_FOLDED]:
        whose = f" of {names_of(each.ranks)}" if differences or len(totals) > 1 else ""
        table = [[name, _number(true), _number(reported)] for name, true, reported in each.rows]
        yield from _table(f"totals{whose}", ["total", "true", "reported"], table)


def _cell(counts: facts.Counts | None, odd: bool) -> str:
    if counts is None:
        return "–"
    return f"{'≠ ' if odd else ''}{'' if counts.closed else '≥ '}{counts.batches:,} / {counts.steps:,}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.10g}"


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str | Table]:
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return
    yield f"\n{title}"
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(Text(column))
    for row in rows[:_FOLDED]:
        table.add_row(*(Text(cell) for cell in row))
    yield table
    if len(rows) > _FOLDED:
        yield f"… and {len(rows) - _FOLDED} more"

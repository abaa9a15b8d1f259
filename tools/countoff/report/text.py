"""The facts of a trace as text, for a terminal without a browser."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table as RichTable
from rich.text import Text

from countoff._terminal import console
from countoff.core.messages import count_of, number_of
from countoff.core.verdict import Verdict
from countoff.report import facts
from countoff.report.facts.parts import Curve, Fact, Lines, Part, Stack, Table
from countoff.report.model import Trace
from countoff.report.ranks import label_of
from countoff.report.words import duration

_MOST = 20
"""Rows of a table and stacks that are printed."""
_HIGHLIGHTED = "yellow"
"""The style of what is not as with most ranks."""


def print_facts(trace: Trace) -> None:
    """Prints all facts."""
    output = console()
    for each in _facts(trace):
        output.print(each)


def print_worst(trace: Trace) -> None:
    """Prints the worst that happened: the verdict as it was printed, or else the headline."""
    console().print(_worst(trace))


def _worst(trace: Trace) -> Text:
    if verdict := trace.verdict:
        return _message(verdict, "bold red")
    style = "bold red" if facts.stall_of(trace) else "bold green" if facts.is_healthy(trace) else "bold"
    return _plain(facts.headline(trace), style)


def _message(verdict: Verdict, style: str) -> Text:
    """A verdict or a warning as it was printed, its first line in colour."""
    first, newline, rest = verdict.render().partition("\n")
    return Text.assemble((first, style), newline, rest, overflow="fold")


def _plain(text: str, style: str = "") -> Text:
    """Text as it is: a trace is not to be trusted, and rich would read its own markup in a string."""
    return Text(text, style=style, overflow="fold")


def _facts(trace: Trace) -> Iterator[Text | RichTable]:
    yield _worst(trace)
    for message in facts.messages_of(trace):
        if message.verdict is not trace.verdict:
            yield _message(message.verdict, _HIGHLIGHTED if message.is_warning else "bold red")
    for at, run in enumerate(trace.runs, 1):
        if len(trace.runs) > 1:
            which, took = f"run {at} of {len(trace.runs)}", duration(run.end - run.begin)
            yield _plain(f"\n{which}: {count_of(run.world_size, 'rank')}, {took}", "bold")
        for fact in facts.facts_of(trace, run):
            yield from _fact(fact)
    if trace.skipped:
        yield _plain(f"\n{count_of(trace.skipped, 'line')} could not be read")
    yield from map(_plain, trace.problems)


def _fact(fact: Fact) -> Iterator[Text | RichTable]:
    if fact.title and fact.parts:
        yield _plain(f"\n{fact.title}", "bold")
    for part in fact.parts[:_MOST]:
        yield from _part(part)
    if len(fact.parts) > _MOST:
        yield _plain(f"… and {len(fact.parts) - _MOST} more")


def _part(part: Part) -> Iterator[Text | RichTable]:
    if isinstance(part, Table):
        if part.rows:
            yield from _table(part)
        return
    if part.title:
        yield _plain(part.title, "bold")
    if isinstance(part, Lines):
        yield from map(_plain, part.lines)
    elif isinstance(part, Stack):
        yield from (_plain(f"  {line}") for line in part.lines)
    else:
        yield from _curve(part)


def _table(table: Table) -> Iterator[Text | RichTable]:
    yield _plain(f"\n{table.title}", "bold")
    shown = RichTable(box=None, pad_edge=False, header_style="dim")
    for column in table.columns:
        shown.add_column(Text(column.name), overflow="fold")
    for row in table.rows[:_MOST]:
        shown.add_row(*(Text(cell.text, style=_HIGHLIGHTED if cell.is_highlighted else "") for cell in row))
    yield shown
    if len(table.rows) > _MOST:
        yield _plain(f"… and {len(table.rows) - _MOST} more")


def _curve(curve: Curve) -> Iterator[Text]:
    for line in curve.lines:
        first, most, last = map(number_of, (line.rates[0], max(line.rates), line.rates[-1]))
        whose = f"{label_of(line.ranks)}: " if line.ranks else ""
        yield _plain(f"{whose}{first} at first, {most} at most, {last} at last")

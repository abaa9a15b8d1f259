"""A look as a table, in the size of the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from countoff.core.words import count_of, listed, number_of
from countoff.report.top.rows import Row
from countoff.report.top.watch import Look
from countoff.report.words import duration

_RATES, _WARNING_LINES = 3, 4
_NAMES: tuple[str, ...] = ("ranks", "host", "span", "batch", "batches/s", "loader", "learning rate", "age", "note")
"""The columns of the table on a terminal."""
_NUMBERS = {"batch", "batches/s", "loader", "age"}
_LEFT_OUT = ("learning rate", "host", "age", "loader", "batches/s", "batch")
"""The columns that a narrow terminal leaves out, the least useful first. Ranks and what they are doing always stay."""
_NOTE = len("slow loader")
"""Cells that are kept free for a note, so that no column comes and goes with it."""
_WORTH_A_NOTE = len(_LEFT_OUT) - _LEFT_OUT.index("host") - 1
"""Columns that stay where a longer note, as an exception, has no room; those before them leave for it."""
_NOTE_LINES, _HEADING_LINES = 3, 2
_ENDLESS = 10_000
"""Cells of a line on which everything has room."""


@dataclass(frozen=True)
class Picture:
    """A look as a table, in the size that the terminal has when it is painted.

    Attributes:
        look: The look.
        is_whole: Whether it has the whole terminal, and must fit in; then keys are read.
    """

    look: Look
    is_whole: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        look, width = self.look, options.max_width
        below: list[Text] = []
        if look.warning is not None:
            text = f"{_clock(look.warning.time)}{look.warning.headline}"
            below.append(_cut(text, _WARNING_LINES * width, "yellow"))
        if look.problem:
            below.append(_cut(f"cannot be read: {look.problem}", width, "yellow"))
        if self.is_whole:
            below.append(Text("q leaves", style="dim"))
        heading = _cut(look.heading, _HEADING_LINES * width, "bold")
        yield heading
        yield Text()
        if look.rows:
            rows = look.rows
            if self.is_whole:
                lines = options.size.height - 4 - sum(len(text.wrap(console, width)) for text in (heading, *below))
                rows = _rows_in(lines, rows, console, options)
            yield _table(rows, console, options)
            if folded := look.rows[len(rows) :]:
                ranks = sum(len(row.ranks) for row in folded)
                yield Text(f"… and {count_of(len(folded), 'row')} more, of {count_of(ranks, 'rank')}")
            yield Text()
        yield from below


def _cut(text: str, cells: int, style: str) -> Text:
    line = Text(text, style=style)
    line.truncate(cells, overflow="ellipsis")
    return line


def _rows_in(lines: int, rows: Sequence[Row], console: Console, options: ConsoleOptions) -> Sequence[Row]:
    """The first rows, as many as a table of so many lines has; one at least."""
    rows = rows[: max(1, lines - 1)]
    while len(rows) > 1 and len(console.render_lines(_table(rows, console, options), options)) > lines:
        rows = rows[:-1]
    return rows


def _table(rows: Sequence[Row], console: Console, options: ConsoleOptions) -> Table:
    """Rows with as many columns as fit. What is left has the whole text of its cells, but for a very long note."""
    endless = options.update(max_width=_ENDLESS)
    longest = max(_NOTE, *(len(row.note) for row in rows))
    for left_out in range(len(_LEFT_OUT) + 1):
        names = [name for name in _NAMES if name not in _LEFT_OUT[:left_out]]
        note = longest if len(_LEFT_OUT) - left_out > _WORTH_A_NOTE else _NOTE
        least = console.measure(_columns(names, rows, note), options=endless).maximum
        if least <= options.max_width:
            return _columns(names, rows, note + options.max_width - least)
    return _columns([name for name in _NAMES if name not in _LEFT_OUT], rows, _NOTE)


def _columns(names: Sequence[str], rows: Sequence[Row], note: int) -> Table:
    """These columns of rows; ranks, span and note have several lines where they must.

    Args:
        names: The columns.
        rows: The rows.
        note: Cells of a line of a note, at most.
    """
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in names:
        table.add_column(
            name,
            justify="right" if name in _NUMBERS else "left",
            no_wrap=name not in ("ranks", "span", "note"),
            overflow="fold",
            min_width=_NOTE if name == "note" else None,
            max_width=note if name == "note" else None,
        )
    for row in rows:
        cells = {name: Text(cell) for name, cell in zip(_NAMES, _cells(row), strict=True)}
        cells["note"].truncate(_NOTE_LINES * note, overflow="ellipsis")
        table.add_row(*(cells[name] for name in names), style="bold" if row.note else None)
    return table


def _cells(row: Row) -> tuple[str, ...]:
    fewest, most = row.batches or (0, 0)
    batches = f"{fewest:,}" if fewest == most else f"{fewest:,}–{most:,}"
    more = ", …" if len(row.learning_rates) > _RATES else ""
    return (
        listed(row.ranks),
        row.hosts[0] if len(row.hosts) == 1 else count_of(len(row.hosts), "host") if row.hosts else "",
        row.where,
        batches if row.batches else "",
        "" if row.batches_per_second is None else number_of(row.batches_per_second),
        "" if row.loader_share is None else f"{row.loader_share:.0%}",
        ", ".join(number_of(rate, 4) for rate in row.learning_rates[:_RATES]) + more,
        "" if row.age_seconds is None else duration(math.floor(row.age_seconds)),
        row.note,
    )


def _clock(seconds: float) -> str:
    """The time of day of a warning, as this host has it; empty if it is no time."""
    try:
        return f"{datetime.fromtimestamp(seconds):%H:%M:%S} " if seconds > 0 else ""
    except (OverflowError, ValueError, OSError):
        return ""

"""Prints the demo: headings, paragraphs, tables, and a status line."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

_MIN_WIDTH = 100


class Show:
    """Prints to a terminal or into a pipe. Only a terminal gets a status line that changes."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, markup=False, emoji=False)
        if not self._console.is_terminal:
            self._console.width = max(_MIN_WIDTH, self._console.width)

    def part(self, heading: str, text: str) -> None:
        """Prints the heading and the first paragraph of a part."""
        self._console.print()
        self._console.print(Text(heading, style="bold"))
        self.paragraph(text)

    def paragraph(self, text: str, style: str = "") -> None:
        """Prints a paragraph."""
        self._console.print(Text(text, style=style))

    def line(self, text: str) -> None:
        """Prints a line that is never broken, such as a path to copy."""
        self._console.print(Text(text), soft_wrap=True)

    def verbatim(self, text: str) -> None:
        """Prints the output of another process, unchanged."""
        self._console.print(Text(text, style="yellow"), soft_wrap=True)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Prints a small table."""
        table = Table(header_style="bold", box=None, padding=(0, 2, 0, 1))
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*row)
        self._console.print(table)

    @contextlib.contextmanager
    def status(self, text: str) -> Iterator[Callable[[str], None]]:
        """Shows a status line while the block runs; yields a function that changes its text on a terminal."""
        if not self._console.is_terminal:
            self.paragraph(f"… {text}")
            yield lambda _: None
            return
        with self._console.status(text) as status:
            yield status.update

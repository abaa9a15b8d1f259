"""What the demo looks like: headings, sentences, tables, and a line that moves while it works."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

_MIN_WIDTH = 100


class Show:
    """Prints for people; into a pipe as well as on a terminal, where it also moves."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, markup=False, emoji=False)
        if not self._console.is_terminal:
            self._console.width = max(_MIN_WIDTH, self._console.width)

    def part(self, heading: str, sentence: str) -> None:
        """Begins a part."""
        self._console.print()
        self._console.print(Text(heading, style="bold"))
        self.say(sentence)

    def say(self, sentence: str, style: str = "") -> None:
        """Prints one sentence."""
        self._console.print(Text(sentence, style=style))

    def verbatim(self, text: str) -> None:
        """Prints what somebody else has printed, as it was."""
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
    def working(self, text: str) -> Iterator[Callable[[str], None]]:
        """Says what is being done while it is; what it yields changes the text, which only a terminal shows."""
        if not self._console.is_terminal:
            self.say(f"… {text}")
            yield lambda _: None
            return
        with self._console.status(text) as status:
            yield status.update

"""Prints the demo to a terminal, or into a pipe."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

_MIN_WIDTH = 100
SIGN_SECONDS = 5.0
"""From one sign of life to the next, where nothing can be painted over."""


class Show(Console):
    """A console that prints text as it is, and lines of at least 100 characters into a pipe."""

    def __init__(self) -> None:
        super().__init__(highlight=False, markup=False, emoji=False)
        if not self.is_terminal:
            self.width = max(_MIN_WIDTH, self.width)

    def part(self, heading: str, text: str) -> None:
        """Prints the heading and the first paragraph of a part."""
        self.print()
        self.print(heading, style="bold")
        self.print(text)

    def verbatim(self, text: str) -> None:
        """Prints what rank 0 has printed, unchanged."""
        self.print("\n".join(f"[rank 0] {line}" for line in text.splitlines()), style="yellow", soft_wrap=True)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Prints a small table."""
        table = Table(header_style="bold", box=None, padding=(0, 2, 0, 1))
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*row)
        self.print(table)

    @contextlib.contextmanager
    def waiting(self, text: str) -> Iterator[Callable[[str], None]]:
        """Says what is awaited while the block runs; yields a function that changes the text on a terminal.

        Where the output is no terminal, seconds are counted on stderr.
        """
        if not self.is_terminal:
            self.print(f"… {text}")
            with _signs_of_life():
                yield lambda _: None
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        with Progress(*columns, console=self, transient=True) as progress:
            task = progress.add_task(text, total=None)
            yield lambda text: progress.update(task, description=text)


@contextlib.contextmanager
def _signs_of_life() -> Iterator[None]:
    """Counts seconds on stderr while the block runs."""
    began, done = time.monotonic(), threading.Event()

    def count() -> None:
        while not done.wait(SIGN_SECONDS):
            print(f"… {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)

    counting = threading.Thread(target=count, name="countoff demo: signs of life", daemon=True)
    counting.start()
    try:
        yield
    finally:
        done.set()
        counting.join()

"""What the commands print on: with colours and wrapped at words on a terminal, whole lines in a pipe."""

from __future__ import annotations

from rich.console import Console

__all__ = ["ENDLESS", "console"]

ENDLESS = 10_000
"""Columns in which any row of a table has room."""


def console() -> Console:
    """Returns what a command prints on.

    On a terminal, texts are as wide as it is; ``NO_COLOR`` turns colours off. In a pipe or a file there are none, and
    each line and each row of a table stays whole, for grep.
    """
    found = Console(highlight=False)
    if not found.is_terminal:
        found.soft_wrap = True
        found.width = ENDLESS
    return found

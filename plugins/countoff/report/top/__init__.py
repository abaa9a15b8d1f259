"""`countoff top`: what the ranks of a job are doing while it runs."""

from countoff.report.top.command import COLUMNS, top

__all__ = ["COLUMNS", "top"]

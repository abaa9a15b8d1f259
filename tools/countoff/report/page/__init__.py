"""The page of a trace: one HTML file, without a script."""

from countoff.report.page.html import render

__all__ = ["render"]

"""The page of a trace. Needs the extra `report`."""

from countoff.report.page.html import render

__all__ = ["render"]

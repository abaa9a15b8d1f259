"""`countoff report`: a trace as one HTML page that needs no network. Needs Bokeh, the extra `countoff[report]`."""

from countoff.report.page import render

__all__ = ["render"]

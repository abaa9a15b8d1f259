"""The two pictures of the page, drawn by Bokeh: the lanes, and the learning rate.

Bokeh, because with 256 lanes of 200 blocks its page has 2.0 MB and is drawn in 2.2 s, where Plotly's has 6.5 MB and
takes 15 s; with 2,000 blocks each, it is 8.1 MB to 21 MB. Neither makes the blocks accessible: the page has the lanes
and their facts as text beside them.

No colour is set here: `page.css` has them all, and `page.js` gives them to these models by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from bokeh.embed import json_item
from bokeh.models import (
    ColumnDataSource,
    CrosshairTool,
    DatetimeTicker,
    DatetimeTickFormatter,
    HoverTool,
    Label,
    NumeralTickFormatter,
    PanTool,
    Range1d,
    Span,
    WheelZoomTool,
)
from bokeh.plotting import figure

from countoff.report.facts.counts import Parting
from countoff.report.facts.rates import RateLine
from countoff.report.model import Fit, Run
from countoff.report.page.gaps import TimeAxis
from countoff.report.page.lanes import Block, Lane, NotedBlock, blocks_of, pauses_of, rests_of
from countoff.report.ranks import label_of

_SIDE = 30
"""Pixels left and right of the lanes, for half of a label of the time axis."""
_AXIS_HEIGHT, _LABEL_HEIGHT = 40, 20
_COLORS, _MOST_MARKERS = 8, 200
_UNITS = ("seconds", "minsec", "minutes", "hourmin", "hours")
_CLOCK = dict.fromkeys(_UNITS, "%H:%M:%S") | dict.fromkeys(("microseconds", "milliseconds"), "%H:%M:%S.%3N")
_COUNTS = """
<div class="hover"><b>@label</b>, @span<br>@from{%H:%M:%S} – @until{%H:%M:%S}<br>
@batches{0,0} batches, @steps{0,0} steps<br>@rate{0.[00]} batches per second{waiting}</div>
"""
_WAITING = "<br>@share{0%} waiting for the loader"
_NOTE = '<div class="hover"><b>@label</b><br>@from{%H:%M:%S} – @until{%H:%M:%S}<br>@note</div>'
_UNCERTAIN: Any = {
    "tags": ["unknown"],
    "fill_alpha": 0.35,
    "line_alpha": 0.35,
    "hatch_pattern": "/",
    "hatch_alpha": 0.8,
    "hatch_scale": 8,
}
_LEAST_SHARE = 0.05
"""A smaller share of waiting for the loader is not drawn."""


def lane_height(lanes: int) -> int:
    """Pixels of one lane."""
    return 30 if lanes <= 16 else 20 if lanes <= 64 else 14


def lanes_figure(
    lanes: Sequence[Lane], begin: float, end: float, partings: Sequence[Parting], axis: TimeAxis
) -> tuple[Any, set[str]]:
    """The lanes below one another, the first on top.

    Args:
        lanes: The lanes.
        begin: Where the time axis begins, in milliseconds as it places them.
        end: Where it ends.
        partings: Where counts begin to differ; there is a line across all lanes.
        axis: What places times.

    Returns:
        What `Bokeh.embed.embed_item` takes; and the names of what is in the picture, for the legend.
    """
    height = lane_height(len(lanes))
    places = {"x_axis_location": None, "y_axis_location": None, "min_border_top": 0, "min_border_bottom": 0}
    plot = _figure(
        begin, end, name="lanes", height=height * len(lanes), y_range=Range1d(start=len(lanes), end=0), **places
    )
    plot.ygrid.ticker = list(range(len(lanes) + 1))
    names = [lane.label for lane in lanes]
    draw = _Drawing(plot, axis, names)
    draw.gaps(len(lanes))
    spans, rests = _draw_spans(draw, lanes)
    pauses = [
        plot.quad(source=draw.noted(blocks), name=f"pause {where}")
        for where in ("loader", "collective", "code")
        for blocks in [pauses_of(lanes, where)]
    ]
    plot.add_tools(
        HoverTool(
            renderers=spans[:2],
            tooltips=draw.tooltip(_COUNTS.replace("{waiting}", _WAITING)),
            formatters=draw.times,
            attachment="below",
            name="counts",
        ),
        HoverTool(
            renderers=spans[2:],
            tooltips=draw.tooltip(_COUNTS.replace("{waiting}", "")),
            formatters=draw.times,
            attachment="below",
            name="evaluations",
        ),
        HoverTool(
            renderers=[*rests, *pauses],
            tooltips=draw.tooltip(_NOTE),
            formatters=draw.times,
            attachment="above",
            name="notes",
        ),
    )
    lines = [(parting.time, 0, len(lanes)) for parting in partings]
    draw.lines("parting", lines, line_dash="dashed")
    ends = [
        (axis.place(end), index + 0.5)
        for index, lane in enumerate(lanes)
        for fit, end in zip(lane.fits, lane.ends, strict=True)
        if _ends_badly(fit)
    ]
    source = ColumnDataSource({"x": [x for x, _ in ends], "y": [y for _, y in ends]})
    plot.scatter("x", "y", source=source, marker="x", size=min(10, height - 4), line_width=2, name="end")
    return json_item(plot), _drawn_in(plot)


def _drawn_in(plot: Any) -> set[str]:
    """The names of what is in a picture: a renderer without data draws nothing."""
    drawn = [each for each in plot.renderers if any(len(column) for column in each.data_source.data.values())]
    return {name.removeprefix("pause ") for each in drawn for name in each.glyph.tags or [each.name]}


def _draw_spans(draw: _Drawing, lanes: Sequence[Lane]) -> tuple[list[Any], list[Any]]:
    """Draws train epochs and evaluations, and how much of them was spent waiting for the loader.

    Returns:
        What has counts to show, the evaluations whose waits were not measured last; and rests of spans not closed.
    """
    train, evaluations = (blocks_of(lanes, evaluations=each) for each in (False, True))
    measured = [block for block in evaluations if block.measured]
    others = [block for block in evaluations if not block.measured]
    drawn = [
        draw.plot.quad(source=draw.counted(blocks), name=name)
        for name, blocks in (("train", train), ("evaluation", measured), ("evaluation", others))
    ]
    rests = [
        draw.plot.quad(source=draw.noted(blocks), name=name, **style)
        for name, evaluations in (("train", False), ("evaluation", True))
        for certain, style in ((True, {}), (False, _UNCERTAIN))
        for blocks in [rests_of(lanes, certain=certain, evaluations=evaluations)]
        if blocks
    ]
    waited = [block for block in (*train, *evaluations) if block.share >= _LEAST_SHARE]
    shares = np.array([block.share for block in waited], dtype="f4")
    draw.plot.quad(source=ColumnDataSource(draw.columns(waited, shares)), name="loader")
    begins = [(span.begin, at, at + 1) for at, lane in enumerate(lanes) for fit in lane.fits for span in fit.spans]
    draw.lines("seam", begins)
    return drawn, rests


class _Drawing:
    """The lanes that are being drawn.

    Args:
        plot: The picture.
        axis: What places times.
        names: The name of each lane.
    """

    def __init__(self, plot: Any, axis: TimeAxis, names: Sequence[str]) -> None:
        self.plot = plot
        self._axis = axis
        self._names = names

    def tooltip(self, text: str) -> str:
        """A tooltip, with the columns that have the true times."""
        return text if self._axis.is_cut else text.replace("@from", "@left").replace("@until", "@right")

    @property
    def times(self) -> Any:
        """The columns of a tooltip that have times."""
        return dict.fromkeys(("@from", "@until") if self._axis.is_cut else ("@left", "@right"), "datetime")

    def counted(self, blocks: Sequence[Block]) -> ColumnDataSource:
        """Blocks with their counts."""
        return ColumnDataSource(self.columns(blocks) | _counts(blocks, self._names))

    def noted(self, blocks: Sequence[NotedBlock]) -> ColumnDataSource:
        """Blocks with their notes."""
        return ColumnDataSource(self.columns(blocks) | _notes(blocks, self._names))

    def columns(self, blocks: Sequence[Block | NotedBlock], heights: Any = 1.0) -> dict[str, Any]:
        """Where blocks are: from the bottom of their lanes up, as high as `heights` says."""
        bottom = np.array([block.lane for block in blocks], dtype="f4") + np.float32(0.92)
        left, right = [block.left for block in blocks], [block.right for block in blocks]
        times = {"from": 1000 * np.array(left, "f8"), "until": 1000 * np.array(right, "f8")}
        return {
            "left": self._axis.places(left),
            "right": self._axis.places(right),
            "bottom": bottom,
            "top": bottom - np.float32(0.84) * heights,
            **(times if self._axis.is_cut else {}),
        }

    def gaps(self, lanes: int) -> None:
        """Draws the gaps between runs, across all lanes."""
        if gaps := self._axis.gaps:
            left, right = [self._axis.place(gap.begin) for gap in gaps], [self._axis.place(gap.end) for gap in gaps]
            self.plot.quad(left=left, right=right, top=0, bottom=lanes, name="gap", hatch_pattern="/", hatch_scale=8)

    def lines(self, name: str, lines: Sequence[tuple[float, int, int]], **style: Any) -> None:
        """Draws vertical lines: each at a time, from the top of one lane to that of another."""
        data = {
            "x": self._axis.places([time for time, _, _ in lines]),
            "top": np.array([first for _, first, _ in lines], dtype="f4") + np.float32(0.08),
            "bottom": np.array([last for _, _, last in lines], dtype="f4") - np.float32(0.08),
        }
        self.plot.segment("x", "top", "x", "bottom", source=ColumnDataSource(data), name=name, line_width=2, **style)


def axis_figure(begin: float, end: float, partings: Sequence[Parting], axis: TimeAxis) -> Any:
    """The time axis of the lanes: a picture of its own, so that it stays in sight while the lanes scroll.

    Args:
        begin: Where the time axis begins, in milliseconds as it places them.
        end: Where it ends.
        partings: Where counts begin to differ; the numbers are written below the axis.
        axis: What places times.
    """
    height = _AXIS_HEIGHT + (_LABEL_HEIGHT if partings or axis.gaps else 0)
    places = {"x_axis_location": "above", "y_axis_location": None, "min_border_bottom": 0}
    plot = _figure(begin, end, name="axis", height=height, y_range=Range1d(start=0, end=1), **places)
    plot.min_border_top = _AXIS_HEIGHT - 2
    plot.ygrid.visible = False
    plot.scatter([], [], name="end")  # Bokeh warns of a picture with nothing in it
    style: Any = {"text_align": "center", "text_baseline": "middle", "text_font_size": "12px"}
    for parting in partings:
        numbers = " ≠ ".join(f"{number:,}" for number, _ in parting.groups[:3])
        place = axis.place(parting.time)
        plot.add_layout(Label(x=place, y=0.5, text=numbers, name="parting", text_font_style="bold", **style))
    for gap in axis.gaps:
        middle = (axis.place(gap.begin) + axis.place(gap.end)) / 2
        plot.add_layout(Label(x=middle, y=0.5, text=gap.words, name="gap", **style))
    plot.xaxis.formatter = DatetimeTickFormatter(**_CLOCK, days="%d %b %H:%M", months="%d %b", years="%Y")
    plot.xaxis.major_label_text_font_size = "12px"
    return json_item(plot)


def rates_figure(lines: Sequence[RateLine], last: Run) -> Any | None:
    """The learning rate by optimizer step; None if it never changes.

    Args:
        lines: The lines.
        last: The last run, for the step at which its schedule would have ended.
    """
    if len({rate for line in lines for rate in line.rates}) < 2:
        return None
    plot = figure(
        name="rates",
        height=260,
        sizing_mode="stretch_width",
        toolbar_location=None,
        tools="",
        x_axis_label="optimizer steps",
        y_axis_label="learning rate",
        background_fill_alpha=0,
        border_fill_alpha=0,
        min_border_right=_SIDE,
    )
    for number, (steps, rates, ranks) in enumerate(lines):
        name, whose = f"rate {number % _COLORS}", {"legend_label": label_of(ranks)} if ranks else {}
        line = plot.line(steps, rates, line_width=2, name=name, **whose)
        if len(steps) <= _MOST_MARKERS:
            plot.scatter(steps, rates, size=6, name=name, **whose)
        tooltips = [("step", "@x{0,0}"), ("learning rate", "@y{0.000e+0}")]
        tooltips += [("of", label_of(ranks))] if ranks else []
        plot.add_tools(HoverTool(renderers=[line], tooltips=tooltips))
    for horizon in last.horizons:
        plot.add_layout(Span(location=horizon, dimension="height", line_width=2, line_dash="dotted", name="horizon"))
    most = max(rate for line in lines for rate in line.rates)
    least = min(0.0, *(rate for line in lines for rate in line.rates))
    plot.y_range = Range1d(start=least * 1.05, end=most + 0.05 * (most - least) if most > least else 1)
    plot.x_range = Range1d(start=0, end=1.02 * max(1, *last.horizons, *(line.steps[-1] for line in lines)))
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0")
    plot.add_tools(CrosshairTool(dimensions="height"))
    return json_item(plot)


def _figure(begin: float, end: float, **options: Any) -> Any:
    plot = figure(
        x_range=Range1d(start=begin, end=end),
        x_axis_type="datetime",
        sizing_mode="stretch_width",
        toolbar_location=None,
        tools="",
        min_border_left=_SIDE,
        min_border_right=_SIDE,
        outline_line_color=None,
        background_fill_alpha=0,
        border_fill_alpha=0,
        **options,
    )
    ticker = DatetimeTicker(desired_num_ticks=9)  # one for lines and labels, in both pictures
    plot.xgrid.ticker = ticker
    for axis in plot.xaxis:
        axis.ticker = ticker
    wheel = WheelZoomTool(dimensions="width", modifiers="ctrl")
    pan = PanTool(dimensions="width")
    plot.add_tools(wheel, pan)
    plot.toolbar.active_scroll, plot.toolbar.active_drag = wheel, pan
    return plot


def _counts(blocks: Sequence[Block], names: Sequence[str]) -> dict[str, Any]:
    return {
        "label": [names[block.lane] for block in blocks],
        "span": [block.span for block in blocks],
        "batches": np.array([block.batches for block in blocks], dtype="f8"),
        "steps": np.array([block.steps for block in blocks], dtype="f8"),
        "rate": np.array([block.rate for block in blocks], dtype="f4"),
        "share": np.array([block.share for block in blocks], dtype="f4"),
    }


def _notes(blocks: Sequence[NotedBlock], names: Sequence[str]) -> dict[str, Any]:
    return {"label": [names[block.lane] for block in blocks], "note": [block.note for block in blocks]}


def _ends_badly(fit: Fit) -> bool:
    return fit.ending is None or fit.ending.how in ("verdict", "failed")

"""The page as a whole: its text from a template, in which every value is escaped, and the pictures between.

The trace is untrusted. Jinja escapes each value; the pictures come as JSON in which no `<` is left; and the browser
runs no script but the two whose hashes the page itself states, and loads nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import resources
from itertools import groupby
from typing import Any

from bokeh.resources import Resources
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

import countoff.core
from countoff.core.verdict import Verdict, table
from countoff.core.words import count_of, names_of, plain
from countoff.report import facts
from countoff.report.facts.paces import hosts_table, slow_table
from countoff.report.facts.rates import only_rate, rate_lines_of, rates_table
from countoff.report.model import Run, Trace
from countoff.report.page import figures
from countoff.report.page.gaps import TimeAxis, gaps_of
from countoff.report.page.lanes import MOST_LANES, lanes_of
from countoff.report.words import duration, number

_MOST_RUNS, _MOST_ROWS, _MOST_COLUMNS, _MOST_STACKS, _MOST_WARNINGS, _MOST_LINES = 20, 400, 24, 64, 100, 16
"""The most of each that a page shows; it says how many there are."""

_LEGEND = (
    ("train", "", "train epoch"),
    ("evaluation", "", "evaluation"),
    ("loader", "", "waiting for the loader (height: share of the time)"),
    ("collective", "", "pause: waiting in a collective"),
    ("code", "", "pause in its own code"),
    ("unknown", "", "no more data from this rank"),
    ("parting", "", "where the ranks' counts begin to differ"),
    ("gap", "", "between runs"),
    ("end", "×", "verdict, failed, or no end"),
)
"""What may be in the picture of the lanes: the name of its colour, what is drawn with it, and what it means."""
_WORDS = {
    "rank": "one process of the job, usually with one GPU. Ranks are numbered from 0. In most jobs, each trains "
    "the same model on its own part of the data, and all must do so in step.",
    "batch": "the samples that a rank takes from its data loader at once.",
    "fetched": "the loader has handed the batch over. It counts as a batch once the rank has begun to use it.",
    "step": "one change of the model's parameters by the optimizer, after one batch or a few.",
    "span": "one pass over the data: a train epoch, or an evaluation.",
    "collective": "an operation in which all ranks take part, such as the averaging of gradients. Each waits there "
    "until all others have come.",
    "verdict": "what countoff has proved: which ranks are out of step.",
}
"""What a reader must know who has never heard of ranks."""


def render(trace: Trace) -> str:
    """Returns the page of a trace, as HTML.

    Args:
        trace: What was read; at least one run.
    """
    runs = trace.runs[-_MOST_RUNS:]
    lanes = lanes_of(trace)
    begin, end = min(run.begin for run in runs), max(run.end for run in runs)
    axis = TimeAxis(gaps_of(runs))
    left, right = axis.place(begin), axis.place(end)
    # A job that ended at once has whole seconds on its axis, not a fraction of one.
    margin = 0.01 * (right - left) if right - left >= 1_000 else 5_000.0
    limits = left - margin, right + margin
    partings = [parting for run in runs for parting in facts.partings_of(run)][:_MOST_LINES]
    lines = rate_lines_of(runs)
    rates = figures.rates_figure(lines, runs[-1])
    picture, drawn = figures.lanes_figure(lanes, *limits, partings, axis)
    pictures = {
        "axis": figures.axis_figure(*limits, partings, axis),
        "lanes": picture,
        **({"rates": rates} if rates else {}),
    }
    scripts = [_bokeh(), _own("page.js")]
    return _template().render(
        title=facts.headline(trace),
        heading=facts.heading(trace),
        verdict=trace.verdict,
        stall=facts.stall_of(trace),
        is_healthy=facts.is_healthy(trace),
        trace=trace,
        runs=[_run(run, at) for at, run in enumerate(runs, 1 + len(trace.runs) - len(runs))],
        last=runs[-1],
        several_hosts=len(runs[-1].hosts) > 1,
        lanes=lanes,
        by_class=runs[-1].world_size > MOST_LANES,
        lane_height=figures.lane_height(len(lanes)),
        legend=[each for each in _LEGEND if each[0] in drawn],
        partings=partings,
        gaps=axis.gaps,
        cuts=json.dumps(axis.steps),
        begin=begin,
        has_rates=rates is not None,
        only_rate=only_rate(lines),
        incident_stacks=[incident.stacks for incident in trace.incidents if incident.stacks],
        words=_WORDS,
        limits={"rows": _MOST_ROWS, "columns": _MOST_COLUMNS, "stacks": _MOST_STACKS, "warnings": _MOST_WARNINGS},
        version=countoff.core.__version__,
        style=Markup(_own("page.css")),
        scripts=[Markup(script) for script in scripts],
        policy=_policy(scripts),
        figures=Markup(_harmless(pictures)),
    )


def _run(run: Run, at: int) -> dict[str, Any]:
    """What the tables show of one run."""
    paces = facts.paces_of(run)
    fits = list(run.fits.values())
    return {
        "number": at,
        "run": run,
        "slow": slow_table(paces),
        "hosts": hosts_table(facts.hosts_of(run, paces)),
        "counts": facts.counts_of(run),
        "stacks": facts.stacks_of(run),
        "plans": facts.plan_differences_of(run),
        "totals": facts.totals_of(run),
        "rates": rates_table(run),
        "frameworks": sorted({fit.framework for fit in fits if fit.framework}),
        "versions": sorted({(name, str(value)) for fit in fits for name, value in fit.versions.items()}),
        "clock_error": max((fit.clock_error for fit in fits if fit.clock_error is not None), default=None),
        "dropped_lines": sum(fit.dropped_lines for fit in fits),
        "dropped_spans": sum(fit.dropped_spans for fit in fits),
    }


def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("countoff.report.page", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"duration": duration, "clock": _clock, "names": names_of, "number": number}
    environment.filters |= {"count_of": count_of, "plain": plain, "parts": _parts}
    return environment.get_template("page.html")


def _bokeh() -> str:
    """Bokeh's own script, without its tables, widgets and WebGL."""
    return "\n".join(Resources(mode="inline", minified=True, components=["bokeh"]).js_raw)


def _own(name: str) -> str:
    return resources.files("countoff.report.page").joinpath(name).read_text("utf-8")


def _policy(scripts: Sequence[str]) -> str:
    """What the browser may do: run these scripts, and load nothing."""
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    nothing = "default-src 'none'; base-uri 'none'; form-action 'none'"
    return f"{nothing}; script-src {allowed}; style-src 'unsafe-inline'; img-src data:"


def _harmless(value: object) -> str:
    """A value as JSON that may stand within a script element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _parts(verdict: Verdict) -> list[tuple[bool, str]]:
    """The text of a message in parts: whether each is the table of ranks, and its lines."""
    rows = {plain(line) for line in table(verdict.rows, verdict.counted, hosts=bool(verdict.hosts))}
    found = groupby(verdict.render().splitlines(), key=lambda line: line in rows)
    return [(is_table, "\n".join(lines)) for is_table, lines in found]


def _clock(seconds: float, pattern: str = "%Y-%m-%d %H:%M:%S") -> str:
    """A time in UTC; empty if no calendar has it."""
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime(pattern)
    except (OverflowError, ValueError, OSError):
        return ""

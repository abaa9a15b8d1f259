"""The page as a whole: the facts and the lanes, in a template that escapes every value.

The trace is untrusted. Jinja escapes each value, there is no script, and the browser is told to run none and to load
nothing.
"""

from __future__ import annotations

from importlib import resources
from itertools import groupby

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

import countoff.core
from countoff.core.messages import count_of, plain
from countoff.core.verdict import Verdict, table
from countoff.report import facts
from countoff.report.model import Run, Trace
from countoff.report.page.axis import TimeAxis, apart
from countoff.report.page.curve import Picture
from countoff.report.page.lanes import MOST_LANES, Lane, lanes_of
from countoff.report.words import duration, moment

_MOST = {"runs": 20, "rows": 400, "parts": 64, "messages": 100, "divergences": 16}
"""The most of each that a page shows; it says how many there are."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_LEGEND = (
    ("train", "", "train epoch"),
    ("evaluation", "", "evaluation"),
    ("waits", "", "waiting for the loader (height: share of the time)"),
    ("loader", "", "pause in the loader"),
    ("collective", "", "pause: waiting in a collective"),
    ("code", "", "pause in its own code"),
    ("unknown", "", "no more data from this rank"),
    ("divergence", "", "where the ranks' counts begin to differ"),
    ("gap", "", "between runs"),
    ("end", "×", "verdict, failed, or no end"),
)
"""What may be in the lanes: the name of its colour, what is drawn with it, and what it means."""
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
    runs = trace.runs[-_MOST["runs"] :]
    axis = TimeAxis(runs)
    lanes = lanes_of(Trace(trace.directories, runs), axis)
    divergences = [divergence for run in runs for divergence in facts.first_divergences(run)][: _MOST["divergences"]]
    numbers = [(each.time, " ≠ ".join(f"{number:,}" for number, _ in each.groups[:3])) for each in divergences]
    return _template().render(
        title=facts.headline(trace),
        heading=facts.heading(trace),
        look="bad" if trace.verdict or facts.stall_of(trace) else "good" if facts.is_healthy(trace) else "",
        messages=facts.messages_of(trace),
        trace=trace,
        runs=[(at, run, facts.facts_of(trace, run)) for at, run in enumerate(runs, 1 + len(trace.runs) - len(runs))],
        last=runs[-1],
        lanes=lanes,
        lane_height=26 if len(lanes) <= 16 else 18 if len(lanes) <= 64 else 13,
        legend=_legend(lanes, divergences=bool(divergences), gaps=bool(axis.gaps)),
        axis=axis,
        times=axis.times(),
        below=list(apart([*axis.labels(numbers), *axis.gap_labels()])),
        divergences=[axis.place(each.time) for each in divergences],
        by_class=runs[-1].world_size > MOST_LANES,
        words=_WORDS,
        most=_MOST,
        about=_about(runs[-1]),
        version=countoff.core.__version__,
        style=Markup(resources.files("countoff.report.page").joinpath("page.css").read_text("utf-8")),
        policy=_POLICY,
    )


def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("countoff.report.page", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"count_of": count_of, "plain": plain, "duration": duration, "moment": moment}
    environment.filters |= {"percent": _percent, "parts": _parts, "picture": Picture}
    return environment.get_template("page.html")


def _percent(value: float) -> str:
    """A place or a width in a picture."""
    return f"{value:.2f}".rstrip("0").rstrip(".") + "%"


def _legend(lanes: list[Lane], *, divergences: bool, gaps: bool) -> list[tuple[str, str, str]]:
    """What the lanes show, in words; what is in none of them is left out."""
    drawn = {shape.kind for lane in lanes for shape in lane.shapes}
    drawn |= {"waits"} if any(lane.waits for lane in lanes) else set()
    drawn |= {"end"} if any(lane.crosses for lane in lanes) else set()
    drawn |= {name for name, is_there in (("divergence", divergences), ("gap", gaps)) if is_there}
    return [each for each in _LEGEND if each[0] in drawn]


def _about(run: Run) -> list[str]:
    """What the foot of the page says about a run."""
    fits = list(run.fits.values())
    versions = sorted({f"{name} {value}" for fit in fits for name, value in fit.versions.items()})
    said = [", ".join([*sorted({fit.framework for fit in fits if fit.framework}), *versions])]
    errors = [fit.clock_error for fit in fits if fit.clock_error is not None]
    said += [f"Clocks of other hosts are corrected to within {duration(max(errors))}"] if errors else []
    if lines := sum(fit.dropped_lines for fit in fits):
        said.append(f"{count_of(lines, 'line')} not written, because the file system was too slow")
    if spans := sum(fit.dropped_spans for fit in fits):
        said.append(f"{count_of(spans, 'old span')} left out")
    return [each for each in said if each]


def _parts(verdict: Verdict) -> list[tuple[bool, str]]:
    """The text of a message in parts: whether each is the table of ranks, and its lines."""
    rows = {plain(line) for line in table(verdict.rows, verdict.counted, hosts=bool(verdict.hosts))}
    found = groupby(verdict.render().splitlines(), key=lambda line: line in rows)
    return [(is_table, "\n".join(lines)) for is_table, lines in found]

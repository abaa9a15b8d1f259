"""What the last look at a job has shown, as metrics of Prometheus. docs/seeing.md lists them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from countoff.core.checks import KINDS
from countoff.core.verdict import Verdict
from countoff.report.facts import behind_batches, late_seconds, totals_of
from countoff.report.model import Fit, Run, Trace
from countoff.report.top.rows import ODD_STATES, STATES, Row

MOST_RANKS = 256
"""Ranks that have series of their own: as many as the page has lanes."""
OTHER = "other"
"""The kind of a verdict that this version does not know: there must be few labels, and anybody may write a trace."""
_TOTALS = {
    "total_steps": ("steps", "Optimizer steps of the training"),
    "steps_per_epoch": ("epoch_steps", "Optimizer steps of an epoch"),
    "batches_per_epoch": ("epoch_batches", "Batches of an epoch on each rank"),
    "samples_per_epoch": ("epoch_samples", "Samples of an epoch on all ranks together"),
}
"""The totals that are served, by their names in a trace: the end of the metric's name, and what they count."""
_EPOCH = re.compile(r"train epoch (\d{1,9})")

_Family = type[CounterMetricFamily | GaugeMetricFamily]
_OF_RANKS: Sequence[tuple[_Family, str, str]] = (
    (CounterMetricFamily, "countoff_batches_total", "Batches of train epochs in this run."),
    (CounterMetricFamily, "countoff_evaluation_batches_total", "Batches of evaluations in this run."),
    (
        CounterMetricFamily,
        "countoff_samples_total",
        "Samples of train epochs in this run: batches times the batch size, where that is known.",
    ),
    (
        CounterMetricFamily,
        "countoff_steps_total",
        "Optimizer steps of the training, with those before the checkpoint from which the run resumes.",
    ),
    (CounterMetricFamily, "countoff_loader_seconds_total", "Seconds waited for the loader in this run."),
    (GaugeMetricFamily, "countoff_epoch", "Number of the last train epoch, from 0."),
    (
        GaugeMetricFamily,
        "countoff_epoch_batches",
        "Batches of the last train epoch, with those before the checkpoint from which the run resumes.",
    ),
    (
        GaugeMetricFamily,
        "countoff_behind_batches",
        "Batches that the rank lacks in its span, compared with half of the ranks in this span.",
    ),
    (
        GaugeMetricFamily,
        "countoff_late_seconds",
        "Seconds after the first rank at the end of the last train epoch or evaluation that the rank has ended.",
    ),
    (
        GaugeMetricFamily,
        "countoff_last_record_timestamp_seconds",
        "When the rank wrote its last line, by the clock of rank 0.",
    ),
)
"""The metrics with a series for each rank, in the order of `_values`."""


class JobCollector:
    """The metrics of a job, as `update` has left them. A scrape reads no file and waits for nothing.

    Args:
        run: The value of the label ``run``.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._shown: dict[int, None] = {}
        self._runs = 0
        self._metrics: Sequence[Metric] = ()

    def collect(self) -> Iterable[Metric]:
        """Returns the metrics; the client library calls it on the thread of each scrape."""
        return self._metrics

    def update(self, trace: Trace, rows: Sequence[Row], time: float) -> None:
        """Takes over what a look has shown.

        Args:
            trace: What has been read.
            rows: What the ranks of the last run are doing.
            time: When that was, in seconds since the epoch.
        """
        run = trace.runs[-1] if trace.runs else Run()
        if len(trace.runs) != self._runs:
            self._runs, self._shown = len(trace.runs), {}
        self._metrics = (*self._of_ranks(run, rows), *self._of_totals(run), *self._of_job(trace, rows, time))

    def _of_ranks(self, run: Run, rows: Sequence[Row]) -> Iterator[Metric]:
        families = [family(name, text, labels=("run", "rank", "host")) for family, name, text in _OF_RANKS]
        behind, late = behind_batches(run), late_seconds(run)
        for fit in self._fits(run, rows):
            for family, value in zip(families, _values(fit, behind, late), strict=True):
                if value is not None:
                    family.add_metric((self._run, str(fit.rank), fit.host), value)
        yield from families

    def _fits(self, run: Run, rows: Sequence[Row]) -> Iterable[Fit]:
        """The ranks that have series. In a large job: the first one, and those to look at, from then on."""
        if run.world_size <= MOST_RANKS:
            return run.fits.values()
        named = run.verdict.named if run.verdict else ()
        odd = (rank for row in rows if row.state in ODD_STATES for rank in row.ranks)
        for rank in (min(run.fits), *named, *odd):
            if len(self._shown) < MOST_RANKS:
                self._shown[rank] = None
        return [run.fits[rank] for rank in self._shown if rank in run.fits]

    def _of_totals(self, run: Run) -> Iterator[Metric]:
        """The totals; where ranks have different ones, those of most ranks."""
        told = totals_of(run)
        sources = (
            ("true", "by countoff's arithmetic", told[-1].true if told else {}),
            ("reported", "as the framework reports them", told[-1].reported if told else {}),
        )
        for kind, source, totals in sources:
            for total, (name, text) in _TOTALS.items():
                values = {(): totals[total]} if total in totals else {}
                yield self._of_run(GaugeMetricFamily, f"countoff_{kind}_{name}", f"{text}, {source}.", values)

    def _of_job(self, trace: Trace, rows: Sequence[Row], time: float) -> Iterator[Metric]:
        states = dict.fromkeys(STATES, 0)
        for row in rows:
            states[row.state] += len(row.ranks)
        verdicts = [*(run.verdict for run in trace.runs[:-1]), trace.verdict]
        counter, gauge, one = CounterMetricFamily, GaugeMetricFamily, self._of_run
        yield one(gauge, "countoff_ranks", "Ranks by what they are doing.", _labelled(states), "state")
        yield one(counter, "countoff_verdicts_total", "Verdicts of all runs.", _by_kind(verdicts), "kind")
        warnings = [warning for run in trace.runs for warning in run.warnings]
        yield one(counter, "countoff_warnings_total", "Warnings of all runs.", _by_kind(warnings), "kind")
        yield one(counter, "countoff_runs_total", "Runs: more than one after a restart.", {(): len(trace.runs)})
        yield one(counter, "countoff_skipped_lines_total", "Lines that could not be read.", {(): trace.skipped})
        problems = len(trace.problems)
        yield one(gauge, "countoff_unreadable_files", "Files that the last look could not read.", {(): problems})
        text = "When the trace was last read, by the clock of the reader."
        yield one(gauge, "countoff_last_look_timestamp_seconds", text, {(): time})

    def _of_run(
        self, family: _Family, name: str, text: str, values: Mapping[tuple[str, ...], float], *labels: str
    ) -> Metric:
        """A metric of the whole job.

        Args:
            family: Its type.
            name: Its name.
            text: What it is.
            values: Its values, by those of its labels.
            labels: Its labels beside ``run``.
        """
        metric = family(name, text, labels=("run", *labels))
        for key, value in values.items():
            metric.add_metric((self._run, *key), value)
        return metric


def _values(fit: Fit, behind: Mapping[int, float], late: Mapping[int, float]) -> tuple[float | None, ...]:
    """What `_OF_RANKS` names, of one rank; None: not known, so there is no series."""
    size = fit.plan.get("batch_size")
    epoch = next((span for span in reversed(fit.spans) if not span.is_evaluation), None)
    number = _EPOCH.fullmatch(epoch.name) if epoch else None
    return (
        fit.batches,
        fit.evaluation_batches,
        fit.batches * size if type(size) is int and size > 0 else None,
        fit.steps,
        fit.loader_seconds,
        int(number[1]) if number else None,
        max(epoch.batches, epoch.before) if epoch else None,
        behind.get(fit.rank),
        late.get(fit.rank),
        fit.last,
    )


def _labelled(values: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    return {(label,): value for label, value in values.items()}


def _by_kind(found: Iterable[Verdict | None]) -> dict[tuple[str, ...], float]:
    """How many there are of each kind; also of those of which there are none: an increase begins at 0."""
    counts = Counter(verdict.kind if verdict.kind in KINDS else OTHER for verdict in found if verdict is not None)
    return _labelled({kind: counts[kind] for kind in (*KINDS, OTHER)})

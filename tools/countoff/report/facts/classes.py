"""Which ranks behaved alike, and why the others did not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from countoff.core.messages import count_of
from countoff.core.trace.format import SILENT_SECONDS
from countoff.report.facts.counts import closed_counts, outlier_counts
from countoff.report.facts.paces import slow_loaders
from countoff.report.facts.parts import NONE, Cell, Column, Table
from countoff.report.facts.rates import ranks_with_other_rates
from countoff.report.facts.spans import Key, spans_of
from countoff.report.facts.stalls import waited_for
from countoff.report.model import Fit, Run
from countoff.report.ranks import label_of, outlier_ranks, ranks_by
from countoff.report.words import duration


@dataclass(frozen=True)
class RankClass:
    """Ranks that behaved alike.

    Attributes:
        ranks: The ranks, ascending.
        reasons: Why they are not like most others; empty for these.
        fit: What the first of them has recorded; None if none of them has left a trace.
        hosts: The names of their hosts.
    """

    ranks: tuple[int, ...]
    reasons: tuple[str, ...]
    fit: Fit | None
    hosts: tuple[str, ...]


def classes_of(run: Run) -> list[RankClass]:
    """Sorts ranks into classes that behaved alike: the outliers first, most ranks last.

    Ranks behave alike if they have counted the same, ended the same way, and were in the same kind of place at a stall.
    Those that are slow or named by the verdict are apart. Ranks that have left no trace are a class.
    """
    reasons = _reasons(run)
    groups = ranks_by(
        {
            rank: (reasons.get(rank), *((span.name, closed_counts(span)) for span in fit.spans))
            for rank, fit in run.fits.items()
        }
    )
    found = [
        RankClass(ranks, reasons.get(ranks[0], ()), run.fits[ranks[0]], _hosts(run, ranks)) for ranks in groups.values()
    ]
    if missing := run.missing:
        found.append(RankClass(tuple(missing), ("no trace",), None, ()))
    first = (*(run.verdict.named if run.verdict else ()), *waited_for(run))
    return sorted(found, key=lambda each: (each.ranks[0] not in first, not each.reasons, len(each.ranks), each.ranks))


def _reasons(run: Run) -> dict[int, tuple[str, ...]]:
    """Why ranks are not like most others."""
    found: defaultdict[int, list[str]] = defaultdict(list)
    verdict, end = run.verdict, run.end
    for rank in verdict.named if verdict and len(verdict.named) < run.world_size else ():
        found[rank].append("named by the verdict")
    for rank in outlier_ranks({rank: fit.ending and fit.ending.how for rank, fit in run.fits.items()}):
        ending = run.fits[rank].ending
        found[rank].append(f"end: {ending.how}" if ending else "no end")
    for rank, fit in run.fits.items():
        # A rank outside of spans writes nothing, whatever the others do.
        if fit.ending is None and fit.open and end - fit.last > SILENT_SECONDS:
            found[rank].append("silent before the others")
    spans = spans_of(run)
    for rank in sorted({rank for table in spans.values() for rank in outlier_counts(table)}):
        found[rank].append("other counts")
    for rank in sorted(ranks_with_other_rates(run)):
        found[rank].append("other learning rates")
    # Where a verdict names ranks, it has stopped the others wherever they were.
    stopped = verdict is not None and bool(verdict.ranks)
    states = {rank: fit.stacks[-1].state for rank, fit in run.fits.items() if fit.stacks and not stopped}
    waited = waited_for(run)
    for rank in waited:
        found[rank].append("the others wait for it")
    for rank in outlier_ranks(states).intersection(waited or states):  # those that wait for another one are no outliers
        found[rank].append(f"last seen in {run.fits[rank].stacks[-1].state or 'an unknown place'}")
    slow: defaultdict[int, list[Key]] = defaultdict(list)
    for key, table in spans.items():
        for rank in slow_loaders(table):
            slow[rank].append(key)
    for rank, keys in slow.items():
        found[rank].append(f"slow loader in {keys[0]}" if len(keys) == 1 else "slow loader")
    return {rank: tuple(reasons) for rank, reasons in found.items()}


def _hosts(run: Run, ranks: Iterable[int]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(run.fits[rank].host for rank in ranks if run.fits[rank].host))


def classes_table(run: Run, classes: Sequence[RankClass]) -> Table:
    """How far ranks that behaved alike got, and how they ended, as a table."""
    columns = [Column(name) for name in ("ranks", "host", "unlike most", "got to", "waited for the loader", "end")]
    note = (
        "Of several ranks, what the first of them has recorded." if any(len(each.ranks) > 1 for each in classes) else ""
    )
    return Table(columns, [class_row(run, each) for each in classes], "Ranks that behaved alike", note)


def class_row(run: Run, ranks: RankClass) -> list[Cell]:
    """One class in that table."""
    hosts = [host for host in ranks.hosts if host]
    place = f"{hosts[0]} … {hosts[-1]} ({len(hosts)})" if len(hosts) > 2 else ", ".join(hosts)
    reasons = "; ".join(ranks.reasons)
    fit = ranks.fit
    waited = Cell(duration(fit.loader_seconds)) if fit and fit.spans else NONE
    return [
        Cell(label_of(ranks.ranks)),
        Cell(place or "–"),
        Cell(reasons or "–", is_highlighted=bool(reasons)),
        Cell(_reached(fit) if fit else "–"),
        waited,
        Cell(_ended(run, fit) if fit else "–"),
    ]


def _reached(fit: Fit) -> str:
    """The last span of a rank, with its batches, and its optimizer steps."""
    if not fit.spans:
        return "before the first span"
    last = fit.open[-1] if fit.open else fit.spans[-1]
    counted = f", {count_of(last.batches, 'batch')}" if last.batches or last.end is not None else ""
    return f"{last.name}{counted}; {count_of(fit.steps, 'step')}"


def _ended(run: Run, fit: Fit) -> str:
    """How a fit has ended, in words."""
    if fit.ending is not None:
        return ": ".join(filter(None, (fit.ending.how, fit.ending.what)))
    lost = run.verdict is not None and run.verdict.kind == "LostRank" and fit.rank in run.verdict.ranks
    return f"no end: killed, or {'crashed' if lost else 'still running'}"

"""How much each rank counted, and where their counts begin to differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from countoff.core.messages import count_of, names_of
from countoff.report.facts.parts import NONE, Cell, Column, Table
from countoff.report.facts.spans import Key, spans_of
from countoff.report.model import Run, Span
from countoff.report.ranks import outlier_ranks, ranks_by, ranks_in

_MOST_CLASSES = 24
"""Columns of the table."""


class Counts(NamedTuple):
    """What one rank has counted in one span; None: not known.

    Attributes:
        batches: Batches that it has begun.
        steps: Optimizer steps of the training until then.
        unused: Batches that were left in its loader.
        closed: Whether it has closed the span; else it has counted at least so many.
        fetched: Batches that it had fetched at the verdict or the stall, where that came before the end of the span;
            the other counts are of the same moment then.
    """

    batches: int
    steps: int
    unused: int | None
    closed: bool
    fetched: int | None = None


@dataclass(frozen=True)
class CountsRow:
    """The counts of one span, one cell per class of ranks.

    Attributes:
        key: The span.
        cells: What each class has counted; None if it has no such span, or nothing is known of it but that it began.
        outlier: Whether the cell differs from what most ranks have counted.
    """

    key: Key
    cells: tuple[Counts | None, ...]
    outlier: tuple[bool, ...]


@dataclass(frozen=True)
class CountsTable:
    """Counts per span and class of ranks.

    Attributes:
        classes: The ranks of each column; those with other counts than most come first.
        rows: The spans.
    """

    classes: tuple[tuple[int, ...], ...]
    rows: tuple[CountsRow, ...]

    @property
    def known_rows(self) -> list[CountsRow]:
        """The spans of which the counts of a class are known."""
        return [row for row in self.rows if any(cell is not None for cell in row.cells)]


@dataclass(frozen=True)
class FirstDivergence:
    """A place where the counts of ranks part.

    Attributes:
        time: When the first rank had reached its last batch or step of this span.
        key: The span.
        noun: What was counted: ``batch`` or ``step``.
        groups: Each number, and the ranks that have it; the smallest number first.
        fetched: The ranks whose number is that of the batches that they had fetched, some of them not begun yet.
    """

    time: float
    key: Key
    noun: str
    groups: tuple[tuple[int, tuple[int, ...]], ...]
    fetched: frozenset[int] = frozenset()

    @property
    def sentence(self) -> str:
        """The two numbers and whose they are."""
        parts = [f"{names_of(ranks)}: {count_of(number, self._noun(ranks))}" for number, ranks in self.groups[:4]]
        more = "; …" if len(self.groups) > 4 else ""
        return f"the ranks' counts begin to differ in {self.key}: {'; '.join(parts)}{more}"

    def _noun(self, ranks: Sequence[int]) -> str:
        return self.noun if self.fetched.isdisjoint(ranks) else f"fetched {self.noun}"


def counts_of(run: Run) -> CountsTable:
    """What all ranks have counted in each span. Ranks with the same counts share a column.

    The counts of a span that was not closed are a few seconds old, so ranks that differ in them alone share one, too;
    but not where the table of a verdict has later ones.
    """
    spans = spans_of(run)
    groups = ranks_by(
        {
            rank: tuple(_known_counts(table[rank]) if rank in table else "no such span" for table in spans.values())
            for rank in run.fits
        }
    )
    outliers = {key: outlier_counts(table) for key, table in spans.items()}
    if (divergence := _divergence_of_verdict(run)) is not None:
        outliers[divergence.key] |= outlier_ranks(
            {rank: number for number, ranks in divergence.groups for rank in ranks}
        )
    outlier_cells = Counter(rank for ranks in outliers.values() for rank in ranks)
    classes = sorted(groups.values(), key=lambda ranks: (-outlier_cells[ranks[0]], ranks))
    rows: list[CountsRow] = []
    for key, table in spans.items():
        firsts = [ranks[0] for ranks in classes]
        cells = tuple(_least_counts([table[rank] for rank in ranks if rank in table]) for ranks in classes)
        rows.append(CountsRow(key, cells, tuple(rank in outliers[key] for rank in firsts)))
    return CountsTable(tuple(classes), tuple(rows))


def counts_table(counts: CountsTable) -> Table:
    """The counts as a table."""
    columns = [Column("span"), *(Column(names_of(ranks), is_number=True) for ranks in counts.classes[:_MOST_CLASSES])]
    rows = [[Cell(str(row.key)), *map(_cell, row.cells[:_MOST_CLASSES], row.outlier)] for row in counts.known_rows]
    note = "Steps are those of the whole training. ≠: not as with most ranks. ≥: the rank may have counted more."
    if len(counts.classes) > _MOST_CLASSES:
        note += f" {_MOST_CLASSES} of {len(counts.classes)} classes of ranks, the odd ones first."
    return Table(columns, rows, "Counts", note)


def _cell(counts: Counts | None, outlier: bool) -> Cell:
    if counts is None:
        return NONE
    fetched = counts.fetched if counts.fetched != counts.batches else None
    more = ((fetched, "fetched"), (counts.unused, "unused"))
    said = [count_of(counts.batches, "batch"), count_of(counts.steps, "step")]
    said += [f"{number:,} {what}" for number, what in more if number]
    at_least = not counts.closed and counts.fetched is None
    return Cell(f"{'≠ ' if outlier else ''}{'≥ ' if at_least else ''}{', '.join(said)}", outlier)


def first_divergences(run: Run) -> list[FirstDivergence]:
    """Where the counts of ranks begin to differ, the first place first.

    They differ in a span that ranks have closed after different numbers of batches, or of steps, and where one has read
    more batches than another has closed it with. A verdict about batches may come before any rank has closed the span:
    then it is what each had fetched that differs. Ranks that exit are not compared with each other: each is wherever a
    signal has reached it.
    """
    found: list[FirstDivergence] = []
    for key, spans in spans_of(run).items():
        known = _comparable(spans)
        if all(span.why == "exited" for span in known.values()):
            continue
        ends = [span.end for span in known.values() if span.end is not None]
        batches = _by_number({rank: _read(spans, span) for rank, span in known.items()})
        steps = _by_number({rank: span.steps for rank, span in known.items() if span.end is not None})
        if len(batches) > 1:
            fetched = frozenset(rank for rank, span in known.items() if _read(spans, span) > span.batches)
            found.append(FirstDivergence(min(ends), key, "batch", batches, fetched))
        elif len(steps) > 1 and any(span.why not in ("", "exited") for span in known.values()):
            found.append(FirstDivergence(min(ends), key, "step", steps))
    at_verdict = _divergence_of_verdict(run)
    if at_verdict is not None and at_verdict.key not in {divergence.key for divergence in found}:
        found.append(at_verdict)
    return sorted(found, key=lambda divergence: divergence.time)


def _divergence_of_verdict(run: Run) -> FirstDivergence | None:
    """Where ranks had fetched different numbers of batches in a span that none has closed, by the verdict's table."""
    verdict = run.verdict
    if verdict is None or verdict.kind != "UnevenBatches" or not verdict.rows:
        return None
    where = verdict.rows[0].get("where")
    keys = [key for key, spans in spans_of(run).items() if key.name == where and not _closed(spans)]
    fetched = {
        rank: row["fetched"]
        for row in verdict.rows
        if row.get("where") == where and isinstance(row.get("fetched"), int)
        for rank in ranks_in(row.get("rank"), run.fits)
    }
    groups = _by_number(fetched)
    if not keys or len(groups) < 2:
        return None
    return FirstDivergence(min(max(verdict.time, run.begin), run.end), keys[-1], "batch", groups, frozenset(fetched))


def _closed(spans: Mapping[int, Span]) -> bool:
    return any(span.end is not None for span in spans.values())


def _by_number(numbers: Mapping[int, int]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Ranks by their number, the smallest number first."""
    return tuple(sorted(ranks_by(numbers).items()))


def outlier_counts(spans: Mapping[int, Span]) -> set[int]:
    """The ranks that have trained on other numbers of batches, or taken other numbers of steps, in a span than most.

    What is left in a loader may differ: where ranks are made even, that is how they stay even.
    """
    closed = {rank: (span.batches, span.steps) for rank, span in spans.items() if span.end is not None}
    whole = {found for rank, found in closed.items() if spans[rank].why != "exited"}
    # Ranks that exit are not compared with each other: those that are like no rank that has not, count as the same.
    outliers = outlier_ranks({rank: found if found in whole else None for rank, found in closed.items()})
    known = _comparable(spans)
    least = min((span.batches for span in known.values()), default=0)
    whole_least = any(span.batches == least and span.why != "exited" for span in known.values())
    compared = {
        rank: _read(spans, span) > least and (whole_least or span.why != "exited") for rank, span in known.items()
    }
    return outliers | outlier_ranks(compared)


def _comparable(spans: Mapping[int, Span]) -> dict[int, Span]:
    """The ranks whose batches in a span can be compared: they have closed it, or read more than one that has."""
    least = min((span.batches for span in spans.values() if span.end is not None), default=None)
    if least is None:
        return {}
    return {rank: span for rank, span in spans.items() if span.end is not None or _read(spans, span) > least}


def _read(spans: Mapping[int, Span], span: Span) -> int:
    """Batches that a rank has read: also one that it has only fetched, where another rank's data has run out.

    Where a span is closed for another reason, as a limit, ranks may have fetched a batch that none of them will use.
    """
    if span.end is not None or span.fetched is None or all(each.why != "exhausted" for each in spans.values()):
        return span.batches
    return max(span.batches, span.fetched)


def closed_counts(span: Span) -> Counts | None:
    """What a rank has counted in a span that it has closed; None of any other one."""
    return _counts(span) if span.end is not None else None


def _known_counts(span: Span) -> Counts | None:
    """What a rank has counted in a span that it has closed, or until the verdict; None where the last tick has it."""
    return _counts(span) if span.end is not None or span.at_verdict else None


def _least_counts(spans: Sequence[Span]) -> Counts | None:
    """What ranks of one class have counted in a span: where they have not closed it, the least that one of them has."""
    least = min(spans, key=lambda span: (span.batches, span.steps), default=None)
    if least is None or (least.end is None and not least.batches and not least.at_verdict):
        return None  # its rank was gone before its first tick
    return _counts(least)


def _counts(span: Span) -> Counts:
    fetched = span.fetched if span.at_verdict and span.end is None else None
    return Counts(span.batches, span.steps, span.unused, span.end is not None, fetched)

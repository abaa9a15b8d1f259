"""In which values the ranks' plans differ, and the totals that follow from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from countoff.core.messages import names_of
from countoff.core.trace.format import COMPARED_LIMITS, COMPARED_PLAN, COMPARED_SETTINGS
from countoff.report.facts.parts import Cell, Column, Table
from countoff.report.model import Fit, Run, Value
from countoff.report.ranks import ranks_by
from countoff.report.words import number

_MOST_VALUES = 24
"""Different values of one name that are shown."""


class PlanRow(NamedTuple):
    """A value of the plan in which ranks differ.

    Attributes:
        name: The name of the value, as ``batch_size``.
        groups: Each value as text, and the ranks that have it; those of the fewest ranks first.
    """

    name: str
    groups: tuple[tuple[str, tuple[int, ...]], ...]


class Totals(NamedTuple):
    """The totals of a class of ranks.

    Attributes:
        ranks: The ranks that have told them. Where the plans of all ranks agree, rank 0 tells them for all.
        true: The totals that are true, by metric.
        reported: Those that the framework reports.
    """

    ranks: tuple[int, ...]
    true: Mapping[str, float]
    reported: Mapping[str, float]

    @property
    def rows(self) -> list[tuple[str, float | None, float | None]]:
        """Each metric, its true number and the reported one; None: not known."""
        return [(name, self.true.get(name), self.reported.get(name)) for name in {**self.true, **self.reported}]

    def measured(self, by_epochs: Mapping[str, float]) -> list[str]:
        """The names of the true totals that were measured too.

        Args:
            by_epochs: What was measured, by metric.
        """
        return [name for name, value in self.true.items() if by_epochs.get(name) == value]


def plan_differences_of(run: Run) -> list[PlanRow]:
    """In which values of the plan ranks differ that must not, as far as these are known."""
    known = {rank: fit for rank, fit in run.fits.items() if fit.plan}
    found: list[PlanRow] = []
    for name in (*COMPARED_PLAN, *COMPARED_LIMITS):
        values = {rank: fit.plan.get(name) for rank, fit in known.items() if not _may_differ(fit, name)}
        if name not in COMPARED_LIMITS:
            values = {rank: value for rank, value in values.items() if value is not None}
        found += _plan_row(name, values, "none")
    for name in COMPARED_SETTINGS:
        found += _plan_row(name, {rank: fit.settings.get(name) for rank, fit in known.items()}, "the default")
    return found


def plans_table(found: Sequence[PlanRow]) -> Table:
    """These values as a table."""
    columns = (Column("value"), Column("ranks"), Column("it is", is_number=True))
    rows = [
        (Cell(row.name), Cell(names_of(ranks)), Cell(f"≠ {value}", is_highlighted=True))
        for row in found
        for value, ranks in row.groups[:_MOST_VALUES]
    ]
    return Table(columns, rows, "The ranks' plans differ")


def _may_differ(fit: Fit, name: str) -> bool:
    """Whether ranks may differ in a value of the plan: in a length, where `uneven_train` makes them even."""
    even = fit.settings.get("uneven_train", "raise") != "raise" and fit.plan.get("why_equal_lengths") is None
    return even and name in ("batches_per_epoch", "proven_batches_per_epoch")


def _plan_row(name: str, values: Mapping[int, Value], absent: str) -> Iterator[PlanRow]:
    """What there is to say of a value: nothing where all ranks have the same one."""
    groups = ranks_by(values)
    if len(groups) > 1:
        texts = [(absent if value is None else str(value), ranks) for value, ranks in groups.items()]
        yield PlanRow(name, tuple(sorted(texts, key=lambda group: (len(group[1]), group[1]))))


def totals_of(run: Run) -> list[Totals]:
    """The totals that ranks have told, for each class of ranks with equal ones; those of the fewest ranks first."""
    groups = ranks_by(
        {
            rank: (*fit.true_totals.items(), None, *fit.reported_totals.items())
            for rank, fit in run.fits.items()
            if fit.true_totals or fit.reported_totals
        }
    )
    found = [
        Totals(ranks, run.fits[ranks[0]].true_totals, run.fits[ranks[0]].reported_totals) for ranks in groups.values()
    ]
    return sorted(found, key=lambda each: (len(each.ranks), each.ranks))


def totals_table(totals: Totals, by_epochs: Mapping[str, float], *, whose: bool) -> Table:
    """Totals as a table.

    Args:
        totals: The totals.
        by_epochs: What was measured, by metric.
        whose: Whether the title names their ranks.
    """
    columns = (
        Column("total"),
        Column("true", is_number=True),
        Column("reported by the framework", is_number=True),
    )
    rows: list[tuple[Cell, Cell, Cell]] = []
    measured = totals.measured(by_epochs)
    for name, exact, reported in totals.rows:
        differs = None not in (exact, reported) and exact != reported
        shown = f"{name} (measured)" if name in measured else name
        rows.append((Cell(shown), Cell(number(exact)), Cell(f"{'≠ ' if differs else ''}{number(reported)}", differs)))
    return Table(columns, rows, f"Totals of {names_of(totals.ranks)}" if whose else "Totals")

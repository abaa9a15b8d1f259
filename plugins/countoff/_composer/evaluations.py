"""Composer's evaluations as a guard counts them: in a fit, after it and outside of one."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from countoff._adapter.evaluation_totals import ObservedLengths, evaluation_facts
from countoff._adapter.fit import OwnRank
from countoff._adapter.loader_observer import LoaderObserver
from countoff._composer.loader_report import LoaderReport, read_loader, unused_batches
from countoff._composer.state import length_of
from countoff.core import Guard
from countoff.core.arithmetic.totals import evaluation_metrics

__all__ = ["Evaluations"]


class Evaluations:
    """The evaluators that the ranks agreed on when the fit began, and the current evaluation.

    Args:
        state: Composer's State.
        guard: The guard of the fit.
        own: This rank.
        fixes: Whether lengths are set where they are proven.

    Attributes:
        length: The true batches of the last evaluation that began, by its arithmetic or by those before; None if they
            are not known.
    """

    def __init__(self, state: Any, guard: Guard, own: OwnRank, *, fixes: bool) -> None:
        self._guard = guard
        self._own, self._fixes = own, fixes
        self._agreed: dict[str, tuple[Any, LoaderReport]] = {}
        for each in state.evaluators:
            loader, limit = each.dataloader.dataloader, each.subset_num_batches
            limit = None if limit == -1 else limit
            self._agreed[each.label] = loader, self._read(loader, each.label, limit)
        self._open: tuple[LoaderReport, LoaderObserver] | None = None
        self._observed = ObservedLengths()
        self.length: int | None = None

    @property
    def reports(self) -> dict[str, LoaderReport]:
        """The reports of the evaluators' loaders, by label."""
        return {label: report for label, (_, report) in self._agreed.items()}

    @property
    def loaders(self) -> dict[str | None, Any]:
        """The evaluators' loaders, by label."""
        return {label: loader for label, (loader, _) in self._agreed.items()}

    def start(self, state: Any, *, may_correct: bool) -> None:
        """Opens an evaluation.

        Args:
            state: Composer's State.
            may_correct: Whether to set its length where that is proven; all ranks must have agreed on the evaluations.
        """
        label, loader = str(state.dataloader_label), state.dataloader
        known, report = self._agreed.get(label, (None, None))
        agreed = known is loader and report is not None
        if report is None or not agreed:
            report = self._read(loader, label, None)
        if not self._ends_at_a_limit(state, report):
            length = report.corrected_length if agreed and may_correct else None
            wrong = report.notice(length)
            if wrong is not None:
                self._guard.warn(replace(wrong, subject=label))
            if length is not None:
                state.dataloader_len = length
        # The last batch is announced when the loader is exhausted: no hook comes before the collectives of the metrics,
        # in which uneven ranks may hang.
        guard = self._guard
        observer = LoaderObserver(
            loader, guard.waited, failing=guard.failing, failed=guard.failed, exhausted=guard.last_batch
        )
        observer.expected = report.own_batches if report.streaming is not None else None
        self._open = report, observer
        self.length = self._observed.known.get(label) if report.proven is None else report.proven
        self._guard.eval_start(f"evaluation {label}")

    def end(self, state: Any) -> dict[str, float]:
        """Closes the evaluation; returns how much it has read, where that is proven."""
        if self._open is None:
            return {}
        report, observer = self._open
        observed = observer.begun
        unused = unused_batches(report, observed, self._guard.batches, before=0, length=length_of(state))
        if unused is not None:
            self._guard.report_unused(unused)
        self.release()
        batches = self._guard.batches
        exhausted = observed is not None and observed.exhausted
        if exhausted and self._is_agreed(state):
            self._observed.ended({str(state.dataloader_label): batches})
        self._guard.eval_end("exhausted" if exhausted else "stopped")
        return self._metrics(state, report, batches)

    def release(self) -> None:
        """Gives the loader back as it was. Does nothing when called again."""
        if self._open is not None:
            self._open[1].release()
            self._open = None

    def _metrics(self, state: Any, report: LoaderReport, batches: int) -> dict[str, float]:
        name = str(state.dataloader_label) if len(state.evaluators) > 1 else ""
        dp_degree = report.totals.plan.dp_degree
        with contextlib.suppress(Exception):  # of the user's own objects
            known = evaluation_facts(state.dataloader, dp_rank=self._own.rank, dp_degree=dp_degree)
            if report.streaming is not None or known is not None:
                return evaluation_metrics(report.facts, batches=batches, dp_degree=dp_degree, name=name)
        return {}

    def _is_agreed(self, state: Any) -> bool:
        """Returns whether the evaluation is over the loader that its evaluator had when the fit began."""
        known, _ = self._agreed.get(str(state.dataloader_label), (None, None))
        return known is state.dataloader

    @staticmethod
    def _ends_at_a_limit(state: Any, report: LoaderReport) -> bool:
        """Returns whether a limit comes before the proven end; `trainer.eval(subset_num_batches=N)` sets its own."""
        limit = length_of(state)
        if limit is None or limit == report.facts.reported_batches:
            return False
        return report.proven is not None and limit <= report.proven

    def _read(self, loader: Any, label: str, limit: int | None) -> LoaderReport:
        return read_loader(loader, length=limit, evaluator=label, own=self._own, fixes=self._fixes)

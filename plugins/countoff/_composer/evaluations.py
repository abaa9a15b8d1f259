"""Composer's evaluations, in a fit, after it and outside of one, as a guard sees them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from countoff._adapter.loader_observer import LoaderObserver
from countoff._composer.loader_report import LoaderReport, read_loader, report_unused
from countoff._composer.messages import mended
from countoff._composer.state import length_of
from countoff.core import Guard


class Evaluations:
    """The evaluators as they are when a roll call begins, and the evaluation under way.

    Args:
        state: Composer's State.
        guard: The guard of the fit.
        rank: This rank.
        dp_degree: Shares into which the data is cut.
    """

    def __init__(self, state: Any, guard: Guard, rank: int, dp_degree: int) -> None:
        self._guard = guard
        self._ranks = {"rank": rank, "dp_degree": dp_degree}
        self._counted_off: dict[str, tuple[Any, LoaderReport]] = {}
        for each in state.evaluators:
            loader, limit = each.dataloader.dataloader, each.subset_num_batches
            limit = None if limit == -1 else limit
            self._counted_off[each.label] = loader, self._read(loader, each.label, limit)
        self._open: tuple[LoaderReport, LoaderObserver] | None = None

    @property
    def reads(self) -> dict[str, LoaderReport]:
        """What was read off the evaluators' loaders, by label."""
        return {label: read for label, (_, read) in self._counted_off.items()}

    def start(self, state: Any, *, may_mend: bool) -> None:
        """Opens an evaluation.

        Args:
            state: Composer's State.
            may_mend: Whether to set its length where that is proven; all ranks must have agreed on the evaluations.
        """
        label, loader = str(state.dataloader_label), state.dataloader
        known, read = self._counted_off.get(label, (None, None))
        counted_off = known is loader and read is not None
        if read is None or not counted_off:
            read = self._read(loader, label, None)
        if not self._ends_at_a_limit(state, read):
            wrong = read.wrong_length()
            length = read.mended_length if counted_off and may_mend else None
            if wrong is not None:
                self._guard.warn(replace(mended(wrong, length), subject=label))
            if length is not None:
                state.dataloader_len = length
        # Announced, because nothing marks its end before the metrics' collectives, in which uneven ranks may hang.
        fetches = LoaderObserver(loader, self._guard.waited, self._guard.failed, self._guard.last_batch)
        fetches.expected = read.own_batches if read.streaming is not None else None
        self._open = read, fetches
        self._guard.eval_start(f"evaluation {label}")

    def end(self, state: Any) -> None:
        """Closes the evaluation."""
        if self._open is None:
            return
        read, fetches = self._open
        fetched = fetches.begun
        left = report_unused(read, fetched, self._guard.batches, before=0, length=length_of(state))
        if left is not None:
            self._guard.report_unused(left)
        self.release()
        self._guard.eval_end("exhausted" if fetched is not None and fetched.exhausted else "stopped")

    def release(self) -> None:
        """Gives the loader back as it was. The second time nothing happens."""
        if self._open is not None:
            self._open[1].release()
            self._open = None

    @staticmethod
    def _ends_at_a_limit(state: Any, read: LoaderReport) -> bool:
        """Whether a limit comes before the proven end; `trainer.eval(subset_num_batches=N)` has one of its own."""
        limit = length_of(state)
        if limit is None or limit == read.facts.reported_batches:
            return False
        return read.proven is not None and limit <= read.proven

    def _read(self, loader: Any, label: str, limit: int | None) -> LoaderReport:
        return read_loader(loader, length=limit, evaluator=label, **self._ranks)

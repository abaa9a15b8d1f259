"""countoff for a plain PyTorch loop: ``attach(train=train_loader, eval=eval_loader)``, once, on every rank.

Loaders are observed where they are iterated, so the loop stays as it is: a pass opens a span, every batch is counted
as it is handed out, and the pass closes when the loader is exhausted or the loop leaves it. Optimizer steps are
counted by torch's own hook.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

from countoff._observe import learning_rates, loader_facts, on_optimizer_step, rank_and_world_size, versions
from countoff._passes import Passes
from countoff.core import DivergenceError, Guard, Settings, Verdict, ending
from countoff.core.totals import Totals

__all__ = ["Attached", "attach"]

REMEDIES = {
    "UnevenBatches": (
        "give every rank as many batches: a DistributedSampler, an iterable dataset that cuts all ranks at the "
        "shortest, or a break at a count that every rank has; if only some ranks evaluate: attach(eval_ranks=[0])."
    ),
    "PlanMismatch": "build the loader from the same configuration on every rank.",
    "StepMismatch": "step on the same batches everywhere: no condition of one rank around optimizer.step().",
    "LearningRateMismatch": "give the scheduler the same horizon on every rank, and step it on every rank.",
    "LostRank": "read that rank's own output first; the others only lost their peer.",
    "WrongLength": "make len(loader) one rank's number of batches, not that of all ranks together.",
}


def attach(
    *,
    train: Any,
    eval: Any = None,  # the name that every adapter uses
    optimizer: Any = None,
    gradient_accumulation_steps: int = 1,
    start_epoch: int = 0,
    **options: Any,
) -> Attached:
    """Watches a plain training loop. Collective: every rank must call it, after `init_process_group`.

    It waits for the other ranks at most `deadline_seconds`; nothing later waits for another rank.

    Args:
        train: The loader of the training loop: a DataLoader, or any object whose class is written in Python.
        eval: The evaluation loader, or a mapping from names to loaders.
        optimizer: The optimizer, or several: its learning rates are compared between ranks.
        gradient_accumulation_steps: Batches of one rank per optimizer step.
        start_epoch: Number of the first epoch, where a run resumes.
        options: Those of `countoff.core.Settings`.

    Returns:
        A handle, which is also a context manager; without it, the program's end is the end of the fit.

    Raises:
        SettingsError: If an option or a ``COUNTOFF_*`` variable has a bad value.
        TypeError: If a loader cannot be observed.
        RuntimeError: If WORLD_SIZE announces several ranks and torch.distributed is not initialised.
        PlanMismatch: If ranks begin with different plans.
    """
    settings = Settings.resolve(**options)
    rank, world_size = rank_and_world_size()
    if settings.enabled and world_size == 1 and os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        raise RuntimeError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but torch.distributed is not initialised: call attach() after "
            "init_process_group()"
        )
    evals: Mapping[str, Any] = eval if isinstance(eval, Mapping) else {} if eval is None else {"evaluation": eval}
    optimizers = [] if optimizer is None else list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    guard = Guard(
        settings,
        rank=rank,
        world_size=world_size,
        remedies=REMEDIES,
        learning_rates=(lambda: learning_rates(optimizers)) if optimizers else None,
    )
    facts = loader_facts(
        train,
        gradient_accumulation_steps=gradient_accumulation_steps,
        reported_is_cap=False,
        partial_step="dropped",
    )
    totals = Totals(facts, dp_degree=world_size, framework="len(loader)")
    attached = Attached(guard, totals, settings, epoch=start_epoch)
    if settings.enabled:
        plan = {
            "batches_per_epoch": facts.reported_batches,
            "proven_batches_per_epoch": totals.plan.batches_per_epoch,
            "batch_size": facts.batch_size,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "position": [start_epoch, 0, 0],
        }
        attached._begin(plan, train, evals)
    return attached


class Attached:
    """What `attach` returns.

    Attributes:
        guard: The guard underneath.
    """

    def __init__(self, guard: Guard, totals: Totals, settings: Settings, *, epoch: int) -> None:
        self.guard = guard
        self._totals = totals
        self._settings = settings
        self._passes = Passes(guard, epoch=epoch, exhausted=self._learn_length)
        self._steps: Any = None
        self._excepthook: Any = None
        self._stay: Any = None
        self._detached = True

    def progress(self) -> dict[str, float]:
        """The true totals as known by now, and how far this rank is, under the names of the logs."""
        values: dict[str, float] = {**self._totals.plan.metrics(), **self.guard.metrics}
        done = self._totals.progress(self.guard.train_batches)
        return values if done is None else values | {"countoff/epoch_progress": done}

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """A context in which passes are not compared: around `Join`, or what else may legitimately be uneven."""
        self.guard.compare_spans(False)
        try:
            yield
        finally:
            self.guard.compare_spans(True)

    def detach(self) -> None:
        """Ends the fit and gives the loaders back as they were. The second time nothing happens.

        Raises:
            DivergenceError: If another rank goes on, or has diverged before.
        """
        if self._detached:
            return
        self._detached = True
        self._stay()
        sys.excepthook = self._excepthook
        self._steps.remove()
        self._passes.release()
        try:
            self._passes.close_stale(everything=True)
            self.guard.fit_end()
        finally:
            self.guard.close()

    def __enter__(self) -> Attached:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.detach()
        elif not self._detached:
            self.guard.failed(error)

    def _begin(self, plan: dict[str, Any], train: Any, evals: Mapping[str, Any]) -> None:
        self._detached = False
        self._passes.observe(train, None)
        for name, loader in evals.items():
            self._passes.observe(loader, name)
        self._steps = on_optimizer_step(self.guard.step)
        self._excepthook = sys.excepthook
        sys.excepthook = self._tell_and_raise
        self.guard.fit_start(plan, versions())
        self._stay = ending.at_exit(self._at_exit)  # after the guard's own, so that it runs before it
        wrong = self._totals.wrong_length()
        if wrong is not None:
            self.guard.warn(wrong)

    def _learn_length(self) -> Verdict | None:
        self._totals.observe(self.guard.batches)
        return self._totals.wrong_length()

    def _tell_and_raise(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        self.guard.failed(error)
        self._excepthook(kind, error, traceback)

    def _at_exit(self) -> None:
        if self.guard.verdict is None:
            with contextlib.suppress(DivergenceError):
                self.detach()
        verdict = self.guard.verdict
        raised = getattr(sys, "last_value", None) is not None
        if verdict is not None and not raised and self._settings.on_divergence == "raise":
            ending.leave_now()  # found after the last line of the program: nothing else can say it by an exit code
        self.guard.close()

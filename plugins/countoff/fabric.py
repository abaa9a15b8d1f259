"""countoff for Lightning Fabric: ``Fabric(callbacks=[Countoff()])``, and the hooks that your loop calls anyway.

Fabric has no loop of its own: ``fabric.call("on_train_epoch_start", …)`` calls the method of that name on each
callback. The callback is duck-typed, so it serves ``lightning.fabric`` and ``lightning_fabric`` and imports neither.
"""

from __future__ import annotations

from typing import Any

from countoff._adapter.requirements import needs

with needs("Lightning Fabric", facade="countoff.fabric", install="'countoff[lightning]'"):
    from countoff._adapter.guards import new_guard
    from countoff._adapter.torch_facts import on_optimizer_step, rank_and_world_size, versions
from countoff._adapter.options import Options
from countoff._adapter.remedies import uneven_remedies
from countoff.core import FitPlan, Guard
from countoff.core.verdict import Remedies

__all__ = ["Countoff"]

REMEDIES: Remedies = {
    "UnevenBatches": uneven_remedies(
        train=(
            "give every rank as many batches. If each rank's dataset holds all of the data, "
            "fabric.setup_dataloaders(loader) does it. If each holds a part, or is iterable: end the loop after as "
            "many batches on every rank; what is beyond them is not read."
        ),
        option="Countoff({})",
    ),
    "PlanMismatch": (
        "give every rank as many samples. If each rank's dataset holds all of the data, "
        "fabric.setup_dataloaders(loader) does it. If each holds a part: parts of one size."
    ),
}


class Countoff(Options):
    """Checks that all ranks count the same batches and steps, in the hooks that the loop calls with `fabric.call`.

    Call at least `on_train_epoch_start`, `on_train_batch_start` and `on_train_epoch_end` on every rank, as Lightning's
    Trainer would; `on_validation_start`, `on_validation_batch_start` and `on_validation_end` where you evaluate;
    `on_train_end` at the end; `on_exception` if you catch exceptions. Arguments of the hooks are ignored. The options
    are those of `countoff.core.Settings`.

    Raises:
        SettingsError: If an option or a ``COUNTOFF_*`` variable has a bad value.
    """

    _guard: Guard | None = None
    _steps: Any = None
    _epoch = 0

    @property
    def guard(self) -> Guard | None:
        """The guard of the current fit."""
        return self._guard

    def on_train_start(self, *_: Any, **__: Any) -> None:
        """Begins the fit. Collective: every rank must call it; the first epoch calls it if the loop does not."""
        if not self.settings.enabled or self._guard is not None:
            return
        rank, world_size = rank_and_world_size()
        self._guard = guard = new_guard(self.settings, rank=rank, world_size=world_size, remedies=REMEDIES)
        self._steps = on_optimizer_step(guard.step)
        guard.fit_start(FitPlan(position=[self._epoch]), versions("lightning", "lightning-fabric"))

    def on_train_epoch_start(self, *_: Any, **__: Any) -> None:
        """Opens the epoch's span."""
        self.on_train_start()
        if self._guard is not None:
            self._guard.train_start(self._epoch)
            self._epoch += 1

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        """Counts the batch."""
        if self._guard is not None:
            self._guard.batch()

    def on_train_epoch_end(self, *_: Any, **__: Any) -> None:
        """Closes the epoch's span."""
        if self._guard is not None:
            self._guard.train_end("stopped")

    def on_validation_start(self, *_: Any, **__: Any) -> None:
        """Opens an evaluation."""
        self.on_train_start()
        if self._guard is not None:
            self._guard.eval_start("validation")

    def on_validation_batch_start(self, *_: Any, **__: Any) -> None:
        """Counts an evaluation's batch."""
        if self._guard is not None:
            self._guard.batch()

    def on_validation_end(self, *_: Any, **__: Any) -> None:
        """Closes the evaluation."""
        if self._guard is not None:
            self._guard.eval_end("stopped")

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Ends the fit and closes the guard."""
        if self._guard is not None:
            self._steps.remove()
            self._guard.fit_end()
            self._guard.close()
            self._guard = None

    def on_exception(self, exception: BaseException, *_: Any, **__: Any) -> None:
        """Reports the exception to the other ranks."""
        if self._guard is not None:
            self._guard.failed(exception)

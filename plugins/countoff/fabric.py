"""countoff for Lightning Fabric: ``Fabric(callbacks=[Countoff()])``, or ``COUNTOFF=1`` with the script unchanged.

The loaders that `fabric.setup_dataloaders` returns are counted where the script iterates them. The callback is
duck-typed, so it serves ``lightning.fabric`` and ``lightning_fabric`` and imports neither.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from countoff._adapter.requirements import needs

with needs("Lightning Fabric", facade="countoff.fabric", install="'countoff[lightning]'"):
    if not (find_spec("lightning") or find_spec("lightning_fabric")):
        raise ModuleNotFoundError("neither lightning nor lightning_fabric is installed")
    from countoff._adapter.fit import Fit
    from countoff._adapter.leaving import LeftFit
    from countoff._adapter.torch_facts import on_optimizer_step, versions
    from countoff._fabric.loaders import FabricLoaders
    from countoff._fabric.setup import watch_fabric
from countoff._adapter.options import Options, cannot_make_even
from countoff._fabric.words import WORDS
from countoff.core import FitPlan, Guard

__all__ = ["Countoff"]


class Countoff(Options):
    """Checks that all ranks of a Fabric script count the same batches and steps.

    The loaders that `fabric.setup_dataloaders` returns are counted where the script iterates them, so the script needs
    to call nothing. A pass with gradients disabled is an evaluation. The fit begins with the first train epoch, and
    ends with `on_train_end` or with the program.

    For loaders that Fabric has not set up, call at least `on_train_epoch_start`, `on_train_batch_start` and
    `on_train_epoch_end` on every rank with `fabric.call`, as Lightning's Trainer would; `on_validation_start`,
    `on_validation_batch_start` and `on_validation_end` where you evaluate; `on_train_end` at the end; `on_exception` if
    you catch exceptions. Arguments of the hooks are ignored. Where the loaders are counted, these calls count nothing.

    A pickle or a copy of the callback holds the options only. The options are those of `countoff.core.Settings`.

    Raises:
        SettingsError: If an option or a ``COUNTOFF_*`` variable has a bad value.
    """

    _loaders: FabricLoaders
    _guard: Guard | None = None
    _steps: Any = None
    _epoch = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._watch()

    def __getstate__(self) -> dict[str, Any]:
        own = ("_loaders", "_guard", "_steps", "_epoch")
        return {name: value for name, value in vars(self).items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._watch()

    @property
    def guard(self) -> Guard | None:
        """The guard of the current fit."""
        loop = self._loaders.loop
        return self._guard if loop is None else loop.guard

    def state_dict(self) -> dict[str, Any]:
        """Returns how far this rank has come, for ``fabric.save(path, {"countoff": callback, ...})``.

        It has plain types alone, which load without countoff. It is empty before the first train epoch, where countoff
        is off, and where the script calls hooks over loaders of its own.
        """
        return self._loaders.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the record that `state_dict` has returned, as ``fabric.load(path, {"countoff": callback, ...})`` does.

        It restores nothing of the run. The fit that the next train epoch begins is compared with it, and countoff warns
        if the script repeats or skips data, or if its learning rate jumps. Collective: every rank must call it.

        Args:
            state: What `state_dict` has returned, on any rank; an empty mapping if there is none.
        """
        self._loaders.load_state_dict(state)

    def watch_schedule(
        self,
        *schedulers: Any,
        epochs: int | None = None,
        max_steps: int | None = None,
        gradient_accumulation_steps: int = 1,
    ) -> None:
        """Compares where learning-rate schedules end with where the run ends; to be called before the first epoch.

        Fabric knows no scheduler, and no length of the run. A warning says if one does not end where the run does, as
        soon as a few optimizer steps have shown how often it is stepped.

        Args:
            schedulers: The learning-rate schedulers, of the fit that the next train epoch begins.
            epochs: Epochs of the whole run, at least 0, if known.
            max_steps: Optimizer steps after which the whole run ends, at least 0, if there is such a limit.
            gradient_accumulation_steps: Batches of one rank per optimizer step, at least 1.

        Raises:
            TypeError: If one of them has no `step`.
        """
        for each in schedulers:
            if not hasattr(each, "step"):
                raise TypeError(f"watch_schedule() takes learning-rate schedulers, got a {type(each).__name__}")
        self._loaders.watch_schedules(
            schedulers,
            max_epochs=epochs,
            max_steps=max_steps,
            gradient_accumulation_steps=gradient_accumulation_steps,
        )

    def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
        """Reports a step to what counts the loaders. Fabric itself calls this hook."""
        del strategy
        self._loaders.stepped(optimizer)

    def on_train_start(self, *_: Any, **__: Any) -> None:
        """Begins the fit. Collective: every rank must call it; the first epoch calls it if the loop does not."""
        if self._guard is None and not (self._loaders.known or self._loaders.aside):
            self._begin()

    def on_train_epoch_start(self, *_: Any, **__: Any) -> None:
        """Opens the epoch's span."""
        self.on_train_start()
        if self._guard is not None:
            self._open_epoch(self._guard)

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        """Counts the batch."""
        if self._guard is None and self._loaders.loop is None and not self._loaders.aside:
            # Fabric has set up loaders, and the loop trains on others.
            self._open_epoch(self._begin())
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
        """Ends the fit."""
        self._loaders.end()
        if self._guard is not None:
            self._steps.remove()
            self._guard.fit_end()
            self._guard.close()
            self._guard, self._loaders.aside = None, False

    def on_exception(self, exception: BaseException, *_: Any, **__: Any) -> None:
        """Tells the other ranks of the exception."""
        self._loaders.failed(exception)
        if (guard := self._guard) is not None:
            self._steps.remove()
            self._guard, self._loaders.aside = None, False
            LeftFit(guard, exception, guard.close).leave()

    def _watch(self) -> None:
        self._loaders = FabricLoaders(self.settings)
        if self.settings.enabled:
            watch_fabric(self, self._loaders)

    def _begin(self) -> Guard:
        cannot_make_even(
            self.settings,
            "hooks that a script calls",
            "call none, and iterate the loaders that fabric.setup_dataloaders returns",
        )
        self._loaders.leave_to_others()
        loaders = self._loaders
        fit = Fit(self.settings, WORDS, loaders.own_rank(), optimizers=loaders.optimizers, models=loaders.models)
        self._guard = guard = fit.guard
        self._steps = on_optimizer_step(lambda optimizer: guard.step())
        fit.begin(FitPlan(position=[self._epoch]), versions("lightning", "lightning-fabric"))
        return guard

    def _open_epoch(self, guard: Guard) -> None:
        guard.train_start(self._epoch)
        self._epoch += 1


functools.update_wrapper(Countoff.__init__, Options.__init__)  # its parameters, for help() and configuration tools

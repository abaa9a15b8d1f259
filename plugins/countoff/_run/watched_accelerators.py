"""Watches the loops over what Accelerate has prepared."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from countoff._accelerate.accelerator import is_prepared_optimizer
from countoff._accelerate.beginning import begin_loop, goes_on_with
from countoff._accelerate.loaders import followers, same_source, skipped_batches, watch_local_sgd
from countoff._accelerate.observation import watch_joins
from countoff._adapter.observed_loop import ObservedLoop
from countoff._run.watched_loops import FOUND, Noticed, WatchedLoops

__all__ = ["WatchedAccelerators"]


class WatchedAccelerators(WatchedLoops):
    """The Accelerators of a script, and the loops over the loaders that they prepare."""

    def __init__(self) -> None:
        super().__init__("this loop over Accelerate's loaders")
        self._accelerators: weakref.WeakSet[Any] = weakref.WeakSet()
        self.hooks.callback(followers.add(self.follow))
        self.hooks.callback(watch_joins(self._joins))
        self.hooks.callback(watch_local_sgd(lambda _, inside: self.train_apart(inside)))

    def add(self, accelerator: Any) -> None:
        """Watches the loaders that an Accelerator has prepared, and those that it prepares later."""
        if accelerator.num_processes > 1:
            self._accelerators.add(accelerator)

    def noticed(self, loader: Any) -> Noticed | None:
        for accelerator in self._accelerators:
            for prepared in accelerator._dataloaders:
                if same_source(prepared, loader):
                    return Noticed(accelerator, loader, prepared)
        return None

    def steps_together(self, noticed: Noticed, optimizer: Any) -> bool:
        return is_prepared_optimizer(noticed.owner, optimizer)

    def begin(self, noticed: Noticed) -> ObservedLoop:
        settings = self.settings_of_fit(noticed.owner.process_index)
        return begin_loop(
            noticed.owner, settings, train=noticed.source, evaluations={}, found_by=FOUND, found_at=self.steps()
        )

    def goes_on_with(self, loop: ObservedLoop, noticed: Noticed) -> None:
        goes_on_with(loop, noticed.owner, noticed.source)

    def where(self, loader: Any) -> dict[str, Any]:
        return {"position": skipped_batches(loader), "ahead": loader}

    @contextlib.contextmanager
    def _joins(self, accelerator: Any) -> Iterator[None]:
        del accelerator
        self.train_apart(True)
        try:
            yield
        finally:
            self.train_apart(False)

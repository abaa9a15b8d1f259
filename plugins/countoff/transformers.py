"""countoff for the Trainer of transformers, and for its subclasses as in TRL: ``Trainer(callbacks=[Countoff()])``.

The Trainer's callbacks see steps, not batches, and never the end of a loader, so passes are observed where Accelerate's
loaders are iterated; the callback says when a fit begins and ends, and when an epoch is over.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any, ClassVar

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError("countoff.transformers needs transformers: pip install 'countoff[transformers]'") from error
from accelerate import PartialState

from countoff._accelerate.facts import alone, unwrapped
from countoff._adapter.handle import Attached
from countoff._adapter.options import Options
from countoff._adapter.torch_facts import learning_rates, versions
from countoff._transformers.trainer import REMEDIES, horizon_warning, observe, plan_of, total_warning, train_facts
from countoff.core import Guard
from countoff.core.totals import Totals

__all__ = ["Countoff"]

_log = logging.getLogger("countoff")


class Countoff(Options, TrainerCallback):  # noqa: D101  # the options' text is the class's
    __doc__ = Options.__doc__
    _handle: Attached | None = None
    _under_way: ClassVar[weakref.WeakSet[Attached]] = weakref.WeakSet()  # of every instance; a process trains one model

    @property
    def guard(self) -> Guard | None:
        """The guard of the training under way, or of the last one."""
        return None if self._handle is None else self._handle.guard

    def progress(self) -> dict[str, float]:
        """The true totals as known by now, and how far this rank is, under the names of the logs; `Trainer.log` it."""
        return {} if self._handle is None else self._handle.progress()

    def on_train_begin(self, args: Any, state: Any, control: Any, **of_trainer: Any) -> None:
        """Counts off: loaders, optimizer and a resumed position are final."""
        for left in list(self._under_way):  # a training that an exception has ended, such as one that ran out of memory
            left.abandon()
        self._under_way.clear()
        if not self.settings.enabled:
            return
        self._handle = None
        process, loader = PartialState(), of_trainer["train_dataloader"]
        optimizer, scheduler = of_trainer["optimizer"], of_trainer["lr_scheduler"]

        def new_guard() -> Guard:
            return Guard(
                self.settings,
                rank=process.process_index,
                world_size=process.num_processes,
                remedies=REMEDIES,
                learning_rates=lambda: learning_rates([optimizer]),
            )

        facts = train_facts(loader, args, process)
        totals = Totals(facts, dp_degree=process.num_processes, framework="the Trainer")
        applied = unwrapped(optimizer)
        epoch = int(state.epoch or 0)
        handle = Attached(new_guard, totals, self.settings, epoch=epoch, steps_of=lambda each: each is applied)
        try:
            release = observe(handle, loader, resumes_inside=bool((state.epoch or 0) % 1 and not args.ignore_data_skip))
        except TypeError as error:
            if process.is_main_process:
                _log.warning("countoff counts nothing in this training: %s", error)
            return
        self._handle = handle
        self._under_way.add(handle)
        position = [epoch, state.global_step]
        handle.begin(
            plan_of(facts, args) | {"position": position},
            versions("accelerate", "transformers"),
            release,
            alone(process),
            horizon_warning(scheduler, state, args),
            total_warning(args, process.num_processes),
        )
        self._log(state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **of_trainer: Any) -> None:
        """Closes the epoch's span: the Trainer leaves its loader before that is exhausted."""
        if self._handle is not None and self._handle in self._under_way:
            before = self._handle.totals.plan
            self._handle.passes.close_stale(everything=True)
            if self._handle.totals.plan != before:
                self._log(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **of_trainer: Any) -> None:
        """Ends the fit."""
        if self._handle is not None:
            self._under_way.discard(self._handle)
            self._handle.detach()

    def _log(self, state: Any) -> None:
        """Adds the totals to the Trainer's own history, which it saves with every checkpoint."""
        if state.is_world_process_zero and self._handle is not None:
            state.log_history.append({**self._handle.progress(), "step": state.global_step})

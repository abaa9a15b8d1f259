"""countoff for the Trainer of transformers, and for its subclasses as in TRL: ``Trainer(callbacks=[Countoff()])``.

The Trainer's callbacks get steps, not batches, and no event for the end of a loader, so passes are observed where
Accelerate's loaders are iterated. The callback gets the begin and the end of a fit, and the end of an epoch.
"""

from __future__ import annotations

import functools
import logging
import weakref
from typing import Any, ClassVar

from countoff._adapter.requirements import needs

with needs("transformers", facade="countoff.transformers", install="'countoff[transformers]'"):
    from accelerate import PartialState
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState
from countoff._accelerate.loader_facts import evaluation_facts
from countoff._accelerate.process import not_distributed, unwrapped
from countoff._adapter.evaluation_totals import EvaluationTotals
from countoff._adapter.guards import new_guard
from countoff._adapter.handle import Attached
from countoff._adapter.options import Options
from countoff._adapter.torch_facts import versions
from countoff._adapter.weights import Wrappers
from countoff._transformers.resume import first_epoch, loaded_record, restore, state_of
from countoff._transformers.trainer import (
    named_evaluation,
    observe,
    plan_of,
    schedules,
    total_warning,
    train_facts,
)
from countoff._transformers.words import WORDS
from countoff.core import Guard
from countoff.core.totals import Totals

__all__ = ["Countoff"]

_log = logging.getLogger("countoff")


class Countoff(Options, TrainerCallback, ExportableState):  # noqa: D101  # the options' text is the class's
    __doc__ = Options.__doc__
    _of_the_fit = ("_handle", "_exported", "_trainer_state")
    _handle: Attached | None = None
    _exported: Any = None
    _trainer_state: Any = None
    _active: ClassVar[weakref.WeakSet[Attached]] = weakref.WeakSet()  # of every instance; a process trains one model

    @property
    def guard(self) -> Guard | None:
        """The guard of the current training, or of the last one."""
        return None if self._handle is None else self._handle.guard

    def progress(self) -> dict[str, float]:
        """Returns the true totals as known by now and this rank's progress, for `Trainer.log`."""
        return {} if self._handle is None else self._handle.progress()

    def state(self) -> dict[str, Any]:
        """Returns the options and a record of how far this process has come, for the Trainer's checkpoint."""
        handle = self._handle if self._handle in self._active else None
        self._exported = state_of(self.settings, handle, self._trainer_state)
        return self._exported

    def on_train_begin(self, args: Any, state: Any, control: Any, **of_trainer: Any) -> None:
        """Begins the fit, with the final loaders and optimizer and the restored position."""
        for earlier in list(self._active):  # an exception ended that training, out of memory, say
            earlier.abandon()
        self._active.clear()
        self._handle = None
        record = loaded_record(state, type(self).__name__, self._exported)
        # The Trainer saves the state of a callback only where it finds one, as in no checkpoint without countoff.
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if not self.settings.enabled:
            return
        loader, process = of_trainer["train_dataloader"], PartialState()
        facts = train_facts(loader, args, process)
        handle = self._new_handle(facts, args, state, of_trainer, process)
        try:
            release = observe(handle, loader, resumes_inside=bool((state.epoch or 0) % 1 and not args.ignore_data_skip))
        except TypeError as error:
            if process.is_main_process:
                _log.warning("countoff counts nothing in this training: %s", error)
            return
        ranks = {"num_processes": process.num_processes, "process_index": process.process_index}
        evaluated = functools.partial(evaluation_facts, **ranks)
        handle.tell_evaluations(EvaluationTotals(evaluated, dp_degree=process.num_processes, several=False))
        self._handle = handle
        self._active.add(handle)
        handle.steps_before = state.global_step
        handle.watch_schedules(
            schedules(of_trainer["lr_scheduler"], state),
            processes=process.num_processes,
            steps=max(0, state.max_steps),
            stepping=WORDS.stepping,
        )
        handle.begin(
            plan_of(facts, args, state, self.settings),
            versions("accelerate", "transformers"),
            release,
            not_distributed(process),
            total_warning(args, process.num_processes),
        )
        self._trainer_state = state
        if record is not None:
            restore(handle.guard, record, args, state, sized=facts.reported_batches is not None)
        self._log_progress(state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **of_trainer: Any) -> None:
        """Closes the epoch's span: the Trainer stops iterating its loader before the loader is exhausted."""
        if self._handle is not None and self._handle in self._active:
            before = self._handle.totals.plan
            self._handle.passes.close_stale(everything=True)
            if self._handle.totals.plan != before:
                self._log_progress(state)

    def on_evaluate(self, args: Any, state: Any, control: Any, **of_trainer: Any) -> None:
        """Adds how much the evaluation has read to the Trainer's own history."""
        handle = self._handle
        if handle is None or handle not in self._active or handle.evaluations is None:
            return
        found = named_evaluation(handle.evaluations.metrics, of_trainer.get("metrics") or {})
        if found and state.is_world_process_zero:
            state.log_history.append({**found, "step": state.global_step})

    def on_train_end(self, args: Any, state: Any, control: Any, **of_trainer: Any) -> None:
        """Ends the fit."""
        if self._handle is not None:
            self._active.discard(self._handle)
            self._trainer_state = None
            self._handle.detach()

    def _new_handle(
        self, facts: Any, args: Any, state: Any, of_trainer: dict[str, Any], process: PartialState
    ) -> Attached:
        optimizer, scheduler, model = (of_trainer[name] for name in ("optimizer", "lr_scheduler", "model"))
        make_guard = functools.partial(
            new_guard,
            self.settings,
            WORDS,
            rank=process.process_index,
            world_size=process.num_processes,
            optimizers=lambda: [optimizer],
            models=Wrappers(lambda: [model]),
            schedulers=lambda: [getattr(scheduler, "scheduler", scheduler)],
        )
        totals = Totals(facts, dp_degree=process.num_processes, framework="the Trainer")
        applied = unwrapped(optimizer)
        epoch = first_epoch(facts, args, state)
        return Attached(make_guard, totals, self.settings, epoch=epoch, steps_of=lambda each: each is applied)

    def _log_progress(self, state: Any) -> None:
        """Adds the totals to the Trainer's own history, which it saves with every checkpoint."""
        if state.is_world_process_zero and self._handle is not None:
            state.log_history.append({**self._handle.progress(), "step": state.global_step})

"""countoff for the Trainer of transformers, and for its subclasses as in TRL: ``Trainer(callbacks=[Countoff()])``.

The Trainer's callbacks get steps, not batches, and no event for the end of a loader, so passes are observed where
Accelerate's loaders are iterated. The callback gets the begin and the end of a fit, and the end of an epoch.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any, ClassVar

from countoff._adapter.requirements import needs

with needs("transformers", facade="countoff.transformers", install="'countoff[transformers]'"):
    from accelerate import PartialState
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState
from countoff._accelerate.loader_facts import evaluation_facts
from countoff._accelerate.process import not_distributed, unwrapped, unwrapped_scheduler
from countoff._adapter.counted_loop import CountedLoop
from countoff._adapter.evaluation_totals import EvaluationTotals
from countoff._adapter.fit import Fit, OwnRank
from countoff._adapter.options import Options
from countoff._adapter.torch_facts import versions
from countoff._adapter.weight_hashes import Wrappers
from countoff._transformers.checkpoints import first_epoch, loaded_record, restore, state_of
from countoff._transformers.logs import TrainerLogs
from countoff._transformers.messages import MESSAGES
from countoff._transformers.trainer import (
    named_evaluation,
    observe,
    plan_of,
    schedules,
    total_warning,
    train_facts,
)
from countoff.core import Guard
from countoff.core.arithmetic.totals import Totals

__all__ = ["Countoff"]


class Countoff(Options, TrainerCallback, ExportableState):  # noqa: D101  # the options' text is the class's
    __doc__ = Options.__doc__
    _of_the_fit = ("_loop", "_exported", "_trainer_state", "_planned", "_control", "_stopping", "_logs")
    _loop: CountedLoop | None = None
    _exported: Any = None
    _trainer_state: Any = None
    _planned = 0
    _control: Any = None
    _stopping = False
    _logs: TrainerLogs | None = None
    # Of every instance: a process trains one model.
    _active: ClassVar[weakref.WeakSet[CountedLoop]] = weakref.WeakSet()

    @property
    def guard(self) -> Guard | None:
        """The guard of the current training, or of the last one."""
        return None if self._loop is None else self._loop.guard

    def progress(self) -> dict[str, float]:
        """Returns the true totals as known by now and this rank's progress, for `Trainer.log`."""
        return {} if self._loop is None else self._loop.progress()

    def state(self) -> dict[str, Any]:
        """Returns the options and a record of how far this process has come, for the Trainer's checkpoint."""
        self._exported = state_of(self.settings, self._training, self._trainer_state)
        return self._exported

    def on_train_begin(self, args: Any, state: Any, control: Any, **of_trainer: Any) -> None:
        """Begins the fit, with the final loaders and optimizer and the restored position."""
        for earlier in list(self._active):  # an exception ended that training, out of memory, say
            earlier.abandon()
        self._active.clear()
        self._loop = None
        record = loaded_record(state, type(self).__name__, self._exported)
        # The Trainer saves the state of a callback only where it finds one, as in no checkpoint without countoff.
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if not self.settings.enabled:
            return
        loader, process = of_trainer["train_dataloader"], PartialState()
        facts = train_facts(loader, args, process)
        loop = self._new_loop(facts, args, state, of_trainer, process)
        try:
            observe(loop, loader)
        except TypeError as error:
            if process.is_main_process:
                print(f"countoff counts nothing in this training: {error}", file=sys.stderr)
            return
        loop.train_loader, loop.trainer_ends, self._planned = lambda: loader, True, state.max_steps
        began = loop.passes.began

        def begin_epoch(epoch: int) -> None:
            self._stopping = self._control is not None and self._control.should_training_stop
            if began is not None:
                began(epoch)

        loop.passes.began = begin_epoch
        self._loop = loop
        self._active.add(loop)
        whole = args.max_steps > 0 or args.num_train_epochs % 1 == 0
        self._logs = TrainerLogs(self, loop, from_start=state.global_step == 0, whole_epochs=whole)
        loop.until_end(self._logs.follow())
        loop.begin(
            plan_of(facts, args, state, self.settings),
            versions("accelerate", "transformers"),
            not_distributed(process),
            total_warning(args, process.num_processes),
            loaders={None: loader},
        )
        self._trainer_state = state
        if record is not None:
            restore(loop.guard, record, args, state, sized=facts.reported_batches is not None)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **of_trainer: Any) -> None:
        """Keeps what tells whether a callback has asked the Trainer to stop, for when the epoch's pass begins."""
        self._control = control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **of_trainer: Any) -> None:
        """Closes the epoch's span: the Trainer stops iterating its loader before the loader is exhausted."""
        if (loop := self._training) is not None and loop.fit.totals is not None:
            loop.passes.close_stale(everything=True)

    def on_evaluate(self, args: Any, state: Any, control: Any, **of_trainer: Any) -> None:
        """Adds how much the evaluation has read to the Trainer's next logs; compares how the data was split."""
        if (loop := self._training) is None or loop.evaluations is None:
            return
        if loop.train_loader is not None:
            loop.fit.evaluates(loop.train_loader(), of_trainer.get("eval_dataloader"))
        if self._logs is not None:
            self._logs.evaluated(named_evaluation(loop.evaluations.metrics, of_trainer.get("metrics") or {}))

    def on_train_end(self, args: Any, state: Any, control: Any, **of_trainer: Any) -> None:
        """Ends the fit."""
        if self._loop is not None:
            self._active.discard(self._loop)
            self._trainer_state = self._control = None
            if self._ended_by_itself(control) and state.max_steps == self._planned:
                self._loop.fit.run_ended(steps=state.global_step, planned=state.max_steps)
            self._loop.end()

    def _ended_by_itself(self, control: Any) -> bool:
        """Whether no callback has ended the training: the Trainer does so where an epoch has given no batch at all."""
        if self._loop is None or not control.should_training_stop:
            return True
        last = self._loop.fit.short.last
        empty = last is not None and not last.given and last.epoch == self._loop.passes.epoch - 1
        return empty and not self._stopping

    @property
    def _training(self) -> CountedLoop | None:
        """The training that goes on; None if there is none."""
        return self._loop if self._loop in self._active else None

    def _new_loop(
        self, facts: Any, args: Any, state: Any, of_trainer: dict[str, Any], process: PartialState
    ) -> CountedLoop:
        optimizer, scheduler, model = (of_trainer[name] for name in ("optimizer", "lr_scheduler", "model"))
        rank, world_size = process.process_index, process.num_processes
        fit = Fit(
            self.settings,
            MESSAGES,
            OwnRank(rank, world_size, rank, world_size),
            Totals(facts, dp_degree=world_size),
            steps_before=state.global_step,
            optimizers=lambda: [optimizer],
            schedulers=lambda: [unwrapped_scheduler(scheduler)],
            models=Wrappers(lambda: [model]),
        )
        applied = unwrapped(optimizer)
        loop = CountedLoop(fit, epoch=first_epoch(facts, args, state), steps_of=lambda each: each is applied)
        evaluated = functools.partial(evaluation_facts, num_processes=world_size, process_index=rank)
        loop.tell_evaluations(EvaluationTotals(evaluated, dp_degree=world_size, unnamed="evaluation"))
        fit.watch_schedules(schedules(scheduler, state), steps=max(0, int(state.max_steps)))
        return loop

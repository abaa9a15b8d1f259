"""Measures what countoff's callback for transformers' Trainer costs per step, compared with a no-op callback."""

from __future__ import annotations

import timeit
from collections.abc import Iterator
from typing import Any

from benchmarks.ranks import on_ranks
from benchmarks.results import COUNTOFF, NO_OP, NOTHING, Samples, Table, compared, in_turns, progress

_CALLS = 640
_CHUNKS = 20


def tables(quick: bool) -> Iterator[Table]:
    """Yields tables of the Trainer's dispatch of a step's two events inside a fit."""
    for world_size in (1, 2):
        progress(f"transformers: {world_size} ranks")
        samples = on_ranks(trainer_costs, world_size, 3 if quick else 21)[0]
        title = f"The Trainer's dispatch of `on_step_begin` and `on_step_end`, ranks: {world_size}"
        note = "countoff uses neither event: it counts batches where the loader is iterated; see `accelerate`."
        yield compared(title, "µs", samples, against=NO_OP, notes=[note])


def trainer_costs(repeats: int) -> Samples:
    """Returns the seconds per step that the dispatch takes, with each callback in turn alone in the Trainer."""
    from transformers import TrainerCallback

    from countoff.transformers import Countoff
    from integration_tests.trainer_jobs import Job

    costs: list[Samples] = []

    class NoOp(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            pass

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            pass

    class Measure(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if costs or state.global_step != 3:
                return
            handler = trainer.callback_handler
            callbacks_of_fit = handler.callbacks
            countoff = next(each for each in callbacks_of_fit if isinstance(each, Countoff))
            variants = {NOTHING: [], NO_OP: [NoOp()], COUNTOFF: [countoff]}
            names = {"handler": handler, "args": args, "state": state, "control": control}
            step = "handler.on_step_begin(args, state, control); handler.on_step_end(args, state, control)"
            timers = {
                name: timeit.Timer(step, "handler.callbacks = callbacks", globals={**names, "callbacks": callbacks})
                for name, callbacks in variants.items()
            }
            costs.append(in_turns(timers, repeats * _CHUNKS, _CALLS))
            handler.callbacks = callbacks_of_fit

    trainer, *_ = Job(samples=128, args={"num_train_epochs": 1}).trainer()
    trainer.add_callback(Measure())
    trainer.train()
    return costs[0]

"""What countoff's callback for transformers' Trainer costs a batch, beside one that does nothing."""

from __future__ import annotations

import timeit
from collections.abc import Iterator
from typing import Any

from benchmarks.ranks import on_ranks
from benchmarks.results import COUNTOFF, NO_OP, NOTHING, Table, compared, in_turns, progress

_CALLS = 640
_CHUNKS = 20


def tables(quick: bool) -> Iterator[Table]:
    """The Trainer's dispatch of a step's events inside a fit; countoff counts batches where its loader is iterated."""
    for world_size in (1, 2):
        progress(f"transformers: {world_size} ranks")
        samples = on_ranks(trainer_costs, world_size, 3 if quick else 21)[0]
        title = f"The Trainer's dispatch of `on_step_begin` and `on_step_end`, ranks: {world_size}"
        note = "countoff has no hook for either: it counts batches where the loader is iterated; see `accelerate`."
        yield compared(title, "µs", samples, against=NO_OP, notes=[note])


def trainer_costs(repeats: int) -> dict[str, list[float]]:
    """Seconds per step that the callbacks' dispatch takes, with one callback after the other alone in the Trainer."""
    from transformers import TrainerCallback

    from countoff.transformers import Countoff
    from integration_tests.trainer_jobs import Job

    found: list[dict[str, list[float]]] = []

    class NoOp(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            pass

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            pass

    class Measure(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if found or state.global_step != 3:
                return
            handler = trainer.callback_handler
            mine = handler.callbacks
            guarded = next(each for each in mine if isinstance(each, Countoff))
            variants = {NOTHING: [], NO_OP: [NoOp()], COUNTOFF: [guarded]}
            names = {"handler": handler, "args": args, "state": state, "control": control}
            step = "handler.on_step_begin(args, state, control); handler.on_step_end(args, state, control)"
            timers = {
                name: timeit.Timer(step, "handler.callbacks = callbacks", globals={**names, "callbacks": callbacks})
                for name, callbacks in variants.items()
            }
            found.append(in_turns(timers, repeats * _CHUNKS, _CALLS))
            handler.callbacks = mine

    trainer, *_ = Job(samples=128, args={"num_train_epochs": 1}).trainer()
    trainer.add_callback(Measure())
    trainer.train()
    return found[0]

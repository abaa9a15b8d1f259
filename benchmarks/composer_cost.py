"""Measures what one batch costs on the training thread of a Composer fit, compared with a no-op callback.

On real ranks, with gloo and a store like torchrun's; with two ranks, countoff's threads run. In real fits:

1. `engine.run_event(Event.BATCH_START)` inside a fit: with no callback, with one that overrides the same events as
   `Countoff` and does nothing, and with `Countoff`, including its ticks (one in 64 batches).
2. A fetch: `next()` on a loader that always returns the same object, bare and observed by countoff.
3. Whole batches: fits of a linear model with each of the three, per batch, from the ninth batch to the last.

The variants take turns within one process, so that other load on the machine affects all of them alike.
"""

import itertools
import os
import time
import timeit
from collections.abc import Iterator
from typing import Any

from benchmarks.ranks import on_ranks
from benchmarks.results import (
    COUNTOFF,
    NO_OP,
    NOTHING,
    THREAD_TIME,
    WALL_TIME,
    Samples,
    Table,
    compared,
    in_turns,
    progress,
)
from integration_tests.composer_jobs import Job
from integration_tests.digits import BATCH_SIZE

BARE, OBSERVED = "bare", "observed"
CLOCKS = {WALL_TIME: time.perf_counter, THREAD_TIME: time.thread_time}
CALLS = 640  # ten ticks
BATCHES, FIRST = 128, 8  # batches of a fit on each rank; those before FIRST are the warm-up


class Endless:
    """A loader that returns the same object for ever."""

    def __iter__(self) -> Any:
        return itertools.repeat(None)


def tables(quick: bool) -> Iterator[Table]:
    """Yields tables of the dispatch of `BATCH_START`, of a fetch from an observed loader, and of whole fits."""
    for world_size in (1, 2):
        progress(f"composer: {world_size} ranks")
        dispatches, fetches = on_ranks(event_costs, world_size, 21 if quick else 101)[0]
        fits = on_ranks(fit_costs, world_size, 2 if quick else 15)[0]
        measured = {
            "Composer's dispatch of `BATCH_START`": (dispatches, NO_OP),
            "A fetch from Composer's train loader": (fetches, BARE),
            "A batch of a whole fit of Composer's": (fits, NO_OP),
        }
        for title, (costs, against) in measured.items():
            for clock, samples in costs.items():
                yield compared(f"{title}, {clock}, ranks: {world_size}", "µs", samples, against=against)


def no_op_callback() -> Any:
    """Returns a callback that overrides the events that `Countoff` overrides, and does nothing."""
    from composer.core import Callback

    from countoff.composer import Countoff

    def nothing(self: Any, state: Any, logger: Any) -> None:
        """Does nothing."""

    events = [name for name in vars(Countoff) if not name.startswith("_") and callable(getattr(Callback, name, None))]
    return type("NoOp", (Callback,), dict.fromkeys(events, nothing))()


def dispatch_costs(trainer: Any, countoff: Any, repeats: int) -> dict[str, Samples]:
    """Returns seconds per dispatch of BATCH_START by clock, with each callback in turn alone in the Trainer."""
    from composer.core import Event

    state = trainer.state
    callbacks_of_fit = list(state.callbacks)
    variants = {NOTHING: [], NO_OP: [no_op_callback()], COUNTOFF: [countoff]}
    names = {"engine": trainer.engine, "event": Event.BATCH_START, "state": state}

    def timer(callbacks: list[Any], clock: Any) -> timeit.Timer:
        variables = {**names, "callbacks": callbacks}
        return timeit.Timer("engine.run_event(event)", "state.callbacks[:] = callbacks", clock, variables)

    costs = {
        clock: in_turns({name: timer(callbacks, now) for name, callbacks in variants.items()}, repeats, CALLS)
        for clock, now in CLOCKS.items()
    }
    state.callbacks[:] = callbacks_of_fit
    return costs


def fetch_costs(guard: Any, repeats: int) -> dict[str, Samples]:
    """Returns seconds per fetch, bare and observed, by clock."""
    from countoff._adapter.loader_observer import LoaderObserver

    observed = LoaderObserver(
        Endless(), guard.waited, failing=guard.failing, failed=guard.failed, batch_requested=guard.batch_requested
    )
    loaders = {BARE: iter(Endless()), OBSERVED: iter(observed.loader)}
    next(loaders[OBSERVED])
    observed.used = observed.begun  # as in a train epoch
    return {
        clock: in_turns(
            {
                name: timeit.Timer("next(batches)", timer=now, globals={"batches": each})
                for name, each in loaders.items()
            },
            repeats,
            CALLS,
        )
        for clock, now in CLOCKS.items()
    }


def event_costs(repeats: int) -> tuple[dict[str, Samples], dict[str, Samples]]:
    """Returns what a dispatch and what a fetch costs, measured in the middle of a fit."""
    from composer.core import Callback

    from countoff.composer import Countoff

    costs: list[dict[str, Samples]] = []

    class Measure(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            if int(state.timestamp.batch) == 3:
                countoff = next(each for each in state.callbacks if isinstance(each, Countoff))
                costs.append(dispatch_costs(trainer, countoff, repeats))
                costs.append(fetch_costs(countoff.guard, repeats))

    trainer = Job(even=64).make_trainer(callbacks=[Measure()], max_duration="1ep")
    trainer.fit()
    trainer.close()
    return costs[0], costs[1]


def fit_costs(repeats: int) -> dict[str, Samples]:
    """Returns seconds per batch of whole fits by clock, with each callback in turn; the first round is the warm-up."""
    from composer.core import Callback

    costs: dict[str, Samples] = {clock: {NOTHING: [], NO_OP: [], COUNTOFF: []} for clock in CLOCKS}

    class Time(Callback):
        def __init__(self) -> None:
            self.began: dict[str, float] = {}
            self.seconds: dict[str, float] = {}

        def after_dataloader(self, state: Any, logger: Any) -> None:
            if int(state.timestamp.batch) == FIRST:
                self.began = {clock: now() for clock, now in CLOCKS.items()}

        def batch_end(self, state: Any, logger: Any) -> None:
            if int(state.timestamp.batch) == BATCHES:
                self.seconds = {clock: (now() - self.began[clock]) / (BATCHES - FIRST) for clock, now in CLOCKS.items()}

    for repeat in range(repeats + 1):
        for name in (NOTHING, NO_OP, COUNTOFF):
            timing = Time()
            job = Job(
                even=BATCHES * BATCH_SIZE * int(os.environ["WORLD_SIZE"]), options={} if name == COUNTOFF else None
            )
            more = [no_op_callback()] if name == NO_OP else []
            trainer = job.make_trainer(callbacks=[*more, timing], max_duration="1ep")
            trainer.fit()
            trainer.close()
            for clock in CLOCKS if repeat else ():
                costs[clock][name].append(timing.seconds[clock])
    return costs

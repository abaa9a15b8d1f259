"""What one batch costs on the training thread of a Composer fit, beside a callback that does nothing.

With real ranks (gloo, an agent's store, countoff's threads running where there are two), and real fits:

1. `engine.run_event(Event.BATCH_START)` inside a fit: with no callback, with one that overrides the same events as
   `Countoff` and does nothing, and with `Countoff`, its ticks (one in 64 batches) included.
2. A fetch: `next()` on a loader that hands out one and the same object, bare and observed by countoff.
3. Whole batches: fits of a linear model with each of the three, per batch, from the ninth batch to the last.

What is compared is measured in turns within one process, so that a noisy minute hits all alike.
"""

import itertools
import os
import time
import timeit
from collections.abc import Iterator
from typing import Any

from benchmarks.ranks import on_ranks
from benchmarks.results import COUNTOFF, NO_OP, NOTHING, Table, compared, in_turns, progress
from integration_tests.composer_jobs import Job
from integration_tests.jobs import BATCH_SIZE

Samples = dict[str, list[float]]

BARE, OBSERVED = "bare", "observed"
WALL, THREAD = "by the wall", "processor time of the training thread"
CLOCKS = {WALL: time.perf_counter, THREAD: time.thread_time}
CALLS = 640  # ten ticks
BATCHES, FIRST = 128, 8  # of a fit, on each rank; those before FIRST warm up


class Endless:
    """Hands out one and the same object for ever."""

    def __iter__(self) -> Any:
        return itertools.repeat(None)


def tables(quick: bool) -> Iterator[Table]:
    """Composer's dispatch of `BATCH_START` inside a fit, a fetch from its observed loader, and whole fits."""
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
    """A callback that overrides the events that `Countoff` overrides, and does nothing."""
    from composer.core import Callback

    from countoff.composer import Countoff

    def nothing(self: Any, state: Any, logger: Any) -> None:
        """Does nothing."""

    events = [name for name in vars(Countoff) if not name.startswith("_") and callable(getattr(Callback, name, None))]
    return type("NoOp", (Callback,), dict.fromkeys(events, nothing))()


def dispatch_costs(trainer: Any, guarded: Any, repeats: int) -> dict[str, Samples]:
    """Seconds per dispatch of BATCH_START with one callback after the other alone in the Trainer, by clock."""
    from composer.core import Event

    state = trainer.state
    kept = list(state.callbacks)
    variants = {NOTHING: [], NO_OP: [no_op_callback()], COUNTOFF: [guarded]}
    names = {"engine": trainer.engine, "event": Event.BATCH_START, "state": state}

    def timer(callbacks: list[Any], clock: Any) -> timeit.Timer:
        found = {**names, "callbacks": callbacks}
        return timeit.Timer("engine.run_event(event)", "state.callbacks[:] = callbacks", clock, found)

    costs = {
        clock: in_turns({name: timer(callbacks, now) for name, callbacks in variants.items()}, repeats, CALLS)
        for clock, now in CLOCKS.items()
    }
    state.callbacks[:] = kept
    return costs


def fetch_costs(guard: Any, repeats: int) -> dict[str, Samples]:
    """Seconds per fetch, bare and observed, by clock."""
    from countoff._adapter.loader_observer import LoaderObserver

    observed = LoaderObserver(Endless(), guard.waited, guard.failed, batch_requested=guard.batch_requested)
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
    """What a dispatch and what a fetch costs, measured in the middle of a fit."""
    from composer.core import Callback

    from countoff.composer import Countoff

    found: list[dict[str, Samples]] = []

    class Measure(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            if int(state.timestamp.batch) == 3:
                guarded = next(each for each in state.callbacks if isinstance(each, Countoff))
                found.append(dispatch_costs(trainer, guarded, repeats))
                found.append(fetch_costs(guarded.guard, repeats))

    trainer = Job(even=64).make_trainer(callbacks=[Measure()], max_duration="1ep")
    trainer.fit()
    trainer.close()
    return found[0], found[1]


def fit_costs(repeats: int) -> dict[str, Samples]:
    """Seconds per batch of whole fits with each callback, in turns, by clock; the first round only warms up."""
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

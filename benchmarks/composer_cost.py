"""What one batch costs on the training thread of a Composer fit, beside a callback that does nothing.

    python -m benchmarks.composer_cost           # about two minutes
    python -m benchmarks.composer_cost --quick   # fewer repeats

With real ranks (gloo, an agent's store, countoff's threads running where there are two), inside a real fit:

1. `engine.run_event(Event.BATCH_START)` with no callback, with one that overrides the same hook and does nothing, and
   with `Countoff`, its ticks (one in 64 batches) included.
2. A fetch: `next()` on a loader that hands out one and the same object, bare and observed by countoff.

What is compared is measured in turns within one process, so that a noisy minute hits all alike.
"""

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import timeit
from pathlib import Path
from typing import Any

from integration_tests.composer_jobs import Job
from integration_tests.harness import run_ranks

CALLS = 6400
NOTHING, NO_OP, COUNTOFF = "no callback", "no-op callback", "`Countoff`"


class Endless:
    """Hands out one and the same object for ever."""

    def __iter__(self) -> Any:
        return itertools.repeat(None)


def in_turns(timers: dict[str, timeit.Timer], repeats: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in timers}
    for repeat in range(repeats + 1):
        for name, timer in timers.items():
            seconds = timer.timeit(CALLS) / CALLS
            if repeat:  # the first round warms up
                samples[name].append(seconds)
    return samples


def costs(repeats: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds per dispatch of BATCH_START, and per fetch."""
    from composer.core import Callback, Event

    from countoff._fetches import Fetches
    from countoff.composer import Countoff

    class NoOp(Callback):
        def batch_start(self, state: Any, logger: Any) -> None:
            pass

    found: list[dict[str, list[float]]] = []

    class Measure(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            if found or int(state.timestamp.batch) != 3:
                return
            mine = state.callbacks
            guarded = next(each for each in mine if isinstance(each, Countoff))
            variants: dict[str, list[Callback]] = {NOTHING: [], NO_OP: [NoOp()], COUNTOFF: [guarded]}
            names = {"engine": trainer.engine, "event": Event.BATCH_START, "state": state}
            timers = {
                name: timeit.Timer(
                    "engine.run_event(event)",
                    "state.callbacks[:] = callbacks",
                    globals={**names, "callbacks": callbacks},
                )
                for name, callbacks in variants.items()
            }
            kept = list(mine)
            found.append(in_turns(timers, repeats))
            state.callbacks[:] = kept
            observed = Fetches(Endless(), guarded.guard.waited, guarded.guard.failed)
            found.append(
                in_turns(
                    {
                        "bare": timeit.Timer("next(batches)", globals={"batches": iter(Endless())}),
                        "observed": timeit.Timer("next(batches)", globals={"batches": iter(observed.loader)}),
                    },
                    repeats,
                )
            )

    trainer = Job(even=64).make_trainer(callbacks=[Measure()], max_duration="1ep")
    trainer.fit()
    trainer.close()
    return found[0], found[1]


def print_table(title: str, samples: dict[str, list[float]], against: str) -> None:
    base = statistics.median(samples[against])
    print(f"\n{title}\n\n| what | median µs | quartiles | minus {against}, µs |\n|---|---|---|---|")
    for name, values in samples.items():
        low, middle, high = (quartile * 1e6 for quartile in statistics.quantiles(values, n=4))
        print(f"| {name} | {middle:.2f} | {low:.2f} to {high:.2f} | {middle - base * 1e6:+.2f} |")


def main() -> int:
    parser = argparse.ArgumentParser(description="What one batch costs on the training thread of a Composer fit.")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    repeats = 5 if parser.parse_args().quick else 21
    print(f"repeats: {repeats}, load average {os.getloadavg()[0]:.1f}")
    for world_size in (1, 2):
        with tempfile.TemporaryDirectory() as directory:
            results = run_ranks(costs, world_size, repeats, directory=Path(directory), deadline_seconds=300)
        events, fetches = results[0].value
        print_table(f"Dispatch of `BATCH_START`, ranks: {world_size}", events, NO_OP)
        print_table(f"A fetch, ranks: {world_size}", fetches, "bare")
    return 0


if __name__ == "__main__":
    sys.exit(main())

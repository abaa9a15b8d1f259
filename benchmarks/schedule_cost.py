"""Measures what the check of a learning-rate schedule costs: once per fit, and at every other optimizer step.

The peer is what anybody would do: step the scheduler through the run.
"""

import timeit
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import torch
from torch.optim import lr_scheduler

from benchmarks.results import WALL_TIME, Table, compared, in_turns
from countoff._adapter.schedule_watch import Schedule, ScheduleWatch
from countoff.core.checks.horizon import RunLength

STEPPED = 10_000
LONG = 10_000_000


class WithItsOwnStep(lr_scheduler.LambdaLR):
    """It cannot be asked for any tick, so it is stepped."""

    def step(self, epoch: int | None = None) -> None:
        super().step()


def linear(length: int) -> Callable[[int], float]:
    return lambda step: max(0.0, 1 - step / length)


def tables(quick: bool) -> Iterator[Table]:
    """Yields the costs of one check, and of a step when the check is over."""
    torch.set_num_threads(1)
    peer = f"stepping a LambdaLR {STEPPED:,} times"
    checks = {
        f"LambdaLR, {STEPPED:,} steps": check(lambda o: lr_scheduler.LambdaLR(o, linear(STEPPED)), STEPPED),
        f"LambdaLR, {LONG:,} steps": check(lambda o: lr_scheduler.LambdaLR(o, linear(LONG // 4)), LONG),
        f"OneCycleLR, {LONG:,} steps": check(lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=LONG), LONG),
        f"warm-up and cosine, {LONG:,} steps": check(warmed_up, LONG),
        "one with a step() of its own, 5,000 steps": check(lambda o: WithItsOwnStep(o, linear(2_500)), 5_000),
        peer: timeit.Timer(stepped),
    }
    yield compared(f"One check of a schedule, {WALL_TIME}", "ms", in_turns(checks, 5 if quick else 30, 1), against=peer)
    over = ScheduleWatch((), lambda _: RunLength())
    steps = {
        "`pass`": timeit.Timer("pass"),
        "a step after the check": timeit.Timer("over.stepped(9, 9)", globals={"over": over}),
    }
    yield compared("An optimizer step", "ns", in_turns(steps, 20 if quick else 200, 10_000), against="`pass`")


def check(make: Callable[[Any], Any], steps: int) -> timeit.Timer:
    """Times one check of a scheduler."""
    scheduler, run = make(an_optimizer()), RunLength(steps)
    return timeit.Timer(lambda: ScheduleWatch([Schedule.of(scheduler, Fraction(1))], lambda _: run).begin(0))


def stepped() -> None:
    scheduler: Any = lr_scheduler.LambdaLR(an_optimizer(), linear(STEPPED))
    scheduler.optimizer.step()  # torch warns of a scheduler that is stepped before
    for _ in range(STEPPED):
        scheduler.step()


def warmed_up(optimizer: Any) -> Any:
    parts: list[Any] = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=1000),
        lr_scheduler.CosineAnnealingLR(optimizer, LONG),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[1000])


def an_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)

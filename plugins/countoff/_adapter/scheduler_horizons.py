"""Reads from live learning-rate schedulers of torch and transformers for how many ticks they were made."""

from __future__ import annotations

import functools
from typing import Any

from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
)

from countoff.core.arithmetic.horizon import Horizon


def horizon_of(scheduler: Any, *, ticks_per_step: int = 1) -> Horizon | None:
    """Returns for how many ticks a scheduler was made; None if it does not show that, or never ends.

    It knows OneCycleLR, CosineAnnealingLR, PolynomialLR, a falling LinearLR, SequentialLR and ChainedScheduler of
    these, and a LambdaLR whose function was made for `num_training_steps`, as those of transformers and diffusers are.

    Args:
        scheduler: A torch scheduler, unwrapped.
        ticks_per_step: How often it will tick at each optimizer step, at least 1.
    """
    ticks, warmup_ticks = _length(scheduler)
    if not ticks or ticks < 1:
        return None
    return Horizon(type(scheduler).__name__, ticks, ticks_per_step=ticks_per_step, warmup_ticks=warmup_ticks)


def _length(scheduler: Any) -> tuple[int | None, int]:
    """Returns the ticks until a scheduler ends, None if it does not end, and its warm-up ticks."""
    if isinstance(scheduler, OneCycleLR):
        return int(scheduler.total_steps), 0
    if isinstance(scheduler, CosineAnnealingLR):
        return int(scheduler.T_max), 0
    if isinstance(scheduler, PolynomialLR):
        return int(scheduler.total_iters), 0
    if isinstance(scheduler, LinearLR):
        falls = scheduler.end_factor < scheduler.start_factor
        return (int(scheduler.total_iters), 0) if falls else (None, int(scheduler.total_iters))
    if isinstance(scheduler, SequentialLR):
        return _length_of_sequence(scheduler)
    if isinstance(scheduler, ChainedScheduler):
        parts = [_length(part) for part in scheduler._schedulers]
        return max((ticks for ticks, _ in parts if ticks), default=None), max(warmup for _, warmup in parts)
    if isinstance(scheduler, LambdaLR):
        return _length_of_function(scheduler.lr_lambdas[0])
    return None, 0


def _length_of_sequence(scheduler: Any) -> tuple[int | None, int]:
    ends, _ = _length(scheduler._schedulers[-1])
    _, warmup = _length(scheduler._schedulers[0])
    return None if ends is None else int(scheduler._milestones[-1]) + ends, warmup


def _length_of_function(function: Any) -> tuple[int | None, int]:
    """Returns the length by the names of the values that a schedule's function (partial or closure) was made with."""
    if isinstance(function, functools.partial):
        made_with = dict(function.keywords)
    else:
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        cells = getattr(function, "__closure__", None) or ()
        made_with = {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
    numbers = {name: int(value) for name, value in made_with.items() if isinstance(value, int)}
    warmup, decay = numbers.get("num_warmup_steps", 0), numbers.get("num_decay_steps")
    if decay is not None:  # warm-up, stable, decay
        return warmup + numbers.get("num_stable_steps", 0) + decay, warmup
    return numbers.get("num_training_steps"), warmup

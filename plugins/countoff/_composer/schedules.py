"""The learning-rate schedules of a Composer run: torch's, and Composer's own, which follow the State's time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from composer import optim
from composer.core import Time

from countoff._adapter.schedule_watch import Schedule
from countoff._composer.state import made_with, own_schedulers
from countoff.core.arithmetic.schedules import Ending, decay, milestones, vanishing, warmup

__all__ = ["schedules"]


def schedules(state: Any, *, length_is_right: bool) -> Iterator[Schedule]:
    """Yields the schedules of a run.

    Composer steps torch's schedulers after every epoch or after every batch, which its State does not show: their
    first steps do.

    Args:
        state: Composer's State.
        length_is_right: Whether an epoch has as many batches as Composer counts on. Otherwise another warning tells
            what becomes of a schedule that is made in epochs.
    """
    own = own_schedulers(state)
    for scheduler in own:
        yield Schedule.of(scheduler)
    if not own and len(state.schedulers) == 1:  # several multiply their factors
        yield _by_time(state, state.schedulers[0], length_is_right)


def _by_time(state: Any, compiled: Any, length_is_right: bool) -> Schedule:
    """The schedule of one of Composer's own schedulers, in batches."""
    with_it = made_with(compiled.lr_lambdas[0])
    scheduler, ratio = with_it["scheduler"], with_it.get("ssr", 1.0)
    length = int(state.dataloader_len) if length_is_right and state.dataloader_len else None

    def ending() -> Ending | None:
        read = _READERS.get(type(scheduler))
        try:
            found = None if read is None else read(vars(scheduler), length, ratio)
        except (ArithmeticError, LookupError, TypeError, ValueError):  # also where a time is no number of batches
            return None
        return None if found is None else found.times(max(map(float, compiled.base_lrs)))

    name = getattr(scheduler, "__name__", type(scheduler).__name__)
    return Schedule(name, ending, lambda: int(state.timestamp.batch), Fraction(1))


def _batches(time: str | Time[Any], length: int | None, ratio: float) -> int:
    """Returns a time in batches, as Composer rounds it.

    Raises:
        ValueError: If it is none. A part of the duration is what the user says, and the batches of a token or a second
            are not known.
    """
    parsed = Time.from_timestring(time) if isinstance(time, str) else time
    unit = {"ba": 1, "ep": length}.get(parsed.unit.value)
    if unit is None:
        raise ValueError(f"{time} is no number of batches")
    return int(parsed.value * unit * ratio)


def _falls(held: Mapping[str, Any], length: int | None, ratio: float) -> Ending:
    return decay(
        _batches(held["t_max"], length, ratio),
        warmup=_warmup(held, length, ratio) if "t_warmup" in held else 0,
        lowest=held["alpha_f"],
        peak=held.get("alpha_i", 1.0),
    )


def _warmup(held: Mapping[str, Any], length: int | None, ratio: float) -> int:
    return _batches(held["t_warmup"], length, ratio if held["scale_warmup"] else 1.0)


def _steps(held: Mapping[str, Any], length: int | None, ratio: float) -> Ending:
    return milestones([_batches(each, length, ratio) for each in held["milestones"]], held["gamma"])


_READERS: Mapping[type, Callable[[Mapping[str, Any], int | None, float], Ending | None]] = {
    optim.LinearScheduler: _falls,
    optim.LinearWithWarmupScheduler: _falls,
    optim.CosineAnnealingScheduler: _falls,
    optim.CosineAnnealingWithWarmupScheduler: _falls,
    optim.PolynomialScheduler: _falls,
    optim.PolynomialWithWarmupScheduler: _falls,
    optim.ConstantWithWarmupScheduler: lambda held, length, ratio: warmup(_warmup(held, length, ratio)),
    optim.MultiStepScheduler: _steps,
    optim.MultiStepWithWarmupScheduler: _steps,
    optim.StepScheduler: lambda held, length, ratio: vanishing(
        held["gamma"], _batches(held["step_size"], length, ratio)
    ),
    optim.ExponentialScheduler: lambda held, length, ratio: vanishing(
        held["gamma"], _batches(held["decay_period"], length, ratio)
    ),
}
"""Reads where the schedule of a class ends, from what an object of it holds, the batches of an epoch, and the ratio."""

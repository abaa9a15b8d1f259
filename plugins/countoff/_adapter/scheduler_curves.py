"""The curve of a live learning-rate scheduler, from a copy of it that is moved through the run.

Nothing is known of the scheduler but how torch's are built: `last_epoch` counts the ticks, and `get_lr` computes the
rates. A scheduler whose rates follow from the tick alone is asked for any tick at once; any other one is stepped.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import numbers
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LRScheduler,
    ReduceLROnPlateau,
    SequentialLR,
)

from countoff._adapter.object_copies import NotCopied, copied
from countoff.core.counts.curves import UnknownRate

__all__ = ["SchedulerCurve", "curve_of", "ticks_of", "undisturbed"]

_MOST_STEPS = 5_000
"""Ticks up to which a scheduler is stepped that cannot be asked for any tick."""
_ENDLESS = (ReduceLROnPlateau, CyclicLR, CosineAnnealingWarmRestarts)
"""They follow what is measured, or begin again on purpose."""
_TICKS = {"last_epoch": 0, "last_batch_iteration": -1}
"""Where torch's schedulers and DeepSpeed's count their ticks, and from which number on."""
_PER_GROUP = frozenset(("base_lrs", "lr_lambdas", "min_lrs", "max_lrs", "_last_lr"))
"""What schedulers of torch and of DeepSpeed hold for each parameter group."""


class SchedulerCurve:
    """The learning rate of a scheduler after a number of ticks: the highest of its optimizer's parameter groups.

    Args:
        scheduler: The scheduler, unwrapped. It is copied, and not changed.

    Attributes:
        name: The scheduler's class.
        ticks: How often the scheduler was stepped when it was copied.

    Raises:
        NotCopied: If no copy stands for it.
    """

    def __init__(self, scheduler: Any) -> None:
        self.name = type(scheduler).__name__
        self.ticks = ticks_of(scheduler)
        if isinstance(scheduler, _ENDLESS):
            raise NotCopied("it has no end")
        self._scheduler = scheduler
        self.copy = _copied(scheduler)
        self._stepped: list[float] | None = None

    def __call__(self, tick: int) -> float:
        """Returns the learning rate after a number of ticks.

        Raises:
            UnknownRate: If it cannot be told.
            ValueError, LookupError: If the scheduler raises it there.
        """
        try:
            if self._stepped is None:
                try:
                    return _highest(_rates(self.copy, tick))
                except _Recursive:
                    self.copy, self._stepped = _copied(self._scheduler), []
            return self._step_to(tick)
        except (ValueError, LookupError):
            raise
        except Exception as error:  # also where numbers overflow, which they do far beyond the run
            raise UnknownRate from error

    def _step_to(self, tick: int) -> float:
        """Steps the copy up to a tick; before the present one, the rate is taken for the present one."""
        stepped = self._stepped = self._stepped or [_highest(_present_rates(self.copy))]
        while len(stepped) <= tick - self.ticks:
            if len(stepped) > _MOST_STEPS:
                raise UnknownRate
            self.copy.step()
            stepped.append(_highest(_present_rates(self.copy)))
        return stepped[max(0, tick - self.ticks)]


def curve_of(scheduler: Any) -> SchedulerCurve | None:
    """Returns the curve of a scheduler; None if no copy stands for it, or it has no end by its kind.

    Args:
        scheduler: A scheduler, unwrapped.
    """
    try:
        return SchedulerCurve(scheduler)
    except NotCopied:
        return None


class _Recursive(Exception):
    """A scheduler whose rate follows from the one before."""


class _StandIn:
    """Takes the place of the optimizer: the learning rates, and what else its parameter groups hold, without them."""

    def __init__(self, optimizer: Any) -> None:
        self.defaults = copied(dict(optimizer.defaults), {})
        groups = [{name: each for name, each in group.items() if name != "params"} for group in optimizer.param_groups]
        self.param_groups = [{**copied(group, {}), "params": []} for group in groups]


def _copied(scheduler: Any) -> Any:
    optimizer = getattr(scheduler, "optimizer", None)
    if not hasattr(optimizer, "param_groups"):
        raise NotCopied("it has no optimizer")
    copy = copied(scheduler, {id(optimizer): _StandIn(optimizer)})
    _keep_highest_groups(copy)
    for each in (copy, *getattr(copy, "_schedulers", ())):
        # As torch does it while it steps. Otherwise it warns of being asked, and of steps without the optimizer's.
        each._get_lr_called_within_step = True
        each._step_count = max(2, getattr(each, "_step_count", 2))
    return copy


def _keep_highest_groups(copy: Any) -> None:
    """Leaves a copied scheduler only the highest group of each function, as all others have its curve."""
    groups = copy.optimizer.param_groups
    if len(groups) == 1:
        return
    parts = [copy, *getattr(copy, "_schedulers", ())]
    by_function = [part.lr_lambdas for part in parts if hasattr(part, "lr_lambdas")]
    base = [float(group.get("max_lr", group.get("initial_lr", group["lr"]))) for group in groups]
    # The last one of each function is the highest one.
    ascending = sorted(range(len(groups)), key=base.__getitem__)
    kept = {tuple(id(functions[at]) for functions in by_function): at for at in ascending}.values()
    for part in parts:
        for name in vars(part).keys() & _PER_GROUP:
            setattr(part, name, [getattr(part, name)[at] for at in kept])
    copy.optimizer.param_groups = [groups[at] for at in kept]


def ticks_of(scheduler: Any) -> int:
    """Returns how often a scheduler was stepped until now.

    Raises:
        NotCopied: If it does not show that.
    """
    if isinstance(scheduler, ChainedScheduler):
        return ticks_of(scheduler._schedulers[0])
    for name, first in _TICKS.items():
        if isinstance(count := getattr(scheduler, name, None), numbers.Integral):
            return int(count) - first
    raise NotCopied("it does not show how often it was stepped")


def _rates(scheduler: Any, tick: int) -> list[Any]:
    """The rates of all parameter groups after a number of ticks, of a scheduler that can be asked for any.

    Raises:
        _Recursive: If it cannot.
    """
    if type(scheduler) is SequentialLR:
        part = bisect.bisect_right(scheduler._milestones, tick)
        return _rates(scheduler._schedulers[part], tick - (scheduler._milestones[part - 1] if part else 0))
    if type(scheduler) is ChainedScheduler:
        products = [float(group["initial_lr"]) for group in scheduler.optimizer.param_groups]
        for part in scheduler._schedulers:
            factors = zip(_rates(part, tick), part.base_lrs, strict=True)
            products = [product * (rate / float(base)) for product, (rate, base) in zip(products, factors, strict=True)]
        return products
    kind: type[Any] = type(scheduler)
    steps_by_itself = isinstance(scheduler, LRScheduler) and kind.step is not LRScheduler.step
    if steps_by_itself or not hasattr(scheduler, "get_lr"):
        raise _Recursive
    setattr(scheduler, next(name for name in _TICKS if hasattr(scheduler, name)), tick)
    defined_by = next(each for each in kind.__mro__ if "get_lr" in vars(each))
    if "_get_closed_form_lr" in vars(defined_by):
        return list(scheduler._get_closed_form_lr())  # pyright: ignore[reportAttributeAccessIssue]
    found = [_asked(scheduler, rate) for rate in (1.0, 2.0)]
    if found[0] != found[1]:
        raise _Recursive
    return found[0]


def _asked(scheduler: Any, rate: float) -> list[Any]:
    """The rates of a scheduler at its present tick, if the present rate were another one."""
    for group in scheduler.optimizer.param_groups:
        group["lr"] = rate
    return list(scheduler.get_lr())


def _present_rates(scheduler: Any) -> list[Any]:
    return [group["lr"] for group in scheduler.optimizer.param_groups]


def _highest(rates: Sequence[Any]) -> float:
    """The highest of the rates of all parameter groups.

    Raises:
        ValueError: If one of them is a complex number, as a root of what has fallen below 0; an optimizer refuses it.
        UnknownRate: If one is no finite number.
    """
    if any(isinstance(rate, complex) for rate in rates):
        raise ValueError("a learning rate is a real number")
    found = max((float(rate) for rate in rates), default=0.0)
    if not all(math.isfinite(float(rate)) for rate in rates):
        raise UnknownRate
    return found


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """A context in which a schedule is looked at: random generators of the CPU get their state back, numpy is quiet."""
    numpy: Any = sys.modules.get("numpy")
    states = random.getstate(), torch.get_rng_state(), None if numpy is None else numpy.random.get_state()
    try:
        with contextlib.nullcontext() if numpy is None else numpy.errstate(all="ignore"):
            yield
    finally:
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        if numpy is not None:
            numpy.random.set_state(states[2])

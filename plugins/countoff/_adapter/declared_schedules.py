"""What schedulers declare of their end: the attributes of torch's and DeepSpeed's classes, transformers' keywords.

A scheduler is known by its exact class. Neither it nor a function in it is called, and no code of the user's runs.
"""

from __future__ import annotations

import functools
import numbers
import types
from collections.abc import Callable, Mapping
from typing import Any

from countoff._adapter.torch_facts import schedule_positions
from countoff.core.arithmetic.schedules import (
    Ending,
    chained,
    decay,
    milestones,
    one_after_another,
    one_cycle,
    vanishing,
    warmup,
)

__all__ = ["UnknownCalls", "calls_of", "declared_ending"]

_TORCH, _TRANSFORMERS = "torch.optim.lr_scheduler", "transformers.optimization"
_DEEPSPEED = "deepspeed.runtime.lr_schedules"


class UnknownCalls(Exception):
    """A scheduler that does not show how often it was stepped."""


def declared_ending(scheduler: Any) -> Ending | None:
    """Returns where a schedule ends; None if its scheduler does not declare it.

    Args:
        scheduler: The scheduler, unwrapped.
    """
    try:
        ending = _relative(scheduler)
        return None if ending is None else ending.times(_highest_rate(vars(scheduler)))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):  # attributes that the user has set
        return None


def calls_of(scheduler: Any) -> int:
    """Returns how often a scheduler was stepped until now.

    Raises:
        UnknownCalls: If it does not show that.
    """
    held = getattr(scheduler, "__dict__", {})
    if _kind(scheduler) == f"{_TORCH}.ChainedScheduler":
        return calls_of(held["_schedulers"][0])
    count, first = (held["last_epoch"], 0) if "last_epoch" in held else (held.get("last_batch_iteration"), -1)
    if not isinstance(count, numbers.Integral):
        raise UnknownCalls
    return int(count) - first


def _kind(scheduler: Any) -> str:
    return f"{type(scheduler).__module__}.{type(scheduler).__qualname__}"


def _relative(scheduler: Any) -> Ending | None:
    """Where a schedule ends, with rates that are parts of its optimizer's."""
    read = _READERS.get(_kind(scheduler))
    return None if read is None else read(vars(scheduler))


def _highest_rate(held: Mapping[str, Any]) -> float:
    """The highest of the rates that the schedule multiplies."""
    groups = held["optimizer"].param_groups
    of_cycle = [group["max_lr"] for group in groups if "_schedule_phases" in held]
    rates = of_cycle or held.get("max_lrs") or held.get("org_lrs") or schedule_positions([held["optimizer"]], ())[0]
    return max(map(float, rates), default=1.0)


def _cosine(held: Mapping[str, Any]) -> Ending:
    return decay(held["T_max"], lowest=held["eta_min"] / _highest_rate(held), rises=True)


def _linear(held: Mapping[str, Any]) -> Ending:
    first, last = float(held["start_factor"]), float(held["end_factor"])
    return warmup(held["total_iters"]) if first < last else decay(held["total_iters"], lowest=last, peak=first)


def _constant(held: Mapping[str, Any]) -> Ending | None:
    return warmup(held["total_iters"]) if held["factor"] < 1 else None


def _one_cycle(held: Mapping[str, Any]) -> Ending:
    return one_cycle(held["total_steps"], warmup=max(0, held["_schedule_phases"][0]["end_step"]))


def _milestones(held: Mapping[str, Any]) -> Ending:
    return milestones([*held["milestones"].elements()], held["gamma"])


def _sequence(held: Mapping[str, Any]) -> Ending | None:
    return one_after_another([*map(_relative, held["_schedulers"])], held["_milestones"])


def _warmup_then_decay(held: Mapping[str, Any]) -> Ending:
    return decay(held["total_num_steps"], warmup=held["warmup_num_steps"], lowest=held.get("cos_min_ratio", 0.0))


def _functions(held: Mapping[str, Any]) -> Ending | None:
    """The ending that all functions of a LambdaLR have; None if one of them is not known, or has another one."""
    found = {_of_partial(function) for function in held["lr_lambdas"]}
    return found.pop() if len(found) == 1 else None


def _of_partial(function: Any) -> Ending | None:
    """Where a function of transformers ends, by the keywords with which it was made."""
    if type(function) is not functools.partial or type(function.func) is not types.FunctionType or function.args:
        return None
    given, name = function.keywords, function.func.__name__
    if function.func.__module__ != _TRANSFORMERS or "num_warmup_steps" not in given:
        return None
    first = given["num_warmup_steps"]
    if "num_decay_steps" in given:
        flat, rest = given["num_stable_steps"], given["num_decay_steps"]
        return decay(first + flat + rest, warmup=first, flat=flat, lowest=given["min_lr_ratio"])
    if "num_training_steps" not in given:  # constant, or falling for ever
        return warmup(first)
    if "lr_init" in given:
        return decay(given["num_training_steps"], warmup=first, lowest=given["lr_end"] / given["lr_init"])
    wave = "num_cycles" in given and "restarts" not in name
    if wave and given["num_cycles"] != 0.5:  # it does not end at its lowest rate
        return None
    return decay(given["num_training_steps"], warmup=first, lowest=given.get("min_lr_rate") or 0.0, rises=wave)


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Ending | None]] = {
    f"{_TORCH}.CosineAnnealingLR": _cosine,
    f"{_TORCH}.LinearLR": _linear,
    f"{_TORCH}.ConstantLR": _constant,
    f"{_TORCH}.PolynomialLR": lambda held: decay(held["total_iters"]),
    f"{_TORCH}.OneCycleLR": _one_cycle,
    f"{_TORCH}.MultiStepLR": _milestones,
    f"{_TORCH}.StepLR": lambda held: vanishing(held["gamma"], held["step_size"]),
    f"{_TORCH}.ExponentialLR": lambda held: vanishing(held["gamma"]),
    f"{_TORCH}.SequentialLR": _sequence,
    f"{_TORCH}.ChainedScheduler": lambda held: chained([*map(_relative, held["_schedulers"])]),
    f"{_TORCH}.LambdaLR": _functions,
    f"{_DEEPSPEED}.WarmupLR": lambda held: warmup(held["warmup_num_steps"]),
    f"{_DEEPSPEED}.WarmupDecayLR": _warmup_then_decay,
    f"{_DEEPSPEED}.WarmupCosineLR": _warmup_then_decay,
}
"""Reads where the schedule of a class ends, from what an object of it holds."""

"""Reads Composer's State: the length and the position in force, and what all ranks must agree on."""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import FunctionType
from typing import Any, cast

from composer.core import Time

from countoff._adapter.fit import OwnRank
from countoff._adapter.mesh_position import data_position
from countoff._adapter.torch_facts import of_library
from countoff._composer.loader_report import LoaderReport
from countoff._composer.messages import equal_for_interval, equal_for_schedule
from countoff.core import FitPlan
from countoff.core.data.plain import attributes_of

__all__ = [
    "exception_at_close",
    "length_of",
    "made_with",
    "own_schedulers",
    "plan_of",
    "position_of",
    "times_of",
    "why_equal_lengths",
]

_TIME = re.compile(r"^[0-9.]+(?:ep|dur)$")


def length_of(state: Any) -> int | None:
    """Returns the batches after which Composer stops the pass over its current loader; None for no limit."""
    return None if state.dataloader_len is None else int(state.dataloader_len)


def own_schedulers(state: Any) -> list[Any]:
    """Returns the schedulers that count by themselves: torch's. One of Composer's own goes by the State's time."""
    return [
        each
        for each in state.schedulers
        if not any("scheduler" in made_with(function) for function in getattr(each, "lr_lambdas", ()))
    ]


def position_of(state: Any, *, rank: int, world_size: int) -> tuple[int, int]:
    """Returns this rank's dp_rank and the dp_degree by the mesh that `parallelism_config` makes.

    Without a mesh every rank reads its own data.

    Args:
        state: Composer's State.
        rank: This rank.
        world_size: Ranks in the job.
    """
    return data_position(getattr(state, "device_mesh", None), rank=rank, world_size=world_size)


def plan_of(state: Any, train: LoaderReport | None, evaluations: Mapping[str, LoaderReport], own: OwnRank) -> FitPlan:
    """Returns what all ranks must agree on at the start of a fit, or of a standalone evaluation.

    Args:
        state: Composer's State.
        train: The report of the train loader, if a fit begins.
        evaluations: The reports of the evaluators' loaders, by label.
        own: This rank.
    """
    proven = sorted((label, report.proven) for label, report in evaluations.items())
    plan = FitPlan(
        evaluations=zlib.crc32(repr(proven).encode()),
        dp_rank=own.dp_rank,
        dp_degree=own.dp_degree,
    )
    if train is None:
        return plan
    timestamp, reported = state.timestamp, train.totals.plan.reported_batches_per_epoch
    why = why_equal_lengths(state)
    if why is None:
        plan = replace(plan, own_batches_per_epoch=train.proven or reported)
    else:
        plan = replace(plan, batches_per_epoch=reported, proven_batches_per_epoch=train.proven, why_equal_lengths=why)
    return replace(
        plan,
        batch_size=train.facts.batch_size,
        max_epochs=train.facts.max_epochs,
        max_steps=train.facts.max_steps,
        position=[int(timestamp.epoch), int(timestamp.batch_in_epoch), int(timestamp.batch)],
        evaluation_intervals=dict(_intervals(state)),
    )


def _intervals(state: Any) -> Iterator[tuple[str, str]]:
    """Yields each evaluator's interval that is in the unit of the run's length, and not longer than the run."""
    for each in state.evaluators:
        interval = made_with(each.eval_interval).get("time_interval")
        run = state.max_duration
        if interval is not None and run is not None and interval.unit == run.unit and interval.value <= run.value:
            yield f"eval_interval ({each.label})", next(times_of(interval))


def why_equal_lengths(state: Any) -> str | None:
    """Returns what depends on the length of each rank's train loader, as a sentence; None if nothing does.

    Composer itself ends an epoch on all ranks with the shortest loader, so loaders of different lengths may be meant.

    Args:
        state: Composer's State.
    """
    relative = ("ep", "dur") if state.max_duration.unit.value == "ep" else ("ep",)
    for compiled in state.schedulers:
        for function in getattr(compiled, "lr_lambdas", ()):
            for time in times_of(made_with(function).get("scheduler")):
                if time.endswith(relative):
                    return equal_for_schedule(time)
    intervals = [each.eval_interval for each in state.evaluators]
    intervals += [value for callback in state.callbacks for value in vars(callback).values()]
    for interval in intervals if "dur" in relative else ():
        for time in times_of(made_with(interval).get("time_interval")):
            if time.endswith("dur"):
                return equal_for_interval(time)
    return None


def made_with(function: Any) -> dict[str, Any]:
    """Returns the values with which a function of Composer's own was made, by name; none for anything else."""
    if type(function) is not FunctionType or not of_library(function, "composer"):
        return {}
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def times_of(value: Any, depth: int = 3) -> Iterator[str]:
    """Yields the times of a schedule as Composer writes them: those of its attributes, and of schedules in it."""
    if issubclass(type(value), Time):
        yield f"{value.value}{value.unit.value}"
    elif isinstance(value, str):
        yield from _TIME.findall(value)
    elif depth:
        parts = value if isinstance(value, (list, tuple)) else attributes_of(value).values()
        for each in cast("Iterable[Any]", parts):
            yield from times_of(each, depth - 1)


def exception_at_close() -> BaseException:
    """Returns the exception that is being handled, or the program's last; a `SystemExit` without a code if none."""
    return sys.exc_info()[1] or getattr(sys, "last_value", None) or SystemExit()

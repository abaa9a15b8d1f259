"""Composer's YAML files, as llm-foundry reads them: they hold the global batch, from which each rank's batch follows.

Every batch is an optimizer step; micro-batches are cut out of it. Durations have a unit: ``4800ba``, ``1ep``,
``5000000tok``. Composer trains until the duration is reached, so the last step may go beyond it. The comments name the
lines of ``llmfoundry/utils/config_utils.py`` at 8c8dd48f.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from countoff.plan.fields import ConfigError, Count, Fields
from countoff.plan.formats import Format
from countoff.plan.job import Job, Origin
from countoff.plan.schedules import ConfiguredSchedule

__all__ = ["FORMAT", "read"]

_DURATION = re.compile(r"(\d[\d_]*(?:\.\d+)?(?:[eE]\d+)?)\s*(ba|ep|sp|tok|dur|iter|sec)")
_SCHEDULERS = ("cosine_with_warmup", "linear_decay_with_warmup", "constant_with_warmup")
_MESH = {  # composer/utils/parallelism.py:25, :26 and :181 of Composer 0.32.1
    "data_parallel_replicate": Count("fsdp_config.data_parallel_replicate_degree", 1),
    "data_parallel_shard": Count("fsdp_config.data_parallel_shard_degree", -1, unset=(-1,)),
    "tensor_parallel": Count("tp_config.tensor_parallel_degree", 1),
}
_COUNTS = {
    "global_batch_size": Count("global_train_batch_size"),  # :176
    "batch_size": Count("device_train_batch_size"),  # :108
    "sequence_length": Count(("max_seq_len", "variables.max_seq_len")),  # :111
}


def read(data: Mapping[str, Any]) -> Job:
    """Returns the run that an llm-foundry YAML describes.

    Args:
        data: The parsed file; a ``${…}`` is replaced by the field of the file that it names.

    Raises:
        ConfigError: If a field has a wrong type or is outside its domain, or refers to a field that is not in the file.
    """
    fields = Fields(data, references=True)
    counts = fields.counts(_COUNTS)
    batch, length = counts["global_batch_size"], counts["sequence_length"]
    if batch:
        counts["batch_size"] = None  # llm-foundry computes it from the global one
        del fields.origins["batch_size"]
    steps, epochs = _run_length(fields, batch, length)
    if epochs is not None:
        _compare_epochs(fields, epochs)
    return fields.job(
        "composer",
        "composer",
        fields.counts(_MESH),
        **counts,
        gradient_accumulation_steps=1,
        steps=steps,
        epochs=epochs,
        drop_last=fields.flag("train_loader.drop_last", False),
        schedule=_schedule(fields, steps, batch, length),
    )


def _duration(fields: Fields, path: str) -> tuple[float, str] | None:
    """Returns a duration as number and unit; None if it is not written."""
    text = fields.text(path)
    if text is None:
        return None
    found = _DURATION.fullmatch(text.strip())
    if found is None and text.isdigit():
        found = _DURATION.fullmatch(f"{text}ep")  # a bare number is in epochs
    if found is None:
        raise ConfigError(f"{path} must be a time with a unit, such as 4800ba, 1ep or 5000000tok, got {text!r}")
    amount = float(found[1].replace("_", ""))
    if not math.isfinite(amount):
        raise ConfigError(f"{path} is too large: {text[:40]}…")
    return amount, found[2]


def _run_length(fields: Fields, batch: int | None, length: int | None) -> tuple[int | None, int | None]:
    """Returns the steps and the epochs of the run; at least one of them is None."""
    duration = _duration(fields, "max_duration")
    for name in ("steps", "epochs"):
        in_other_unit = duration is not None and duration[1] in ("sp", "tok") and name == "steps"
        shown = fields.text("max_duration") or ""
        fields.origins[name] = Origin(
            "max_duration", given=duration is not None, written=shown if in_other_unit else None
        )
    if duration is None:
        return None, None
    if duration[1] == "ep":
        return None, _whole("max_duration", duration[0])
    return _steps("max_duration", duration, batch, length), None


def _steps(path: str, duration: tuple[float, str], batch: int | None, length: int | None) -> int | None:
    """Returns a duration in batches, rounded up to the batch that reaches it; None if that cannot be known."""
    amount, unit = _whole(path, duration[0]), duration[1]
    if unit == "ba":
        return amount
    per_step = {"sp": batch, "tok": batch * length if batch and length else None}.get(unit)
    return None if per_step is None else -(-amount // per_step)


def _schedule(fields: Fields, steps: int | None, batch: int | None, length: int | None) -> ConfiguredSchedule | None:
    name = fields.text("scheduler.name")
    if name not in _SCHEDULERS:
        return None
    warmup, warmup_part = _duration_in_steps(fields, "warmup_steps", "scheduler.t_warmup", "0ba", steps, batch, length)
    horizon, horizon_part = _duration_in_steps(fields, "horizon_steps", "scheduler.t_max", "1dur", steps, batch, length)
    if warmup is None or horizon is None:
        return None
    if steps is None and horizon_part is None and warmup_part is not None:
        return None  # a warm-up of an unknown number of steps, in a schedule of a known one
    if not horizon and (steps is not None or horizon_part is None):
        return None
    lowest = 1.0 if name == "constant_with_warmup" else fields.number("min_factor", "scheduler.alpha_f", 0.0) or 0.0
    return ConfiguredSchedule(warmup, warmup_part, horizon=horizon, horizon_part=horizon_part, lowest=lowest)


def _compare_epochs(fields: Fields, epochs: int) -> None:
    """Adds the issues of a schedule in epochs that does not fit a run in epochs."""
    warmup, horizon = _duration(fields, "scheduler.t_warmup"), _duration(fields, "scheduler.t_max")
    if warmup is not None and warmup[1] == "ep" and warmup[0] >= epochs:
        text = f"scheduler.t_warmup is {warmup[0]:g}ep and max_duration is {epochs}ep: the learning rate only rises"
        fields.note("warm-up", text, "silent", "make the warm-up a fraction of the run, such as 0.05dur")
    if horizon is not None and horizon[1] == "ep" and horizon[0] < epochs:
        text = f"scheduler.t_max is {horizon[0]:g}ep and max_duration is {epochs}ep: later epochs have the lowest rate"
        fields.note("horizon", text, "silent", "make it 1dur")


def _duration_in_steps(
    fields: Fields, name: str, path: str, default: str, steps: int | None, batch: int | None, length: int | None
) -> tuple[int | None, float | None]:
    """Returns a duration in steps, and as a fraction of the run where it is written as one; 0 steps of no known run."""
    fields.origins[name] = Origin(path, given=fields.has(path))
    duration = _duration(fields, path) or _duration(Fields({"default": default}), "default")
    assert duration is not None
    amount, unit = duration
    return (round(amount * (steps or 0)), amount) if unit == "dur" else (_steps(path, duration, batch, length), None)


def _whole(path: str, amount: float) -> int:
    if amount != int(amount):
        raise ConfigError(f"{path} must be a whole number in its unit, got {amount:g}")
    return int(amount)


FORMAT = Format(
    "composer",
    read,
    endings=(".yaml", ".yml"),
    fields=("max_duration", "global_train_batch_size", "device_train_batch_size", "device_train_microbatch_size"),
)

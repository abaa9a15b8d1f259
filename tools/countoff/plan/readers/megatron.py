"""Megatron-LM's arguments: the flags of its ``pretrain_*.py``, as a command has them.

The sizes of the model divide the ranks, and what is left over reads different data. A batch is cut into micro-batches
of every data rank. The learning rate counts samples: those of the steps taken, also where its flags count iterations.
Source: Megatron-LM d98e8a64 and core_v0.9.0, ``validate_args`` in ``megatron/training/arguments.py``,
``SchedulerConfig`` in ``megatron/training/config/training_config.py``, ``update_train_iters`` and
``get_optimizer_param_scheduler`` in ``megatron/training/training.py``, and
``megatron/core/num_microbatches_calculator.py``. The comments name lines at d98e8a64.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, cast

from countoff.plan.fields import ConfigError, Count, Fields
from countoff.plan.formats import Format
from countoff.plan.job import Job, Origin
from countoff.plan.ramp import Ramp
from countoff.plan.schedules import ConfiguredSchedule

__all__ = ["FORMAT", "read"]

_MESH = {
    "pp": Count("--pipeline-model-parallel-size", 1),
    "cp": Count("--context-parallel-size", 1),
    "tp": Count("--tensor-model-parallel-size", 1),
}
_COUNTS = {
    "batch_size": Count("--micro-batch-size"),  # training_config.py:11
    "global_batch_size": Count("--global-batch-size"),  # training_config.py:15
    "sequence_length": Count("--seq-length"),  # arguments.py:3305
}
_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
# More steps than any ramp has.
_LONGEST_RAMP = 1_000_000


class _Length(NamedTuple):
    """How long the run is, in its own unit.

    Attributes:
        unit: The end of the names of the flags: ``iters`` or ``samples``.
        amount: Iterations or samples; None if the run is as long as nothing says.
    """

    unit: Literal["iters", "samples"]
    amount: int | None


def read(data: Mapping[str, Any]) -> Job:
    """Returns the run that arguments of Megatron-LM describe.

    Args:
        data: The flags, with their dashes, and their values; True for a flag without one.

    Raises:
        ConfigError: If a value has a wrong type or is outside its domain.
    """
    fields = Fields(data)
    counts = fields.counts(_COUNTS)
    ramp = _ramp(fields, counts["global_batch_size"])
    stages = _stages(fields, counts["sequence_length"])
    if stages and counts["global_batch_size"] is None:
        batch = counts["global_batch_size"] = stages[-1][1]
        fields.origins["global_batch_size"] = Origin("--step-batch-size-schedule", written=f"{batch:,} at its end")
    length, batch = _length(fields), counts["global_batch_size"]
    return fields.job(
        "megatron",
        "megatron",
        {**fields.counts(_MESH), "dp": -1},
        **counts,
        steps=_steps(fields, length, batch, ramp),
        run_samples=length.amount if length.unit == "samples" else None,
        ramp=ramp,
        batch_stages=stages,
        schedule=_schedule(fields, length, batch, ramp),
    )


def _length(fields: Fields) -> _Length:
    iterations = fields.count("steps", Count("--train-iters"))
    if iterations is not None or not fields.has("--train-samples"):
        return _Length("iters", iterations)
    return _Length("samples", fields.count("steps", Count("--train-samples")))


def _steps(fields: Fields, length: _Length, batch: int | None, ramp: tuple[int, int, int] | None) -> int | None:
    """Returns the iterations of the run; those of a run in samples are of whole batches."""
    if length.unit == "iters" or length.amount is None:
        return length.amount
    fields.origins["steps"] = Origin("--train-samples", written=f"{length.amount:,}")
    if batch is None or fields.has("--step-batch-size-schedule"):
        return None
    if ramp is None:
        return length.amount // batch or None
    if _too_long(ramp):
        return None
    growing = _growing(ramp, batch)
    steps = done = 0
    while done <= ramp[2] and done <= length.amount:
        done += growing.batch_after(done)
        steps += 1
    return steps + max(length.amount - done, 0) // batch


def _too_long(ramp: tuple[int, int, int]) -> bool:
    return ramp[2] // ramp[0] > _LONGEST_RAMP


def _growing(ramp: tuple[int, int, int], batch: int) -> Ramp:
    return Ramp(start=ramp[0], increment=ramp[1], samples=ramp[2], global_batch_size=batch)


def _ramp(fields: Fields, batch: int | None) -> tuple[int, int, int] | None:
    """Returns the first batch, the increment and the samples of a ramp; None if there is none, or it is no ramp."""
    value = fields.raw("--rampup-batch-size")
    if value is None:
        return None
    if not isinstance(value, list) or len(cast("list[object]", value)) != 3:
        raise ConfigError("--rampup-batch-size must be three numbers: the first batch, the increment, the samples")
    names = ("start", "increment", "samples")
    numbers = Fields({"--rampup-batch-size": dict(zip(names, cast("list[object]", value), strict=True))})
    start, increment, samples = (numbers.count("", Count(f"--rampup-batch-size.{name}")) for name in names)
    if start is None or increment is None or samples is None or batch is None:
        return None
    if batch < start or (batch - start) % increment:
        return None  # Megatron-LM refuses it
    if fields.has("--train-iters"):
        text = (
            "--rampup-batch-size with --train-iters: Megatron-LM before April 2026 stops on an assertion, and later "
            "versions ignore the ramp"
        )
        fields.note("batch", text, "stops", "give --train-samples")
    return (start, increment, samples) if batch > start else None


def _stages(fields: Fields, sequence_length: int | None) -> tuple[tuple[int, int], ...]:
    """Returns the global batches of ``--step-batch-size-schedule``, each with the samples after which it begins.

    Raises:
        ConfigError: If an entry is not ``THRESHOLD:BATCH``, or they do not begin at 0 and grow.
    """
    flag = "--step-batch-size-schedule"
    value = fields.raw(flag)
    if value is None:
        return ()
    entries = " ".join(map(str, cast("list[object]", value) if isinstance(value, list) else [value])).replace(",", " ")
    found: list[tuple[int, int]] = []
    for entry in entries.split():
        parts = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)([KMBT]?):(\d{1,9})", entry.upper())
        if parts is None or not int(parts[3]):
            raise ConfigError(f"{flag} must be entries such as 0:16 or 2.4B:320, got {entry[:40]}")
        threshold = int(float(parts[1]) * _SUFFIXES.get(parts[2], 1))
        found.append((threshold // sequence_length if sequence_length else threshold, int(parts[3])))
    found.sort()
    if not found or found[0][0] or len({samples for samples, _ in found}) < len(found):
        raise ConfigError(f"{flag} must begin with an entry at 0, and no two may begin at the same sample")
    return tuple(found)


def _schedule(
    fields: Fields, length: _Length, batch: int | None, ramp: tuple[int, int, int] | None
) -> ConfiguredSchedule | None:
    """Returns the schedule; None if its decay or its warm-up is not known, or Megatron-LM refuses it."""
    style = fields.choice("--lr-decay-style", _STYLES, "linear")
    rate = fields.number("", "--lr")
    lowest = fields.number("", "--min-lr", 0.0) or 0.0
    first = fields.number("", "--lr-warmup-init", 0.0) or 0.0
    unit = length.unit
    decay = fields.count("horizon_steps", Count(f"--lr-decay-{unit}", length.amount))
    warmup = fields.count("warmup_steps", Count(f"--lr-warmup-{unit}", 0, minimum=0))
    fraction = fields.number("", "--lr-warmup-fraction")
    wsd = fields.count("", Count(f"--lr-wsd-decay-{unit}"))
    if decay is None or rate is None or max(lowest, first) > rate:
        return None
    per_step = 1 if unit == "iters" else batch
    if per_step is None or not rate or (style == "WSD" and (wsd is None or wsd > decay)):
        return None
    if fraction is not None:
        if not 0 <= fraction <= 1:
            raise ConfigError(f"--lr-warmup-fraction must be a number from 0 to 1, got {fraction:g}")
        fields.origins["warmup_steps"] = Origin("--lr-warmup-fraction", written=f"{fraction:g}")
    elif unit == "samples":
        _keep_written(fields, "warmup_steps", warmup or 0)
    if unit == "samples":
        _keep_written(fields, "horizon_steps", decay)
    own = fields.has(f"--lr-decay-{unit}")
    return ConfiguredSchedule(
        warmup or 0 if fraction is None else fraction * decay,
        warmup_part=None if own else fraction,
        horizon=decay if own else None,
        lowest=1.0 if style == "constant" else lowest / rate,
        may_be_held=True,
        linear_warmup=not first,
        per_step=per_step,
        growth=tuple(_growing(ramp, per_step).pieces()) if ramp and unit == "samples" and not _too_long(ramp) else (),
    )


def _keep_written(fields: Fields, name: str, amount: int) -> None:
    """Makes messages show a number in samples, as it is written, and not in steps."""
    origin = fields.origins[name]
    fields.origins[name] = Origin(origin.key, given=origin.given, written=f"{amount:,}")


FORMAT = Format(
    "megatron",
    read,
    endings=(),
    fields=(
        *("--micro-batch-size", "--train-iters", "--train-samples", "--tensor-model-parallel-size"),
        *("--pipeline-model-parallel-size", "--lr-decay-style", "--lr-decay-iters", "--lr-decay-samples"),
    ),
    arguments=lambda launch: launch.flags,
)

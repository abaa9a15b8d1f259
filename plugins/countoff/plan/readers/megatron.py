"""Megatron-LM's arguments: the flags of its ``pretrain_*.py``, as a command has them.

The sizes of the model divide the ranks, and what is left over reads different data. A batch is cut into micro-batches
of every data rank. The learning rate counts samples: those of the steps taken, also where its flags count iterations.
Source: Megatron-LM d98e8a64 and core_v0.9.0, ``validate_args`` in ``megatron/training/arguments.py``,
``SchedulerConfig`` in ``megatron/training/config/training_config.py``, ``update_train_iters`` and
``get_optimizer_param_scheduler`` in ``megatron/training/training.py``, and
``megatron/core/num_microbatches_calculator.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, cast

from countoff.core.ranks import ORDERS
from countoff.plan.fields import ConfigError, Fields, misspelt, near_miss
from countoff.plan.formats import Format
from countoff.plan.job import Job, Origin
from countoff.plan.ramp import Ramp
from countoff.plan.schedules import ConfiguredSchedule

__all__ = ["FLAGS", "FORMAT", "read"]

# The flags that are read here.
FLAGS = (
    *("--micro-batch-size", "--global-batch-size", "--rampup-batch-size", "--step-batch-size-schedule"),
    *("--train-iters", "--train-samples", "--lr", "--min-lr", "--lr-decay-style", "--lr-decay-iters"),
    *("--lr-decay-samples", "--lr-warmup-iters", "--lr-warmup-samples", "--lr-warmup-fraction", "--lr-warmup-init"),
    *("--lr-wsd-decay-iters", "--lr-wsd-decay-samples", "--tensor-model-parallel-size"),
    *("--pipeline-model-parallel-size", "--context-parallel-size", "--expert-model-parallel-size"),
    *("--expert-tensor-parallel-size", "--seq-length", "--decrease-batch-size-if-needed"),
)
_DEGREES = {
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
    "tp": "--tensor-model-parallel-size",
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
    fields = Fields(data, reads_exponents=True)
    _note_misspelt(fields, data)
    degrees = {name: fields.parse_count(name, flag, 1) or 1 for name, flag in _DEGREES.items()}
    batch = fields.parse_count("global_batch_size", "--global-batch-size", None)
    stages = _stages(fields)
    ramp = _ramp(fields, batch)
    if stages and batch is None:
        batch = stages[-1][1]
        fields.origins["global_batch_size"] = Origin("--step-batch-size-schedule", written=f"{batch:,} at its end")
    length = _length(fields)
    _check_units(fields, length)
    _check_sequence(fields, degrees["cp"])
    return Job(
        framework="megatron",
        names=ORDERS["megatron"].names,
        sizes=(degrees["pp"], -1, degrees["cp"], degrees["tp"]),
        data_dims=ORDERS["megatron"].data_dims,
        batch_size=fields.parse_count("batch_size", "--micro-batch-size", None),
        sequence_length=fields.parse_count("sequence_length", "--seq-length", None),
        global_batch_size=batch,
        steps=_steps(fields, length, batch, ramp),
        run_samples=length.amount if length.unit == "samples" else None,
        ramp=ramp,
        batch_stages=stages,
        expert_parallel=_experts(fields, degrees["tp"]),
        expert_dims=("dp", "cp"),
        learning_rate=fields.number("learning_rate", "--lr", None),
        schedule=_schedule(fields, length, batch, ramp),
        origins=fields.origins,
        issues=tuple(fields.issues),
    )


def _note_misspelt(fields: Fields, data: Mapping[str, Any]) -> None:
    absent = [flag for flag in FLAGS if flag not in data]
    for name in data:
        meant = misspelt(str(name), FLAGS) or near_miss(str(name), absent)
        if meant is not None and name not in FLAGS:
            fields.note("unknown-field", f"there is no {name}; did you mean {meant}? Megatron-LM stops on it.", "stops")


def _length(fields: Fields) -> _Length:
    iterations = fields.parse_count("steps", "--train-iters", None)
    if iterations is not None or not fields.has("--train-samples"):
        return _Length("iters", iterations)
    return _Length("samples", fields.parse_count("steps", "--train-samples", None))


def _steps(fields: Fields, length: _Length, batch: int | None, ramp: tuple[int, int, int] | None) -> int | None:
    """Returns the iterations of the run; those of a run in samples are of whole batches."""
    if length.unit == "iters" or length.amount is None:
        return length.amount
    fields.origins["steps"] = Origin("--train-samples", written=f"{length.amount:,}")
    if batch is None or (fields.has("--step-batch-size-schedule")):
        return None
    if ramp is None:
        if length.amount < batch:
            text = (
                f"--train-samples {length.amount:,} is less than one global batch of {batch:,}: there is no iteration"
            )
            fields.note("length", text, "stops")
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
    start, increment, samples = (numbers.parse_count("", f"--rampup-batch-size.{name}", None) for name in names)
    if start is None or increment is None or samples is None or batch is None:
        return None
    if batch < start or (batch - start) % increment:
        text = (
            f"--rampup-batch-size goes from {start} in increments of {increment} and does not reach "
            f"--global-batch-size {batch}: Megatron-LM stops on an assertion"
        )
        fields.note("batch", text, "stops")
        return None
    if fields.has("--train-iters"):
        text = (
            "--rampup-batch-size with --train-iters: Megatron-LM before April 2026 stops on an assertion, and later "
            "versions ignore the ramp; give --train-samples"
        )
        fields.note("batch", text, "stops")
    return (start, increment, samples) if batch > start else None


def _stages(fields: Fields) -> tuple[tuple[int, int], ...]:
    """Returns the global batches of ``--step-batch-size-schedule``, each with the samples after which it begins.

    Raises:
        ConfigError: If an entry is not ``THRESHOLD:BATCH``, or they do not begin at 0 and grow.
    """
    flag = "--step-batch-size-schedule"
    value = fields.raw(flag)
    if value is None:
        return ()
    if fields.has("--global-batch-size"):
        text = f"{flag} and --global-batch-size: Megatron-LM refuses both together; leave out --global-batch-size"
        fields.note("batch", text, "stops")
    entries = " ".join(map(str, cast("list[object]", value) if isinstance(value, list) else [value])).replace(",", " ")
    length = fields.parse_count("sequence_length", "--seq-length", None)
    found: list[tuple[int, int]] = []
    for entry in entries.split():
        parts = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)([KMBT]?):(\d{1,9})", entry.upper())
        if parts is None or not int(parts[3]):
            raise ConfigError(f"{flag} must be entries such as 0:16 or 2.4B:320, got {entry[:40]}")
        threshold = int(float(parts[1]) * _SUFFIXES.get(parts[2], 1))
        found.append((threshold // length if length else threshold, int(parts[3])))
    found.sort()
    if not found or found[0][0] or len({samples for samples, _ in found}) < len(found):
        raise ConfigError(f"{flag} must begin with an entry at 0, and no two may begin at the same sample")
    return tuple(found)


def _check_units(fields: Fields, length: _Length) -> None:
    """Adds the issues of flags that count in another unit than the run does, or that exclude each other."""
    other = "samples" if length.unit == "iters" else "iters"
    run = f"--train-{length.unit}"
    if not fields.has(run):
        return
    if fields.has(f"--train-{other}"):
        fields.note("length", f"{run} and --train-{other}: Megatron-LM stops on an assertion; keep one", "stops")
    for name, code in (("decay", "horizon"), ("warmup", "warm-up")):
        flag = f"--lr-{name}-{other}"
        if fields.has(flag) and fields.text(flag) != "0":
            text = f"{flag} with {run}: Megatron-LM stops on an assertion; give --lr-{name}-{length.unit}"
            fields.note(code, text, "stops")
    warmup = f"--lr-warmup-{length.unit}"
    if fields.has("--lr-warmup-fraction") and fields.has(warmup) and fields.text(warmup) != "0":
        text = f"--lr-warmup-fraction and {warmup}: Megatron-LM stops on an assertion; keep one"
        fields.note("warm-up", text, "stops")


def _check_sequence(fields: Fields, context_parallel: int) -> None:
    length = fields.parse_count("sequence_length", "--seq-length", None)
    if length is not None and context_parallel > 1 and length % (2 * context_parallel):
        text = (
            f"--seq-length {length} must divide by 2 × --context-parallel-size {context_parallel} = "
            f"{2 * context_parallel}: Megatron-LM stops on an assertion"
        )
        fields.note("sequence-length", text, "stops")


def _experts(fields: Fields, tensor_parallel: int) -> int:
    """Returns the ranks of dp and cp among which experts are sharded; 1 if they also divide those of tp."""
    experts = fields.parse_count("expert_parallel", "--expert-model-parallel-size", 1) or 1
    width = fields.parse_count("", "--expert-tensor-parallel-size", tensor_parallel)
    return experts if width == tensor_parallel else 1


def _schedule(
    fields: Fields, length: _Length, batch: int | None, ramp: tuple[int, int, int] | None
) -> ConfiguredSchedule | None:
    """Returns the schedule; None if its decay or its warm-up is not known."""
    style = fields.choice("--lr-decay-style", _STYLES, "linear")
    rate = fields.number("learning_rate", "--lr", None)
    lowest = fields.number("", "--min-lr", 0.0) or 0.0
    first = fields.number("", "--lr-warmup-init", 0.0) or 0.0
    for name, value in (("--min-lr", lowest), ("--lr-warmup-init", first)):
        if rate is not None and value > rate:
            fields.note("horizon", f"{name} {value:g} is above --lr {rate:g}: Megatron-LM stops", "stops")
            return None
    unit = length.unit
    decay = fields.parse_count("horizon_steps", f"--lr-decay-{unit}", length.amount)
    warmup = fields.parse_count("warmup_steps", f"--lr-warmup-{unit}", 0, minimum=0)
    fraction = fields.number("", "--lr-warmup-fraction", None)
    wsd = fields.parse_count("", f"--lr-wsd-decay-{unit}", None)
    if style == "WSD" and wsd is None:
        fields.note("horizon", f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}: Megatron-LM stops", "stops")
    if decay is None or rate is None:
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

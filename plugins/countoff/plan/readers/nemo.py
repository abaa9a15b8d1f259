"""NeMo's YAML files, of NeMo 1 and of the later scripts that are configured in the same way.

A model with ``model.global_batch_size`` is Megatron's: its sizes divide the ranks, and a batch is cut into
micro-batches of every data rank. Any other model is Lightning's: every rank is a data rank with batches of its own.
Source: NeMo v1.23.0, ``examples/nlp/language_modeling/conf``, ``MegatronBaseModel._get_max_steps`` and
``MegatronGPTModel._validate_trainer`` in ``nemo/collections/nlp/models/language_modeling``, ``prepare_lr_scheduler`` in
``nemo/core/optim/lr_scheduler.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from countoff.core.ranks import ORDERS
from countoff.plan.fields import ConfigError, Fields, near_miss
from countoff.plan.formats import Format
from countoff.plan.job import Job, Origin
from countoff.plan.references import with_references
from countoff.plan.schedules import NemoCosine, Schedule, WarmupDecay

__all__ = ["FORMAT", "read"]

_DEGREES = {
    "pp": "model.pipeline_model_parallel_size",
    "cp": "model.context_parallel_size",
    "tp": "model.tensor_model_parallel_size",
}
_BATCH = ("model.global_batch_size", "model.data.train_ds.global_batch_size")
_MICRO_BATCH = ("model.micro_batch_size", "model.data.train_ds.micro_batch_size")
_SAMPLE_BATCH = ("model.train_ds.batch_size",)
_LENGTH = ("model.encoder_seq_length", "model.data.seq_length", "model.data.train_ds.max_seq_length")
_UNSET = ("???", -1)
_SCHEDULES = ("CosineAnnealing", "WarmupPolicy")
_SCHED = "model.optim.sched"
# The fields that decide the numbers of a run, and what a misspelt one does.
_COUNTED = {
    "trainer": ("devices", "num_nodes", "max_steps", "max_epochs", "accumulate_grad_batches"),
    "model": (
        *("global_batch_size", "micro_batch_size", "rampup_batch_size", "encoder_seq_length"),
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    ),
    _SCHED: ("warmup_steps", "warmup_ratio", "constant_steps", "constant_ratio", "max_steps", "min_lr"),
}
# One that looks like a counted one, and is read by the models that have a decoder.
_OTHERS = ("decoder_seq_length",)
_ALL = ("auto", "-1", -1)


def read(data: Mapping[str, Any]) -> Job:
    """Returns the run that a YAML of NeMo describes.

    Args:
        data: The parsed file; ``${…}`` is replaced by the field of the file that it names.

    Raises:
        ConfigError: If a field has a wrong type or is outside its domain, or references go round in a circle.
    """
    filled = with_references(data, relative=True)
    fields = Fields(filled, reads_exponents=True)
    _note_misspelt(fields)
    is_megatron = any(fields.has(path) for path in (*_BATCH, *_MICRO_BATCH))
    degrees = {name: fields.parse_count(name, path, 1) or 1 for name, path in _DEGREES.items()} if is_megatron else {}
    batch = fields.parse_count("global_batch_size", _written(fields, _BATCH), None, unset=_UNSET)
    batch_paths = _written(fields, _MICRO_BATCH if is_megatron else _SAMPLE_BATCH)
    steps = fields.parse_count("steps", "trainer.max_steps", None, unset=_UNSET)
    return Job(
        framework="nemo",
        names=ORDERS["megatron"].names,
        sizes=(degrees.get("pp", 1), -1, degrees.get("cp", 1), degrees.get("tp", 1)),
        data_dims=ORDERS["megatron"].data_dims,
        batch_size=fields.parse_count("batch_size", batch_paths, None, unset=_UNSET),
        sequence_length=fields.parse_count("sequence_length", _written(fields, _LENGTH), None, unset=_UNSET),
        global_batch_size=batch,
        gradient_accumulation_steps=_accumulation(fields, is_megatron),
        steps=steps,
        # Steps overrule epochs in the schedule, and are reached first in every file of NeMo that has both.
        epochs=fields.parse_count("epochs", "trainer.max_epochs", None, unset=_UNSET) if steps is None else None,
        ramp=_ramp(fields, batch),
        world_size=_world_size(fields),
        learning_rate=fields.number("learning_rate", "model.optim.lr", None),
        schedule=_schedule(fields, steps, is_megatron),
        unknown=fields.unknown_numbers,
        origins=fields.origins,
        issues=tuple(fields.issues),
    )


def _note_misspelt(fields: Fields) -> None:
    """Adds an issue for each field whose name is nearly that of one that counts and is not written.

    The trainer and the schedulers take the fields of their sections as arguments. A model looks up those it needs.
    """
    for section, known in _COUNTED.items():
        if section == _SCHED and fields.text(f"{section}.name") not in _SCHEDULES:
            continue
        if not isinstance(fields.raw(section), Mapping):
            continue
        absent = [name for name in known if not fields.has(f"{section}.{name}")]
        for name in fields.section(section):
            meant = None if name in (*known, *_OTHERS) else near_miss(str(name), absent)
            if meant is None:
                continue
            text = f"there is no {section}.{name}; did you mean {meant}?"
            if section == "model":
                text = f"{text} In a file NeMo ignores it; as an override without + Hydra stops on it."
                fields.note("unknown-field", text, "silent")
            else:
                fields.note("unknown-field", f"{text} NeMo stops on it.", "stops")


def _written(fields: Fields, paths: tuple[str, ...]) -> str:
    """Returns the first of several places in which a number is written; the first of all if it is in none."""
    return next((path for path in paths if fields.has(path)), paths[0])


def _world_size(fields: Fields) -> int | None:
    devices = fields.raw("trainer.devices")
    if isinstance(devices, list):
        per_node: int | None = len(cast("list[object]", devices)) or None
    elif isinstance(devices, str) and devices.isdecimal() and len(devices) < 10:
        per_node = int(devices) or None
    else:
        per_node = fields.parse_count("", "trainer.devices", None, unset=_ALL)
    nodes = fields.parse_count("", "trainer.num_nodes", 1) or 1
    if per_node is None or "trainer.num_nodes" in fields.unknown:
        return None
    fields.origins["world_size"] = Origin("trainer.devices × trainer.num_nodes")
    return per_node * nodes


def _accumulation(fields: Fields, is_megatron: bool) -> int | None:
    """Returns the batches per step of a Lightning model; None for one of Megatron's, in which they follow."""
    batches = fields.parse_count("gradient_accumulation_steps", "trainer.accumulate_grad_batches", 1) or 1
    if not is_megatron:
        return batches
    if batches > 1:
        text = (
            f"trainer.accumulate_grad_batches is {batches}, and must be 1 for a Megatron model, which accumulates up "
            f"to {_written(fields, _BATCH)} by itself: NeMo stops"
        )
        fields.note("batch", text, "stops")
    del fields.origins["gradient_accumulation_steps"]
    return None


def _ramp(fields: Fields, batch: int | None) -> tuple[int, int, int] | None:
    path = "model.rampup_batch_size"
    value = fields.raw(path)
    if value is None:
        return None
    if not isinstance(value, list) or len(cast("list[object]", value)) != 3:
        raise ConfigError(f"{path} must be three numbers: the first batch, the increment, the samples")
    names = ("start", "increment", "samples")
    numbers = Fields({"model": {"rampup_batch_size": dict(zip(names, cast("list[object]", value), strict=True))}})
    start, increment, samples = (numbers.parse_count("", f"{path}.{name}", None) for name in names)
    if start is None or increment is None or samples is None or batch is None:
        return None
    if batch < start or (batch - start) % increment:
        key = _written(fields, _BATCH)
        text = f"{path} goes from {start} in increments of {increment} and does not reach {key} {batch}: NeMo stops"
        fields.note("batch", text, "stops")
        return None
    return (start, increment, samples) if batch > start else None


def _schedule(fields: Fields, steps: int | None, is_megatron: bool) -> Schedule | None:
    """Returns the schedule of the names whose curve is known here, if it has an end or a warm-up.

    Only a Megatron model keeps a ``max_steps`` of its own where the trainer has one (``ModelPT.setup_optimization``).
    """
    section = _SCHED
    name = fields.text(f"{section}.name")
    if name not in _SCHEDULES:
        return None
    is_own = is_megatron or steps is None
    own = fields.raw(f"{section}.max_steps") if is_own else None
    if type(own) is int and own == -1:
        text = f"{section}.max_steps is -1: NeMo makes no schedule, and the learning rate stays as it is; leave it out"
        fields.note("horizon", text, "silent")
        return None
    horizon = steps
    if is_own and fields.has(f"{section}.max_steps"):
        horizon = fields.parse_count("horizon_steps", f"{section}.max_steps", steps, unset=("???",))
    warmup, part = _part(fields, "warmup_steps", f"{section}.warmup", horizon)
    constant, _ = _part(fields, "constant_steps", f"{section}.constant", horizon)
    rate = fields.number("learning_rate", "model.optim.lr", None)
    lowest = fields.number("", f"{section}.min_lr", 0.0) or 0.0
    if constant is None or (warmup is None and part is None) or f"{section}.max_steps" in fields.unknown:
        return None
    # Without a horizon in the file the schedule is as long as the run.
    horizon, warmup = horizon or 0, warmup or 0
    if not horizon:
        fields.origins["horizon_steps"] = fields.origins["epochs"]
    if name == "WarmupPolicy":
        return WarmupDecay("constant", warmup, horizon, 0.0, part, 1.0)
    if not rate or rate < 0:
        return None
    if lowest > rate:
        text = f"{section}.min_lr {lowest:g} is above model.optim.lr {rate:g}: NeMo stops"
        fields.note("horizon", text, "stops")
        return None
    return NemoCosine(warmup, horizon, constant, lowest / rate, own is not None and own != "???", part)


def _part(fields: Fields, name: str, stem: str, horizon: int | None) -> tuple[int | None, float | None]:
    """Returns steps that are written as a number or as a fraction of the schedule, and that fraction.

    Raises:
        ConfigError: If the fraction is not from 0 to 1.
    """
    if not fields.has(f"{stem}_ratio"):
        return fields.parse_count(name, f"{stem}_steps", 0, minimum=0), None
    if fields.has(f"{stem}_steps"):
        fields.note("warm-up", f"{stem}_steps and {stem}_ratio: NeMo stops on an assertion; keep one", "stops")
    part = fields.number("", f"{stem}_ratio", 0.0) or 0.0
    if not 0 <= part <= 1:
        raise ConfigError(f"{stem}_ratio must be a number from 0 to 1, got {part:g}")
    if name:
        fields.origins[name] = Origin(f"{stem}_ratio", written=f"{part:g}")
    return None if horizon is None else int(part * horizon), part


FORMAT = Format(
    "nemo",
    read,
    endings=(".yaml", ".yml"),
    fields=(
        *("exp_manager", "model.optim.sched", "model.micro_batch_size", "model.global_batch_size"),
        *("model.tensor_model_parallel_size", "model.train_ds"),
    ),
    arguments=lambda launch: launch.fields,
)

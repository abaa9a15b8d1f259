"""Composer's YAML files, as llm-foundry reads them: they hold the global batch, from which each rank's batch follows.

Every batch is an optimizer step; micro-batches are cut out of it. Durations have a unit: ``4800ba``, ``1ep``,
``5000000tok``. Composer trains until the duration is reached, so the last step may go beyond it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from countoff.core.ranks import ORDERS
from countoff.plan.fields import ConfigError, Fields, note_unknown_fields
from countoff.plan.formats import Format
from countoff.plan.job import Job, Origin
from countoff.plan.schedules import ConfiguredSchedule

__all__ = ["FORMAT", "read"]

_DURATION = re.compile(r"(\d[\d_]*(?:\.\d+)?(?:[eE]\d+)?)\s*(ba|ep|sp|tok|dur|iter|sec)")
_SCHEDULERS = ("cosine_with_warmup", "linear_decay_with_warmup", "constant_with_warmup")
_FIELDS = (
    *("max_seq_len", "global_seed", "run_name", "model", "tokenizer", "train_loader", "eval_loader", "eval_loaders"),
    *("scheduler", "schedulers", "optimizer", "algorithms", "max_duration", "eval_interval", "eval_first"),
    *("eval_subset_num_batches", "global_train_batch_size", "device_train_batch_size", "device_train_microbatch_size"),
    *("device_train_grad_accum", "device_eval_batch_size", "device_eval_microbatch_size", "precision", "seed"),
    *("fsdp_config", "tp_config", "parallelism_config", "deepspeed_config", "progress_bar", "log_to_console"),
    *("console_log_interval", "callbacks", "loggers", "variables", "data_local", "data_remote", "save_interval"),
    *("save_num_checkpoints_to_keep", "save_folder", "save_filename", "save_overwrite", "save_latest_filename"),
    *("save_ignore_keys", "save_weights_only", "load_path", "load_weights_only", "load_ignore_keys", "icl_tasks"),
    *("load_strict_model_weights", "autoresume", "max_split_size_mb", "python_log_level", "dist_timeout", "code_paths"),
    *("metadata", "profiler", "compile_config", "expandable_segments", "icl_seq_len", "eval_gauntlet", "log_config"),
    *("icl_subset_num_batches", "only_hf_checkpoint", "only_composer_checkpoint", "accumulate_train_batch_on_tokens"),
    *("flatten_imports", "spin_dataloaders", "load_exclude_algorithms", "fp8_config", "train_dataset", "name"),
)


def read(data: Mapping[str, Any]) -> Job:
    """Returns the run that an llm-foundry YAML describes.

    Args:
        data: The parsed file; a ``${…}`` is replaced by the field of the file that it names.

    Raises:
        ConfigError: If a field has a wrong type or is outside its domain, or refers to a field that is not in the file.
    """
    fields = Fields(data, references=True)
    note_unknown_fields(fields, {}, sections=_FIELDS, data=data, consequence="llm-foundry stops on it.", level="stops")
    sizes = (
        fields.parse_count("data_parallel_replicate", "fsdp_config.data_parallel_replicate_degree", 1) or 1,
        fields.parse_count("data_parallel_shard", "fsdp_config.data_parallel_shard_degree", -1, unset=(-1,)) or 1,
        fields.parse_count("tensor_parallel", "tp_config.tensor_parallel_degree", 1) or 1,
    )
    batch = fields.parse_count("global_batch_size", "global_train_batch_size", None)
    length = fields.parse_count("sequence_length", ("max_seq_len", "variables.max_seq_len"), None)
    steps, epochs = _run_length(fields, batch, length)
    if epochs is not None:
        _compare_epochs(fields, epochs)
    return Job(
        framework="composer",
        names=ORDERS["composer"].names,
        sizes=sizes,
        data_dims=ORDERS["composer"].data_dims,
        batch_size=None if batch else fields.parse_count("batch_size", "device_train_batch_size", None),
        sequence_length=length,
        gradient_accumulation_steps=1,
        global_batch_size=batch,
        micro_batch_size=fields.parse_count("micro_batch_size", "device_train_microbatch_size", None, unset=("auto",)),
        steps=steps,
        epochs=epochs,
        drop_last=fields.flag("train_loader.drop_last", False),
        learning_rate=fields.number("learning_rate", "optimizer.lr", None),
        schedule=_schedule(fields, steps, batch, length),
        origins=fields.origins,
        issues=tuple(fields.issues),
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
        fields.note("warm-up", f"{text}; make the warm-up a fraction of the run, such as 0.05dur", "silent")
    if horizon is not None and horizon[1] == "ep" and horizon[0] < epochs:
        text = f"scheduler.t_max is {horizon[0]:g}ep and max_duration is {epochs}ep: later epochs have the lowest rate"
        fields.note("horizon", f"{text}; make it 1dur", "silent")


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

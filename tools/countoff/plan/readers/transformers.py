"""transformers' ``TrainingArguments`` in YAML or JSON, also with the fields of a script or of TRL beside them.

The Trainer has ``per_device_train_batch_size`` samples per process and batch, and Accelerate deals out whole batches.
``max_steps`` overrules ``num_train_epochs``, and the learning-rate schedule is planned for the steps that follow.
Sources: transformers 4.57.6 and 5.23.0, ``training_args.py`` (``get_warmup_steps``), ``trainer.py``
(``set_initial_training_values``, ``create_scheduler``). The comments name the lines of ``training_args.py`` 4.57.6.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from countoff.plan.fields import ConfigError, Count, Fields
from countoff.plan.formats import Format
from countoff.plan.job import Job, Origin
from countoff.plan.schedules import ConfiguredSchedule

__all__ = ["FORMAT", "read", "read_deepspeed", "read_run", "read_schedule"]

_BATCH = Count("per_device_train_batch_size", 8)  # :861
_ACCUMULATION = Count("gradient_accumulation_steps", 1)  # :887
_STEPS = Count("max_steps", unset=(-1,))  # :923
_SCHEDULERS = (
    *("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"),
    *("reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay", "greedy"),
)
# DeepSpeed's own schedulers (VALID_LR_SCHEDULES in lr_schedules.py), each with the Trainer's of the same curve.
_DEEPSPEED_SCHEDULERS = {
    "WarmupLR": ("constant", "constant_with_warmup"),
    "WarmupDecayLR": ("linear",),
    "WarmupCosineLR": ("cosine", "cosine_with_min_lr", "cosine_warmup_with_min_lr"),
    "OneCycle": (),
    "LRRangeTest": (),
}


def read(data: Mapping[str, Any]) -> Job:
    """Returns the run that the arguments of a Trainer describe.

    Args:
        data: The arguments by name, with underscores. Names that TrainingArguments does not have are left alone.

    Raises:
        ConfigError: If a field has a wrong type or is outside its domain.
    """
    fields = Fields(_with_parsed_json(data))
    run = read_run(fields)
    packed = fields.flag("packing", False)
    length = next((name for name in ("max_length", "max_seq_length") if packed and fields.has(name)), None)
    # A sample that is not packed has at most this many tokens.
    tokens = None if length is None else fields.count("sequence_length", Count(length))
    theirs = read_deepspeed(fields)
    tensor_parallel = theirs.count("tp", Count("tensor_parallel.autotp_size", 1, unset=(0, "auto")))
    fields.origins.update(theirs.origins)
    return fields.job(
        "transformers",
        "accelerate",
        {"dp_shard": -1, "tp": tensor_parallel},
        sequence_length=tokens,
        schedule=read_schedule(fields, theirs),
        **run,
    )


def read_run(fields: Fields) -> dict[str, Any]:
    """Returns the batches and the length of a Trainer's run, by their names in ``Job``.

    Args:
        fields: The arguments.

    Raises:
        ConfigError: If a field has a wrong type or is outside its domain.
    """
    in_pieces = fields.flag("accelerator_config.split_batches", False)
    batch_size = fields.count("global_batch_size" if in_pieces else "batch_size", _BATCH)
    accumulation = fields.count("gradient_accumulation_steps", _ACCUMULATION) or 1
    steps = fields.count("steps", _STEPS)
    epochs = _epochs(fields) if steps is None else None
    fields.origins["drop_last"] = Origin("dataloader_drop_last", given=fields.has("dataloader_drop_last"))
    return {
        "batch_size": None if in_pieces else batch_size,
        "global_batch_size": (batch_size or 1) * accumulation if in_pieces else None,
        "gradient_accumulation_steps": accumulation,
        "accelerate_shards": "pieces" if in_pieces else "batches",
        "steps": steps,
        "epochs": epochs,
        "drop_last": fields.flag("dataloader_drop_last", False),  # :1149
    }


def read_schedule(fields: Fields, theirs: Fields, *, thirds: bool = False) -> ConfiguredSchedule | None:
    """Returns the learning-rate schedule of a Trainer.

    None if it depends on the loss, the Trainer refuses it, or a scheduler of DeepSpeed's takes its place
    (``deepspeed_optim_sched`` in ``integrations/deepspeed.py``).

    Args:
        fields: The arguments.
        theirs: What ``read_deepspeed`` returned for them.
        thirds: Whether ``warmup_stable_decay`` has LLaMA-Factory's defaults.

    Raises:
        ConfigError: If a field has a wrong type or is outside its domain.
    """
    curve = fields.choice("lr_scheduler_type", _SCHEDULERS, "linear")
    if theirs.has("scheduler"):
        _note_replaced(fields, curve, theirs.text("scheduler.type"))
        return None
    warmup_steps, warmup_part = _warmup(fields)
    options = fields.section("lr_scheduler_kwargs")
    if curve == "constant":
        if warmup_steps or warmup_part:
            _note_no_warmup(fields)
        warmup_steps, warmup_part = 0, None
    refused = curve == "warmup_stable_decay" and "num_decay_steps" not in options and not thirds
    if curve in ("reduce_lr_on_plateau", "greedy") or refused:
        return None
    if curve == "warmup_stable_decay":
        fields.origins["horizon_steps"] = Origin("warm-up + num_stable_steps + num_decay_steps")
    stable = curve == "warmup_stable_decay"
    return ConfiguredSchedule(
        warmup_steps,
        warmup_part,
        rounds_up=True,
        lowest=fields.number("", "lr_scheduler_kwargs.min_lr_ratio", 0.0) or 0.0 if stable else 0.0,
        linear_warmup=curve != "cosine_warmup_with_min_lr" and not stable,
        stable=fields.count("", Count("lr_scheduler_kwargs.num_stable_steps", minimum=0)),
        falling=fields.count("", Count("lr_scheduler_kwargs.num_decay_steps", minimum=0)),
        phases=None if not stable else "thirds" if thirds else "rest",
    )


def _with_parsed_json(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments with those parsed that transformers takes as JSON text as well."""
    found = dict(data)
    for name in ("lr_scheduler_kwargs", "accelerator_config"):
        value = found.get(name)
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                found[name] = json.loads(value)
            except (ValueError, RecursionError):
                raise ConfigError(f"{name} must be JSON, got {value[:60]!r}") from None
    if isinstance(found.get("accelerator_config"), str):
        found["accelerator_config"] = _json_file(found["accelerator_config"])
    return found


def _json_file(name: object) -> dict[str, Any]:
    """Returns the fields of a JSON file, which is looked for as the framework does; none if it cannot be read."""
    try:
        found: object = json.loads(Path(str(name)).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _epochs(fields: Fields) -> int | float | None:
    epochs = fields.number("epochs", "num_train_epochs", 3.0)
    if epochs is not None and epochs <= 0:
        raise ConfigError(f"num_train_epochs must be a number above 0, got {epochs:g}")
    return int(epochs) if epochs is not None and epochs == int(epochs) else epochs


def _warmup(fields: Fields) -> tuple[int, float | None]:
    """Returns the warm-up in steps, and as a fraction of the run where it is written as one."""
    ratio = fields.number("", "warmup_ratio", None)
    steps = fields.number("", "warmup_steps", None)
    for name, value in (("warmup_ratio", ratio), ("warmup_steps", steps)):
        if value is not None and value < 0:
            raise ConfigError(f"{name} must be at least 0, got {value:g}")
    if ratio is not None and ratio > 1:
        raise ConfigError(f"warmup_ratio must be at most 1, got {ratio:g}")
    written = "warmup_ratio" if ratio and not steps else "warmup_steps"
    fields.origins["warmup_steps"] = Origin(written, given=bool(ratio or steps))
    if steps:
        # Since transformers 5, a number below 1 is a fraction of the run.
        return (0, steps) if steps < 1 else (int(steps), None)
    return (0, ratio) if ratio else (0, None)


def _note_no_warmup(fields: Fields) -> None:
    key = fields.origins["warmup_steps"].key
    text = f"{key} is {fields.text(key)}, and lr_scheduler_type constant has no warm-up: the first step has the full"
    fields.note("warm-up", f"{text} learning rate", "silent", "use constant_with_warmup")


def _note_replaced(fields: Fields, curve: str, scheduler: str | None) -> None:
    """Adds an issue if DeepSpeed's scheduler has another curve than the one that is written: the Trainer says nothing.

    A curve that is not written is the Trainer's default, and nobody's intention.
    """
    same = _DEEPSPEED_SCHEDULERS.get(scheduler or "")
    if same is None or curve in same or not fields.has("lr_scheduler_type"):
        return
    never_decays = scheduler == "WarmupLR"
    named = fields.raw("deepspeed")
    where = named if isinstance(named, str) else "deepspeed"
    text = (
        f"lr_scheduler_type is {curve}, and the scheduler in {where}, {scheduler}, takes its place"
        f"{': the learning rate never decays' if never_decays else ''}"
    )
    remedy = f"leave scheduler out of {where}, or lr_scheduler_type out of the arguments"
    fields.note("override", text, "silent" if never_decays else "note", remedy)


def read_deepspeed(fields: Fields) -> Fields:
    """Returns DeepSpeed's fields: those written here, or those of the file that is named; none if it is not here.

    Args:
        fields: The arguments of the Trainer.
    """
    found = fields.raw("deepspeed")
    if isinstance(found, Mapping):
        return Fields(cast("Mapping[str, Any]", found))
    return Fields(_json_file(found) if isinstance(found, str) and found.endswith(".json") else {})


FORMAT = Format(
    "transformers",
    read,
    endings=(".yaml", ".yml", ".json"),
    fields=("per_device_train_batch_size", "per_device_eval_batch_size", "num_train_epochs", "load_best_model_at_end"),
    arguments=lambda launch: launch.named_flags,
)

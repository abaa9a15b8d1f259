"""transformers' ``TrainingArguments`` in YAML or JSON, also with the fields of a script or of TRL beside them.

The Trainer has ``per_device_train_batch_size`` samples per process and batch, and Accelerate deals out whole batches.
``max_steps`` overrules ``num_train_epochs``, and the learning-rate schedule is planned for the steps that follow.
Sources: transformers 4.57.6 and 5.23.0, ``training_args.py`` (``TrainingArguments``: ``__post_init__``,
``_validate_args``, ``get_warmup_steps``), ``trainer.py`` (``set_initial_training_values``, ``create_scheduler``) and
``integrations/deepspeed.py`` (``HfTrainerDeepSpeedConfig.trainer_config_process``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

from countoff.core.ranks import ORDERS
from countoff.plan.fields import ConfigError, Fields, JsonObject, near_miss
from countoff.plan.formats import Format
from countoff.plan.job import Job, Origin
from countoff.plan.schedules import ConfiguredSchedule

__all__ = ["FORMAT", "TRAINING_ARGUMENTS", "note_checkpoints", "note_misspelt", "read", "read_run", "read_schedule"]

_NAMES = """
output_dir overwrite_output_dir do_train do_eval do_predict eval_strategy prediction_loss_only
per_device_train_batch_size per_device_eval_batch_size per_gpu_train_batch_size per_gpu_eval_batch_size
gradient_accumulation_steps eval_accumulation_steps eval_delay torch_empty_cache_steps learning_rate weight_decay
adam_beta1 adam_beta2 adam_epsilon max_grad_norm num_train_epochs max_steps lr_scheduler_type lr_scheduler_kwargs
warmup_ratio warmup_steps log_level log_level_replica log_on_each_node logging_dir logging_strategy
logging_first_step logging_steps logging_nan_inf_filter save_strategy save_steps save_total_limit save_safetensors
save_on_each_node save_only_model restore_callback_states_from_checkpoint no_cuda use_cpu use_mps_device seed
data_seed jit_mode_eval bf16 fp16 fp16_opt_level half_precision_backend bf16_full_eval fp16_full_eval tf32
local_rank ddp_backend tpu_num_cores tpu_metrics_debug debug dataloader_drop_last eval_steps dataloader_num_workers
dataloader_prefetch_factor past_index run_name disable_tqdm remove_unused_columns label_names load_best_model_at_end
metric_for_best_model greater_is_better ignore_data_skip fsdp fsdp_min_num_params fsdp_config
fsdp_transformer_layer_cls_to_wrap accelerator_config parallelism_config deepspeed label_smoothing_factor optim
optim_args adafactor group_by_length length_column_name report_to project trackio_space_id
ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers dataloader_pin_memory
dataloader_persistent_workers skip_memory_metrics use_legacy_prediction_loop push_to_hub resume_from_checkpoint
hub_model_id hub_strategy hub_token hub_private_repo hub_always_push hub_revision gradient_checkpointing
gradient_checkpointing_kwargs include_inputs_for_metrics include_for_metrics eval_do_concat_batches fp16_backend
push_to_hub_model_id push_to_hub_organization push_to_hub_token _n_gpu mp_parameters auto_find_batch_size
full_determinism torchdynamo ray_scope ddp_timeout torch_compile torch_compile_backend torch_compile_mode
include_tokens_per_second include_num_input_tokens_seen neftune_noise_alpha optim_target_modules batch_eval_metrics
eval_on_start use_liger_kernel liger_kernel_config eval_use_gather_object average_tokens_across_devices
activation_checkpointing activation_checkpointing_kwargs use_cache trackio_bucket_id trackio_static_space_id
enable_jit_checkpoint dataloader_multiprocessing_context dataloader_in_order train_sampling_strategy
ddp_static_graph generation_max_length predict_with_generate generation_config generation_num_beams sortish_sampler
evaluation_strategy
"""
TRAINING_ARGUMENTS = frozenset(_NAMES.split())
"""The names of the fields of ``TrainingArguments`` and ``Seq2SeqTrainingArguments``, in transformers 4.57.6 and 5.23.0,
and ``evaluation_strategy``, an older one."""
# Those that decide the numbers of a run: for these, a misspelling is worth a word.
_COUNTED = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps", "warmup_ratio"),
    *("warmup_steps", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "dataloader_drop_last"),
)
_SCHEDULERS = (
    *("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"),
    *("reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay", "greedy"),
)
_KWARGS = {
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate", "warmup_lr_rate"),
    "warmup_stable_decay": (
        *("num_stable_steps", "num_decay_steps", "warmup_type", "decay_type", "min_lr_ratio", "num_cycles"),
    ),
}
_OPTIONS = ("num_cycles", "power", "min_lr", "min_lr_rate", "min_lr_ratio", "warmup_lr_rate")
# Names of other programs, and those that TrainingArguments has instead.
_ELSEWHERE = {
    "num_epochs": "num_train_epochs",
    "warmup_rate": "warmup_ratio",
    "train_batch_size": "per_device_train_batch_size",
}
# ``HfArgumentParser.parse_dict`` checks no types, so that AdamW compares the text with a number. TRL's parser makes
# numbers of such texts, except inside of another field.
_TEXT_NUMBERS = "after HfArgumentParser.{} the Trainer stops with a TypeError"
# Those that are written with an exponent, besides those that are read.
_SMALL_NUMBERS = ("weight_decay", "adam_epsilon")


def read(data: Mapping[str, Any]) -> Job:
    """Returns the run that the arguments of a Trainer describe.

    Args:
        data: The arguments by name, with underscores. Names that TrainingArguments does not have are left alone.

    Raises:
        ConfigError: If a field has a wrong type or is outside its domain.
    """
    parser = "parse_json_file" if isinstance(data, JsonObject) else "parse_yaml_file"
    fields = Fields(_with_parsed_json(data), text_numbers=_TEXT_NUMBERS.format(parser))
    for name in _SMALL_NUMBERS:
        fields.number("", name, None)
    note_misspelt(fields, data, TRAINING_ARGUMENTS, _COUNTED)
    run = read_run(fields)
    note_checkpoints(fields)
    packed = fields.flag("packing", False)
    length = next((name for name in ("max_length", "max_seq_length") if packed and fields.has(name)), None)
    return Job(
        framework="transformers",
        names=ORDERS["accelerate"].names,
        sizes=(1, -1, 1, 1, _tensor_parallel(fields)),
        data_dims=ORDERS["accelerate"].data_dims,
        # A sample that is not packed has at most this many tokens.
        sequence_length=None if length is None else fields.parse_count("sequence_length", length, None),
        schedule=read_schedule(fields, run),
        origins=fields.origins,
        issues=tuple(fields.issues),
        **run,
    )


def read_run(fields: Fields) -> dict[str, Any]:
    """Returns the batches and the length of a Trainer's run, by their names in ``Job``.

    Args:
        fields: The arguments.

    Raises:
        ConfigError: If a field has a wrong type or is outside its domain.
    """
    batch_size = fields.parse_count("batch_size", "per_device_train_batch_size", 8)
    accumulation = fields.parse_count("gradient_accumulation_steps", "gradient_accumulation_steps", 1) or 1
    in_pieces = fields.flag("accelerator_config.split_batches", False)
    global_batch_size = (batch_size or 1) * accumulation if in_pieces else _deepspeed_batch(fields)
    if in_pieces:
        fields.origins["global_batch_size"] = fields.origins.pop("batch_size")
    steps = fields.parse_count("steps", "max_steps", None, unset=(-1,))
    epochs = _epochs(fields)
    if steps is not None:
        _note_overruled_epochs(fields, steps)
    drop_last = fields.flag("dataloader_drop_last", False)
    fields.origins["drop_last"] = Origin("dataloader_drop_last", given=fields.has("dataloader_drop_last"))
    if fields.flag("auto_find_batch_size", False):
        text = "auto_find_batch_size is true: if memory runs out, the batch becomes smaller, and every number changes"
        fields.note("batch", text)
    _note_deepspeed(fields, steps)
    return {
        "batch_size": None if in_pieces else batch_size,
        "global_batch_size": global_batch_size,
        "gradient_accumulation_steps": accumulation,
        "accelerate_shards": "pieces" if in_pieces else "batches",
        "steps": steps,
        "epochs": epochs if steps is None else None,
        "drop_last": drop_last,
        "learning_rate": fields.number("learning_rate", "learning_rate", 5e-5),
    }


def read_schedule(fields: Fields, run: Mapping[str, Any], *, thirds: bool = False) -> ConfiguredSchedule | None:
    """Returns the learning-rate schedule of a Trainer; None if it depends on the loss, or is DeepSpeed's.

    Args:
        fields: The arguments.
        run: What ``read_run`` returned for them.
        thirds: Whether ``warmup_stable_decay`` has LLaMA-Factory's defaults.

    Raises:
        ConfigError: If a field has a wrong type or is outside its domain.
    """
    curve = fields.choice("lr_scheduler_type", _SCHEDULERS, "linear")
    warmup_steps, warmup_part = _warmup(fields)
    options = fields.section("lr_scheduler_kwargs")
    _note_options(fields, curve, options, run["learning_rate"], thirds)
    if curve == "constant":
        if warmup_steps or warmup_part:
            _note_no_warmup(fields)
        warmup_steps, warmup_part = 0, None
    if curve in ("reduce_lr_on_plateau", "greedy") or _deepspeed_data(fields).get("scheduler"):
        return None
    if curve == "warmup_stable_decay":
        fields.origins["horizon_steps"] = Origin("warm-up + num_stable_steps + num_decay_steps")
    numbers = {name: fields.number("", f"lr_scheduler_kwargs.{name}", None) for name in _OPTIONS}
    stable = curve == "warmup_stable_decay"
    return ConfiguredSchedule(
        warmup_steps,
        warmup_part,
        rounds_up=True,
        lowest=numbers["min_lr_ratio"] or 0.0 if stable else 0.0,
        linear_warmup=curve != "cosine_warmup_with_min_lr" and not stable,
        stable=fields.parse_count("", "lr_scheduler_kwargs.num_stable_steps", None, minimum=0),
        falling=fields.parse_count("", "lr_scheduler_kwargs.num_decay_steps", None, minimum=0),
        phases=None if not stable else "thirds" if thirds else "rest",
    )


def note_checkpoints(fields: Fields) -> None:
    """Adds the issue of a best model that the Trainer refuses to load, because it is not saved where it is evaluated.

    Source: transformers, ``training_args.py``, ``TrainingArguments._validate_args``.

    Args:
        fields: The arguments.

    Raises:
        ConfigError: If a field has a wrong type.
    """
    evaluation = "evaluation_strategy" if fields.has("evaluation_strategy") else "eval_strategy"
    save, evaluate = _strategy(fields, "save_strategy", "steps"), _strategy(fields, evaluation, "no")
    if not fields.flag("load_best_model_at_end", False) or save == "best":
        return
    if evaluate != save:
        both = (("save_strategy", save), (evaluation, evaluate))
        shown = " and ".join(f"{name} is {value}{'' if fields.has(name) else ' by default'}" for name, value in both)
        text = f"load_best_model_at_end needs the same save and eval strategy: {shown}"
        fields.note("checkpoints", f"{text}; the Trainer stops before the first step", "stops")
        return
    save_every = fields.number("", "save_steps", 500.0) or 0.0
    logging = fields.number("", "logging_steps", 500.0) or 0.0
    evaluate_every = fields.number("", "eval_steps", None) or logging
    in_steps = save == "steps" and save_every >= 1 and evaluate_every >= 1
    if in_steps and save_every % evaluate_every:
        saves = f"save_steps {save_every:g}{'' if fields.has('save_steps') else ' (by default)'}"
        evaluates = f"eval_steps {evaluate_every:g}{'' if fields.has('eval_steps') else ' (those of logging_steps)'}"
        text = f"load_best_model_at_end needs {saves} to be a multiple of {evaluates}"
        fields.note("checkpoints", f"{text}; the Trainer stops before the first step", "stops")


def note_misspelt(
    fields: Fields, data: Mapping[str, Any], known: Iterable[str], counted: Iterable[str], *, ignored_by: str = ""
) -> None:
    """Adds an issue for each field whose name is nearly that of one that counts and is not in the file.

    Such files may also hold the fields of the user's own script, so other unknown names are left alone, and one that
    another program has in the place of a field that counts gives a note.

    Args:
        fields: The fields to which the issues are added.
        data: The configuration.
        known: All names of the format that are known.
        counted: Those that decide the numbers of a run.
        ignored_by: The framework that ignores such a field; if empty, the arguments are those of transformers'
            ``HfArgumentParser``, which stops on an unknown one (``parse_dict``).
    """
    for name in data:
        if name in known:
            continue
        absent = [field for field in counted if not fields.has(field)]
        meant = near_miss(str(name), absent)
        if meant is not None and ignored_by:
            text = f"there is no {name}; did you mean {meant}? {ignored_by} ignores it."
            fields.note("unknown-field", text, "silent")
        elif meant is not None:
            text = f"there is no {name}; did you mean {meant}? HfArgumentParser stops on it with a ValueError."
            fields.note("unknown-field", text, "stops")
        elif not ignored_by and _ELSEWHERE.get(str(name)) in absent:
            meant = _ELSEWHERE[str(name)]
            text = f"TrainingArguments has no {name}; did you mean {meant}? The default of {meant} is used."
            fields.note("unknown-field", text)


def _with_parsed_json(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments with those parsed that transformers takes as JSON text as well."""
    found = JsonObject(data) if isinstance(data, JsonObject) else dict(data)
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


def _note_overruled_epochs(fields: Fields, steps: int) -> None:
    epochs = fields.origins.pop("epochs")
    if epochs.given:
        text = f"max_steps is {steps:,} and num_train_epochs is {fields.text('num_train_epochs')}"
        fields.note("length", f"{text}: max_steps ends the run, and num_train_epochs has no effect")


def _warmup(fields: Fields) -> tuple[int, float | None]:
    """Returns the warm-up in steps, and as a fraction of the run where it is written as one."""
    ratio = fields.number("", "warmup_ratio", None)
    steps = fields.number("", "warmup_steps", None)
    for name, value in (("warmup_ratio", ratio), ("warmup_steps", steps)):
        if value is not None and value < 0:
            raise ConfigError(f"{name} must be at least 0, got {value:g}")
    if ratio is not None and ratio > 1:
        raise ConfigError(f"warmup_ratio must be at most 1, got {ratio:g}")
    if steps and ratio:
        text = f"warmup_steps is {steps:g} and warmup_ratio is {ratio:g}: warmup_steps decides, and warmup_ratio"
        fields.note("warm-up", f"{text} has no effect")
    written = "warmup_ratio" if ratio and not steps else "warmup_steps"
    fields.origins["warmup_steps"] = Origin(written, given=bool(ratio or steps))
    if steps:
        # Since transformers 5, a number below 1 is a fraction of the run.
        return (0, steps) if steps < 1 else (int(steps), None)
    return (0, ratio) if ratio else (0, None)


def _note_no_warmup(fields: Fields) -> None:
    key = fields.origins["warmup_steps"].key
    text = f"{key} is {fields.text(key)}, and lr_scheduler_type constant has no warm-up: the first step has the full"
    fields.note("warm-up", f"{text} learning rate; use constant_with_warmup", "silent")


def _note_options(fields: Fields, curve: str, options: Mapping[str, Any], rate: float | None, thirds: bool) -> None:
    """Adds the issues of ``lr_scheduler_kwargs`` with which the scheduler's function fails."""
    known = _KWARGS.get(curve, ())
    strays = [name for name in options if name not in known]
    if strays and curve not in ("constant", "constant_with_warmup", "reduce_lr_on_plateau", "greedy"):
        text = f"lr_scheduler_kwargs has {strays[0]}, which {curve} does not take: the Trainer stops with a TypeError"
        fields.note("learning-rate", text, "stops")
    if curve in ("cosine_with_min_lr", "cosine_warmup_with_min_lr"):
        minima = [name for name in ("min_lr", "min_lr_rate") if fields.has(f"lr_scheduler_kwargs.{name}")]
        if len(minima) != 1:
            has = "both" if minima else "neither"
            text = f"{curve} needs min_lr or min_lr_rate in lr_scheduler_kwargs, which has {has}: the Trainer stops"
            fields.note("learning-rate", text, "stops")
    if curve == "warmup_stable_decay" and "num_decay_steps" not in options and not thirds:
        text = "warmup_stable_decay needs num_decay_steps in lr_scheduler_kwargs: the Trainer stops with a TypeError"
        fields.note("learning-rate", text, "stops")
    end = fields.number("", "lr_scheduler_kwargs.lr_end", 1e-7) or 0.0
    if curve == "polynomial" and rate is not None and end >= rate:
        default = "" if fields.has("lr_scheduler_kwargs.lr_end") else " by default"
        text = f"lr_scheduler_kwargs.lr_end is {end:g}{default}, and must be below learning_rate {rate:g}"
        fields.note("learning-rate", f"{text}: the Trainer stops", "stops")


def _strategy(fields: Fields, path: str, default: Literal["steps", "no"]) -> str:
    found = fields.text(path) or default
    return "no" if found == "False" else found.lower()  # YAML reads a bare `no` as false


def _deepspeed_data(fields: Fields) -> Mapping[str, Any]:
    """Returns DeepSpeed's fields: those written here, or those of the file that is named; none if it is not here."""
    text = fields.text("deepspeed")
    if text is None:
        return {}
    return _json_file(text) if text.endswith(".json") else fields.section("deepspeed") if "{" in text else {}


def _deepspeed_name(fields: Fields) -> str:
    text = fields.text("deepspeed") or ""
    return text if text.endswith(".json") else "deepspeed"


def _deepspeed_batch(fields: Fields) -> int | None:
    """Returns DeepSpeed's global batch, with which the Trainer's must agree; None if there is none."""
    theirs, name = Fields(_deepspeed_data(fields)), f"train_batch_size of {_deepspeed_name(fields)}"
    batch = theirs.parse_count("", "train_batch_size", None, unset=("auto",))
    if batch is not None:
        fields.origins["global_batch_size"] = Origin(name)
    return batch


def _tensor_parallel(fields: Fields) -> int:
    theirs = Fields(_deepspeed_data(fields))
    size = theirs.parse_count("", "tensor_parallel.autotp_size", 1, minimum=0, unset=("auto",)) or 1
    if size > 1:
        fields.origins["tp"] = Origin(f"tensor_parallel.autotp_size of {_deepspeed_name(fields)}")
    return size


def _note_deepspeed(fields: Fields, steps: int | None) -> None:
    """Adds the issues of numbers that are also in DeepSpeed's file, and have another value there."""
    ours = {
        "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", 8),
        "gradient_accumulation_steps": ("gradient_accumulation_steps", 1),
        "gradient_clipping": ("max_grad_norm", 1.0),
        "optimizer.params.lr": ("learning_rate", 5e-5),
        "scheduler.params.warmup_max_lr": ("learning_rate", 5e-5),
    }
    if steps is not None:
        ours["scheduler.params.total_num_steps"] = ("max_steps", steps)
    theirs = Fields(_deepspeed_data(fields))
    where = _deepspeed_name(fields)
    for path, (name, default) in ours.items():
        if theirs.text(path) in (None, "auto"):
            continue
        there, here = theirs.number("", path, None), fields.number("", name, default)
        if there != here:
            stated = f"{name} is {here:g}{'' if fields.has(name) else ' by default'}"
            text = f"{where} has {path} {there:g}, and {stated}: transformers stops on it; write auto in {where}"
            fields.note("deepspeed", text, "stops")


FORMAT = Format(
    "transformers",
    read,
    endings=(".yaml", ".yml", ".json"),
    fields=("per_device_train_batch_size", "per_device_eval_batch_size", "num_train_epochs", "load_best_model_at_end"),
    arguments=lambda launch: launch.named_flags,
)

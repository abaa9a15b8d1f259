"""DeepSpeed's JSON files: any two of the three batch numbers give the third; the Trainer fills in ``auto``.

Source: DeepSpeed 0.19.8, ``deepspeed/runtime/lr_schedules.py`` and ``_scheduler_from_config`` in
``deepspeed/runtime/engine.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from countoff.core.ranks import ORDERS
from countoff.core.words import nearest
from countoff.plan.fields import Fields, note_unknown_fields
from countoff.plan.formats import Format
from countoff.plan.job import Job
from countoff.plan.schedules import ConfiguredSchedule

__all__ = ["FORMAT", "read"]

_AUTO = ("auto",)
_FIELDS = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer", "scheduler"),
    *("communication_data_type", "prescale_gradients", "gradient_predivide_factor", "sparse_gradients", "fp16", "bf16"),
    *("amp", "gradient_clipping", "zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    *("steps_per_print", "wall_clock_breakdown", "dump_state", "autotuning", "flops_profiler", "comms_logger"),
    *("activation_checkpointing", "sparse_attention", "data_efficiency", "curriculum_learning", "tensorboard", "wandb"),
    *("csv_monitor", "comet", "compression_training", "checkpoint", "data_types", "elasticity", "aio", "eigenvalue"),
    *("progressive_layer_drop", "quantize_training", "hybrid_engine", "compile", "tensor_parallel", "nebula"),
    *("sequence_parallel_size", "memory_breakdown", "disable_allgather", "dataloader_drop_last", "torch_autocast"),
    *("seq_parallel_communication_data_type", "graph_harvesting", "use_data_before_expert_parallelism", "zenflow"),
    *("gradient_accumulation_dtype", "weight_quantization", "fp16_master_weights_and_gradients", "pipeline"),
)

# The arguments of each scheduler of DeepSpeed. It takes the schedulers of torch as well.
_WARMUP = ("warmup_num_steps", "warmup_type", "last_batch_iteration")
_SCHEDULERS = {
    "LRRangeTest": (
        *("lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate", "lr_range_test_staircase"),
        "last_batch_iteration",
    ),
    "OneCycle": (
        *("cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_first_step_size", "cycle_second_step_size"),
        *("cycle_first_stair_count", "cycle_second_stair_count", "decay_step_size", "cycle_momentum"),
        *("cycle_min_mom", "cycle_max_mom", "decay_mom_rate", "last_batch_iteration"),
    ),
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", *_WARMUP),
    "WarmupDecayLR": ("total_num_steps", "warmup_min_lr", "warmup_max_lr", *_WARMUP),
    "WarmupCosineLR": ("total_num_steps", "warmup_min_ratio", "cos_min_ratio", *_WARMUP),
}
_OF_TORCH = (
    *("LambdaLR", "MultiplicativeLR", "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR"),
    *("SequentialLR", "CosineAnnealingLR", "ChainedScheduler", "ReduceLROnPlateau", "CyclicLR", "OneCycleLR"),
    *("CosineAnnealingWarmRestarts", "PolynomialLR"),
)


def read(data: Mapping[str, Any]) -> Job:
    """Returns the run that a DeepSpeed JSON describes.

    Args:
        data: The parsed file.

    Raises:
        ConfigError: If a field has a wrong type or is outside its domain.
    """
    fields = Fields(data)
    # JSON has no comments: by custom, they are fields whose names begin with an underscore.
    named = {name: value for name, value in data.items() if not str(name).startswith("_")}
    note_unknown_fields(fields, {}, sections=_FIELDS, data=named, consequence="DeepSpeed ignores it.")
    _note_scheduler(fields)
    return Job(
        framework="deepspeed",
        names=ORDERS["deepspeed"].names,
        sizes=(
            1
            if not fields.has("pipeline.stages")
            else fields.parse_count("pipe", "pipeline.stages", 1, unset=_AUTO) or 1,
            -1,
            fields.parse_count("model", "tensor_parallel.autotp_size", 1, minimum=0) or 1,
        ),
        data_dims=ORDERS["deepspeed"].data_dims,
        batch_size=fields.parse_count("batch_size", "train_micro_batch_size_per_gpu", None, unset=_AUTO),
        gradient_accumulation_steps=fields.parse_count(
            "gradient_accumulation_steps", "gradient_accumulation_steps", None, unset=_AUTO
        ),
        global_batch_size=fields.parse_count("global_batch_size", "train_batch_size", None, unset=_AUTO),
        learning_rate=_rate(fields),
        schedule=_schedule(fields),
        origins=fields.origins,
        issues=tuple(fields.issues),
    )


def _note_scheduler(fields: Fields) -> None:
    """Adds the issues of a scheduler that DeepSpeed cannot make."""
    kind = fields.text("scheduler.type")
    if kind is None or kind in _OF_TORCH:
        return
    if kind not in _SCHEDULERS:
        hint = nearest(kind, _SCHEDULERS)
        if hint:
            text = f"scheduler.type is {kind}, and there is no such scheduler{hint} DeepSpeed stops on it."
            fields.note("unknown-field", text, "stops")
        return
    known = _SCHEDULERS[kind]
    for name in fields.section("scheduler.params"):
        if name not in known:
            text = f"{kind} takes no scheduler.params.{name}{nearest(str(name), known)}"
            end = " DeepSpeed" if text.endswith("?") else ": DeepSpeed"
            fields.note("unknown-field", f"{text}{end} stops with a TypeError.", "stops")


def _rate(fields: Fields) -> float | None:
    if fields.text("optimizer.params.lr") in (None, "auto"):
        return None
    return fields.number("learning_rate", "optimizer.params.lr", None)


def _schedule(fields: Fields) -> ConfiguredSchedule | None:
    """Returns the schedule of WarmupDecayLR and WarmupCosineLR, which have a warm-up and an end; None for others."""
    if fields.text("scheduler.type") not in ("WarmupDecayLR", "WarmupCosineLR"):
        return None
    total = fields.parse_count("horizon_steps", "scheduler.params.total_num_steps", None, unset=_AUTO)
    warmup = fields.parse_count("warmup_steps", "scheduler.params.warmup_num_steps", 1000, minimum=0, unset=_AUTO)
    if total is None or fields.text("scheduler.params.warmup_num_steps") == "auto":
        return None
    return ConfiguredSchedule(warmup or 0, horizon=total)


FORMAT = Format(
    "deepspeed",
    read,
    endings=(".json",),
    fields=("train_micro_batch_size_per_gpu", "train_batch_size", "zero_optimization"),
)

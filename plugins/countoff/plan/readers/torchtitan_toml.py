"""TorchTitan's TOML files, from its first releases to 0.2.2, in which batch and mesh moved from section to section.

Until September 2024 ``[training]`` held everything, with one ``data_parallel_degree``. Then this degree was split in
two, and the degrees of pipelines and contexts were in ``[experimental]``. From 2025 on all degrees are in
``[parallelism]``, and the warm-up is in ``[lr_scheduler]``. Every name of every release is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from countoff.core.ranks import ORDERS, RankMap
from countoff.plan.fields import Fields, note_unknown_fields
from countoff.plan.formats import Format
from countoff.plan.issues import ConfigIssue
from countoff.plan.job import Job
from countoff.plan.schedules import ConfiguredSchedule

__all__ = ["FORMAT", "check_sequence_length", "read", "schedule_of"]

_DEGREES = {
    "pp": ("parallelism.pipeline_parallel_degree", "experimental.pipeline_parallel_degree"),
    "dp_replicate": ("parallelism.data_parallel_replicate_degree", "training.data_parallel_replicate_degree"),
    "dp_shard": (
        "parallelism.data_parallel_shard_degree",
        "training.data_parallel_shard_degree",
        "training.data_parallel_degree",
    ),
    "cp": (
        "parallelism.context_parallel_degree",
        "experimental.context_parallel_degree",
        "training.context_parallel_degree",
    ),
    "tp": (
        "parallelism.tensor_parallel_degree",
        "training.tensor_parallel_degree",
        "training.sequence_parallel_degree",
    ),
}
# All sections of all releases.
_SECTIONS = (
    *("job", "profiling", "metrics", "model", "optimizer", "lr_scheduler", "training", "parallelism", "experimental"),
    *("checkpoint", "activation_checkpoint", "compile", "quantize", "float8", "mx", "comm", "memory_estimation"),
    *("fault_tolerance", "validation", "debug", "custom_config", "actorder", "encoder", "eval", "inference"),
)
# All fields of the sections that are read here.
_KNOWN = {
    "lr_scheduler": ("warmup_steps", "total_steps", "decay_ratio", "decay_type", "min_lr_factor", "lr_min"),
    "training": (
        *("dataset", "dataset_path", "batch_size", "local_batch_size", "global_batch_size", "seq_len", "max_norm"),
        *("steps", "warmup_steps", "enable_cpu_offload", "dtype", "mixed_precision_param", "mixed_precision_reduce"),
        *("compile", "gc_freq", "gc_debug", "seed", "deterministic", "fp8_linear", "data_parallel_degree"),
        *("data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree"),
        *("sequence_parallel_degree", "pipeline_parallel_degree", "context_parallel_degree", "enable_loss_parallel"),
        *("disable_loss_parallel", "debug_moe_force_load_balance", "dataloader", "dataset_weights"),
        *("enable_fp8_linear", "checkpoint", "checkpoint_interval", "checkpoint_folder", "enable_fsdp_float8"),
        *("classifier_free_guidance_prob", "img_size", "test_mode", "batch_size_per_rank", "max_patch_per_image"),
        *("max_images_per_batch", "max_patches_per_image", "patch_size", "packing_buffer_size", "special_tokens"),
    ),
    "parallelism": (
        *("data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward"),
        *("tensor_parallel_degree", "disable_loss_parallel", "enable_async_tensor_parallel"),
        *("enable_sequence_parallel", "enable_compiled_autograd", "pipeline_parallel_degree"),
        *("pipeline_parallel_split_points", "module_fqns_per_model_part", "pipeline_parallel_layers_per_stage"),
        *("pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers"),
        *("pipeline_parallel_schedule", "pipeline_parallel_schedule_csv", "pipeline_parallel_microbatch_size"),
        *("pipeline_parallel_expert_parallel_overlap", "context_parallel_degree", "context_parallel_rotate_method"),
        *("context_parallel_load_balancer", "expert_parallel_degree", "expert_tensor_parallel_degree"),
        *("expert_parallel_a2a_impl", "expert_parallel_comm_backend"),
    ),
}


def read(data: Mapping[str, Any]) -> Job:
    """Returns the run that a TorchTitan TOML describes.

    Args:
        data: The parsed file.

    Raises:
        ConfigError: If a field has a wrong type or is outside its domain, or two names of one number disagree.
    """
    fields = Fields(data)
    note_unknown_fields(
        fields, _KNOWN, sections=_SECTIONS, data=data, consequence="TorchTitan would use its default instead."
    )
    sizes = tuple(_degree(fields, name) for name in ORDERS["torchtitan"].names)
    pipeline = sizes[0]
    steps = fields.parse_count("steps", "training.steps", 10_000)
    batch_size = fields.parse_count("batch_size", ("training.local_batch_size", "training.batch_size"), 8)
    schedule = schedule_of(fields)
    return Job(
        framework="torchtitan",
        names=ORDERS["torchtitan"].names,
        sizes=sizes,
        data_dims=ORDERS["torchtitan"].data_dims,
        batch_size=batch_size,
        sequence_length=fields.parse_count("sequence_length", "training.seq_len", 2048),
        global_batch_size=fields.parse_count("global_batch_size", "training.global_batch_size", None, unset=(-1,)),
        pipeline_microbatches=_microbatches(fields, pipeline, batch_size or 1),
        steps=steps,
        expert_parallel=fields.parse_count("expert_parallel", "parallelism.expert_parallel_degree", 1) or 1,
        learning_rate=fields.number("learning_rate", "optimizer.lr", None),
        schedule=schedule,
        own_checks=(check_sequence_length,),
        origins=fields.origins,
        issues=tuple(fields.issues),
    )


def schedule_of(fields: Fields) -> ConfiguredSchedule:
    """Returns the learning-rate schedule of a TorchTitan configuration, TOML or Python.

    TorchTitan cuts a warm-up that is longer than the horizon. After a linear or square-root decay, the factor falls on
    along its curve, below the lowest one and below 0: the stable part has one step more, so that the last step of the
    horizon is not at the lowest factor.

    Args:
        fields: The configuration.

    Raises:
        ConfigError: If a field has a wrong type or is outside its domain.
    """
    warmup = fields.parse_count("warmup_steps", ("lr_scheduler.warmup_steps", "training.warmup_steps"), 200, minimum=0)
    curve = fields.choice("lr_scheduler.decay_type", ("linear", "sqrt", "cosine"), "linear")
    horizon = fields.parse_count("horizon_steps", "lr_scheduler.total_steps", None)
    lowest = fields.number("min_factor", ("lr_scheduler.min_lr_factor", "lr_scheduler.lr_min"), 0.0) or 0.0
    decay = _decay_of(horizon or 0, warmup or 0, fields.number("", "lr_scheduler.decay_ratio", None))
    beyond = "none" if not decay else "rises" if curve == "cosine" else "falls"
    below_zero = 1 / (1 - lowest) ** (2 if curve == "sqrt" else 1) - 1 if 0 <= lowest < 1 else 0.0
    return ConfiguredSchedule(
        warmup or 0,
        horizon=horizon,
        lowest=lowest,
        beyond=beyond,
        falls_below_zero=math.floor(below_zero * decay) + 2,
        cuts_warmup=True,
    )


def _decay_of(horizon: int, warmup: int, ratio: float | None) -> int:
    """Returns the steps of the decay, after TorchTitan has cut them."""
    left = horizon - min(warmup, horizon)
    return left if ratio is None else min(round(horizon * ratio), left)


def check_sequence_length(job: Job, ranks: RankMap) -> Iterator[ConfigIssue]:
    """Yields the issue of a sequence that TorchTitan cannot cut among tensor and context parallel ranks.

    Args:
        job: The run.
        ranks: Its ranks.
    """
    sizes = dict(zip(ranks.names, ranks.sizes, strict=True))
    tp, cp = sizes["tp"], sizes["cp"]
    divisor = tp * (2 * cp if cp > 1 else 1)
    if job.sequence_length is not None and job.sequence_length % divisor:
        product = f"tp {tp}{f' × 2 × cp {cp}' if cp > 1 else ''} = {divisor}"
        text = f"{job.stated('sequence_length', job.sequence_length, '')} must divide by {product}"
        yield ConfigIssue("stops", "sequence-length", text)


def _degree(fields: Fields, name: str) -> int:
    paths = [path for path in _DEGREES[name] if fields.has(path)] or [_DEGREES[name][0]]
    size = fields.parse_count(name, paths, -1 if name == "dp_shard" else 1, unset=(-1,) if name == "dp_shard" else ())
    return size or 1


def _microbatches(fields: Fields, pipeline: int, batch_size: int) -> int:
    """Returns the number of micro-batches into which a pipeline cuts the local batch."""
    if pipeline == 1:
        return 1
    if fields.has("experimental.pipeline_parallel_microbatches"):
        count = fields.parse_count("pipeline_microbatches", "experimental.pipeline_parallel_microbatches", None) or 1
        size, rest = divmod(batch_size, count)
        divisor = f"pipeline_parallel_microbatches {count}"
    else:
        size = fields.parse_count("", "parallelism.pipeline_parallel_microbatch_size", 1) or 1
        count, rest = divmod(batch_size, size)
        divisor = f"parallelism.pipeline_parallel_microbatch_size {size}"
    if rest:
        key = fields.origins["batch_size"].key
        text = f"{key} {batch_size} does not divide by {divisor}: the pipeline refuses it"
        fields.note("micro-batches", text, "stops")
        return 1
    return max(count, 1)


FORMAT = Format(
    "torchtitan",
    read,
    endings=(".toml",),
    fields=("training", "parallelism", "lr_scheduler"),
)

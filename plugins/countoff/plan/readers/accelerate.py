"""Accelerate's YAML files, as ``accelerate config`` writes them: they hold the processes; the batch is in the code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from countoff.core.ranks import ORDERS
from countoff.plan.fields import Fields, note_unknown_fields
from countoff.plan.formats import Format
from countoff.plan.job import Job

__all__ = ["FORMAT", "read"]

_AUTO = ("auto",)
_SECTIONS = (
    *("deepspeed_config", "fsdp_config", "megatron_lm_config", "parallelism_config", "dynamo_config", "ipex_config"),
    *("fp8_config", "mpirun_config", "tpu_env", "commands", "aws_config", "sagemaker_inputs_file", "fault_tolerance"),
)
_FIELDS = (
    *("compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug", "num_processes"),
    *("num_machines", "machine_rank", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend"),
    *("same_network", "main_training_function", "enable_cpu_affinity", "downcast_bf16", "tpu_name", "tpu_zone"),
    *("tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env", "command_file", "dynamo_backend", "deepspeed_hostfile"),
    *("gradient_accumulation_steps", "use_fp8", "command", "main_process_ip", "num_cpu_threads_per_process"),
)
_PARALLELISM = (
    *("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size", "cp_backend", "cp_comm_strategy"),
    *("sp_backend", "sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation"),
)
_DIMS = {"dp_replicate": "dp_replicate_size", "dp_shard": "dp_shard_size", "cp": "cp_size", "sp": "sp_size"}


def read(data: Mapping[str, Any]) -> Job:
    """Returns the run that an Accelerate YAML describes, as far as the file goes.

    Args:
        data: The parsed file.

    Raises:
        ConfigError: If a field has a wrong type or is outside its domain.
    """
    fields = Fields(data)
    known = {"": _FIELDS, "parallelism_config": [f"parallelism_config_{name}" for name in _PARALLELISM]}
    note_unknown_fields(
        fields, known, sections=_SECTIONS, data=data, consequence="Accelerate uses its default instead."
    )
    world_size = fields.parse_count("world_size", "num_processes", None)
    machines = fields.parse_count("", "num_machines", 1) or 1
    if world_size is not None and world_size % machines:
        fields.note(
            "machines",
            f"num_processes {world_size} counts the processes of all {machines} machines together, and does not divide "
            f"by num_machines: {world_size} per machine would be {world_size * machines}",
            "stops",
        )
    return Job(
        framework="accelerate",
        names=ORDERS["accelerate"].names,
        sizes=_sizes(fields),
        data_dims=ORDERS["accelerate"].data_dims,
        batch_size=fields.parse_count(
            "batch_size", "deepspeed_config.train_micro_batch_size_per_gpu", None, unset=_AUTO
        ),
        gradient_accumulation_steps=fields.parse_count(
            "gradient_accumulation_steps",
            ("gradient_accumulation_steps", "deepspeed_config.gradient_accumulation_steps"),
            None,
            unset=_AUTO,
        ),
        global_batch_size=fields.parse_count(
            "global_batch_size", "deepspeed_config.train_batch_size", None, unset=_AUTO
        ),
        world_size=world_size,
        origins=fields.origins,
        issues=tuple(fields.issues),
    )


def _sizes(fields: Fields) -> tuple[int, ...]:
    sizes: list[int] = []
    section = fields.section("parallelism_config")
    for name in ORDERS["accelerate"].names:
        key = f"parallelism_config.parallelism_config_{_DIMS.get(name, 'tp_size')}"
        # Without this section every process reads a share of its own.
        sizes.append(fields.parse_count(name, key, 1 if section or name != "dp_shard" else -1) or 1)
    if section and not any(fields.origins[name].given for name in ("dp_replicate", "dp_shard")):
        sizes[0] = -1  # the ranks that the other dims leave over replicate, as in DDP
    return tuple(sizes)


FORMAT = Format(
    "accelerate",
    read,
    endings=(".yaml", ".yml"),
    fields=("compute_environment", "distributed_type", "parallelism_config"),
)

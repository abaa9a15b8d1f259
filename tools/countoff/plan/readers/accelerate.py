"""Accelerate's YAML files, as ``accelerate config`` writes them: they hold the processes; the batch is in the code.

The comments name the lines of accelerate 1.15.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from countoff.plan.fields import Count, Fields
from countoff.plan.formats import Format
from countoff.plan.job import Job

__all__ = ["FORMAT", "read"]

_AUTO = ("auto",)
_SIZES = "parallelism_config.parallelism_config"
_MESH = {  # parallelism_config.py:70
    "dp_replicate": Count(f"{_SIZES}_dp_replicate_size", 1),
    "dp_shard": Count(f"{_SIZES}_dp_shard_size", 1),
    "cp": Count(f"{_SIZES}_cp_size", 1),
    "sp": Count(f"{_SIZES}_sp_size", 1),
    "tp": Count(f"{_SIZES}_tp_size", 1),
}
_COUNTS = {
    "world_size": Count("num_processes"),  # commands/config/config_args.py:180
    "batch_size": Count("deepspeed_config.train_micro_batch_size_per_gpu", unset=_AUTO),
    "gradient_accumulation_steps": Count(
        ("gradient_accumulation_steps", "deepspeed_config.gradient_accumulation_steps"), unset=_AUTO
    ),
    "global_batch_size": Count("deepspeed_config.train_batch_size", unset=_AUTO),
}


def read(data: Mapping[str, Any]) -> Job:
    """Returns the run that an Accelerate YAML describes, as far as the file goes.

    Args:
        data: The parsed file.

    Raises:
        ConfigError: If a field has a wrong type or is outside its domain.
    """
    fields = Fields(data)
    counts, mesh = fields.counts(_COUNTS), fields.counts(_MESH)
    if not fields.section("parallelism_config"):
        mesh["dp_shard"] = -1  # every process reads a share of its own
    elif not any(fields.origins[name].given for name in ("dp_replicate", "dp_shard")):
        mesh["dp_replicate"] = -1  # the ranks that the other dims leave over replicate, as in DDP
    counts["world_size"] = _started(fields, counts["world_size"])
    return fields.job("accelerate", "accelerate", mesh, **counts)


def _started(fields: Fields, processes: int | None) -> int | None:
    """Returns the processes that Accelerate starts: it rounds down on each machine (utils/launch.py:217)."""
    machines = fields.count("", Count("num_machines", 1)) or 1  # commands/config/config_args.py:182
    if processes is None or processes % machines == 0 or processes < machines:
        return processes
    each = processes // machines
    text = (
        f"num_processes {processes} counts the processes of all {machines} machines together, and does not divide by "
        f"num_machines: Accelerate starts {each} on each, {each * machines} in all; {processes} per machine would be "
        f"{processes * machines}"
    )
    fields.note("machines", text, "silent")
    return each * machines


FORMAT = Format(
    "accelerate",
    read,
    endings=(".yaml", ".yml"),
    fields=("compute_environment", "distributed_type", "parallelism_config"),
)

"""TorchTitan's TOML files, from its first releases to 0.2.2, in which batch and mesh moved from section to section.

Until September 2024 ``[training]`` held everything, with one ``data_parallel_degree``. Then this degree was split in
two, and the degrees of pipelines and contexts were in ``[experimental]``. From 2025 on all degrees are in
``[parallelism]``, and the warm-up is in ``[lr_scheduler]``. Every name of every release is read; the first one is that
of 0.2.2, and the comments name its lines in ``torchtitan/config/job_config.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

from countoff.plan.fields import Count, Fields
from countoff.plan.formats import Format
from countoff.plan.job import Job
from countoff.plan.schedules import TorchTitanSchedule

__all__ = ["FORMAT", "read", "schedule_of"]

_MESH = {
    # :360
    "pp": Count(("parallelism.pipeline_parallel_degree", "experimental.pipeline_parallel_degree"), 1),
    # :313
    "dp_replicate": Count(("parallelism.data_parallel_replicate_degree", "training.data_parallel_replicate_degree"), 1),
    # :324
    "dp_shard": Count(
        (
            "parallelism.data_parallel_shard_degree",
            "training.data_parallel_shard_degree",
            "training.data_parallel_degree",
        ),
        -1,
        unset=(-1,),
    ),
    # :428
    "cp": Count(
        (
            "parallelism.context_parallel_degree",
            "experimental.context_parallel_degree",
            "training.context_parallel_degree",
        ),
        1,
    ),
    # :351
    "tp": Count(
        (
            "parallelism.tensor_parallel_degree",
            "training.tensor_parallel_degree",
            "training.sequence_parallel_degree",
        ),
        1,
    ),
}
_COUNTS = {
    "batch_size": Count(("training.local_batch_size", "training.batch_size"), 8),  # :253
    "sequence_length": Count("training.seq_len", 2048),  # :261
    "global_batch_size": Count("training.global_batch_size", unset=(-1,)),  # :256
    "steps": Count("training.steps", 10_000),  # :267
}


def read(data: Mapping[str, Any]) -> Job:
    """Returns the run that a TorchTitan TOML describes.

    Args:
        data: The parsed file.

    Raises:
        ConfigError: If a field has a wrong type or is outside its domain, or two names of one number disagree.
    """
    fields = Fields(data)
    for section in ("training", "parallelism", "experimental", "lr_scheduler"):
        fields.section(section)
    mesh, counts = fields.counts(_MESH), fields.counts(_COUNTS)
    return fields.job(
        "torchtitan",
        "torchtitan",
        mesh,
        **counts,
        pipeline_microbatches=_microbatches(fields, mesh["pp"] or 1, counts["batch_size"] or 1),
        learning_rate=fields.number("learning_rate", "optimizer.lr"),
        schedule=schedule_of(fields, counts["steps"] or 1),
    )


def schedule_of(fields: Fields, steps: int) -> TorchTitanSchedule:
    """Returns the learning-rate schedule of a TorchTitan configuration, TOML or Python.

    Args:
        fields: The configuration.
        steps: Optimizer steps of the run; the horizon of the schedule where none is configured.

    Raises:
        ConfigError: If a field has a wrong type or is outside its domain.
    """
    warmup = Count(("lr_scheduler.warmup_steps", "training.warmup_steps"), 200, minimum=0)  # :170
    curve = fields.choice("lr_scheduler.decay_type", ("linear", "sqrt", "cosine"), "linear")
    return TorchTitanSchedule(
        warmup_steps=fields.count("warmup_steps", warmup) or 0,
        horizon_steps=fields.count("horizon_steps", Count("lr_scheduler.total_steps", steps)) or steps,  # :175
        decay_ratio=fields.number("decay_ratio", "lr_scheduler.decay_ratio"),  # :183
        decay_type=cast("Literal['linear', 'sqrt', 'cosine']", curve),
        min_factor=fields.number("min_factor", ("lr_scheduler.min_lr_factor", "lr_scheduler.lr_min"), 0.0) or 0.0,
        own_horizon=fields.has("lr_scheduler.total_steps"),
    )


def _microbatches(fields: Fields, pipeline: int, batch_size: int) -> int:
    """Returns the number of micro-batches into which a pipeline cuts the local batch."""
    if pipeline == 1:
        return 1
    count = fields.count("pipeline_microbatches", Count("experimental.pipeline_parallel_microbatches"))
    size = fields.count("", Count("parallelism.pipeline_parallel_microbatch_size", 1)) or 1  # :412
    return count or max(batch_size // size, 1)


FORMAT = Format(
    "torchtitan",
    read,
    endings=(".toml",),
    fields=("training", "parallelism", "lr_scheduler"),
)

"""TorchTitan's TOML files, from its first releases to 0.2.2, in which batch and mesh moved from section to section.

Until September 2024 ``[training]`` held everything, with one ``data_parallel_degree``. Then this degree was split in
two, and the degrees of pipelines and contexts were in ``[experimental]``. From 2025 on all degrees are in
``[parallelism]``, and the warm-up is in ``[lr_scheduler]``. Every name of every release is read; the first one is that
of 0.2.2, and the comments name its lines in ``torchtitan/config/job_config.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from countoff.plan.fields import Count, Fields
from countoff.plan.formats import Format
from countoff.plan.job import Job
from countoff.plan.schedules import ConfiguredSchedule

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
_WARMUP = Count(("lr_scheduler.warmup_steps", "training.warmup_steps"), 200, minimum=0)  # :170


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
        schedule=schedule_of(fields),
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
    warmup = fields.count("warmup_steps", _WARMUP) or 0
    curve = fields.choice("lr_scheduler.decay_type", ("linear", "sqrt", "cosine"), "linear")
    horizon = fields.count("horizon_steps", Count("lr_scheduler.total_steps"))  # :175
    lowest = fields.number("min_factor", ("lr_scheduler.min_lr_factor", "lr_scheduler.lr_min"), 0.0) or 0.0  # :200
    ratio = fields.number("", "lr_scheduler.decay_ratio")  # :183
    decay = _decay_of(horizon or 0, warmup, ratio)
    beyond = "none" if not decay else "rises" if curve == "cosine" else "falls"
    below_zero = 1 / (1 - lowest) ** (2 if curve == "sqrt" else 1) - 1 if 0 <= lowest < 1 else 0.0
    return ConfiguredSchedule(
        warmup,
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

"""DeepSpeed's JSON files: any two of the three batch numbers give the third; the Trainer fills in ``auto``.

The comments name the lines of DeepSpeed 0.19.8, below ``deepspeed/runtime/``; the schedules are those of
``lr_schedules.py``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from countoff.plan.fields import Count, Fields
from countoff.plan.formats import Format
from countoff.plan.job import Job
from countoff.plan.schedules import ConfiguredSchedule

__all__ = ["FORMAT", "read"]

_AUTO = ("auto",)
_MESH = {
    "pipe": Count("pipeline.stages", 1, unset=_AUTO),  # config.py:275
    "model": Count("tensor_parallel.autotp_size", 1, unset=(0, *_AUTO)),  # tensor_parallel/config.py:45
}
_COUNTS = {
    "batch_size": Count("train_micro_batch_size_per_gpu", unset=_AUTO),  # config.py:346
    "gradient_accumulation_steps": Count("gradient_accumulation_steps", unset=_AUTO),  # config.py:209
    "global_batch_size": Count("train_batch_size", unset=_AUTO),  # config.py:340
}
# How much of two names must be the same, from 0 to 1, for one to be a slip of the other.
_NEAR = 0.9


def read(data: Mapping[str, Any]) -> Job:
    """Returns the run that a DeepSpeed JSON describes.

    Args:
        data: The parsed file.

    Raises:
        ConfigError: If a field has a wrong type or is outside its domain.
    """
    fields = Fields(data)
    _note_misspelt(fields, data)
    return fields.job(
        "deepspeed",
        "deepspeed",
        {**fields.counts(_MESH), "data": -1},
        **fields.counts(_COUNTS),
        schedule=_schedule(fields),
    )


def _note_misspelt(fields: Fields, data: Mapping[str, Any]) -> None:
    """Adds an issue for each name at the top that is nearly one that counts: DeepSpeed ignores what it does not know.

    What lies in a section is refused by DeepSpeed itself (config_utils.py:110).
    """
    absent = [str(count.paths) for count in _COUNTS.values() if not fields.has(str(count.paths))]
    for name in data:
        for meant in difflib.get_close_matches(str(name), absent, n=1, cutoff=_NEAR):
            text = f"there is no {name}; did you mean {meant}? DeepSpeed ignores it."
            fields.note("unknown-field", text, "silent")


def _schedule(fields: Fields) -> ConfiguredSchedule | None:
    """Returns the schedule of WarmupDecayLR and WarmupCosineLR, which have a warm-up and an end; None for others."""
    if fields.text("scheduler.type") not in ("WarmupDecayLR", "WarmupCosineLR"):
        return None
    total = fields.count("horizon_steps", Count("scheduler.params.total_num_steps", unset=_AUTO))
    warmup = fields.count("warmup_steps", Count("scheduler.params.warmup_num_steps", 1000, unset=_AUTO, minimum=0))
    if total is None or fields.text("scheduler.params.warmup_num_steps") == "auto":
        return None
    return ConfiguredSchedule(warmup or 0, horizon=total)


FORMAT = Format(
    "deepspeed",
    read,
    endings=(".json",),
    fields=("train_micro_batch_size_per_gpu", "train_batch_size", "zero_optimization"),
)

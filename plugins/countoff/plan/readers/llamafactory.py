"""LLaMA-Factory's YAML and JSON files: a Trainer's arguments, with those of the data and of the method beside them.

Sources at ff6d4d12: ``hparams/parser.py`` (``get_train_args``), ``hparams/data_args.py``,
``hparams/megatron_bridge_args.py``, and ``train/trainer_utils.py`` (``create_custom_scheduler``, which gives
``warmup_stable_decay`` its own defaults).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from countoff.core.ranks import ORDERS
from countoff.plan.fields import Fields
from countoff.plan.formats import Format
from countoff.plan.job import Job
from countoff.plan.readers.transformers import (
    TRAINING_ARGUMENTS,
    note_checkpoints,
    note_misspelt,
    read_run,
    read_schedule,
)

__all__ = ["FORMAT", "read"]

_STAGES = ("pt", "sft", "rm", "ppo", "dpo", "kto")
_COUNTED = (
    *("stage", "finetuning_type", "cutoff_len", "max_samples", "packing", "neat_packing", "streaming"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps", "warmup_ratio"),
    *("warmup_steps", "learning_rate", "lr_scheduler_type", "tensor_model_parallel_size"),
    *("pipeline_model_parallel_size", "context_parallel_size"),
)


def read(data: Mapping[str, Any]) -> Job:
    """Returns the run that a LLaMA-Factory file describes.

    Args:
        data: The parsed file.

    Raises:
        ConfigError: If a field has a wrong type or is outside its domain.
    """
    fields = Fields(data, reads_exponents=True)
    note_misspelt(fields, data, {*TRAINING_ARGUMENTS, *_COUNTED}, _COUNTED)
    run = read_run(fields)
    note_checkpoints(fields)
    stage = fields.choice("stage", _STAGES, "sft")
    packed = fields.flag("packing", stage == "pt") or fields.flag("neat_packing", False)
    _note_refused(fields, stage, run["steps"])
    sizes = (
        fields.parse_count("pp", "pipeline_model_parallel_size", 1) or 1,
        -1,
        fields.parse_count("cp", "context_parallel_size", 1) or 1,
        fields.parse_count("tp", "tensor_model_parallel_size", 1) or 1,
    )
    return Job(
        framework="llamafactory",
        names=ORDERS["megatron"].names,
        sizes=sizes,
        data_dims=ORDERS["megatron"].data_dims,
        # A sample that is not packed has at most this many tokens.
        sequence_length=fields.parse_count("sequence_length", "cutoff_len", 2048) if packed else None,
        schedule=read_schedule(fields, run, thirds=True),
        origins=fields.origins,
        issues=tuple(fields.issues),
        **run,
    )


def _note_refused(fields: Fields, stage: str, steps: int | None) -> None:
    """Adds the issues of numbers that LLaMA-Factory refuses together (``get_train_args``)."""
    if fields.flag("streaming", False) and steps is None:
        text = "streaming needs max_steps, because a stream has no length: LLaMA-Factory stops"
        fields.note("length", text, "stops")
    if fields.flag("neat_packing", False) and stage != "sft":
        text = f"neat_packing is true and stage is {stage}: LLaMA-Factory packs so in stage sft alone, and stops"
        fields.note("batch", text, "stops")


FORMAT = Format(
    "llamafactory",
    read,
    endings=(".yaml", ".yml", ".json"),
    fields=("finetuning_type", "plot_loss", "neat_packing"),
    extends="transformers",
)

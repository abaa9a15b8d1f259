"""LLaMA-Factory's YAML and JSON files: a Trainer's arguments, with those of the data and of the method beside them.

The comments name the lines of LLaMA-Factory at ff6d4d12, below ``src/llamafactory/``. ``create_custom_scheduler`` in
``train/trainer_utils.py`` gives ``warmup_stable_decay`` its own defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from countoff.plan.fields import Count, Fields
from countoff.plan.formats import Format
from countoff.plan.job import Job
from countoff.plan.readers.transformers import read_deepspeed, read_run, read_schedule

__all__ = ["FORMAT", "read"]

_MESH = {
    "pp": Count("pipeline_model_parallel_size", 1),  # hparams/megatron_bridge_args.py:36
    "cp": Count("context_parallel_size", 1),  # hparams/megatron_bridge_args.py:44
    "tp": Count("tensor_model_parallel_size", 1),  # hparams/megatron_bridge_args.py:32
}
_LENGTH = Count("cutoff_len", 2048)  # hparams/data_args.py:46


def read(data: Mapping[str, Any]) -> Job:
    """Returns the run that a LLaMA-Factory file describes.

    Args:
        data: The parsed file.

    Raises:
        ConfigError: If a field has a wrong type or is outside its domain.
    """
    fields = Fields(data)
    run = read_run(fields)
    pretrains = fields.text("stage") == "pt"
    packed = fields.flag("packing", pretrains) or fields.flag("neat_packing", False)  # hparams/parser.py:645
    return fields.job(
        "llamafactory",
        "megatron",
        {**fields.counts(_MESH), "dp": -1},
        # A sample that is not packed has at most this many tokens.
        sequence_length=fields.count("sequence_length", _LENGTH) if packed else None,
        schedule=read_schedule(fields, read_deepspeed(fields), thirds=True),
        **run,
    )


FORMAT = Format(
    "llamafactory",
    read,
    endings=(".yaml", ".yml", ".json"),
    fields=("finetuning_type", "plot_loss", "neat_packing"),
    extends="transformers",
)

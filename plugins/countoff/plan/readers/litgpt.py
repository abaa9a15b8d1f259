"""litgpt's YAML files: a global batch, from which each rank's accumulation follows, rounded down.

Pretraining is counted in tokens, finetuning in epochs or steps. Sources at 26857050: ``args.py`` (``TrainArgs``),
``pretrain.py`` (``setup``, ``fit``, ``get_lr``, ``validate_args``) and ``finetune/*.py`` (``setup``, ``main``, ``fit``,
``get_lr_scheduler``, ``validate_args``). In pretraining the rate is set at each batch; here it is that of the first
batch of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from countoff.plan.fields import ConfigError, Fields, note_unknown_fields
from countoff.plan.formats import Format
from countoff.plan.job import Job, Origin
from countoff.plan.schedules import WarmupDecay

__all__ = ["FORMAT", "read"]

_AUTO = ("auto", -1)
_SECTIONS = ("data", "train", "eval", "log", "optimizer", "model_config", "generate")
_KNOWN = {
    "": (
        *(
            "checkpoint_dir",
            "out_dir",
            "precision",
            "quantize",
            "devices",
            "num_nodes",
            "resume",
            "seed",
            "logger_name",
        ),
        *("access_token", "model_name", "initial_checkpoint_dir", "tokenizer_dir", "config", "lora_r"),
        *(
            "lora_alpha",
            "lora_dropout",
            "lora_query",
            "lora_key",
            "lora_value",
            "lora_projection",
            "lora_mlp",
            "lora_head",
        ),
    ),
    "train": (
        *("save_interval", "log_interval", "global_batch_size", "micro_batch_size", "lr_warmup_steps", "epochs"),
        *("lr_warmup_fraction", "max_tokens", "max_steps", "max_time", "max_seq_length", "tie_embeddings", "max_norm"),
        *("min_lr", "learning_rate", "weight_decay", "beta1", "beta2"),
    ),
    "eval": (
        *("interval", "max_new_tokens", "max_iters", "initial_validation", "final_validation", "evaluate_example"),
    ),
}
# TrainArgs itself has other defaults than the functions that take it.
_DEFAULTS = {
    "pretrain": {"global_batch_size": 512, "micro_batch_size": 4, "lr_warmup_steps": 2000, "min_lr": 4e-5},
    "finetune": {"global_batch_size": 16, "micro_batch_size": 1, "lr_warmup_steps": 100, "min_lr": 6e-5},
}
# Only finetuning has a checkpoint_dir, which may also be an argument of its command.
_PRETRAIN_ONLY = ("model_name", "model_config", "initial_checkpoint_dir", "tokenizer_dir", "train.max_tokens")
_PRETRAIN_TOKENS = 3_000_000_000_000
_FINETUNE_EPOCHS = 5


class _Length(NamedTuple):
    steps: int | None
    epochs: int | None
    tokens: int | None = None


def read(data: Mapping[str, Any]) -> Job:
    """Returns the run that a litgpt YAML describes, for pretraining or for finetuning.

    Args:
        data: The parsed file.

    Raises:
        ConfigError: If a field has a wrong type or is outside its domain.
    """
    fields = Fields(data, reads_exponents=True)
    note_unknown_fields(fields, _KNOWN, sections=_SECTIONS, data=data, consequence="litgpt stops on it.", level="stops")
    pretrain = not fields.has("checkpoint_dir") and any(fields.has(name) for name in _PRETRAIN_ONLY)
    defaults = _DEFAULTS["pretrain" if pretrain else "finetune"]
    total = fields.parse_count("global_batch_size", "train.global_batch_size", int(defaults["global_batch_size"])) or 1
    micro = fields.parse_count("batch_size", "train.micro_batch_size", int(defaults["micro_batch_size"])) or 1
    # In finetuning it is the most tokens that a sample may have.
    length = fields.parse_count("sequence_length" if pretrain else "", "train.max_seq_length", None)
    rate = _rate(fields)
    run = _pretrain_length(fields) if pretrain else _finetune_length(fields)
    return Job(
        framework="litgpt",
        names=("data_parallel",),
        sizes=(-1,),
        data_dims=("data_parallel",),
        batch_size=micro,
        global_batch_size=total,
        accumulation_rounded=True,
        partial_step="carried",
        sequence_length=length if pretrain else None,
        steps=run.steps,
        epochs=run.epochs,
        run_tokens=run.tokens,
        world_size=_world_size(fields),
        learning_rate=rate,
        schedule=_schedule(fields, run, rate, defaults, pretrain=pretrain),
        origins=fields.origins,
        unknown=fields.unknown_numbers,
        issues=tuple(fields.issues),
    )


def _world_size(fields: Fields) -> int | None:
    nodes = fields.parse_count("", "num_nodes", 1) or 1
    devices = fields.parse_count("world_size", "devices", None if fields.has("devices") else 1, unset=_AUTO)
    if devices is None or not fields.has("devices"):
        return None  # the default is one GPU, which a launcher's own number of ranks may well not be meant to be
    if fields.has("num_nodes"):
        fields.origins["world_size"] = Origin("devices × num_nodes")
    return devices * nodes


def _rate(fields: Fields) -> float | None:
    if fields.has("optimizer.init_args.lr"):
        return fields.number("learning_rate", "optimizer.init_args.lr", None)
    return fields.number("learning_rate", "train.learning_rate", None)


def _pretrain_length(fields: Fields) -> _Length:
    tokens = fields.parse_count("", "train.max_tokens", None)
    fields.origins["steps"] = Origin(
        "train.max_tokens", given=tokens is not None, written=f"{tokens or _PRETRAIN_TOKENS:,}"
    )
    written = fields.has("train") and "max_tokens" in fields.section("train")
    if tokens is None and written:
        fields.note("length", "train.max_tokens is empty, and litgpt pretrain needs it: it stops", "stops")
        return _Length(None, None)
    if fields.has("train.epochs"):
        text = f"train.epochs is {fields.text('train.epochs')}, and litgpt pretrain does not take epochs: it stops"
        fields.note("length", text, "stops")
    if fields.has("train.max_steps"):
        text = f"train.max_steps is {fields.text('train.max_steps')}, and litgpt pretrain does not use it"
        fields.note("length", f"{text}: train.max_tokens ends the run", "silent")
    return _Length(None, None, tokens or _PRETRAIN_TOKENS)


def _finetune_length(fields: Fields) -> _Length:
    steps = fields.parse_count("steps", "train.max_steps", None)
    epochs = fields.parse_count("epochs", "train.epochs", _FINETUNE_EPOCHS)
    if not fields.has("train.epochs") and "epochs" in fields.section("train"):
        fields.note("length", "train.epochs is empty, and litgpt finetune needs it: it stops", "stops")
    for name in ("max_tokens", "max_norm", "tie_embeddings", "lr_warmup_fraction"):
        if fields.has(f"train.{name}"):
            text = f"train.{name} is {fields.text(f'train.{name}')}, and litgpt finetune does not take it: it stops"
            fields.note("length" if name == "max_tokens" else "unknown-field", text, "stops")
    return _Length(steps, epochs)


def _schedule(
    fields: Fields, run: _Length, rate: float | None, defaults: Mapping[str, float], *, pretrain: bool
) -> WarmupDecay | None:
    in_train = fields.section("train")
    empty = "lr_warmup_steps" in in_train and not fields.has("train.lr_warmup_steps")
    default = 0 if empty else int(defaults["lr_warmup_steps"])
    warmup = fields.parse_count("warmup_steps", "train.lr_warmup_steps", default, minimum=0) or 0
    fraction = fields.number("", "train.lr_warmup_fraction", None)
    if fraction is not None and not 0 <= fraction <= 1:
        raise ConfigError(f"train.lr_warmup_fraction must be from 0 to 1, got {fraction:g}")
    lowest = fields.number("", "train.min_lr", defaults["min_lr"]) or 0.0
    fields.origins["horizon_steps"] = fields.origins["steps" if run.steps is not None or pretrain else "epochs"]
    if fraction and warmup:
        stated = f"train.lr_warmup_steps is {warmup:,}{'' if fields.has('train.lr_warmup_steps') else ' by default'}"
        text = f"train.lr_warmup_fraction is {fraction:g} and {stated}: litgpt takes only one of them, and stops"
        fields.note("warm-up", text, "stops")
    if not pretrain:
        return _finetune_schedule(fields, run, warmup, lowest)
    if fraction or run.tokens is None:
        return None  # the fraction is one of an epoch, whose length is not in the file
    if rate is not None and lowest > rate:
        text = f"train.min_lr is {lowest:g} and the learning rate {rate:g}: it would rise after the warm-up"
        fields.note("learning-rate", text, "silent")
    return WarmupDecay("cosine", warmup, 0, lowest / rate if rate else 0.0, horizon_part=1.0)


def _finetune_schedule(fields: Fields, run: _Length, warmup: int, lowest: float) -> WarmupDecay | None:
    if not warmup:
        text = "train.lr_warmup_steps is 0 or empty, and litgpt finetune divides by it: it stops; make it at least 1"
        fields.note("warm-up", text, "stops")
        return None
    if lowest and fields.has("train.min_lr"):
        text = f"train.min_lr is {lowest:g}, and litgpt finetune does not use it: the learning rate decays to 0"
        fields.note("learning-rate", text)
    return WarmupDecay("cosine", warmup, run.steps or 0, horizon_part=1.0)


FORMAT = Format(
    "litgpt",
    read,
    endings=(".yaml", ".yml"),
    fields=(
        *("train.lr_warmup_steps", "train.lr_warmup_fraction", "train.max_tokens", "train.max_seq_length"),
        *("train.max_norm", "train.tie_embeddings", "eval.max_new_tokens", "eval.initial_validation"),
        "eval.final_validation",
    ),
)

"""axolotl's YAML files: ``micro_batch_size`` samples per rank and batch, and one number of steps for the whole run.

axolotl hands the Trainer ``max_steps``: the configured number, or the samples of all epochs over the global batch,
rounded up once. Ranks of context and tensor parallelism read the same data; before March 2026 axolotl counted them as
data ranks, and its epochs were too long or too short. Sources at 067b021c: ``utils/config/__init__.py``
(``normalize_config``), ``utils/trainer.py`` (``calculate_total_num_steps``), ``utils/distributed.py``
(``_get_parallel_config_kwargs``), ``core/builders/base.py``, ``core/trainers/mixins/scheduler.py`` and
``utils/schemas/validation.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from countoff.core.ranks import ORDERS
from countoff.plan.fields import ConfigError, Fields
from countoff.plan.formats import Format
from countoff.plan.job import Job, Origin
from countoff.plan.readers.transformers import TRAINING_ARGUMENTS, note_misspelt
from countoff.plan.schedules import TrainerSchedule

__all__ = ["FORMAT", "read"]

_COUNTED = (
    *("micro_batch_size", "gradient_accumulation_steps", "num_epochs", "max_steps", "sequence_len", "sample_packing"),
    *("warmup_steps", "warmup_ratio", "lr_scheduler", "learning_rate", "cosine_min_lr_ratio"),
    *("cosine_constant_lr_ratio", "context_parallel_size", "tensor_parallel_size", "dp_shard_size"),
    "dp_replicate_size",
)
_KNOWN = {*TRAINING_ARGUMENTS, *_COUNTED, "batch_size", "eval_batch_size", "sequence_parallel_degree"}
_SCHEDULERS = (
    *("cosine", "one_cycle", "rex", "linear", "cosine_with_restarts", "polynomial", "constant"),
    *("constant_with_warmup", "inverse_sqrt", "reduce_lr_on_plateau", "cosine_with_min_lr"),
    *("cosine_warmup_with_min_lr", "warmup_stable_decay", "greedy"),
)
# The curves of these follow from the file; those of the others also from lr_scheduler_kwargs, or from the loss.
_PLAIN = ("cosine", "rex", "linear", "constant", "constant_with_warmup")
_DEFAULT_WARMUP = 0.03
_DEFAULT_WARMUP_CAP = 100


def read(data: Mapping[str, Any]) -> Job:
    """Returns the run that an axolotl YAML describes.

    Args:
        data: The parsed file.

    Raises:
        ConfigError: If a field has a wrong type or is outside its domain.
    """
    fields = Fields(data, reads_exponents=True)
    note_misspelt(fields, data, _KNOWN, _COUNTED, ignored_by="axolotl")
    batch_size, accumulation = _batches(fields)
    steps = fields.parse_count("steps", "max_steps", None)
    epochs = _epochs(fields, steps)
    packed = fields.flag("sample_packing", False)
    sizes = _sizes(fields)
    _note_checkpoints(fields)
    _note_refused(fields, packed=packed, context_parallel=sizes[2], batch_size=batch_size, steps=steps)
    # Samples that are neither packed nor padded have at most this many tokens.
    full = packed or fields.flag("pad_to_sequence_len", False)
    return Job(
        framework="axolotl",
        names=ORDERS["accelerate"].names,
        sizes=sizes,
        data_dims=ORDERS["accelerate"].data_dims,
        batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        sequence_length=fields.parse_count("sequence_length", "sequence_len", 512) if full else None,
        accelerate_shards="batches",
        steps=steps,
        epochs=epochs if steps is None else None,
        steps_rounding="down" if packed else "run_up",
        drop_last=fields.flag("dataloader_drop_last", False),
        learning_rate=fields.number("learning_rate", "learning_rate", None),
        schedule=_schedule(fields, steps),
        origins=fields.origins,
        unknown=fields.unknown_numbers,
        issues=tuple(fields.issues),
    )


def _batches(fields: Fields) -> tuple[int, int]:
    """Returns the samples per rank and batch, and the batches per step."""
    micro = fields.parse_count("batch_size", "micro_batch_size", 1) or 1
    of_rank = fields.parse_count("", "batch_size", None)
    accumulation = fields.parse_count("gradient_accumulation_steps", "gradient_accumulation_steps", 1) or 1
    names = ("micro_batch_size", "gradient_accumulation_steps", "batch_size")
    written = [name for name in names if fields.has(name)]
    if len(written) < 2:
        only = f"the file has {written[0]} alone" if written else "the file has none"
        text = f"axolotl needs two of {', '.join(names)}, and {only}: it stops"
        fields.note("batch", text, "stops")
    elif fields.has("gradient_accumulation_steps") and of_rank is not None:
        text = f"gradient_accumulation_steps is {accumulation} and batch_size is {of_rank}: axolotl takes only one"
        fields.note("batch", f"{text} of them, and stops", "stops")
    elif of_rank is not None:
        accumulation = _accumulation_of(fields, of_rank, micro)
    return micro, accumulation


def _accumulation_of(fields: Fields, of_rank: int, micro: int) -> int:
    """Returns the batches per step that follow from the deprecated ``batch_size``, which counts samples of one rank."""
    fields.origins["gradient_accumulation_steps"] = Origin("batch_size")
    if of_rank < micro:
        raise ConfigError(f"batch_size {of_rank} must be at least micro_batch_size {micro}")
    if of_rank % micro:
        text = f"batch_size {of_rank} is no multiple of micro_batch_size {micro}: a step has {of_rank // micro * micro}"
        fields.note("batch", f"{text} samples per rank, and axolotl counts {of_rank} when it plans the steps", "silent")
    return of_rank // micro


def _epochs(fields: Fields, steps: int | None) -> int | float | None:
    epochs = fields.number("epochs", "num_epochs", 1.0)
    if epochs is not None and epochs <= 0:
        raise ConfigError(f"num_epochs must be a number above 0, got {epochs:g}")
    if steps is not None and fields.origins.pop("epochs").given:
        text = f"max_steps is {steps:,} and num_epochs is {fields.text('num_epochs')}"
        fields.note("length", f"{text}: max_steps ends the run, and num_epochs has no effect")
    return int(epochs) if epochs is not None and epochs == int(epochs) else epochs


def _sizes(fields: Fields) -> tuple[int, ...]:
    """Returns the ranks along dp_replicate, dp_shard, cp, sp and tp, as axolotl fills up those that are not written."""
    cp = fields.parse_count("cp", ("context_parallel_size", "sequence_parallel_degree"), 1) or 1
    tp = fields.parse_count("tp", "tensor_parallel_size", 1) or 1
    shard = fields.parse_count("dp_shard", "dp_shard_size", None)
    replicate = fields.parse_count("dp_replicate", "dp_replicate_size", 1) or 1
    experts = fields.parse_count("", "expert_parallel_size", 1) or 1  # its ranks read their own data
    with_fsdp = fields.has("fsdp_config") or fields.has("fsdp")
    if shard is None:
        return replicate, -1 if replicate == 1 or with_fsdp else 1, cp, 1, tp
    if shard == 1:
        return replicate, -1 if with_fsdp else experts, cp, 1, tp
    if replicate == 1:
        return -1, shard * experts, cp, 1, tp
    return replicate, shard * experts, cp, 1, tp


def _note_checkpoints(fields: Fields) -> None:
    """Adds the issues of saves and evaluations that are configured twice (``check_saves``, ``check_evals``)."""
    for kind, per_epoch in (("save", "saves_per_epoch"), ("eval", "evals_per_epoch")):
        steps, strategy = fields.text(f"{kind}_steps"), fields.text(f"{kind}_strategy")
        if not fields.number("", f"{kind}_steps", None):
            continue
        if strategy not in (None, "steps"):
            text = f"{kind}_strategy is {strategy} and {kind}_steps is {steps}: axolotl stops; leave one out"
            fields.note("checkpoints", text, "stops")
        if fields.number("", per_epoch, None):
            text = f"{kind}_steps is {steps} and {per_epoch} is {fields.text(per_epoch)}: axolotl stops; leave one out"
            fields.note("checkpoints", text, "stops")


def _note_refused(fields: Fields, *, packed: bool, context_parallel: int, batch_size: int, steps: int | None) -> None:
    """Adds the issues of numbers that axolotl refuses together."""
    if packed and context_parallel > 1 and batch_size > 1:
        text = f"micro_batch_size is {batch_size}, and sample_packing with {context_parallel} context parallel ranks"
        fields.note("batch", f"{text} needs 1: axolotl stops", "stops")
    for name in ("pretraining_dataset", "streaming"):
        if steps is None and fields.has(name) and fields.text(name) not in ("False", "[]", "{}", ""):
            text = f"{name} needs max_steps, because such data has no length: axolotl stops"
            fields.note("length", text, "stops")


def _schedule(fields: Fields, steps: int | None) -> TrainerSchedule | None:
    curve = fields.choice("lr_scheduler", _SCHEDULERS, "cosine")
    warmup_steps = fields.parse_count("", "warmup_steps", None, minimum=0)
    ratio = fields.number("", "warmup_ratio", None)
    lowest = fields.number("", "cosine_min_lr_ratio", None)
    constant_from = fields.number("", "cosine_constant_lr_ratio", None)
    for name, value in (
        ("warmup_ratio", ratio),
        ("cosine_min_lr_ratio", lowest),
        ("cosine_constant_lr_ratio", constant_from),
    ):
        if value is not None and not 0 <= value <= 1:
            raise ConfigError(f"{name} must be from 0 to 1, got {value:g}")
    if warmup_steps and ratio:
        text = (
            f"warmup_steps is {warmup_steps} and warmup_ratio is {ratio:g}: axolotl takes only one of them, and stops"
        )
        fields.note("warm-up", text, "stops")
    _note_unused(fields, curve, lowest, constant_from)
    if curve == "constant" and (warmup_steps or ratio):
        key = "warmup_steps" if warmup_steps else "warmup_ratio"
        text = f"{key} is {fields.text(key)}, and lr_scheduler constant has no warm-up: the first step has the full"
        fields.note("warm-up", f"{text} learning rate; use constant_with_warmup", "silent")
    if curve not in _PLAIN or fields.has("lr_scheduler_kwargs") or fields.has("jagged_restart_steps"):
        return None
    in_steps = warmup_steps is not None
    fields.origins["warmup_steps"] = Origin(
        "warmup_steps" if in_steps else "warmup_ratio", given=in_steps or ratio is not None
    )
    schedule = TrainerSchedule(
        cast("Any", curve),
        # axolotl makes two steps of one.
        warmup_steps=0 if curve == "constant" else 2 if warmup_steps == 1 else warmup_steps or 0,
        warmup_part=None if in_steps or curve == "constant" else _DEFAULT_WARMUP if ratio is None else ratio,
        warmup_rounding="down",
        warmup_cap=_DEFAULT_WARMUP_CAP if ratio is None else None,
        warmup_curve="square" if curve == "cosine" and fields.flag("lr_quadratic_warmup", False) else "linear",
        min_factor=lowest or 0.0 if _has_minimum(fields, curve) else 0.0,
        decay_part=constant_from or 1.0 if curve == "cosine" and _has_minimum(fields, curve) and lowest else 1.0,
    )
    return schedule if steps is None else schedule.planned_for(steps)


def _has_minimum(fields: Fields, curve: str) -> bool:
    return curve == "rex" or (curve == "cosine" and not fields.flag("lr_quadratic_warmup", False))


def _note_unused(fields: Fields, curve: str, lowest: float | None, constant_from: float | None) -> None:
    """Adds the issues of ratios that the chosen curve does not use."""
    if lowest and curve not in ("cosine", "rex") and not fields.has("jagged_restart_steps"):
        text = f"cosine_min_lr_ratio is {lowest:g}, and lr_scheduler {curve} does not use it"
        fields.note("learning-rate", f"{text}: axolotl does so with cosine and rex", "silent")
    elif lowest and curve == "cosine" and fields.flag("lr_quadratic_warmup", False):
        text = f"cosine_min_lr_ratio is {lowest:g}, and axolotl does not use it with lr_quadratic_warmup"
        fields.note("learning-rate", f"{text}: the learning rate ends at 0", "silent")
    if constant_from and not (lowest and curve == "cosine"):
        text = f"cosine_constant_lr_ratio is {constant_from:g}, and has no effect without cosine_min_lr_ratio above 0"
        fields.note("learning-rate", f"{text} and lr_scheduler cosine", "silent")


FORMAT = Format(
    "axolotl",
    read,
    endings=(".yaml", ".yml"),
    fields=(
        *("sequence_len", "sample_packing", "dataset_prepared_path", "saves_per_epoch", "evals_per_epoch"),
        *("pad_to_sequence_len", "val_set_size", "eval_sample_packing", "train_on_inputs"),
    ),
)

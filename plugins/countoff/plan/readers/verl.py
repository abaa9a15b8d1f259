"""verl's YAML files and overrides: reinforcement learning (``main_ppo``) and supervised fine-tuning (``sft_trainer``).

A step of reinforcement learning reads ``data.train_batch_size`` prompts, makes ``rollout.n`` samples of each, and
updates the actor once per mini-batch and pass. The schedule ticks once per step, not once per update, and verl plans
it for the steps of the run, whatever ``optim.total_training_steps`` says.
Source: verl b178a3cd, ``ActorRolloutRefWorker.__init__`` and ``update_actor`` in ``verl/workers/fsdp_workers.py``,
``DataParallelPPOActor.update_policy`` in ``verl/workers/actor/dp_actor.py``, ``validate_config`` in
``verl/utils/config.py``, ``RayPPOTrainer._create_dataloader`` in ``verl/trainer/ppo/ray_trainer.py``,
``FSDPSFTTrainer._normalize_config_bsz`` and ``_build_model_optimizer`` in ``verl/trainer/fsdp_sft_trainer.py``, and the
defaults in ``verl/trainer/config``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from countoff.core.ranks import ORDERS
from countoff.plan.fields import ConfigError, Fields, misspelt
from countoff.plan.formats import Format
from countoff.plan.job import Job, Origin
from countoff.plan.references import with_references
from countoff.plan.schedules import WarmupDecay

__all__ = ["FORMAT", "read"]

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_UNSET = (-1, "???")
# The fields that decide the numbers of a run: a misspelt one is reported.
_COUNTED = {
    "data": ("train_batch_size",),
    "trainer": ("total_epochs", "total_training_steps", "n_gpus_per_node", "nnodes"),
    _ACTOR: ("ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_epochs", "ulysses_sequence_parallel_size"),
    f"{_ACTOR}.optim": ("lr_warmup_steps_ratio", "lr_warmup_steps", "total_training_steps", "min_lr_ratio"),
}


def read(data: Mapping[str, Any]) -> Job:
    """Returns the run that a configuration of verl describes.

    Args:
        data: The parsed file, or the overrides as nested sections; ``${…}`` is replaced by the field that it names.

    Raises:
        ConfigError: If a field has a wrong type or is outside its domain, or references go round in a circle.
    """
    fields = Fields(with_references(data, relative=True), reads_exponents=True)
    _note_misspelt(fields)
    job = _reinforcement(fields) if fields.has("actor_rollout_ref") else _fine_tuning(fields)
    return Job(
        **job,
        framework="verl",
        unknown=fields.unknown_numbers,
        origins=fields.origins,
        issues=tuple(fields.issues),
    )


def _note_misspelt(fields: Fields) -> None:
    for section, known in _COUNTED.items():
        for name in fields.section(section):
            meant = misspelt(str(name), known)
            if meant is not None:
                text = f"there is no {section}.{name}; did you mean {meant}? verl stops on it."
                fields.note("unknown-field", text, "stops")


def _world_size(fields: Fields, default_per_node: int) -> int | None:
    per_node = fields.parse_count("", "trainer.n_gpus_per_node", default_per_node) or 1
    nodes = fields.parse_count("", "trainer.nnodes", 1) or 1
    if not {"trainer.n_gpus_per_node", "trainer.nnodes"}.isdisjoint(fields.unknown):
        return None
    given = fields.has("trainer.n_gpus_per_node") or fields.has("trainer.nnodes")
    fields.origins["world_size"] = Origin("trainer.n_gpus_per_node × trainer.nnodes", given=given)
    return per_node * nodes if given else None


def _reinforcement(fields: Fields) -> dict[str, Any]:
    # With 0, as its fully asynchronous trainer has it, the prompts come one by one.
    prompts = fields.parse_count("global_batch_size", "data.train_batch_size", 1024, minimum=0)
    mini = fields.parse_count("mini_batch_size", f"{_ACTOR}.ppo_mini_batch_size", 256)
    samples = fields.parse_count("samples_per_prompt", f"{_ROLLOUT}.n", 1) or 1
    known = bool(prompts) and not {"data.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size", f"{_ROLLOUT}.n"} & set(
        fields.unknown
    )
    if samples > 1:
        for name in ("global_batch_size", "mini_batch_size"):
            origin = fields.origins[name]
            fields.origins[name] = Origin(f"{origin.key} × {_ROLLOUT}.n", given=origin.given)
    dynamic = fields.flag(f"{_ACTOR}.use_dynamic_bsz", False)
    steps = fields.parse_count("steps", "trainer.total_training_steps", None, unset=_UNSET)
    epochs = fields.parse_count("epochs", "trainer.total_epochs", 30)
    _note_overruled(fields, steps)
    world_size = _world_size(fields, 8)
    _check_rollout(fields, world_size)
    return {
        **_mesh(fields),
        "global_batch_size": (prompts or 1) * samples if known else None,
        "mini_batch_size": (mini or 1) * samples if known else None,
        "update_passes": fields.parse_count("update_passes", f"{_ACTOR}.ppo_epochs", 1) or 1,
        "micro_batch_size": None if dynamic else _micro_batch(fields, f"{_ACTOR}.ppo_micro_batch_size_per_gpu"),
        "micro_batches_vary": dynamic,
        "samples_per_prompt": samples,
        "dealt": True,
        "drop_last": True,
        "steps": steps,
        "epochs": epochs if steps is None or fields.has("trainer.total_epochs") else None,
        "world_size": world_size,
        "learning_rate": fields.number("learning_rate", f"{_ACTOR}.optim.lr", None),
        "schedule": _schedule(fields, f"{_ACTOR}.optim", steps, None),
    }


def _check_rollout(fields: Fields, world_size: int | None) -> None:
    """Adds the issue of rollout workers whose sizes do not divide the ranks (``_build_rollout``)."""
    names = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
    sizes = {name: fields.parse_count("", f"{_ROLLOUT}.{name}", 1) or 1 for name in names}
    width = math.prod(sizes.values())
    if world_size is not None and world_size % width:
        product = " × ".join(f"{_ROLLOUT}.{name} {size}" for name, size in sizes.items() if size > 1)
        key = fields.origins["world_size"].key
        fields.note("dims", f"{key} = {world_size} ranks do not divide by {product}: verl stops", "stops")


def _micro_batch(fields: Fields, path: str) -> int | None:
    return fields.parse_count("micro_batch_size", path, None, unset=_UNSET)


def _mesh(fields: Fields) -> dict[str, Any]:
    """Returns the dims: Megatron's, or data and sequence parallel ranks."""
    if fields.has(f"{_ACTOR}.megatron") or fields.text(f"{_ACTOR}.strategy") == "megatron":
        sizes = {
            name: fields.parse_count(name, f"{_ACTOR}.megatron.{one}_model_parallel_size", 1) or 1
            for name, one in (("pp", "pipeline"), ("tp", "tensor"))
        }
        context = fields.parse_count("cp", f"{_ACTOR}.megatron.context_parallel_size", 1) or 1
        order = ORDERS["megatron"]
        return {
            "names": order.names,
            "sizes": (sizes["pp"], -1, context, sizes["tp"]),
            "data_dims": order.data_dims,
        }
    paths = (f"{_ACTOR}.ulysses_sequence_parallel_size", f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size")
    path = next((one for one in paths if fields.has(one) and fields.raw(one) != 1), paths[0])
    return _dp_and_sp(fields.parse_count("sp", path, 1) or 1)


def _dp_and_sp(sequence_parallel: int) -> dict[str, Any]:
    return {"names": ("dp", "sp"), "sizes": (-1, sequence_parallel), "data_dims": ("dp",)}


def _note_overruled(fields: Fields, steps: int | None) -> None:
    path = f"{_ACTOR}.optim.total_training_steps"
    own = fields.parse_count("", path, None, unset=_UNSET)
    if own is not None and own != steps:
        text = (
            f"{path} is {own:,} and has no effect: verl plans the schedule for the steps of the run, which "
            f"trainer.total_training_steps or trainer.total_epochs gives"
        )
        fields.note("override", text)


def _schedule(fields: Fields, section: str, steps: int | None, default_curve: str | None) -> WarmupDecay | None:
    """Returns the schedule of a section, which is as long as the run.

    Args:
        fields: The configuration.
        section: The section of the optimizer.
        steps: Steps of the run; None if the epochs give them.
        default_curve: The curve where none is written; None: a constant one.

    Raises:
        ConfigError: If a field has a wrong type or is outside its domain.
    """
    style = fields.text(f"{section}.lr_decay_style")
    names = ("warmup_style", "lr_scheduler_type", "lr_scheduler")
    written = next((f"{section}.{name}" for name in names if fields.has(f"{section}.{name}")), f"{section}.{names[1]}")
    curve = style or fields.choice(written, ("constant", "cosine", "wsd"), default_curve or "constant")
    part = fields.number("", f"{section}.lr_warmup_steps_ratio", 0.0) or 0.0
    if not 0 <= part <= 1:
        raise ConfigError(f"{section}.lr_warmup_steps_ratio must be a number from 0 to 1, got {part:g}")
    warmup = fields.parse_count("warmup_steps", f"{section}.lr_warmup_steps", None, minimum=0, unset=_UNSET)
    lowest = fields.number("", f"{section}.min_lr_ratio", 0.0) or 0.0
    has_unknown = any(path.startswith(f"{section}.") and path != f"{section}.lr" for path in fields.unknown)
    if curve not in ("constant", "cosine", "linear") or has_unknown or fields.has(f"{section}.min_lr"):
        return None
    if warmup is None:
        fields.origins["warmup_steps"] = Origin(f"{section}.lr_warmup_steps_ratio", written=f"{part:g}")
    decays = "constant" if curve == "constant" else "cosine" if curve == "cosine" else "linear"
    own_part = part if warmup is None else None
    fields.origins["horizon_steps"] = fields.origins["epochs" if steps is None else "steps"]
    schedule = WarmupDecay(decays, warmup or 0, 0, lowest, own_part, 1.0, warmup_rounding="down")
    return schedule if steps is None else schedule.planned_for(steps)


def _fine_tuning(fields: Fields) -> dict[str, Any]:
    batch = fields.parse_count("global_batch_size", "data.train_batch_size", 256)
    known = "data.train_batch_size" not in fields.unknown
    dynamic = fields.flag("data.use_dynamic_bsz", False)
    steps = fields.parse_count("steps", "trainer.total_training_steps", None, unset=_UNSET)
    epochs = fields.parse_count("epochs", "trainer.total_epochs", 4)
    paths = ("ulysses_sequence_parallel_size", "engine.ulysses_sequence_parallel_size")
    path = next((one for one in paths if fields.has(one)), paths[0])
    return {
        **_dp_and_sp(fields.parse_count("sp", path, 1) or 1),
        "global_batch_size": batch if known else None,
        "mini_batch_size": batch if known else None,
        "micro_batch_size": None if dynamic else _micro_batch(fields, "data.micro_batch_size_per_gpu"),
        "micro_batches_vary": dynamic,
        "drop_last": True,
        "steps": steps,
        "epochs": epochs if steps is None or fields.has("trainer.total_epochs") else None,
        "world_size": _world_size(fields, 8),
        "learning_rate": fields.number("learning_rate", "optim.lr", None),
        "schedule": None if _plans_epochs(fields, steps) else _schedule(fields, "optim", steps, "cosine"),
    }


def _plans_epochs(fields: Fields, steps: int | None) -> bool:
    """Whether the trainer plans its schedule for the epochs although steps end the run; then adds a note."""
    # Only the files of fsdp_sft_trainer have these.
    if steps is None or not (fields.has("model.partial_pretrain") or fields.has("optim.lr_scheduler")):
        return False
    text = (
        f"trainer.total_training_steps ends the run after {steps:,} steps, and fsdp_sft_trainer plans the learning "
        f"rate for all steps of trainer.total_epochs: it does not reach its end"
    )
    fields.note("horizon", text)
    return True


FORMAT = Format(
    "verl",
    read,
    endings=(".yaml", ".yml"),
    fields=(
        *("actor_rollout_ref", "algorithm.adv_estimator", "data.train_batch_size", "data.micro_batch_size_per_gpu"),
        *("trainer.n_gpus_per_node", "trainer.nnodes", "trainer.total_epochs", "model.partial_pretrain"),
    ),
    arguments=lambda launch: launch.fields,
)

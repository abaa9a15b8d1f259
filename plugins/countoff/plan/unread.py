"""Runs whose format countoff does not read: how one of them is recognised, and the flags that give its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from countoff.plan.fields import Fields

__all__ = ["is_lightning_cli", "plan_of_lightning_cli", "plan_of_numbers"]

# The names of frameworks and scripts for what each flag takes.
_FLAGS = {
    "--batch-size": ("batch_size", "per_device_batch_size", "train_batch_size", "micro_batch_size"),
    "--accumulation": ("gradient_accumulation_steps", "accumulation_steps", "accumulate_grad_batches", "grad_accum"),
    "--steps": ("max_steps", "steps", "num_steps", "train_steps", "max_train_steps"),
    "--epochs": ("epochs", "num_epochs", "max_epochs", "num_train_epochs"),
}
_SHOWN = ("--batch-size",)
"""Flags that are shown with a letter where no number is found."""
_TOP = {"trainer", "model", "data", "optimizer", "lr_scheduler", "ckpt_path"}
"""The fields at the top of a configuration of the Lightning CLI, but for its seed."""


def plan_of_numbers(numbers: Mapping[str, object], ranks: int | None) -> str:
    """Returns the command that plans a run, with the numbers that are known, and letters for the others.

    Args:
        numbers: The numbers of the run by the names that they have there.
        ranks: Ranks of the run; None if unknown.

    Example:
        >>> plan_of_numbers({"batch_size": 32, "epochs": 3, "lr": 0.1}, 8)
        'countoff plan --world-size 8 --batch-size 32 --epochs 3 --dataset-size N'
        >>> plan_of_numbers({"max_steps": 500}, None)
        'countoff plan --world-size N --batch-size N --steps 500'
    """
    words = ["countoff plan", "--world-size", "N" if ranks is None else str(ranks)]
    for flag, names in _FLAGS.items():
        found = next((numbers[name] for name in names if _is_count(numbers.get(name))), None)
        if flag == "--epochs" and (found is None or "--steps" in words):
            continue  # one length is enough
        if found is not None or flag in _SHOWN:
            words += [flag, "N" if found is None else str(found)]
    if "--epochs" in words:
        words += ["--dataset-size", "N"]
    return " ".join(words)


def is_lightning_cli(data: Mapping[str, Any], *, for_sure: bool) -> bool:
    """Whether a configuration is one of the Lightning CLI.

    Args:
        data: The parsed file.
        for_sure: Whether it must have what no other format has; if not, a file that has nothing else is one.

    Example:
        >>> is_lightning_cli({"trainer": {"max_epochs": 3}, "model": {"class_path": "my.Model"}}, for_sure=True)
        True
        >>> is_lightning_cli({"trainer": {"max_epochs": 3}, "model": {"layers": 2}}, for_sure=True)
        False
        >>> is_lightning_cli({"trainer": {"max_epochs": 3}, "model": {"layers": 2}}, for_sure=False)
        True
        >>> is_lightning_cli({"trainer": {}, "seed_everything": 1, "exp_manager": {}}, for_sure=True)  # NeMo's
        False
    """
    fields = Fields(_command(data))
    if not isinstance(fields.raw("trainer"), Mapping) or fields.has("exp_manager"):
        return False
    if any(fields.has(path) for path in ("seed_everything", "model.class_path", "data.class_path")):
        return True
    return not for_sure and _command(data).keys() <= _TOP


def plan_of_lightning_cli(data: Mapping[str, Any]) -> str:
    """Returns the command that plans the run of a configuration of the Lightning CLI.

    Args:
        data: The parsed file.
    """
    fields = Fields(_command(data))
    devices, nodes = fields.raw("trainer.devices"), fields.raw("trainer.num_nodes")
    per_node = len(cast("list[object]", devices)) if isinstance(devices, list) else devices
    nodes = 1 if nodes is None else nodes
    ranks = per_node * nodes if isinstance(per_node, int) and isinstance(nodes, int) else None
    numbers: dict[str, object] = {}
    for section in ("data", "data.init_args", "trainer"):
        found = fields.raw(section)
        numbers |= cast("Mapping[str, object]", found) if isinstance(found, Mapping) else {}
    return plan_of_numbers(numbers, ranks if _is_count(ranks) else None)


def _command(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the fields of ``fit``, where a file has the fields of each command of the Lightning CLI."""
    fit = data.get("fit")
    return cast("Mapping[str, Any]", fit) if isinstance(fit, Mapping) and "trainer" not in data else data


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0

"""``countoff plan`` and ``countoff check``: from arguments to a ``Job``, and from its plans to text."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json

from countoff.core.arithmetic.dim_orders import ORDERS
from countoff.core.cli import show
from countoff.core.configs import read_job
from countoff.core.configs.checks import about_length, check_job
from countoff.core.configs.issues import CODES, worst_first
from countoff.core.configs.job import Job, Origin, RunPlan
from countoff.core.ranks import INFERRED

__all__ = ["check", "plan"]

# Flags that set a number of a Job, by its name there.
_NUMBERS = {
    "batch_size": "batch_size",
    "seq_len": "sequence_length",
    "accumulation": "gradient_accumulation_steps",
    "global_batch_size": "global_batch_size",
    "steps": "steps",
    "epochs": "epochs",
    "dataset_size": "dataset_size",
}
# The names that frameworks have for the dims of the flags.
_DIMS = {
    "dp_replicate": ("dp_replicate", "data_parallel_replicate"),
    "dp_shard": ("dp_shard", "data_parallel_shard", "data_parallel", "data"),
    "cp": ("cp",),
    "tp": ("tp", "tensor_parallel", "model"),
    "pp": ("pp", "pipe"),
}


def plan(chosen: argparse.Namespace) -> int:
    """Prints the plan of a run on one or several world sizes.

    Returns:
        The exit code, 0.

    Raises:
        ValueError: If there is no plan; one line says why.
    """
    job = _job(chosen)
    plans = [RunPlan.of(job, world_size=world_size) for world_size in _world_sizes(chosen, job)]
    wishes = show.Wishes(_rates(chosen), _ramp(chosen), _seen(chosen))
    noticed = [worst_first([*job.issues, *about_length(one)]) for one in plans]
    if chosen.json:
        shown = [show.as_json(one, wishes, found) for one, found in zip(plans, noticed, strict=True)]
        print(json.dumps(shown[0] if len(shown) == 1 else shown, indent=2))
        return 0
    show.table(plans, wishes)
    for one in plans:
        print(f"{one.ranks.world_size} ranks: {one.identity}")
    if chosen.explain:
        show.explain(plans[0])
    for issue in worst_first(issue for found in noticed for issue in found):
        print(issue.line)
    return 0


def check(chosen: argparse.Namespace) -> int:
    """Prints what is wrong with a configuration, one line each, the worst first.

    Returns:
        The exit code: 1 if something has to be done, else 0.

    Raises:
        ValueError: If the configuration cannot be read; one line says why.
    """
    job = _job(chosen)
    for code in chosen.ignore:
        if code not in CODES:
            near = difflib.get_close_matches(code, CODES, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"--ignore knows no code {code!r}{hint}; known: {', '.join(CODES)}")
    worst = 0
    sizes = _world_sizes(chosen, job)
    for world_size in sizes:
        found = [one for one in check_job(job, world_size=world_size) if one.code not in chosen.ignore]
        faults = sum(one.is_fault for one in found)
        worst = max(worst, int(bool(faults)))
        for issue in found:
            print(f"{f'{world_size} ranks: ' if len(sizes) > 1 else ''}{issue.line}")
        if not faults:
            print(f"{chosen.config} on {world_size} ranks: no fault found")
    return worst


def _job(chosen: argparse.Namespace) -> Job:
    if chosen.config is None:
        order = ORDERS["torchtitan"]
        sizes = tuple(INFERRED if name == order.inferred else 1 for name in order.names)
        job = Job("", order.names, sizes, order.data_dims)
    else:
        job = read_job(chosen.config, framework=chosen.framework)
    for flag in ("epochs", "drop_last", "strided"):
        if getattr(chosen, flag) and chosen.dataset_size is None:
            raise ValueError(f"{_flag(flag)} needs --dataset-size N: nothing else says how long an epoch is")
    changes: dict[str, object] = {}
    origins = dict(job.origins)
    for flag, name in _NUMBERS.items():
        if getattr(chosen, flag) is not None:
            changes[name] = _whole(flag, getattr(chosen, flag))
            origins[name] = Origin(_flag(flag))
    for flag in ("drop_last", "strided"):
        if getattr(chosen, flag):
            changes[flag] = True
            origins[flag] = Origin(_flag(flag))
    if (chosen.steps is None) != (chosen.epochs is None):
        # How long the run is, is one thing: a flag for it wins over the file's, in whatever unit that is.
        other = "epochs" if chosen.epochs is None else "steps"
        changes[other] = None
        origins.pop(other, None)
    changes["sizes"] = _sizes(chosen, job, origins)
    return dataclasses.replace(job, origins=origins, **changes)  # pyright: ignore[reportArgumentType]


def _sizes(chosen: argparse.Namespace, job: Job, origins: dict[str, Origin]) -> tuple[int, ...]:
    sizes = dict(zip(job.names, job.sizes, strict=True))
    flagged: list[str] = []
    for flag, names in _DIMS.items():
        text = getattr(chosen, flag)
        if text is None:
            continue
        name = next((one for one in names if one in sizes), None)
        if name is None:
            raise ValueError(f"{_flag(flag)}: {job.framework} has no such dim; it has {', '.join(sizes)}")
        sizes[name] = _whole(flag, text, inferred=True)
        origins[name] = Origin(_flag(flag))
        flagged.append(name)
    if sum(size == INFERRED for size in sizes.values()) > 1 and flagged:
        # A -1 of the file's own, or of ours, yields to the one that was asked for.
        asked = [name for name in flagged if sizes[name] == INFERRED]
        for name in sizes:
            if asked and sizes[name] == INFERRED and name not in flagged:
                sizes[name] = 1
    return tuple(sizes.values())


def _world_sizes(chosen: argparse.Namespace, job: Job) -> list[int]:
    if chosen.world_size:
        if chosen.nodes or chosen.ranks_per_node:
            raise ValueError("give --world-size, or --nodes with --ranks-per-node, not both")
        return [_whole("world_size", part) for text in chosen.world_size for part in text.split(",")]
    if chosen.nodes or chosen.ranks_per_node:
        if not (chosen.nodes and chosen.ranks_per_node):
            raise ValueError("--nodes and --ranks-per-node need each other: world size = nodes × ranks per node")
        return [_whole("nodes", chosen.nodes) * _whole("ranks_per_node", chosen.ranks_per_node)]
    if job.world_size is not None:
        return [job.world_size]
    unsaid = f"{chosen.config} does not say; " if chosen.config else ""
    raise ValueError(f"how many ranks? {unsaid}give --world-size N, or --nodes N --ranks-per-node N")


def _rates(chosen: argparse.Namespace) -> tuple[float, int] | None:
    if chosen.lr is None and chosen.lr_batch is None:
        return None
    if chosen.lr is None or chosen.lr_batch is None:
        raise ValueError("--lr and --lr-batch need each other: the rate, and the global batch size it was tuned for")
    try:
        rate = float(chosen.lr)
    except ValueError:
        raise ValueError(f"--lr must be a number above 0, got {chosen.lr}") from None
    if not 0 < rate < float("inf"):
        raise ValueError(f"--lr must be a number above 0, got {chosen.lr}")
    return rate, _whole("lr_batch", chosen.lr_batch)


def _ramp(chosen: argparse.Namespace) -> tuple[int, int, int] | None:
    if chosen.ramp is None:
        return None
    parts = [_whole("ramp", part) for part in chosen.ramp.split(",")]
    if len(parts) != 3:
        raise ValueError(f"--ramp must be START,STEP,SAMPLES, got {chosen.ramp}")
    return parts[0], parts[1], parts[2]


def _seen(chosen: argparse.Namespace) -> int | None:
    return None if chosen.resume_samples is None else _whole("resume_samples", chosen.resume_samples)


def _whole(flag: str, text: str, *, inferred: bool = False) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1 and not (inferred and number == INFERRED):
        also = f", or {INFERRED} for what is left over" if inferred else ""
        raise ValueError(f"{_flag(flag)} must be a whole number of at least 1{also}, got {text or 'nothing'}")
    return number


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"

"""Reads which ranks hold the very parameters that this rank's optimizers change.

Only such ranks must train with the same learning rates: the stages of a pipeline, or groups of experts, rightly have
rates of their own. What proves it is what keeps the parameters equal, or holds shards of one: DistributedDataParallel,
FSDP, or the mesh of a DTensor.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from countoff._adapter.weight_hashes import is_ignored, modules_of, parameters_of, synchronises_in_its_own_way
from countoff.core.data.plain import bases_of

__all__ = ["holders"]


def holders(models: Iterable[Any], optimizers: Iterable[Any]) -> tuple[int, ...]:
    """Returns the ranks that are proven to hold each parameter that the optimizers change; none if that proves none.

    It raises nothing.

    Args:
        models: Modules that the rank trains, as a framework or the user wraps them.
        optimizers: Its optimizers.
    """
    with contextlib.suppress(Exception):  # objects of the user's, or a process group that is gone
        known: dict[int, frozenset[int]] = {}
        for model in models:
            known |= _of_model(model)
        # Not `parameters_in`, which leaves out a group that is not as torch's: that group would prove nothing.
        changed = [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]
        found = [known.get(id(parameter), frozenset[int]()) for parameter in changed]
        return tuple(sorted(frozenset.intersection(*found))) if found else ()
    return ()


def _of_model(model: Any) -> dict[int, frozenset[int]]:
    """The ranks that hold each parameter of a model, by the parameter's id."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    known: dict[int, frozenset[int]] = {}
    for _, parameter in parameters_of(model):
        mesh = getattr(parameter, "device_mesh", None)  # of a DTensor
        if mesh is not None:
            known[id(parameter)] = frozenset(mesh.mesh.flatten().tolist())
    for _, module in modules_of(model):
        kinds = bases_of(type(module))
        replicated = DistributedDataParallel in kinds and not synchronises_in_its_own_way(module)
        if not (replicated or (fsdp is not None and fsdp.FullyShardedDataParallel in kinds)):
            continue
        ranks = frozenset(dist.get_process_group_ranks(module.process_group))
        for name, parameter in parameters_of(module):
            if not (replicated and is_ignored(module, name.removeprefix("module."))):
                known.setdefault(id(parameter), ranks)
    return known

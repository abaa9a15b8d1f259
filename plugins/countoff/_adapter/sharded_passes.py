"""Counts the forward passes of models whose shards all compared ranks hold (FSDP), where they are collectives.

A pass counts if it has issued a collective in the process group of the shards. FSDP gathers nothing that is still
gathered, as between a pass without gradients and the next backward pass: there a rank may run more passes than the
others, and all is well.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from countoff._adapter.forward_passes import Hook
from countoff._adapter.weight_hashes import modules_of, parameters_of
from countoff.core.data.plain import attributes_of, bases_of

if TYPE_CHECKING:
    from countoff._adapter.fit import Fit

__all__ = ["count_sharded_passes", "sharded_parts", "shards_group"]

_WHOLE = ("FULL_SHARD", "SHARD_GRAD_OP")
"""Strategies of FSDP1 by which all ranks of its process group hold the shards of one model."""


def count_sharded_passes(fit: Fit) -> Callable[[], None]:
    """Reports the forward passes of a fit's models to its guard, if all ranks that it compares hold shards of each.

    Each model may be sharded as a whole, or hold modules that are, as where a framework wraps it. A pass inside of
    another one is not counted, nor one inside a backward pass. Once torch.compile has compiled one of the models with
    its hooks, nothing is counted.

    Args:
        fit: The fit, before it begins.

    Returns:
        A function that ends that.
    """
    with contextlib.suppress(Exception), contextlib.ExitStack() as stack:  # as without a process group any more
        found = [sharded_parts(model) for model in fit.models()] if fit.own.world_size > 1 else []
        models = [part for parts in found for part in parts]
        groups = [shards_group(model, fit.guard.state.ranks) for model in models]
        if models and all(found) and all(group is not None for group in groups):
            passes = _ShardedPasses(fit)
            for model, group in zip(models, groups, strict=True):
                begin, end = _Calls(passes, passes.begin_in(group)), _Calls(passes, passes.end)
                # Before FSDP's own hook, which gathers, and behind the one that frees what was gathered.
                stack.callback(model.register_forward_pre_hook(begin, prepend=True).remove)
                stack.callback(model.register_forward_hook(end, always_call=True).remove)
            return stack.pop_all().close
    return _nothing


def sharded_parts(model: Any) -> list[Any]:
    """Returns the modules of a model that FSDP shards and that no other one of them holds; torch.compile may wrap each.

    Args:
        model: A module, as a framework holds it.
    """
    sharded = [each for _, each in modules_of(model) if _is_sharded(_inside(each))]
    held = {id(each) for outer in sharded for _, each in modules_of(outer) if each is not outer}
    return [each for each in sharded if id(each) not in held]


def shards_group(model: Any, ranks: Sequence[int]) -> Any:
    """Returns the process group of the ranks that hold a model's shards; None if these are not the given ranks.

    Args:
        model: One of the `sharded_parts`.
        ranks: The ranks that are compared, ascending.
    """
    inside = _inside(model)
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    bases = bases_of(type(inside))
    if fsdp is None:
        return None
    if fsdp.FullyShardedDataParallel in bases:
        groups = {inside.process_group} if inside.sharding_strategy.name in _WHOLE else set[Any]()
    elif getattr(fsdp, "FSDPModule", None) in bases:
        meshes = [mesh for _, each in parameters_of(inside) if (mesh := getattr(each, "device_mesh", None)) is not None]
        # In a mesh of several dims, some ranks hold the same shard, or a part of it.
        groups = {mesh.get_group() if mesh.ndim == 1 else None for mesh in meshes}
    else:
        return None
    group = groups.pop() if len(groups) == 1 else None
    same = group is not None and sorted(dist.get_process_group_ranks(group)) == list(ranks)
    return group if same else None


def _inside(model: Any) -> Any:
    """What torch.compile has wrapped; else the module itself."""
    return attributes_of(model).get("_modules", {}).get("_orig_mod", model)


def _is_sharded(module: Any) -> bool:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    names = ("FullyShardedDataParallel", "FSDPModule")
    return fsdp is not None and any(getattr(fsdp, name, None) in bases_of(type(module)) for name in names)


class _ShardedPasses:
    """The passes of a fit's models.

    Args:
        fit: The fit. Its guard may change.

    Attributes:
        compiled: Whether compiled code has run a hook, or may have.
    """

    def __init__(self, fit: Fit) -> None:
        self.compiled = False
        self._fit = fit
        self._depth = 0
        self._began: tuple[Any, int] | None = None

    def begin_in(self, group: Any) -> Callable[..., None]:
        """Returns what is called before each pass of a module whose shards lie in a process group."""

        def begin(*_: Any) -> None:
            self._depth += 1
            in_backward = torch._C._current_graph_task_id() != -1
            if not (self._depth > 1 or in_backward or self.compiled or self._fit.trains_apart):
                self._began = group, _issued(group)
                self._fit.guard.forward_pass_begins()

        return begin

    def end(self, _module: Any, _inputs: Any, result: Any) -> None:
        """Called behind each pass."""
        self._depth = max(0, self._depth - 1)
        if self._depth or self._began is None:
            return
        (group, before), self._began = self._began, None
        has_raised = result is None
        counts = not (has_raised or self.compiled) and _issued(group) != before
        self._fit.guard.forward_pass_ended(counts=counts)


class _Calls(Hook):
    """A hook that calls a function, except in compiled code.

    Args:
        passes: What observes the passes of the module.
        call: The function.
    """

    def __init__(self, passes: _ShardedPasses, call: Callable[..., None]) -> None:
        self._passes = passes
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        if torch.compiler.is_compiling():
            self._passes.compiled = True  # compiled code does this too
        else:
            self._call(*arguments)


def _issued(group: Any) -> int:
    """How many collectives this rank has issued in a process group; 0 where torch does not tell."""
    with contextlib.suppress(Exception):  # read through a name that torch does not promise
        return int(group._get_sequence_number_for_group())
    return 0


def _nothing() -> None:
    pass

"""Watches the loops over torch's own loaders, in programs that attach nothing."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from countoff._adapter.hooks import MethodHook
from countoff._run.unobserved import say_unobserved

__all__ = ["hook"]

_LOADERS = {
    "torch.utils.data.dataloader": "DataLoader",
    "torchdata.stateful_dataloader.stateful_dataloader": "StatefulDataLoader",
}
"""By module: its loader, which iterates by itself."""
_COUNTED_THERE = frozenset(
    {
        "countoff._run.watched_accelerators",
        "countoff.composer",
        "countoff.fabric",
        "countoff.lightning",
        "countoff.lingua",
        "countoff.pytorch_lightning",
        "countoff.torchtitan",
        "countoff.transformers",
    }
)
"""Modules that are imported where a framework's Trainer, or a loop over what it has prepared, is counted."""
_wrappers: weakref.WeakSet[Any] = weakref.WeakSet()
_engines: weakref.WeakSet[Any] = weakref.WeakSet()
_MODELS = {
    "torch.nn.parallel.distributed": ("DistributedDataParallel", _wrappers),
    "deepspeed.runtime.engine": ("DeepSpeedEngine", _engines),
}
"""By module: its class of models in whose optimizer steps ranks may meet, and where each of them is kept."""


def hook(module: Any) -> None:
    """Watches what is made of a class of torch's, of torchdata's or of DeepSpeed's, from here on.

    Args:
        module: That of a loader, of `DistributedDataParallel`, or of `DeepSpeedEngine`.
    """
    loader = _LOADERS.get(module.__name__)
    if loader is not None:
        MethodHook(getattr(module, loader), "__iter__", instead=_iterate)
        return
    name, made = _MODELS[module.__name__]
    MethodHook(getattr(module, name), "__init__", after=lambda model, /, *_, **__: made.add(model))


def _iterate(iterate: Callable[[Any], Iterator[Any]], loader: Any) -> Iterator[Any]:
    batches = iterate(loader)
    watched = _watched() if _may_train() else None
    followed = None if watched is None else watched.follow(loader, batches)
    return batches if followed is None else followed


def _may_train() -> bool:
    """Whether this process is one of several ranks, not a loader's worker, and may train now in a loop of its own."""
    if not _COUNTED_THERE.isdisjoint(sys.modules):
        return False
    dist, worker = sys.modules["torch.distributed"], sys.modules["torch.utils.data._utils.worker"]
    ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return ranks and worker.get_worker_info() is None and sys.modules["torch"].is_grad_enabled()


@functools.cache
def _watched() -> Any:
    try:
        from countoff._run.watched_loaders import WatchedLoaders
    except ImportError as error:  # another version of torch, which lacks something
        say_unobserved("a loop over torch's loaders", str(error))
        return None
    return WatchedLoaders(_wrappers, _engines)

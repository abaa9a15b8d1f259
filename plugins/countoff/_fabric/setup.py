"""What Fabric sets up, told to the loaders of its callback, while that callback exists. Imports no Fabric.

Fabric has no loop, and it calls no callback when it sets up loaders. So while a callback of countoff's exists, Fabric's
class has a `setup_dataloaders` of countoff's, and the class of the loaders that it returns has an `__iter__` of
countoff's. Both call Fabric's own. The Fabric and its loaders stay as they are.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from countoff._adapter.hooks import SharedHooks
from countoff._adapter.loader_followers import LoaderFollowers
from countoff._fabric.loaders import FabricLoaders

__all__ = ["watch_fabric"]

_PACKAGES = ("lightning.fabric", "lightning_fabric")


class _Watch(NamedTuple):
    """A callback, as long as it exists, and the loaders of its Fabric."""

    callback: weakref.ref[Any]
    loaders: FabricLoaders


def watch_fabric(callback: Any, loaders: FabricLoaders) -> None:
    """Adds what a Fabric sets up to the loaders of its callback, while that callback exists.

    It concerns the Fabric packages that are imported by now. When the last such callback is gone, their classes get
    their own methods back. Of two such callbacks of one Fabric, the first one counts.

    Args:
        callback: One of a Fabric's callbacks, now or later.
        loaders: The loaders of that Fabric.
    """
    hooks = contextlib.ExitStack()
    hooks.callback(_watches.add(_Watch(weakref.ref(callback), loaders)))
    hooks.callback(_followers.add(loaders.follow))
    weakref.finalize(callback, hooks.close).atexit = False


def _classes() -> Iterator[tuple[type, type]]:
    """Yields Fabric's class, and that of the loaders that it sets up, of each package that is imported."""
    for package in _PACKAGES:
        fabric = getattr(sys.modules.get(package), "Fabric", None)
        loader = getattr(sys.modules.get(f"{package}.wrappers"), "_FabricDataLoader", None)
        if fabric is not None and loader is not None:
            yield fabric, loader


def _methods() -> dict[tuple[type, str], Callable[..., Any]]:
    """Returns what stands in for methods of Fabric's class."""
    found: dict[tuple[type, str], Callable[..., Any]] = {}
    for fabric, _ in _classes():
        found |= {
            (fabric, "setup_dataloaders"): _set_up_loaders,
            (fabric, "backward"): _backward,
            (fabric, "setup"): _set_up,
            (fabric, "setup_module"): _set_up,
            (fabric, "setup_optimizers"): _set_up,
        }
    return found


_watches: SharedHooks[_Watch] = SharedHooks(_methods)
_followers = LoaderFollowers(lambda: [loader for _, loader in _classes()])


def _watching(fabric: Any) -> list[FabricLoaders]:
    """Returns what watches a Fabric, in the order of its callbacks."""
    known = {id(watch.callback()): watch.loaders for watch in _watches}  # the id of None is that of no callback
    return [known[id(each)] for each in getattr(fabric, "_callbacks", ()) if id(each) in known]


def _set_up_loaders(setup: Callable[..., Any], fabric: Any, *dataloaders: Any, **options: Any) -> Any:
    result = setup(fabric, *dataloaders, **options)
    found = _watching(fabric)
    for loaders in found[1:]:
        loaders.leave_to_others()
    for loaders in found[:1]:
        loaders.add(fabric, result if isinstance(result, list) else [result])
    return result


def _backward(backward: Callable[..., Any], fabric: Any, *arguments: Any, **options: Any) -> Any:
    result = backward(fabric, *arguments, **options)
    for loaders in _watching(fabric):
        if loaders.loop is not None:
            loaders.loop.micro_batch()
    return result


def _set_up(setup: Callable[..., Any], fabric: Any, *parts: Any, **options: Any) -> Any:
    result = setup(fabric, *parts, **options)
    for loaders in _watching(fabric)[:1]:
        for part in result if isinstance(result, tuple) else (result,):
            if isinstance(part, torch.nn.Module):
                loaders.add_model(part)
            else:
                loaders.add_optimizer(getattr(part, "optimizer", None))
    return result

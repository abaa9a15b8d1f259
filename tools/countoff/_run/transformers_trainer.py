"""Adds the callback to every Trainer of transformers when it is made, unless it has one."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from countoff._adapter.hooks import MethodHook
from countoff._run.unobserved import say_unobserved

__all__ = ["hook"]

_added: weakref.WeakSet[Any] = weakref.WeakSet()


def hook(module: Any) -> None:
    """Adds the callback to the Trainers that are made from here on.

    Args:
        module: ``transformers.trainer``.
    """
    MethodHook(module.Trainer, "__init__", after=_made)
    MethodHook(module.Trainer, "add_callback", before=_adds)


def _made(trainer: Any, *_: Any, **__: Any) -> None:
    try:
        from countoff.transformers import Countoff
    except ImportError as error:  # another version of transformers or Accelerate, which lacks something
        say_unobserved("transformers' Trainer", str(error))
        return
    if not any(isinstance(each, Countoff) for each in trainer.callback_handler.callbacks):
        callback = Countoff()
        _added.add(callback)
        trainer.callback_handler.add_callback(callback)


def _adds(trainer: Any, callback: Any) -> None:
    """Makes way for a callback of the program's own, which may have other options."""
    adapter = sys.modules.get("countoff.transformers")
    if adapter is not None and (callback is adapter.Countoff or isinstance(callback, adapter.Countoff)):
        handler = trainer.callback_handler
        # Only of our own class is it asked, because that calls the `__hash__` of what it is asked about.
        handler.callbacks[:] = [
            each for each in handler.callbacks if not (type(each) is adapter.Countoff and each in _added)
        ]

"""Adds the callback to every Trainer of Composer when it is made, unless it is given one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from countoff._adapter.hooks import MethodHook
from countoff._run.unobserved import say_unobserved

__all__ = ["hook"]


def hook(module: Any) -> None:
    """Adds the callback to the Trainers that are made from here on.

    Args:
        module: ``composer.trainer.trainer``.
    """
    MethodHook(module.Trainer, "__init__", instead=_make)


def _make(make: Callable[..., None], *arguments: Any, callbacks: Any = None, **options: Any) -> None:
    try:
        from composer.utils import ensure_tuple

        from countoff.composer import Countoff
    except ImportError as error:  # another version of Composer, which lacks something
        say_unobserved("Composer's Trainer", str(error))
        return make(*arguments, callbacks=callbacks, **options)
    given = list(ensure_tuple(callbacks))
    if not any(isinstance(each, Countoff) for each in given):
        given.append(Countoff())  # its state is in checkpoints, which are loaded while a Trainer is made
    return make(*arguments, callbacks=given, **options)

"""Turns countoff on in code that knows nothing of it: in every Composer Trainer and every Accelerator of a process.

Lightning and Fabric need no help: there `COUNTOFF=1` does it.
"""

import functools
import runpy
import sys
from typing import Any

_handles: list[Any] = []


def count_in_composer() -> None:
    """Adds the callback to every Composer Trainer that is made from here on."""
    from composer import Trainer

    from countoff.composer import Countoff

    original = Trainer.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **options: Any) -> None:
        given = options.get("callbacks") or []
        callbacks = [*given] if isinstance(given, (list, tuple)) else [given]
        options["callbacks"] = [*callbacks, Countoff()]
        original(self, *args, **options)

    Trainer.__init__ = init


def count_in_accelerate() -> None:
    """Attaches to every Accelerator as soon as it has prepared a loader; the attachment before it ends there."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    from countoff.accelerate import attach

    original = Accelerator.prepare

    @functools.wraps(original)
    def prepare(self: Any, *args: Any, **options: Any) -> Any:
        prepared = original(self, *args, **options)
        objects = prepared if isinstance(prepared, tuple) else (prepared,)
        loader = next((each for each in objects if isinstance(each, DataLoader)), None)
        if loader is not None:
            detach_all()
            _handles.append(attach(self, train=loader))
        return prepared

    Accelerator.prepare = prepare


def detach_all() -> None:
    """Ends every attachment to an Accelerator."""
    while _handles:
        _handles.pop().detach()


if __name__ == "__main__":  # python counted.py MODULE: one of Accelerate's scripts, with countoff on
    count_in_accelerate()
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)

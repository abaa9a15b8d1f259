"""Turns countoff on in code that knows nothing of it: in every Composer Trainer and every Accelerator of a process.

Lightning needs no help: there `COUNTOFF=1` does it. In a loop with Accelerate no pass is counted, because nothing in it
says which; what countoff does with an Accelerator's own methods, and with the steps of its optimizers, is there.
"""

import functools
import runpy
import sys
from typing import Any

_fits: list[Any] = []


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
    """Begins a fit with every Accelerator as soon as it has prepared a loader; the fit before it ends there."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    from countoff.accelerate import Countoff

    original = Accelerator.prepare

    @functools.wraps(original)
    def prepare(self: Any, *args: Any, **options: Any) -> Any:
        prepared = original(self, *args, **options)
        objects = prepared if isinstance(prepared, tuple) else (prepared,)
        if any(isinstance(each, DataLoader) for each in objects):
            close_all()
            _fits.append(Countoff(self))
            _fits[-1].start()
        return prepared

    Accelerator.prepare = prepare


def close_all() -> None:
    """Ends the fit with an Accelerator that goes on."""
    while _fits:
        _fits.pop().close()


if __name__ == "__main__":  # python counted.py MODULE: one of Accelerate's scripts, with countoff on
    count_in_accelerate()
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)

"""What is done once a program has a process group: the launcher is told of it, and a stall outside a fit is found.

At the end of a program that has trained, it is said what to add to it, if nothing was counted.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from typing import Any

from countoff._run.environment import REPORT
from countoff.core.at_exit import at_exit, exception_at_exit
from countoff.core.session.threads import first_fit

__all__ = ["hook"]

_NOTHING_COUNTED = (
    "countoff: the ranks' batches were not compared: this program trains in a loop of its own. To compare them, make "
    "{made} {after}, and iterate countoff.train(loader): from countoff.{module} import Countoff."
)
_WAYS = (
    ("accelerate", "countoff = Countoff(accelerator)", "after prepare()"),
    ("lightning.fabric", "countoff = Countoff(fabric, optimizer=optimizer)", "after fabric.setup()"),
    ("lightning_fabric", "countoff = Countoff(fabric, optimizer=optimizer)", "after fabric.setup()"),
    ("torch", "countoff = Countoff(model=model, optimizer=optimizer)", "after init_process_group"),
)
"""By package: what to make in a program that uses it, and where."""
_trains = False
"""Whether this process has applied an optimizer step since it has had other ranks."""


def hook(module: Any) -> None:
    """Waits for the first process group.

    Args:
        module: ``torch.distributed.distributed_c10d``.
    """
    own = module.init_process_group

    @functools.wraps(own)
    def init_process_group(*arguments: Any, **options: Any) -> Any:
        result = own(*arguments, **options)
        _joined(module.get_rank(), module.get_world_size())
        if module.get_world_size() > 1:
            _watch_before_fit()
        return result

    module.init_process_group = init_process_group


def _watch_before_fit() -> None:
    from countoff.core.session.threads.before_fit import watch
    from countoff.core.settings import Settings, SettingsError  # these take a while, so only where there is a group

    with contextlib.suppress(SettingsError):  # the fit raises it
        watch(Settings.resolve())


@functools.cache
def _joined(rank: int, world_size: int) -> None:
    if report := os.environ.get(REPORT):
        with contextlib.suppress(OSError):  # another rank has made it, or it is of another host
            os.close(os.open(report, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600))
    if world_size > 1 and rank == 0:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(_stepped)
        at_exit(_say_if_nothing_was_counted)


def _stepped(*_: Any) -> None:
    global _trains
    _trains = True


@functools.cache
def _say_if_nothing_was_counted() -> None:
    failed = getattr(sys, "last_value", None) is not None or exception_at_exit() is not None
    if _trains and not failed and not first_fit.begun():
        name, made, after = next((each for each in _WAYS if _uses(each[0])), _WAYS[-1])
        text = _NOTHING_COUNTED.format(made=made, after=after, module=name.split(".")[-1].removeprefix("lightning_"))
        print(text, file=sys.stderr, flush=True)


def _uses(package: str) -> bool:
    """Whether the program uses a package. transformers imports Accelerate where nothing makes an Accelerator."""
    if package != "accelerate":
        return package in sys.modules
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    return bool(getattr(state, "_shared_state", None))

"""countoff for Hugging Face Accelerate: ``attach(accelerator, train=…, eval=…)``, once, after ``prepare()``.

Accelerate has no callbacks. Passes are observed where its loaders are iterated, optimizer steps where torch applies
them, and resuming in the hooks of `save_state` and `load_state`; the loop stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from countoff._adapter.requirements import needs

with needs("Accelerate", facade="countoff.accelerate", install="'countoff[accelerate]'"):
    from countoff._accelerate.beginning import begin_loop
    from countoff._accelerate.loaders import is_prepared
from countoff._adapter.handle import Attached
from countoff._adapter.observed_loaders import argument_of, evaluation_loaders
from countoff._adapter.options import own_arguments
from countoff.core import Settings

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from countoff.core.settings import OptionValues

__all__ = ["Attached", "attach"]


def attach(
    accelerator: Any,
    *,
    train: Any = None,
    eval: Any = None,  # the name that every adapter uses
    epochs: int | None = None,
    max_steps: int | None = None,
    dataset_size: int | None = None,
    start_epoch: int = 0,
    **options: Unpack[OptionValues],
) -> Attached:
    """Watches a loop over prepared loaders. Collective: every rank must call it, after `accelerator.prepare()`.

    It waits for the other ranks at most `deadline_seconds`; nothing later waits for one longer than 50 ms, except that
    `accelerator.load_state()` begins another fit at the checkpoint's position.

    Args:
        accelerator: The Accelerator that has prepared the loaders.
        train: The prepared train loader.
        eval: The prepared evaluation loader, or a mapping from names to loaders.
        epochs: Epochs of the run, at least 0, if known: learning-rate schedules are compared with it.
        max_steps: Optimizer steps after which the run ends, at least 0, if there is such a limit.
        dataset_size: Samples of the whole train dataset over all ranks, at least 1. A warning says if each rank reads
            only a share of its share. None: that is found only where the objects or the data show it.
        start_epoch: Number of the first epoch, where a run resumes by other means than `accelerator.load_state()`.
        options: Those of `countoff.core.Settings`.

    Returns:
        A handle, which is also a context manager. If it is not used as one, the fit ends when the program ends.

    Raises:
        SettingsError: If an option or a ``COUNTOFF_*`` variable has a bad value.
        TypeError: If a loader was not prepared, or there is none.
        PlanMismatch: If ranks begin with different plans.
        ValueError: If `dataset_size` is below 1.
    """
    settings = Settings.resolve(*own_arguments(attach), **options)
    evaluations = evaluation_loaders(eval)
    _check_prepared({**({} if train is None else {None: train}), **evaluations})
    loop = begin_loop(
        accelerator,
        settings,
        train=train,
        evaluations=evaluations,
        epochs=epochs,
        max_steps=max_steps,
        dataset_size=dataset_size,
        start_epoch=start_epoch,
    )
    return Attached(loop)


def _check_prepared(loaders: Mapping[str | None, Any]) -> None:
    if not loaders:
        raise TypeError("attach() needs a loader to watch: attach(accelerator, train=…, eval=…)")
    for name, loader in loaders.items():
        if not is_prepared(loader):
            raise TypeError(
                f"attach({argument_of(name)}=…) got a {type(loader).__name__} that Accelerate has not prepared: call "
                "attach() after accelerator.prepare(), with the loader that prepare() returned"
            )

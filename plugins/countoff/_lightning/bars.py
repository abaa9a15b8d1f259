"""The totals of Lightning's progress bars: how many batches an epoch or an evaluation has, where Lightning is wrong.

Only the attribute `total` of a bar is set, by which a bar displays. No limit, no schedule and nothing that trains reads
it. A bar that counts in its user's own way is left alone.
"""

from __future__ import annotations

import contextlib
from typing import Any

from countoff._adapter.torch_facts import of_library

__all__ = ["show"]

_PACKAGES = "lightning", "pytorch_lightning"
_EVALUATION = ("{}_progress_bar", "total_{}_batches_current_dataloader")
_COUNTING = {
    "train": ("{}_progress_bar", "total_{}_batches", "on_{}_epoch_start", "on_{}_batch_end"),
    "val": (*_EVALUATION, "on_validation_batch_start", "on_validation_batch_end"),
    "test": (*_EVALUATION, "on_{}_batch_start", "on_{}_batch_end"),
}
"""By what a bar is of: the bar, and what counts its batches and its total."""


def show(trainer: Any, kind: str, batches: int | None, *, ended: bool = False) -> bool:
    """Sets the total of a bar that Lightning has set too long, or to none; returns whether there was a bar to set.

    Args:
        trainer: Lightning's Trainer.
        kind: What the bar is of: ``train``, ``val`` or ``test``.
        batches: The true number of batches; None if it is not known.
        ended: Whether all of them are done. A bar that does not draw each batch is left then, as one that seems to have
            stopped before its end.
    """
    callback = trainer.progress_bar_callback
    if batches is None or not _counts_as_lightning(callback, kind) or not callback.is_enabled:
        return True
    bar = None
    with contextlib.suppress(Exception):  # its bar has not begun
        bar = getattr(callback, f"{kind}_progress_bar")
    if bar is None:
        return False
    behind = ended and getattr(bar, "n", batches) != batches  # tqdm's: its `refresh_rate` is above 1
    if not behind and (bar.total is None or bar.total > batches):
        bar.total = batches
        if hasattr(bar, "refresh"):  # of tqdm, which draws nothing by itself
            bar.refresh()
    return True


def _counts_as_lightning(callback: Any, kind: str) -> bool:
    """Returns whether a bar is one of Lightning's own classes, or counts its batches and its total as these do."""
    names = ("is_enabled", *_COUNTING[kind])
    defined = (getattr(type(callback), name.format(kind), None) for name in names)
    return all(of_library(getattr(each, "fget", each), *_PACKAGES) for each in defined)

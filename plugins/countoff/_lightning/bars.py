"""The totals of Lightning's progress bars: how many batches an epoch or an evaluation has, where Lightning is wrong.

Only the attribute `total` of a bar is set, by which a bar displays. No limit, no schedule and nothing that trains reads
it. A bar that counts in its user's own way is left alone.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

from countoff._adapter.torch_facts import has_library_methods

__all__ = ["give_back", "show"]

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
    bar = _bar(callback, kind)
    if bar is None:
        return False
    behind = ended and getattr(bar, "n", batches) != batches  # tqdm's: its `refresh_rate` is above 1
    if not behind and (bar.total is None or bar.total > batches):
        _set(callback, bar, batches)
    return True


def give_back(trainer: Any, kind: str, batches: int) -> None:
    """Sets the total that Lightning has itself: an epoch or an evaluation has more batches than those before it.

    Args:
        trainer: Lightning's Trainer.
        kind: What the bar is of: ``train``, ``val`` or ``test``.
        batches: The total that was shown. A bar with another one, as of its user's own, is left alone.
    """
    callback = trainer.progress_bar_callback
    if not _counts_as_lightning(callback, kind) or not callback.is_enabled or (bar := _bar(callback, kind)) is None:
        return
    if bar.total != batches:
        return
    own = getattr(callback, _COUNTING[kind][1].format(kind))
    _set(callback, bar, None if _of_tqdm(bar) and math.isinf(own) else own)


def _bar(callback: Any, kind: str) -> Any:
    """Returns a bar; None if it has not begun."""
    with contextlib.suppress(Exception):
        return getattr(callback, f"{kind}_progress_bar")
    return None


def _of_tqdm(bar: Any) -> bool:
    return hasattr(bar, "refresh")


def _set(callback: Any, bar: Any, total: float | None) -> None:
    if _of_tqdm(bar):
        bar.total = total
        bar.refresh()  # tqdm draws nothing by itself
    else:  # rich's own way also lets go of what it has noted of a bar that had reached its total
        callback.progress.update(bar.id, total=total)


def _counts_as_lightning(callback: Any, kind: str) -> bool:
    """Returns whether a bar is one of Lightning's own classes, or counts its batches and its total as these do."""
    names = [name.format(kind) for name in ("is_enabled", *_COUNTING[kind])]
    return has_library_methods(callback, names, *_PACKAGES)

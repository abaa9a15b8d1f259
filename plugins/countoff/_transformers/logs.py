"""What the Trainer's logs and its progress bar get of the true totals.

The Trainer hands its logs to one callback after the other, its reporters first. So the totals are added before it hands
them to any. Those of an evaluation stay as they are: the table of a model card is made of all that they have, and must
have the same columns in each row. Of the bar, only the attribute `total` is set, which nothing that trains reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import ProgressCallback
from transformers.trainer_callback import CallbackHandler

from countoff._adapter.counted_loop import CountedLoop
from countoff._adapter.hooks import SharedHooks
from countoff._adapter.torch_facts import has_library_methods

__all__ = ["TrainerLogs"]

_COUNTING = ("on_train_begin", "on_step_end")
"""The methods of its ProgressCallback that make the bar and move it."""

_OF_TRAINING = {"loss", "train_runtime"}
"""What the Trainer's logs of training steps have, and those of the end of the training."""


class TrainerLogs:
    """The totals of one training, for what its Trainer shows until it ends.

    Args:
        callback: The callback that the Trainer has.
        loop: The training.
        from_start: Whether it begins with the first epoch, so that epochs are counted from there.
        whole_epochs: Whether no number of epochs ends it in the middle of one: the plan has whole ones.
    """

    def __init__(self, callback: Any, loop: CountedLoop, *, from_start: bool, whole_epochs: bool) -> None:
        self._callback = callback
        self._loop = loop
        self._from_start = from_start
        self._whole_epochs = whole_epochs
        self._evaluated: dict[str, float] = {}

    def follow(self) -> Callable[[], None]:
        """Adds to the logs from here on; returns a function that ends that."""
        return _followed.add(self)

    def evaluated(self, found: Mapping[str, float]) -> None:
        """Takes what an evaluation has read, for the next logs."""
        self._evaluated |= self._loop.fit.changed(found)

    def news(self, handler: Any) -> dict[str, float]:
        """Returns what is to be added to the logs that a handler hands to its callbacks."""
        if not self._belongs_to(handler):
            return {}
        self._loop.passes.settle()
        found, self._evaluated = {**self._loop.fit.news(), **self._loop.fit.unused(), **self._evaluated}, {}
        if not self._knows_steps:
            found.pop("countoff/max_steps", None)
        epoch = self._epoch()
        return found if epoch is None else found | {"countoff/epoch": epoch}

    def show(self, handler: Any) -> None:
        """Sets the total of the Trainer's bar where the run is known to have fewer optimizer steps."""
        fit = self._loop.fit
        plan = None if fit.totals is None or fit.settings.totals == "off" else fit.totals.plan
        if plan is None or plan.total_steps is None or not self._belongs_to(handler) or not self._knows_steps:
            return
        for callback in handler.callbacks:
            draws = isinstance(callback, ProgressCallback) and has_library_methods(callback, _COUNTING, "transformers")
            bar = getattr(callback, "training_bar", None) if draws else None
            if bar is not None and bar.total is not None and bar.total > plan.total_steps:
                bar.total = plan.total_steps
                bar.refresh()

    def _belongs_to(self, handler: Any) -> bool:
        return any(each is self._callback for each in handler.callbacks)

    @property
    def _knows_steps(self) -> bool:
        """Whether the run ends with the steps of the plan.

        With a wrong length, it does not where `max_steps` ends it, because that length also limits its epochs, and
        where it resumes, because the Trainer computes from that length the epoch in which it goes on.
        """
        if self._loop.fit.totals is None or not self._whole_epochs:
            return False
        plan = self._loop.fit.totals.plan
        right = plan.reported_batches_per_epoch in (None, plan.batches_per_epoch)
        return right or (plan.facts.max_epochs is not None and self._from_start)

    def _epoch(self) -> float | None:
        """The epochs that are done, where the Trainer divides by a wrong number, or by none, and the true one is known.

        It is not told where `totals="off"`, or where the training has not begun with the first epoch.
        """
        fit = self._loop.fit
        if fit.totals is None or not self._from_start or fit.settings.totals == "off":
            return None
        plan, done = fit.totals.plan, fit.progress()
        right = plan.reported_batches_per_epoch == plan.batches_per_epoch
        return None if right or done is None else round(max(0, self._loop.passes.epoch - 1) + done, 4)


def _log(method: Callable[..., Any], handler: Any, args: Any, state: Any, control: Any, logs: Any) -> Any:
    news: dict[str, float] = {}
    if not _OF_TRAINING.isdisjoint(logs or ()):
        for each in _followed:
            news |= each.news(handler)
    history = state.log_history if news and state.is_world_process_zero else None
    last = history[-1] if history and isinstance(history, list) else None
    if isinstance(last, dict):  # a Trainer of the user's may keep other things there
        last |= news  # as it was handed to the reporters
    return method(handler, args, state, control, {**logs, **news} if news else logs)


def _epoch_event(method: Callable[..., Any], handler: Any, *arguments: Any) -> Any:
    control = method(handler, *arguments)
    for each in _followed:
        each.show(handler)
    return control


_followed: SharedHooks[TrainerLogs] = SharedHooks(
    lambda: {
        (CallbackHandler, "on_log"): _log,
        (CallbackHandler, "on_epoch_begin"): _epoch_event,
        (CallbackHandler, "on_epoch_end"): _epoch_event,
    }
)

"""What Composer's progress bar, its console and its loggers get of the true totals.

Of the bar, the attribute `total` is set. The console's lines are written by a method that takes Composer's State: it
gets one that differs in the length alone. No limit, no schedule and nothing that trains reads either of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from composer.loggers import ConsoleLogger, ProgressBarLogger

from countoff._adapter.hooks import MethodHook
from countoff._adapter.torch_facts import has_library_methods

__all__ = ["log", "show", "show_in_console"]

_BAR = ("epoch_start", "eval_start", "batch_end", "eval_batch_end", "_build_pbar")
_CONSOLE = ("log_to_console", "_get_progress_string", "_get_eval_progress_string", "_get_total_eval_batches")
"""The methods that make a bar and move it, and those that write the console's lines."""


def log(state: Any, logger: Any, numbers: Mapping[str, float], words: str = "") -> None:
    """Gives numbers, if there are any, to Composer's own loggers as metrics.

    Not as hyperparameters, of which W&B and MLflow refuse another value, as in a resumed run. The console, which has a
    line for each metric, gets words in their place, in one line, or nothing.

    Args:
        state: Composer's State.
        logger: Composer's Logger.
        numbers: The numbers.
        words: The same as sentences, a line for each.
    """
    line: Any = {"countoff/totals": words.replace("\n", " ")}  # a text, which the console writes as any value
    for destination in logger.destinations if numbers else ():
        if not has_library_methods(destination, ["log_metrics"], "composer"):
            continue  # a user's own may know with what it is called, and raise
        if not isinstance(destination, ConsoleLogger):
            destination.log_metrics(dict(numbers), int(state.timestamp.batch))
        elif words and has_library_methods(destination, ["log_to_console"], "composer"):
            destination.log_metrics(line)


def show(state: Any, batches: int | None, *, train: bool) -> None:
    """Sets the total of the bar of a train epoch or of an evaluation, if Composer has set it too long.

    Args:
        state: Composer's State.
        batches: The true number of batches; None if it is not known.
        train: Whether it is a train epoch.
    """
    for each in state.callbacks if batches is not None else ():
        if isinstance(each, ProgressBarLogger) and has_library_methods(each, _BAR, "composer"):
            of = each.train_pbar if train else each.eval_pbar
            if of is None or (train and of.timestamp_key != "batch_in_epoch"):  # one of the whole run
                continue
            if of.pbar.total is None or of.pbar.total > batches:
                of.pbar.total = batches
                of.pbar.refresh()


def show_in_console(state: Any, length: Callable[[bool], int | None]) -> Callable[[], None]:
    """Has the console write the true length; returns a function that ends that.

    Args:
        state: Composer's State.
        length: Returns the true batches of a train epoch (True), or of the last evaluation that began (False); None if
            they are not known.
    """

    def write(method: Callable[..., Any], data: Any, state: Any, prefix: str = "", is_train: bool = True) -> None:
        method(data, _Shown.of(state, length(is_train)), prefix, is_train)

    consoles = [each for each in state.callbacks if isinstance(each, ConsoleLogger)]
    consoles = [each for each in consoles if has_library_methods(each, _CONSOLE, "composer")]
    hooks = [MethodHook(each, "log_to_console", instead=write) for each in consoles]

    def end() -> None:
        for hook in hooks:
            hook.remove()

    return end


class _Shown:
    """A State as the console reads it, with the true length of the current pass."""

    def __init__(self, state: Any, length: int) -> None:
        self._state = state
        self.dataloader_len = length

    @classmethod
    def of(cls, state: Any, length: int | None) -> Any:
        """Returns the State itself where its length is right, or the true one is not known."""
        believed = state.dataloader_len
        return state if length is None or believed is None or int(believed) <= length else cls(state, length)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

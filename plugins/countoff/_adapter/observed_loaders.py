"""The loaders of an observed loop: their passes are counted, and what they tell of themselves holds for the loop.

Each function lasts until the loop's fit has ended.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from countoff._adapter.class_swap import handle_of, swap_class
from countoff._adapter.even_loaders import STATE_METHODS, cover_state, even_pass, forget_state, saves_state
from countoff._adapter.forward_passes import count_forward_passes
from countoff._adapter.observed_loop import ObservedLoop

__all__ = ["argument_of", "cover_state_of", "evaluation_loaders", "observe_loaders", "share_length"]

_COUNTED = (
    "; for a generator, an iterator, a list or a function, leave out train= and take the batches from "
    "handle.counted(source)"
)


def evaluation_loaders(given: Any) -> Mapping[str, Any]:
    """Returns the evaluation loaders by name, as the argument `eval` of an `attach` gives them.

    Args:
        given: One loader, a mapping from names to loaders, or None.
    """
    if isinstance(given, Mapping):
        return given
    return {} if given is None else {"evaluation": given}


def argument_of(name: str | None) -> str:
    """Returns the argument of `attach` that gave a loader, by the evaluation's name; None for the train loader."""
    return "train" if name is None else "eval"


def observe_loaders(loop: ObservedLoop, loaders: Mapping[str | None, Any], models: Sequence[Any] = ()) -> None:
    """Counts the passes over loaders from here on.

    Another loop that still observes one of them is abandoned: it starts again, in a notebook, say, or after an
    exception.

    Args:
        loop: The loop.
        loaders: By the evaluation's name; None for the train loader.
        models: The modules whose forward passes for training are counted.

    Raises:
        TypeError: If a loader or a module cannot be observed; then none of them is.
    """
    for loader in loaders.values():
        if (earlier := handle_of(loader)) is not None:
            earlier.abandon()
    with contextlib.ExitStack() as stack:
        for name, loader in loaders.items():
            methods = STATE_METHODS if name is not None else {**STATE_METHODS, **_length_methods(loop)}
            follow = functools.partial(_follow, loop, name)
            try:
                stack.callback(swap_class(loader, follow, handle=loop, methods=methods))
                forget_state(loader)
            except TypeError as error:
                instead = _COUNTED if name is None else ""
                raise TypeError(f"attach({argument_of(name)}=…) {error}{instead}") from None
        stack.callback(count_forward_passes(models, loop.micro_batch))
        loop.until_end(stack.pop_all().close)


def cover_state_of(loop: ObservedLoop, loader: Any) -> None:
    """Lets a loader that can save its state report the one where the loop is.

    It matters where ranks take the same number of batches, because they fetch ahead then.
    """
    if loop.fit.settings.keeps_even and saves_state(loader) and all(each is not loader for each in loop.covered):
        loop.covered.append(loader)
        loop.until_end(cover_state(loader))


def share_length(loop: ObservedLoop, loader: Any) -> None:
    """Lets `len` of a loader give the batches of a train epoch on every rank, once known.

    It does nothing where ranks are not made even, and for a loader whose class cannot be exchanged.
    """
    if methods := _length_methods(loop):
        with contextlib.suppress(TypeError):
            loop.until_end(swap_class(loader, lambda _, batches: batches, methods=methods))


def _follow(loop: ObservedLoop, name: str | None, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
    even = functools.partial(even_pass, loader=loader, proven=name is None)
    return loop.passes.follow(batches, name, loader=loader, even=even)


def _length_methods(loop: ObservedLoop) -> Mapping[str, Callable[..., Any]]:
    return {} if loop.fit.settings.uneven_train == "raise" else {"__len__": functools.partial(_length_of, loop)}


def _length_of(loop: ObservedLoop, _: Any, own: Callable[[], int]) -> int:
    """What `len` gives, of which schedules are made and by which loops find their last batch."""
    length, common = own(), loop.guard.common_length
    return length if common is None or length != loop.own_length else common

"""Counts and times what a loader hands out where it is iterated, whoever iterates it.

It serves a framework that fetches a batch and may discard it without a hook, or that waits for other ranks before its
hook reports the batch. The loader's class is exchanged for a subclass while it is observed.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from countoff._adapter.class_swap import swap_class
from countoff.core.data.plain import attributes_of, bases_of
from countoff.core.data.unobserved import unobserved
from countoff.core.session.liveness.stacks import register_loader_file

__all__ = ["LoaderObserver", "ObservedPass", "samples_in"]

_DEPTH = 8
"""Containers inside of one another in a batch; a list may hold itself."""

register_loader_file(__file__)  # a rank whose stack has a frame of this module is in its loader


@dataclass
class ObservedPass:
    """One pass over a loader.

    Attributes:
        batches: Batches that the loader has handed out.
        skipped: Those of them that the framework discarded before the first batch that it used, as after a resume.
        exhausted: Whether the loader was asked for another batch and had none.
        last: The batch handed out last, until the next one is asked for.
    """

    batches: int = 0
    skipped: int = 0
    exhausted: bool = False
    last: Any = None


class LoaderObserver:
    """Counts what one loader hands out, until it is released.

    Args:
        loader: Any iterable.
        waited: Called after every fetch with the seconds that it took.
        failing: Called with an exception of the loader before it is raised; the program may catch it.
        failed: Called with an exception of countoff's, for a pass that has ended too early and raises nothing.
        exhausted: Called when the loader has been asked for another batch and had none.
        batch_requested: Called before the loader is asked for another batch in the pass that is used.

    Attributes:
        loader: The loader.
        expected: Batches that a pass is proven to have; a pass that ends earlier is reported as failed. None if nothing
            is proven.
        begun: The pass that began last; None before the first one, and where the loader cannot be observed because
            its class cannot be exchanged, as that of a list or a generator.
        used: The pass whose batches the framework uses, once that is known; any other pass only inspects the loader.
    """

    def __init__(
        self,
        loader: Any,
        waited: Callable[[float], None],
        *,
        failing: Callable[[BaseException], None],
        failed: Callable[[BaseException], None],
        exhausted: Callable[[], None] | None = None,
        batch_requested: Callable[[], None] | None = None,
    ) -> None:
        self.loader = loader
        self.expected: int | None = None
        self.begun: ObservedPass | None = None
        self.used: ObservedPass | None = None
        self._waited = waited
        self._failing = failing
        self._failed = failed
        self._exhausted = exhausted
        self._batch_requested = batch_requested
        self._give_back: Callable[[], None] | None = None
        with contextlib.suppress(TypeError):
            self._give_back = swap_class(loader, self._count)

    def release(self) -> None:
        """Gives the loader its own class back. Does nothing when called again."""
        if self._give_back is not None:
            self._give_back()
        self.begun = self.used = None

    def _count(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        self.begun = this = ObservedPass()
        while True:
            this.last = None  # so that the batch lives no longer than without an observer
            if self._batch_requested is not None and this is self.used:
                self._batch_requested()
            began = time.perf_counter()
            try:
                this.last = next(batches)
            except StopIteration:
                this.exhausted = True
                self._report_early_end(this)
                if self._exhausted is not None:
                    self._exhausted()
                return
            except Exception as error:  # of the user's own data set
                self._failing(error)
                raise
            self._waited(time.perf_counter() - began)
            this.batches += 1
            yield this.last

    def _report_early_end(self, this: ObservedPass) -> None:
        # A loader of streaming ends its pass, and raises nothing, when one of its background threads fails in a
        # download. It also does so when another pass begins, which is not a failure.
        if self.begun is this and self.expected is not None and this.batches < self.expected:
            ended = f"the loader ended after {this.batches} of {self.expected} batches"
            self._failed(RuntimeError(f"{ended}; its own log may hold the exception of a download"))


def samples_in(batch: Any) -> int | None:
    """Returns the samples in a batch: the length of its first tensor; None for a batch of another kind.

    It is for messages only, so it raises nothing and calls no method of the user's classes. It reads the storage of
    containers that are built in, also where a class is made from one, and tensors and arrays of exactly these types.
    """
    for _ in range(_DEPTH):
        kind = type(batch)
        if any(base is UserDict for base in bases_of(kind)):  # an abstract base: `issubclass` asks the metaclass
            batch = attributes_of(batch).get("data")
        elif issubclass(kind, dict):
            batch = next(iter(dict.values(batch)), None)
        elif issubclass(kind, (list, tuple)):
            own = list if issubclass(kind, list) else tuple
            batch = next(own.__iter__(batch), None)
        elif kind is torch.Tensor:
            with unobserved():  # a mode of the user's would see that a shape is read
                return batch.shape[0] if batch.dim() else None
        elif kind is getattr(sys.modules.get("numpy"), "ndarray", None):
            return len(batch) if batch.ndim else None
        else:
            return None
    return None

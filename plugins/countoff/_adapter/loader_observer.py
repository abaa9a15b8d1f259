"""What a loader really hands out: counted and timed where it is iterated, whoever iterates it.

Needed where a framework fetches a batch and may throw it away unseen, or waits for other ranks before it says that it
has one. The loader's class is exchanged for a subclass whose `__iter__` returns a counting generator, so that whoever
asks for the loader's type sees what it saw before.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from countoff._adapter.class_swap import swap_class


@dataclass
class ObservedPass:
    """One pass over a loader.

    Attributes:
        batches: Batches that the loader has handed out.
        skipped: Those of them that the framework threw away before the first that it used, as after a resume.
        exhausted: Whether the loader was asked for more and had none.
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
        failed: Called with the exception that the loader dies of, before it is raised.
        exhausted: Called when the loader has been asked for more and had none.
        asks: Called before the loader is asked for another batch in the pass that is used.

    Attributes:
        loader: The loader.
        expected: Batches that a pass is proven to have; one that ends before that has failed without saying so. None if
            nothing is proven.
        begun: The pass that began last; None before the first one, and where the loader cannot be observed because
            its class cannot be exchanged, as that of a list or a generator.
        used: The pass whose batches are used, where that is known; others are somebody's who only looks.
    """

    def __init__(
        self,
        loader: Any,
        waited: Callable[[float], None],
        failed: Callable[[BaseException], None],
        exhausted: Callable[[], None] | None = None,
        batch_requested: Callable[[], None] | None = None,
    ) -> None:
        self.loader = loader
        self.expected: int | None = None
        self.begun: ObservedPass | None = None
        self.used: ObservedPass | None = None
        self._waited = waited
        self._failed = failed
        self._exhausted = exhausted
        self._asks = batch_requested
        self._give_back: Callable[[], None] | None = None
        with contextlib.suppress(TypeError):
            self._give_back = swap_class(loader, self._count)

    def release(self) -> None:
        """Gives the loader its own class back. The second time nothing happens."""
        if self._give_back is not None:
            self._give_back()
        self.begun = self.used = None

    def _count(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        self.begun = this = ObservedPass()
        while True:
            this.last = None  # so that it lives no longer than without an observer
            if self._asks is not None and this is self.used:
                self._asks()
            began = time.perf_counter()
            try:
                this.last = next(batches)
            except StopIteration:
                this.exhausted = True
                self._see_whether_it_failed(this)
                if self._exhausted is not None:
                    self._exhausted()
                return
            except Exception as error:
                self._failed(error)
                raise
            self._waited(time.perf_counter() - began)
            this.batches += 1
            yield this.last

    def _see_whether_it_failed(self, this: ObservedPass) -> None:
        # streaming ends the pass, with nothing raised, when one of its background threads dies of a download; and when
        # somebody else begins another one, which is no failure.
        if self.begun is this and self.expected is not None and this.batches < self.expected:
            ended = f"the loader ended after {this.batches} of {self.expected} batches"
            self._failed(RuntimeError(f"{ended}; its own log may hold the exception of a download"))


def samples_in(batch: Any) -> int | None:
    """Samples in a batch: the length of its first tensor; None for a batch of another kind."""
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)) and batch:
        return samples_in(batch[0])
    return len(batch) if getattr(batch, "ndim", 0) else None

"""Passes over a loader, observed where it is iterated: opened, counted batch by batch, exhausted or left.

The loader's class is exchanged for a subclass whose `__iter__` returns a counting generator, so the user's loop, and
whoever asks for the loader's type, sees what it saw before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

from countoff.core import Guard, Verdict

How = Literal["exhausted", "stopped"]


class _Pass:
    """One pass under way; told apart from others by identity."""

    def __init__(self, name: str, *, evaluation: bool) -> None:
        self.name = name
        self.evaluation = evaluation


class Passes:
    """The passes over the loaders of one guard.

    Args:
        guard: Where they are counted.
        epoch: Number of the first train epoch.
        exhausted: Called when a train epoch ends because its loader is exhausted; returns a warning, if there is one.
    """

    def __init__(self, guard: Guard, *, epoch: int, exhausted: Callable[[], Verdict | None]) -> None:
        self._guard = guard
        self._epoch = epoch
        self._exhausted = exhausted
        self._open: list[_Pass] = []
        self._observed: list[tuple[Any, type]] = []

    def observe(self, loader: Any, name: str | None) -> None:
        """Counts the passes over a loader from here on.

        Args:
            loader: The loader.
            name: The evaluation's name; None for the train loader.

        Raises:
            TypeError: If its class cannot be exchanged, as that of a list or a generator.
        """
        original = type(loader)

        def observed(this: Any) -> Iterator[Any]:
            return self._batches(original.__iter__(this), name)

        members = {"__iter__": observed, "__module__": original.__module__}
        try:
            loader.__class__ = type(original.__name__, (original,), members)
        except (TypeError, AttributeError):
            raise TypeError(
                f"attach({'train' if name is None else 'eval'}=…) cannot observe a loader of type {original.__name__}: "
                "expected a DataLoader or an iterable object whose class is written in Python"
            ) from None
        self._observed.append((loader, original))

    def release(self) -> None:
        """Gives the loaders their own classes back."""
        for loader, original in self._observed:
            loader.__class__ = original
        self._observed.clear()

    def close_stale(self, *, everything: bool) -> None:
        """Closes passes whose iterator is still around though the program has gone on.

        Args:
            everything: Whether a train epoch may not go on either.
        """
        while self._open and (everything or self._open[-1].evaluation):
            self._close(self._open[-1], "stopped")

    def _batches(self, batches: Iterator[Any], name: str | None) -> Iterator[Any]:
        """One pass: the generator that the loop's `for` really iterates."""
        guard, this = self._guard, self._begin(name)
        try:
            while True:
                began = time.perf_counter()
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                except Exception as error:
                    guard.failed(error)
                    raise
                guard.waited(time.perf_counter() - began)
                if this in self._open:
                    guard.batch()
                yield batch
        except GeneratorExit:  # the loop left early, which is a legitimate end, or an exception is on its way
            self._close(this, "stopped", may_raise=False)
            raise
        self._close(this, "exhausted")

    def _begin(self, name: str | None) -> _Pass:
        self.close_stale(everything=name is None)
        if name is None:
            self._guard.train_start(self._epoch)
            this = _Pass(f"train epoch {self._epoch}", evaluation=False)
            self._epoch += 1
        else:
            self._guard.eval_start(name)
            this = _Pass(name, evaluation=True)
        self._open.append(this)
        return this

    def _close(self, this: _Pass, how: How, *, may_raise: bool = True) -> None:
        while this in self._open:
            innermost = self._open.pop()
            ended = how if innermost is this else "stopped"
            if innermost.evaluation:
                self._guard.eval_end(ended, may_raise=may_raise)
                continue
            notice = self._exhausted() if ended == "exhausted" else None
            self._guard.train_end(ended, notice=notice, may_raise=may_raise)

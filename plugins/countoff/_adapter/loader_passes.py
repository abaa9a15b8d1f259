"""Counts passes over loaders batch by batch where a loop iterates them, and closes them where the loop leaves them.

Whoever observes a loader (by exchanging its class, or the `__iter__` of a framework's loaders) gives the loader's own
iterator to `LoaderPasses.follow` and hands the returned iterator to the loop.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from types import GeneratorType
from typing import Any, Literal

from countoff._adapter.even_loaders import forget_state
from countoff._adapter.sampling import fingerprint_batch
from countoff.core import DivergenceError, Guard, Verdict

__all__ = ["UNSEEN_STEPS", "Even", "LoaderPasses"]

Reason = Literal["exhausted", "stopped"]
Even = Callable[[Guard, Iterator[Any]], contextlib.AbstractContextManager[Iterator[Any]]]
UNSEEN_STEPS = 64
"""Optimizer steps without a batch after which the attached loader is taken not to be the one that the loop iterates."""


class _Span:
    """The span of a pass that has begun; it is open until the loop has gone on to something else.

    Attributes:
        epoch: Number of the train epoch; None for an evaluation.
        ahead: The loader, if it fetches one batch ahead and so knows its last one.
        ended: Called when an evaluation has ended, with the batches that this rank has read; with None if the loop has
            left it before its end.
        compared: Whether it is compared with those of other ranks.
        open: Whether it has not been closed.
        batch: The batch that the loop has, as the loader returned it.
    """

    __slots__ = ("ahead", "batch", "compared", "ended", "epoch", "open")

    def __init__(self, epoch: int | None, ahead: Any, *, compared: bool) -> None:
        self.epoch = epoch
        self.ahead = ahead
        self.compared = compared
        self.ended: Callable[[int | None], None] | None = None
        self.open = True
        self.batch: Any = None

    @property
    def at_end(self) -> bool:
        """Whether the batch that the loader handed out last is known to be its last one."""
        return self.ahead is not None and self.ahead.end_of_dataloader


class LoaderPasses:
    """The passes over the loaders of one guard.

    Args:
        guard: The guard that counts them.
        epoch: Number of the first train epoch.
        exhausted: Called when a train epoch ends because its loader is exhausted; returns a warning, if there is one.
        diverged: Called before a verdict is raised in the loop.

    Attributes:
        guard: The guard that counts them.
        epoch: Number of the next train epoch.
        comparing: Whether passes that begin from here on are compared with those of other ranks.
        began: Called with the number of each train epoch when it has begun.
        left: Called when the loop has let go of a train epoch that it has not ended, if that means that an exception
            has ended the loop; None where it may be a break.
        expects_train: Whether no pass over the train loader has been seen yet; optimizer steps are then suspect.
        has_loader: Whether a train loader was attached; the loop has its batches counted by hand otherwise.
        evaluated: Called after a pass of an evaluation with its name, its loader, and the batches that this rank has
            read; None instead of those if that was not the whole loader.
    """

    def __init__(
        self, guard: Guard, *, epoch: int, exhausted: Callable[[], Verdict | None], diverged: Callable[[], None]
    ) -> None:
        self.guard = guard
        self.epoch = epoch
        self.comparing = True
        self.began: Callable[[int], None] | None = None
        self.left: Callable[[], None] | None = None
        self.expects_train = False
        self.has_loader = True
        self.evaluated: Callable[[str, Any, int | None], None] | None = None
        self._steps_unseen = 0
        self._exhausted = exhausted
        self._diverged = diverged
        self._open: list[_Span] = []

    @property
    def position(self) -> tuple[int, int]:
        """The open train epoch and the batches of it that this rank has begun; the next epoch and 0 if none is open."""
        for span in self._open:
            if span.epoch is not None:
                return span.epoch, self.guard.train_batches
        return self.epoch, 0

    @property
    def batch(self) -> Any:
        """The batch that the loop has of the open train epoch, as the loader returned it; None if it has none."""
        return next((span.batch for span in self._open if span.epoch is not None), None)

    def follow(
        self,
        batches: Iterator[Any],
        name: str | None,
        *,
        position: int = 0,
        ahead: Any = None,
        loader: Any = None,
        even: Even | None = None,
    ) -> Iterator[Any]:
        """Returns the generator of one pass, which the loop's `for` iterates.

        Args:
            batches: The loader's own iterator.
            name: The evaluation's name; None for a train epoch.
            position: Batches of the epoch that were trained on before a checkpoint, and that this pass does not have.
            ahead: Given where the loader fetches one batch ahead: an object whose attribute `end_of_dataloader` tells
                whether the batch that it handed out last is its last one.
            loader: The loader, whose sampler tells about the data.
            even: Makes the pass even where the settings ask for that; None where ranks cannot be uneven.
        """
        guard = self.guard
        # After a training step, little of what a batch needs is in the processor's caches, so the time of this loop is
        # that of the objects it touches. It calls nothing of countoff's for most batches.
        now, more = time.perf_counter, False  # more: the next batch is known to be fetched, so to ask for it begins it
        stack = contextlib.ExitStack()
        try:
            span = self._begin(name, position, ahead)
            if name is not None and self.evaluated is not None and not position:
                span.ended = functools.partial(self.evaluated, name, loader)
            if even is not None and guard.makes_even:
                batches = stack.enter_context(even(guard, batches))
            else:
                forget_state(loader)
            source = batches if isinstance(batches, GeneratorType) else map(next, itertools.repeat(batches))
            counters, state = guard.counting()
            fingerprints_due = name is None and guard.data.fingerprints_due
            try:
                began = now()
                for batch in source:
                    counters.loader_seconds += now() - began
                    if not more:
                        counters.started = started = counters.started + 1
                        if started >= state.alarm and span.open:
                            guard.look()
                    if fingerprints_due and span.open:
                        fingerprint_batch(guard.data, batch, loader)
                        fingerprints_due = guard.data.fingerprints_due
                    if ahead is not None:
                        more = not ahead.end_of_dataloader
                        if not more and span.open:
                            guard.last_batch()
                    span.batch = batch
                    yield batch
                    span.batch = None
                    del batch  # so that it lives no longer than in a loop that is not observed
                    if more:
                        counters.started = started = counters.started + 1
                        if started >= state.alarm and span.open:
                            guard.look()
                    began = now()
            except GeneratorExit:  # the loop stopped early, which may be legitimate, or an exception is being raised
                self._leave(span)
                raise
            except DivergenceError:
                raise
            except Exception as error:
                guard.failed(error)
                raise
            self._close(span, "exhausted")
        except DivergenceError:
            self._diverged()
            raise
        finally:
            stack.close()

    def step_unseen(self) -> None:
        """Counts an optimizer step before the first pass over the train loader; warns at `UNSEEN_STEPS` of them."""
        self._steps_unseen += 1
        if self._steps_unseen == UNSEEN_STEPS:
            self.expects_train = False
            sentence = f"{UNSEEN_STEPS} optimizer steps, and no batch of the train loader that was attached."
            why = "The loop iterates another object, or these are steps of another model. Nothing is compared so far."
            if not self.has_loader:
                sentence = f"{UNSEEN_STEPS} optimizer steps, and no batch was counted."
                why = (
                    "No loader was attached, and the loop has taken nothing from handle.counted(). Nothing is compared."
                )
            self.guard.warn(Verdict("UnseenLoader", sentence, why=why))

    def close_stale(self, *, everything: bool) -> None:
        """Closes spans whose iterator still exists although the program has gone on to something else.

        Args:
            everything: Whether to close a train epoch too.
        """
        while self._open and (everything or self._open[-1].epoch is None):
            self._close(self._open[-1], "stopped")

    def _begin(self, name: str | None, position: int, ahead: Any) -> _Span:
        self.close_stale(everything=name is None)
        span = _Span(self.epoch if name is None else None, ahead, compared=self.comparing)
        if not span.compared:
            self.guard.compare_spans(False)
        if name is None:
            self.guard.train_start(self.epoch, position)
            self.epoch += 1
            self.expects_train = False
        else:
            self.guard.eval_start(name)
        self._open.append(span)
        if span.epoch is not None and self.began is not None:
            self.began(span.epoch)
        return span

    def _leave(self, span: _Span) -> None:
        unfinished = span.open and span.epoch is not None
        self._close(span, "stopped", may_raise=False)
        if unfinished and self.left is not None:
            self.left()

    def _close(self, span: _Span, reason: Reason, *, may_raise: bool = True) -> None:
        while span.open:
            innermost = self._open.pop()
            innermost.open = False
            # A loop that stops at the last batch has exhausted its loader too.
            ended = "exhausted" if (innermost is span and reason == "exhausted") or innermost.at_end else "stopped"
            if innermost.ended is not None:
                whole = ended == "exhausted" and innermost.compared
                innermost.ended(self.guard.batches if whole else None)
            if innermost.epoch is None:
                self.guard.eval_end(ended, may_raise=may_raise)
            else:
                notice = self._exhausted() if ended == "exhausted" else None
                self.guard.train_end(ended, notice=notice, may_raise=may_raise)
            if not innermost.compared:
                self.guard.compare_spans(True)

"""Passes over loaders, counted batch by batch where a loop iterates them: opened, exhausted or left.

Whoever observes a loader (by exchanging its class, or the `__iter__` of a framework's loaders) hands the loader's own
iterator to `Passes.follow` and gives the loop what comes back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

from countoff._adapter.sampling import look_at
from countoff.core import Guard, Verdict

Reason = Literal["exhausted", "stopped"]
UNSEEN_STEPS = 64
"""Optimizer steps without a batch after which the loader is taken for another one than the loop iterates."""


class _OpenPass:
    """One pass under way; told apart from others by identity."""

    def __init__(self, epoch: int | None, at_end: Callable[[], bool], silent: bool) -> None:
        self.epoch = epoch  # None: an evaluation
        self.at_end = at_end
        self.silent = silent


def _never() -> bool:
    """The answer of a loader that cannot say whether it holds more."""
    return False


class LoaderPasses:
    """The passes over the loaders of one guard.

    Args:
        guard: Where they are counted.
        epoch: Number of the first train epoch.
        exhausted: Called when a train epoch ends because its loader is exhausted; returns a warning, if there is one.

    Attributes:
        guard: Where they are counted.
        epoch: Number of the next train epoch.
        comparing: Whether passes that begin from here on are held against those of other ranks.
        began: Called with the number of each train epoch when it has begun.
        expects_train: Whether a pass over a train loader is still to be seen, without which steps are suspect.
    """

    def __init__(self, guard: Guard, *, epoch: int, exhausted: Callable[[], Verdict | None]) -> None:
        self.guard = guard
        self.epoch = epoch
        self.comparing = True
        self.began: Callable[[int], None] | None = None
        self.expects_train = False
        self._steps_unseen = 0
        self._exhausted = exhausted
        self._open: list[_OpenPass] = []

    @property
    def position(self) -> tuple[int, int]:
        """The train epoch under way and the batches of it that this rank has begun; the next one and 0 between them."""
        for each in self._open:
            if each.epoch is not None:
                return each.epoch, self.guard.train_batches
        return self.epoch, 0

    def follow(
        self,
        batches: Iterator[Any],
        name: str | None,
        *,
        position: int = 0,
        ahead: Callable[[], bool] | None = None,
        loader: Any = None,
    ) -> Iterator[Any]:
        """One pass: the generator that the loop's `for` really iterates.

        Args:
            batches: The loader's own iterator.
            name: The evaluation's name; None for a train epoch.
            position: Batches of the epoch that a resumed run has behind it and this pass leaves out.
            ahead: Where the loader looks one batch ahead: whether the batch that it handed out last is its last one.
            loader: The loader, for what its sampler says.
        """
        guard, at_end = self.guard, ahead or _never
        this, under_way = self._begin(name, position, at_end), self._open
        # Looked up once, not per batch.
        fetch, count, waited, now = batches.__next__, guard.batch, guard.waited, time.perf_counter
        data, looks = guard.data, name is None
        more = False  # whether the next batch is known to be in hand, so that asking for it is beginning it
        try:
            while True:
                if more and this in under_way:
                    count()
                began = now()
                try:
                    batch = fetch()
                except StopIteration:
                    break
                except Exception as error:
                    guard.failed(error)
                    raise
                waited(now() - began)
                ends = at_end()
                if this in under_way:
                    if not more:
                        count()
                    if looks and data.fingerprints_due:
                        look_at(data, batch, loader)
                    if ends:
                        guard.last_batch()
                more = ahead is not None and not ends
                yield batch
        except GeneratorExit:  # the loop left early, which is a legitimate end, or an exception is on its way
            self._close(this, "stopped", may_raise=False)
            raise
        self._close(this, "exhausted")

    def step_unseen(self) -> None:
        """Notes an optimizer step before the first pass over the train loader, and warns when they are many."""
        self._steps_unseen += 1
        if self._steps_unseen == UNSEEN_STEPS:
            self.expects_train = False
            sentence = f"{UNSEEN_STEPS} optimizer steps, and no batch of the train loader that was attached."
            why = "The loop iterates another object, or these are steps of another model. Nothing is compared so far."
            self.guard.warn(Verdict("UnseenLoader", sentence, why=why))

    def close_stale(self, *, everything: bool) -> None:
        """Closes passes whose iterator is still around though the program has gone on.

        Args:
            everything: Whether a train epoch may not go on either.
        """
        while self._open and (everything or self._open[-1].epoch is None):
            self._close(self._open[-1], "stopped")

    def _begin(self, name: str | None, position: int, at_end: Callable[[], bool]) -> _OpenPass:
        self.close_stale(everything=name is None)
        this = _OpenPass(self.epoch if name is None else None, at_end, silent=not self.comparing)
        if this.silent:
            self.guard.compare_spans(False)
        if name is None:
            self.guard.train_start(self.epoch, position)
            self.epoch += 1
            self.expects_train = False
        else:
            self.guard.eval_start(name)
        self._open.append(this)
        if this.epoch is not None and self.began is not None:
            self.began(this.epoch)
        return this

    def _close(self, this: _OpenPass, reason: Reason, *, may_raise: bool = True) -> None:
        while this in self._open:
            innermost = self._open.pop()
            # A loop that leaves with the last batch has left nothing behind.
            ended = "exhausted" if (innermost is this and reason == "exhausted") or innermost.at_end() else "stopped"
            if innermost.epoch is None:
                self.guard.eval_end(ended, may_raise=may_raise)
            else:
                notice = self._exhausted() if ended == "exhausted" else None
                self.guard.train_end(ended, notice=notice, may_raise=may_raise)
            if innermost.silent:
                self.guard.compare_spans(True)

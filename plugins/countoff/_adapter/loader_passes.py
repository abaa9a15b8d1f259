"""Counts passes over loaders batch by batch where a loop iterates them, and closes them where the loop leaves them.

Whoever observes a loader (by exchanging its class, or the `__iter__` of a framework's loaders) gives the loader's own
iterator to `LoaderPasses.follow` and hands the returned iterator to the loop. That one can do all that the loader's own
iterator can: a loop may ask for its length or its state, go on after an exception, and share it between threads.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from countoff._adapter.even_loaders import forget_state
from countoff._adapter.held_batch import HeldBatch
from countoff._adapter.iterator_proxy import IteratorProxy
from countoff._adapter.sampling import fingerprint_batch, take_fingerprint
from countoff.core import DivergenceError, Guard, Verdict
from countoff.core.checks.framework import UNSEEN_LOADER
from countoff.core.data.fingerprint import Begun
from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.evidence import SHARED_PASS
from countoff.core.words import count_of

__all__ = ["UNSEEN_STEPS", "Even", "LoaderPasses"]

Reason = Literal["exhausted", "stopped"]
Even = Callable[[Guard, Iterator[Any]], contextlib.AbstractContextManager[Iterator[Any]]]
UNSEEN_STEPS = 64
"""Optimizer steps without a batch after which the attached loader is taken not to be the one that the loop iterates."""


class _Span:
    """The span of a pass that has begun; it is open until the loop has gone on to something else.

    Attributes:
        epoch: Number of the train epoch; None for an evaluation.
        position: Batches of the epoch that it does not have.
        ahead: The loader, if it fetches one batch ahead and so knows its last one.
        ended: Called when an evaluation has ended, with the batches that this rank has read; with None if the loop has
            left it before its end.
        compared: Whether it is compared with those of other ranks.
        open: Whether it has not been closed.
        batch: The batch that the loop has; None before the first one.
        looked: Whether the loop has let go of it, and may only have looked at its first batch.
        count: Counts its batches; None once nobody holds its iterator.
    """

    __slots__ = ("ahead", "batch", "compared", "count", "ended", "epoch", "looked", "open", "position")

    def __init__(self, epoch: int | None, position: int, ahead: Any, *, compared: bool) -> None:
        self.epoch = epoch
        self.position = position
        self.ahead = ahead
        self.compared = compared
        self.ended: Callable[[int | None], None] | None = None
        self.open = True
        self.batch: HeldBatch | None = None
        self.looked = False
        self.count: Callable[[], _Count | None] = _nothing

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
        diverged: Called before a verdict is raised in the loop.
        epoch: Number of the next train epoch.
        comparing: Whether passes that begin from here on are compared with those of other ranks.
        began: Called with the number of each train epoch when it has begun.
        abandoned: Called when a train epoch closes whose loader has not ended.
        left: Called when the loop has let go of a train epoch that it has not ended, if that means that an exception
            has ended the loop; None where it may be a break.
        expects_train: Whether no pass over the train loader has been seen yet; every optimizer step is then suspect.
        expects_more: Whether optimizer steps after a pass over the train loader are suspect, if no other pass begins.
        has_loader: Whether a train loader was attached; the loop has its batches counted by hand otherwise.
        is_untrained: Whether no gradient has been computed so far for what the loop trains. A pass that it has left
            after the first batch was then a look at the data, and its next pass is the same epoch, from its beginning.
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
        self.abandoned: Callable[[], None] | None = None
        self.left: Callable[[], None] | None = None
        self.expects_train = False
        self.expects_more = True
        self.has_loader = True
        self.is_untrained: Callable[[], bool] = _never
        self.evaluated: Callable[[str, Any, int | None], None] | None = None
        self._steps_unseen = 0
        self._exhausted = exhausted
        self.diverged = diverged
        self._open: list[_Span] = []

    @property
    def position(self) -> tuple[int, int]:
        """The open train epoch and the batches of it that this rank has begun; the next epoch and 0 if none is open."""
        for span in self._open:
            if span.epoch is not None:
                return span.epoch, 0 if span.looked else self.guard.train_batches
        return self.epoch, 0

    @property
    def batch(self) -> Any:
        """The batch that the loop has of the open train epoch, as the loader returned it; None if it has none."""
        held = next((span.batch for span in self._open if span.epoch is not None), None)
        return None if held is None else held.get()

    def follow(
        self,
        batches: Iterator[Any],
        name: str | None,
        *,
        position: int = 0,
        ahead: Any = None,
        loader: Any = None,
        even: Even | None = None,
        taken: int = 0,
        read: Sequence[Begun | None] = (),
    ) -> Iterator[Any]:
        """Returns the iterator of one pass, which the loop's `for` iterates. The pass begins with its first batch.

        Args:
            batches: The loader's own iterator.
            name: The evaluation's name; None for a train epoch.
            position: Batches of the epoch that were trained on before a checkpoint, and that this pass does not have.
            ahead: Given where the loader fetches one batch ahead: an object whose attribute `end_of_dataloader` tells
                whether the batch that it handed out last is its last one.
            loader: The loader, whose sampler tells about the data.
            even: Makes the pass even where the settings ask for that; None where ranks cannot be uneven.
            taken: Batches of this pass that the loop has taken before it is counted. With some, it begins now.
            read: The fingerprints of the first batches that it has taken, as `begin_fingerprint` has returned them: of
                all that it has taken, or of as many as are compared.
        """
        count = _Count(self, batches, name, position=position, ahead=ahead, loader=loader, even=even)
        found = (_SizedPass if hasattr(type(batches), "__len__") else Pass)(batches, count)
        if taken:
            count.begin_with(taken, read)
        return found

    def stepped(self) -> None:
        """Counts an optimizer step of the loop; warns at `UNSEEN_STEPS` of them outside of any pass over its loader."""
        if any(span.epoch is not None for span in self._open):
            self._steps_unseen = 0
            return
        self._steps_unseen += 1
        if self._steps_unseen == UNSEEN_STEPS:
            self.guard.warn(self._unseen())
            self.expects_train = False

    def warn_if_unseen(self) -> None:
        """Warns at the end of a fit of few steps if no batch was counted in it."""
        if self.expects_train and self._steps_unseen:
            self.guard.warn(self._unseen())

    def _unseen(self) -> Verdict:
        steps = count_of(self._steps_unseen, "optimizer step")
        if not self.has_loader:
            sentence = f"{steps}, and no batch was counted."
            why = "No loader was attached, and the loop has taken nothing from handle.counted(). Nothing is compared."
        elif self.expects_train:
            sentence = f"{steps}, and no batch of the train loader that was attached."
            why = "The loop iterates another object, or these are steps of another model. Nothing is compared so far."
        else:
            sentence = f"{steps} since the last batch of the train loader that was attached."
            why = "The loop iterates another object now. Its batches are not compared."
        return UNSEEN_LOADER.found(sentence, why=why)

    def close_stale(self, *, everything: bool) -> None:
        """Closes spans whose iterator still exists although the program has gone on to something else.

        Args:
            everything: Whether to close a train epoch too.
        """
        while self._open and (everything or self._open[-1].epoch is None):
            self.close(self._open[-1], "stopped")

    def begin(self, name: str | None, position: int, ahead: Any, thread: int) -> _Span | None:
        """Opens the span of a pass; returns None for one that has no place in the order of this rank's passes."""
        evidence = self.guard.evidence
        if not evidence.has_order(evaluation=name is not None, thread=thread):
            return None
        if name is None and not position and self.comparing and (looked := self._look()) is not None:
            return self._begin_again(looked, ahead, thread)
        self.close_stale(everything=name is None)
        self.end_look()
        self.guard.recovered()  # an exception that has left the pass before was caught
        span = _Span(self.epoch if name is None else None, position, ahead, compared=self.comparing)
        if not span.compared:
            self.guard.compare_spans(False)
        if name is None:
            evidence.takes(thread)
            self.guard.train_start(self.epoch, position)
            self.epoch += 1
            self.expects_train = False
        else:
            self.guard.eval_start(name)
        self._open.append(span)
        if span.epoch is not None and self.began is not None:
            self.began(span.epoch)
        return span

    def _look(self) -> _Span | None:
        """The open train epoch, if this rank has taken nothing but its first batch, and has not trained on that.

        What was compared of a second batch, or at a tick, cannot be taken back.
        """
        span, counters = self._open[-1] if self._open else None, self.guard.span
        if span is None or span.epoch is None or span.position or not span.compared or span.at_end:
            return None
        first = counters.started == 1 and counters.credits is None
        return span if first and not self.guard.steps and self.is_untrained() else None

    def _begin_again(self, looked: _Span, ahead: Any, thread: int) -> _Span:
        """Opens the span of a pass over the epoch of which this rank has seen the first batch."""
        if (count := looked.count()) is not None:
            count.forget()
        looked.open = False
        self.guard.recovered()
        self.guard.evidence.takes(thread)
        self.guard.train_again()
        span = _Span(looked.epoch, 0, ahead, compared=looked.compared)
        self._open[-1] = span
        return span

    def end_look(self) -> None:
        """Closes the epoch of which this rank has seen the first batch: what it does now is no pass over it."""
        if self._open and self._open[-1].looked:
            self.close(self._open[-1], "stopped", may_raise=False)  # it may be called inside of an optimizer's step

    def leave(self, span: _Span) -> None:
        """Closes the span of a pass that its loop has let go of before its end, unless that may have been a look."""
        if span.open and span is self._look():
            span.looked, span.batch = True, None  # what this rank does next shows whether it was
            return
        unfinished = span.open and span.epoch is not None
        self.close(span, "stopped", may_raise=False)
        if unfinished and self.left is not None:
            self.left()

    def close(self, span: _Span, reason: Reason, *, may_raise: bool = True) -> None:
        """Closes a span, and those inside of it."""
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
                if ended == "stopped" and self.abandoned is not None:
                    self.abandoned()
                self.guard.train_end(ended, notice=notice, may_raise=may_raise)
            if not innermost.compared:
                self.guard.compare_spans(True)


def _nothing() -> None:
    """A count that is not there any more."""


def _never() -> bool:
    """What nothing tells does not hold."""
    return False


class Pass(IteratorProxy):
    """The iterator of one pass over a loader.

    Python looks up each attribute of a proxy the long way, so all that a batch needs is elsewhere.

    Args:
        batches: The loader's own iterator.
        count: Counts its batches.
    """

    def __init__(self, batches: Iterator[Any], count: _Count) -> None:
        super().__init__(batches)
        self.__own = batches
        self.__count = count
        self.__take = count.take

    def __next__(self) -> Any:
        return self.__take()

    def close(self) -> None:
        """Ends the pass, as where the loop lets go of it; also the loader's own iterator, if that can be closed."""
        self.__count.leave()
        if (close := getattr(self.__own, "close", None)) is not None:
            close()

    def __del__(self) -> None:
        self.__count.leave()


class _SizedPass(Pass):
    """The iterator of a pass whose own one has a length."""

    def __len__(self) -> int:
        return len(self._Pass__own)  # pyright: ignore[reportAttributeAccessIssue]


class _Count:
    """Counts the batches that a loader's own iterator gives to the loop in one pass.

    It ends as the loader's own iterator does: an exception that the loop catches, to ask for the next batch, is no end.
    Several threads may share it if they may share that one.

    Args:
        passes: The passes to which it belongs.
        batches: The loader's own iterator.
        name: The evaluation's name; None for a train epoch.
        position: As for `LoaderPasses.follow`; so are the others.
        ahead: The loader, where it fetches one batch ahead.
        loader: The loader.
        even: Makes the pass even.
    """

    def __init__(
        self,
        passes: LoaderPasses,
        batches: Iterator[Any],
        name: str | None,
        *,
        position: int,
        ahead: Any,
        loader: Any,
        even: Even | None,
    ) -> None:
        self._passes = passes
        self._own = self._source = batches
        self._name = name
        self._position = position
        self._ahead = ahead
        self._loader = loader
        self._even = even
        self._stack = contextlib.ExitStack()
        self._begun = self._over = False
        self._span: _Span | None = None  # None too where the pass is compared by itself
        self._busy = False  # whether a thread waits for the loader's own iterator
        self._lock: threading.Lock | None = None  # where several threads share it
        self._turn = threading.Lock()
        self._inside, self._ended = 0, False  # with the lock: threads in it, and whether one has seen the end
        self._more = False  # whether the next batch is known to be fetched, so that to ask for it begins it
        self._failed = False  # whether the last call has raised an exception of the loader's

    def take(self) -> Any:
        """Returns the next batch, and counts it."""
        # After a training step, little of what a batch needs is in the processor's caches, so the time of this is that
        # of the objects that it touches. It calls nothing of countoff's for most batches.
        if self._over:
            return next(self._source)
        try:
            if not self._begun:
                with self._turn:  # two threads may ask for the first batch at once
                    if not self._begun:
                        self._begin()
            if self._failed:
                self._go_on()  # the loop has caught what the loader has raised
            if self._busy or self._lock is not None:
                return self._next_shared()
            if (thread := threading.get_ident()) != self._thread:
                self._move(thread)
            counters, span, more = self._counters, self._span, self._more
            if more:
                counters.started = started = counters.started + 1
                if started >= self._state.alarm and span is not None and span.open:
                    self._guard.look()
            self._busy = True
            began = time.perf_counter()
            try:
                batch = next(self._source)
            finally:
                counters.loader_seconds += time.perf_counter() - began
                self._busy = False
            if self._lock is not None:  # another thread has come meanwhile
                self._count_shared()
                return batch
            if not more:
                counters.started = started = counters.started + 1
                if started >= self._state.alarm and span is not None and span.open:
                    self._guard.look()
            if span is not None:
                if self._fingerprints_due and span.open:
                    self._take_fingerprint(batch)
                if self._ahead is not None:
                    self._more = not (at_end := self._ahead.end_of_dataloader)
                    if at_end and span.open and self._guard.span is counters:  # else an evaluation inside is open
                        self._guard.last_batch()
                if span.epoch is not None:
                    span.batch = HeldBatch(batch)
            return batch
        except StopIteration as end:
            values = end.args
        except DivergenceError:
            self._passes.diverged()
            raise
        except Exception as error:  # of the user's own data set
            if self._lock is not None:
                self._leave_shared(ended=False)
            elif self._span is not None:
                self._failed = True
                self._guard.failing(error)  # the loop may catch it, and ask for the next batch
            raise
        self._stop()  # here, so that a verdict that it raises does not tell of the loader's end
        raise StopIteration(*values)

    def _begin(self) -> None:
        passes, name = self._passes, self._name
        self._guard = guard = passes.guard
        self._thread = thread = threading.get_ident()
        self._span = span = passes.begin(name, self._position, self._ahead, thread)
        if span is not None:
            span.count = weakref.ref(self)
        self._fingerprints_due = False
        if span is None:
            self._counters = SpanCounters(name or "", evaluation=True, compared=False)
            self._state = guard.state
            self._begun = True
            return
        if name is not None and passes.evaluated is not None and not self._position:
            span.ended = functools.partial(passes.evaluated, name, self._loader)
        if self._even is not None and guard.makes_even:
            self._source = _InTurn(self._stack.enter_context(self._even(guard, self._own)))
        else:
            forget_state(self._loader)
        self._counters, self._state = guard.span, guard.state
        self._fingerprints_due = name is None and bool(guard.data.fingerprints_due)
        self._begun = True  # last: another thread may ask for a batch as soon as it sees that

    def begin_with(self, taken: int, read: Sequence[Begun | None]) -> None:
        """Begins the pass with batches that the loop has taken already."""
        self._begin()
        self._counters.started += taken
        data = self._guard.data
        for each in read if self._fingerprints_due else ():
            take_fingerprint(data, lambda each=each: each, self._loader)
        self._fingerprints_due = bool(data.fingerprints_due)
        if self._span is not None:
            self._guard.look()

    def forget(self) -> None:
        """Counts nothing that its iterator may still give: the loop has only looked at its first batch."""
        self._over = True

    def _go_on(self) -> None:
        """The loop has caught an exception of the loader's, and goes on with the pass."""
        self._failed = False
        self._guard.recovered()

    def _take_fingerprint(self, batch: Any) -> None:
        data = self._guard.data
        fingerprint_batch(data, batch, self._loader)
        self._fingerprints_due = bool(data.fingerprints_due)

    def _move(self, thread: int) -> None:
        """Takes note that another thread takes the batches from here on."""
        self._thread = thread
        if self._span is not None and self._span.epoch is not None:
            self._guard.evidence.takes(thread)

    def _next_shared(self) -> Any:
        """Takes the next batch where another thread is taking one. Nothing but the number of batches is looked at."""
        if self._lock is None:
            self._lock, self._inside = threading.Lock(), 1  # that thread's call
            self._counters.guess, self._fingerprints_due = SHARED_PASS, False
        with self._lock:
            self._inside += 1
        batch = next(self._source)
        self._count_shared()
        return batch

    def _count_shared(self) -> None:
        with self._lock or contextlib.nullcontext():
            self._counters.started += 1
        self._leave_shared(ended=False)

    def _leave_shared(self, *, ended: bool) -> None:
        """A thread's call is over. The pass has ended once the last one is, after one of them has seen its end."""
        with self._lock or contextlib.nullcontext():
            self._inside -= 1
            self._ended = self._ended or ended
            over = self._ended and not self._inside and not self._over
        if over:
            self._end()

    def _stop(self) -> None:
        """The loader's own iterator has ended."""
        try:
            if self._lock is None:
                self._end()
            else:
                self._leave_shared(ended=True)
        except DivergenceError:
            self._passes.diverged()
            raise

    def _end(self) -> None:
        if self._failed:
            self._go_on()
        self._over = True
        try:
            if self._span is not None:
                self._passes.close(self._span, "exhausted")
            else:
                self._guard.evaluated_apart(self._name or "", self._counters.started)
        finally:
            self._stack.close()

    def leave(self) -> None:
        """The loop has let go of the pass: it stopped early, which may be legitimate, or an exception is being raised.

        After an exception of the loader's own, the span stays open until it is known what becomes of it.
        """
        if not self._begun or self._over:
            return
        self._over = True
        try:
            if self._span is not None and not self._failed:
                self._passes.leave(self._span)
        finally:
            self._stack.close()


class _InTurn:
    """An iterator that takes one thread at a time."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._turn = threading.Lock()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self._turn:
            return next(self._batches)

"""Counts passes over loaders batch by batch where a loop takes them, and closes them where the loop leaves them."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal

from countoff._adapter.held_batch import HeldBatch
from countoff._adapter.sampling import fingerprint_batch
from countoff.core import DivergenceError, Guard, Verdict
from countoff.core.protocol.counters import SpanCounters
from countoff.core.session.threads.guard_status import CLOSER

__all__ = ["Count", "Even", "Passes"]

Reason = Literal["exhausted", "stopped"]
Even = Callable[[Guard, Iterator[Any], list[Any]], Iterator[Any]]
"""Makes a pass even: takes the guard, the pass, and a list that keeps the even pass for a later one to go on with."""


class _Span:
    """The span of a pass that has begun; it is open until the loop has gone on to something else.

    Attributes:
        name: The evaluation's name; None for a train epoch.
        epoch: Number of the train epoch; None for an evaluation.
        ahead: The loader, if it fetches one batch ahead and so knows its last one.
        ended: Called when an evaluation has ended, with the batches that this rank has read; with None if the loop has
            left it before its end.
        compared: Whether it is compared with those of other ranks.
        open: Whether it has not been closed.
        batch: The batch that the loop has; None before the first one.
        failed: Whether the loader has raised an exception, and no pass has gone on with the span since then.
        even: The even pass that gives its batches, once it has begun; empty where ranks are not made even.
    """

    __slots__ = ("ahead", "batch", "compared", "ended", "epoch", "even", "failed", "name", "open")

    def __init__(self, name: str | None, epoch: int | None, ahead: Any, *, compared: bool) -> None:
        self.name = name
        self.epoch = epoch
        self.ahead = ahead
        self.compared = compared
        self.ended: Callable[[int | None], None] | None = None
        self.open = True
        self.batch: HeldBatch | None = None
        self.failed = False
        self.even: list[Any] = []

    @property
    def at_end(self) -> bool:
        """Whether the batch that the loader handed out last is known to be its last one."""
        return self.ahead is not None and self.ahead.end_of_dataloader


class Passes:
    """The passes over the loaders of one guard.

    A pass that is dropped may be found by the garbage collector, at any moment and on any thread. So that only queues
    it: it is closed at the loop's next call, or by the guard's thread before that.

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
        left: Called, on a thread of its own, when a train epoch was dropped before its end, if that means that an
            exception has ended the loop; None where it may be a break.
        evaluated: Called after a pass of an evaluation with its name, its loader, and the batches that this rank has
            read; None instead of those if that was not the whole loader.
        reads: Called with the loader's own iterator at the first batch of each train epoch that is compared.
        unsettled: Whether a pass was dropped that is not closed yet.
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
        self.evaluated: Callable[[str, Any, int | None], None] | None = None
        self.reads: Callable[[Any], None] | None = None
        self.diverged = diverged
        self.unsettled = False
        self._exhausted = exhausted
        self._open: list[_Span] = []
        self._dropped: deque[Count] = deque()
        self._lock = threading.RLock()

    @property
    def batch(self) -> Any:
        """The batch that the loop has of the open train epoch, as the loader returned it; None if it has none."""
        held = next((span.batch for span in self._open if span.epoch is not None), None)
        return None if held is None else held.get()

    def follow(self, batches: Iterator[Any], name: str | None, **known: Any) -> Iterator[Any]:
        """Returns the iterator of one pass, for a framework's loop that iterates its loader by itself.

        It can do all that the loader's own iterator can. The pass begins with its first batch.

        Args:
            batches: The loader's own iterator.
            name: The evaluation's name; None for a train epoch.
            known: What else `count` takes.
        """
        counted = self.count(batches, name, **known)
        return (_SizedPass if hasattr(type(batches), "__len__") else _Pass)(batches, counted)

    def count(
        self,
        batches: Iterator[Any],
        name: str | None,
        *,
        epoch: int | None = None,
        position: int = 0,
        ahead: Any = None,
        loader: Any = None,
        even: Even | None = None,
    ) -> Count:
        """Returns what counts the batches of one pass. The pass begins with its first batch.

        Args:
            batches: The loader's own iterator.
            name: The evaluation's name; None for a train epoch.
            epoch: Number of the train epoch; None: the next one.
            position: Batches of the epoch that were trained on before a checkpoint, and that this pass does not have.
            ahead: Given where the loader fetches one batch ahead: an object whose attribute `end_of_dataloader` tells
                whether the batch that it handed out last is its last one.
            loader: The loader, whose sampler tells about the data.
            even: Makes the pass even where the settings ask for that; None where ranks cannot be uneven.
        """
        return Count(self, batches, name, epoch=epoch, position=position, ahead=ahead, loader=loader, even=even)

    def drop(self, count: Count) -> None:
        """Queues a pass that nobody holds any more. It may be called at any moment, on any thread."""
        self._dropped.append(count)
        self.unsettled = True
        self.guard.soon(self._settle_soon)

    def settle(self) -> None:
        """Closes what was dropped; to be called before anything that follows it in the program."""
        with self._lock:  # also where the guard's thread is about to close the last one
            while True:
                try:
                    self._dropped.popleft().leave()
                except IndexError:
                    self.unsettled = False
                    if not self._dropped:
                        return
                    self.unsettled = True

    def _settle_soon(self, _: Any) -> None:
        if self._lock.acquire(blocking=False):
            try:
                self.settle()
            finally:
                self._lock.release()
        else:  # the program's thread is in a call that may wait for this one
            self.guard.soon(self._settle_soon)

    def close_stale(self, *, everything: bool) -> None:
        """Closes spans whose iterator still exists although the program has gone on to something else.

        Args:
            everything: Whether to close a train epoch too.
        """
        self.settle()
        with self._lock:
            while self._open and (everything or self._open[-1].epoch is None):
                self.close(self._open[-1], "stopped")

    def begin(self, count: Count, thread: int) -> _Span | None:
        """Opens the span of a pass, or goes on with one whose loader has failed.

        Returns:
            The span; None for a pass that has no place in the order of this rank's passes.
        """
        name, epoch = count.name, count.epoch
        if not self.guard.evidence.has_order(evaluation=name is not None, thread=thread):
            return None
        with self._lock:
            self.settle()
            self.guard.recovered()  # an exception that has left the loop was caught
            if name is None:
                self.guard.evidence.takes(thread)
            if (span := self._failed(name, epoch)) is not None:
                span.failed, span.ahead = False, count.ahead
                return span
            self.close_stale(everything=name is None)
            if name is None and epoch is not None:
                self.epoch = epoch
            span = _Span(name, self.epoch if name is None else None, count.ahead, compared=self.comparing)
            if not span.compared:
                self.guard.compare_spans(False)
            if name is None:
                self.guard.train_start(self.epoch, count.position)
                self.epoch += 1
            else:
                self.guard.eval_start(name)
            self._open.append(span)
            if span.epoch is not None and self.began is not None:
                self.began(span.epoch)
            return span

    def _failed(self, name: str | None, epoch: int | None) -> _Span | None:
        """The innermost span, if its loader has failed and the program goes on with it."""
        span = self._open[-1] if self._open else None
        same = span is not None and span.failed and span.name == name and epoch in (None, span.epoch)
        return span if same else None

    def leave(self, span: _Span) -> None:
        """Closes the span of a pass that its loop has let go of before its end."""
        with self._lock:
            unfinished = span.open and span.epoch is not None
            self.close(span, "stopped", may_raise=False)
            if unfinished and self.left is not None:
                with contextlib.suppress(RuntimeError):  # no thread can be started: the next fit closes this one
                    threading.Thread(target=self.left, name=CLOSER, daemon=True).start()

    def close(self, span: _Span, reason: Reason, *, may_raise: bool = True) -> None:
        """Closes a span, and those inside of it."""
        with self._lock:
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


class _Pass:
    """The iterator of one pass over a loader, in the place of the loader's own one, which does all else that it can do.

    Python looks up each attribute of a proxy the long way, so all that a batch needs is elsewhere. Names with two
    underscores hide no attribute of the loader's own iterator.

    Args:
        batches: The loader's own iterator.
        count: Counts its batches.
    """

    def __init__(self, batches: Iterator[Any], count: Count) -> None:
        self.__own = batches
        self.__count = count
        self.__take = count.take

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.__take()

    def close(self) -> None:
        """Ends the pass, as where the loop lets go of it; also the loader's own iterator, if that can be closed."""
        self.__count.drop()
        if (close := getattr(self.__own, "close", None)) is not None:
            close()

    def __del__(self) -> None:
        self.__count.drop()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_Pass__"):
            raise AttributeError(name)
        return getattr(self.__own, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__own.__reduce_ex__(protocol)

    @property  # what `isinstance` and the user's code see
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self.__own)


class _SizedPass(_Pass):
    """The iterator of a pass whose own one has a length."""

    def __len__(self) -> int:
        return len(self._Pass__own)  # pyright: ignore[reportAttributeAccessIssue]


class Count:
    """Counts the batches that a loader's own iterator gives to the loop in one pass.

    An exception of the loader's is the program's: the loop may catch it and ask for the next batch, or begin another
    pass, which goes on with the span. Threads that share a pass take their batches one after the other.

    Args:
        passes: The passes to which it belongs.
        batches: The loader's own iterator.
        name: The evaluation's name; None for a train epoch.
        epoch: As for `Passes.count`; so are the others.
        position: Batches of the epoch that this pass does not have.
        ahead: The loader, where it fetches one batch ahead.
        loader: The loader.
        even: Makes the pass even.

    Attributes:
        name: As above.
        epoch: As above.
        position: As above.
        ahead: As above.
    """

    def __init__(
        self,
        passes: Passes,
        batches: Iterator[Any],
        name: str | None,
        *,
        epoch: int | None,
        position: int,
        ahead: Any,
        loader: Any,
        even: Even | None,
    ) -> None:
        self._passes = passes
        self._own = self._source = batches
        self.name = name
        self.epoch = epoch
        self.position = position
        self.ahead = ahead
        self._loader = loader
        self._even = even
        self._begun = self._over = False
        self._span: _Span | None = None  # None too where the pass is compared by itself
        self._turn = threading.RLock()  # one thread at a time takes a batch
        self._taken = False  # whether it has given a batch
        self._more = False  # whether the next batch is known to be fetched, so that to ask for it begins it

    def take(self) -> Any:
        """Returns the next batch, and counts it."""
        # After a training step, little of what a batch needs is in the processor's caches, so the time of this is that
        # of the objects that it touches. It calls nothing of countoff's for most batches.
        with self._turn:
            if self._over:
                return next(self._source)
            try:
                if not self._begun:
                    self._begin()
                if self._passes.unsettled:
                    self._passes.settle()
                if (thread := threading.get_ident()) != self._thread:
                    self._move(thread)
                counters, span, more, ahead = self._counters, self._span, self._more, self.ahead
                ended_before = ahead is not None and ahead.end_of_dataloader
                if more:
                    counters.started = started = counters.started + 1
                    if started >= self._state.next_check_at and span is not None and span.open:
                        self._guard.look()
                began = time.perf_counter()
                try:
                    batch = next(self._source)
                except Exception:
                    counters.started -= more  # it was not handed out: the loader could not fetch the one after it
                    raise
                finally:
                    counters.loader_seconds += time.perf_counter() - began
                if not more:
                    counters.started = started = counters.started + 1
                    if started >= self._state.next_check_at and span is not None and span.open:
                        self._guard.look()
                if span is not None:
                    if self._fingerprints_due and span.open:
                        self._take_fingerprint(batch)
                    if ahead is not None:
                        self._more = not (at_end := ahead.end_of_dataloader)
                        if at_end and ended_before and self._taken:
                            # Another pass over the same loader, inside of this one, has come to its end.
                            self.ahead = span.ahead = None
                        elif at_end and span.open and self._guard.span is counters:  # else an evaluation inside is open
                            self._guard.last_batch()
                    self._taken = True
                    if span.epoch is not None:
                        span.batch = HeldBatch(batch)
                    span.failed = False
                return batch
            except StopIteration as end:
                values = end.args
            except DivergenceError:
                self._passes.diverged()
                raise
            except Exception:  # of the user's own data set
                if self._span is not None:
                    self._span.failed = True
                raise
            try:
                self._end()  # here, so that a verdict that it raises does not tell of the loader's end
            except DivergenceError:
                self._passes.diverged()
                raise
            raise StopIteration(*values)

    def _begin(self) -> None:
        passes, name = self._passes, self.name
        self._guard = guard = passes.guard
        self._thread = thread = threading.get_ident()
        self._span = span = passes.begin(self, thread)
        self._fingerprints_due = False
        if span is None:
            self._counters = SpanCounters(name or "", evaluation=True, compared=False)
            self._state = guard.state
            self._begun = True
            return
        if name is not None and passes.evaluated is not None and not self.position:
            span.ended = functools.partial(passes.evaluated, name, self._loader)
        if self._even is not None and guard.makes_even:
            self._source = self._even(guard, self._own, span.even)
        self._counters, self._state = guard.span, guard.state
        self._fingerprints_due = name is None and bool(guard.data.fingerprints_due)
        self._begun = True

    def _take_fingerprint(self, batch: Any) -> None:
        data = self._guard.data
        if self._passes.reads is not None and self._guard.once.reads is None:
            self._passes.reads(self._own)
        fingerprint_batch(data, batch, self._loader)
        self._fingerprints_due = bool(data.fingerprints_due)

    def _move(self, thread: int) -> None:
        """Takes note that another thread takes the batches from here on."""
        self._thread = thread
        if self._span is not None and self._span.epoch is not None:
            self._guard.evidence.takes(thread)

    def _end(self) -> None:
        self._over = True
        if self._span is not None:
            self._passes.settle()
            self._passes.close(self._span, "exhausted")
        else:
            self._guard.evaluated_apart(self.name or "", self._counters.started)

    def drop(self) -> None:
        """Nobody holds the pass any more. It only queues that, because the garbage collector may call it."""
        if self._begun and not self._over:
            self._passes.drop(self)

    def leave(self) -> None:
        """The loop has let go of the pass: it stopped early, which may be legitimate, or an exception is being raised.

        After an exception of the loader's own, the span stays open until it is known what becomes of it.
        """
        if self._over:
            return
        self._over = True
        if self._span is not None and not self._span.failed:
            self._passes.leave(self._span)

"""Even passes: a loader that gives as many batches on every rank, whatever each rank's own loader holds.

The training thread gives a batch to the loop once all ranks have one of that number (`protocol.credits`). Where the
loader fetches ahead by itself, this thread takes batches ahead of its loop too, so that it waits only if it is ahead of
the slowest loader. From any other loader it takes each batch where the loop asks for it: the order of random draws, the
memory that a loader fills again, and all that a loader does as a side effect are as without countoff. A verdict ends
each wait.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from countoff.core.ending import shutdown
from countoff.core.protocol.counters import SpanCounters, UnusedBatches
from countoff.core.protocol.credits import Credits
from countoff.core.session.state import State

__all__ = ["EvenPass", "Resumable"]

WAIT_SECONDS = 1.0
"""A wait is short: Ctrl-C is handled when it ends, if the signal came just before it or went to another thread.

The log is read after it, if nothing has come by the reader.
"""


@dataclass
class Resumable:
    """The state of a loader from which a run can resume where its loop is.

    Attributes:
        state: The state after the last batch that was given to the loop.
        over: Whether the pass has come to its common end.
    """

    state: Any
    over: bool = False


class EvenPass:
    """An iterator over one pass. It ends after the same number of batches on every rank.

    Args:
        state: This rank's state.
        span: The span of the pass, open on this rank.
        credits: Its credits.
        batches: The loader's own iterator.
        samples: Returns the number of samples of a batch of this rank; None if that is not known.
        snapshot: Returns the state of the loader from which a run can resume.
        ahead: Whether the caller itself fetches one batch ahead of the one that its loop trains on.
        own: Batches that this rank's loader has, where that is known before the pass; None: it is counted.
        read_log: Has the writer read the log. A reader that cannot connect, or not yet, receives nothing that the
            other ranks write. A rank that waits writes nothing, so its writer receives nothing either.

    Attributes:
        resumable: The loader's state where the loop is; None without `snapshot`.
    """

    def __init__(
        self,
        state: State,
        span: SpanCounters,
        credits: Credits,
        batches: Iterator[Any],
        *,
        samples: Callable[[Any], int | None] = lambda batch: None,
        snapshot: Callable[[], Any] | None = None,
        ahead: bool = False,
        own: int | None = None,
        read_log: Callable[[], object] = lambda: None,
    ) -> None:
        self._state = state
        self._span = span
        self._credits = credits
        self._batches = batches
        self._samples = samples
        self._snapshot = snapshot
        self._ahead = ahead
        self._own = own
        self._read_log = read_log
        self._held: deque[tuple[Any, Any]] = deque()
        self._first = span.started  # batches before a resumed pass
        self._given = 0
        self._lost = 0  # batches that are to be fetched again, which the other ranks know of
        self._exhausted = False
        self._error: Exception | None = None
        self.resumable = None if snapshot is None else Resumable(copy.deepcopy(snapshot()))

    def go_on_with(self, batches: Iterator[Any]) -> None:
        """Takes the next batches from another iterator: the loader has raised an exception, and was begun again.

        A caller that fetches ahead had not handed out the batch that it was given last. It takes that one again.
        """
        self._batches, self._exhausted, self._error = batches, False, None
        if self._ahead and self._given and not self._lost:
            self._given -= 1
            self._lost += 1

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Returns the next batch, once every rank has one of that number.

        Raises:
            StopIteration: After the same number of batches on every rank.
            DivergenceError: If ranks are known to be out of step.
        """
        credits, wanted = self._credits, self._given + 1
        if self._span.credits is None:  # the span was closed, so that nobody waits for this rank any more
            if not self._held:
                self._raise_error()
            return self._held.popleft()[0] if self._held else next(self._batches)
        if not self.is_ready():
            self._wait()
        if self._state.end is not None or self._state.proposed is not None:
            self._note_request()  # the verdict's table tells who has asked for this batch, and who has not
            shutdown.raise_verdict(self._state)
        if credits.total is not None and wanted > credits.total:
            self._end(credits.total)
            raise StopIteration
        if wanted > credits.granted:
            self._raise_error()
        while not self._held:  # nothing is fetched ahead
            self._fetch_needed()
        self._given = wanted
        batch, state = self._held.popleft()
        if self.resumable is not None:
            self.resumable.state = state
        return batch

    def is_ready(self) -> bool:
        """Fetches what may be fetched ahead; whether the next batch, or the end, is there without waiting."""
        if not self._is_decided():
            self._note_request()
            self._state.look()  # another rank may have left the span at the batch before
        while self._may_fetch():  # last: once this rank has told what it has, it waits for the answer
            self._fetch()
        return self._is_decided()

    def _note_request(self) -> None:
        # A caller that fetches ahead holds the batch that its loop asks for.
        self._span.requested = self._first + self._given + (not self._ahead)

    def _is_decided(self) -> bool:
        credits = self._credits
        decided = self._given < credits.granted or credits.total is not None
        failed = self._error is not None and not credits.can_come(self._given + 1)
        over = self._state.end is not None or self._state.proposed is not None or self._span.credits is None
        return decided or failed or over

    def _may_fetch(self) -> bool:
        """Whether the look-ahead has room, and this rank's loader a batch that may be needed."""
        credits = self._credits
        return not (
            self._exhausted
            or len(self._held) >= credits.lookahead
            or self._error is not None
            or (credits.total is not None and credits.ready >= credits.total)
        )

    def _raise_error(self) -> None:
        """Raises what the loader has raised ahead of the loop, once: a loop that catches it asks for the next batch."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _fetch_needed(self) -> None:
        self._raise_error()
        if self._exhausted:
            raise StopIteration  # shorter than what was proved, as the sync points will show; or nobody is to wait
        self._fetch()

    def _fetch(self) -> None:
        credits = self._credits
        try:
            batch = next(self._batches)
        except StopIteration:
            self._loader_ended()
            return
        except Exception as error:  # raised where the loop comes to that batch, as without a look-ahead
            if not self._held:
                raise
            self._error = error
            return
        # Copied: a data set may return the very object that it changes with the next batch.
        self._held.append((batch, None if self._snapshot is None else copy.deepcopy(self._snapshot())))
        if self._lost:
            self._lost -= 1
        else:
            self._state.fetched(credits)

    def _loader_ended(self) -> None:
        self._exhausted = True
        if self._credits.own_end is None:
            self._state.loader_ended(self._credits)

    def _wait(self) -> None:
        """Waits until the next batch is granted, is known not to come, or there is a verdict."""
        state, waited, ready = self._state, 0.0, False
        while not ready:
            began = time.monotonic()
            with state.changed:
                while not self._is_decided():
                    heard = state.changed.wait(WAIT_SECONDS)
                    if not heard and state.outbox.empty():  # else a slow store has enough to do
                        self._read_log()
            waited += time.monotonic() - began
            ready = self.is_ready()
        self._span.loader_seconds -= waited  # the adapter adds all that it waits for an iterator

    def conclude(self) -> None:
        """Ends the pass after the batch that was given last, for a caller that knows the common end by itself."""
        self._note(self._given)

    def _end(self, total: int) -> None:
        credits = self._credits
        if not self._exhausted and not self._held and credits.own_end is None and self._own in (None, total):
            # A loader that ends here is to end as in any loop, and whether it does is to be told.
            with contextlib.suppress(Exception):  # of a batch that no rank takes
                self._fetch()
        if self.resumable is not None:
            self.resumable.over = True
            if self._snapshot is not None and self._exhausted and not self._held:
                self.resumable.state = copy.deepcopy(self._snapshot())  # the loader's own end: its next pass is whole
        self._note(total)

    def _note(self, total: int) -> None:
        """Notes what this rank had beyond the common end."""
        own = self._credits.own_end if self._own is None else self._own
        known = [self._samples(batch) for batch, _ in self._held]
        samples = sum(each or 0 for each in known) if known and None not in known else None
        left = len(self._held) if self._own is None else self._own - total
        self._span.unused = UnusedBatches(left, samples, exact=own is not None)

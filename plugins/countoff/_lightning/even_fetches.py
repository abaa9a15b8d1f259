"""Lightning's data fetchers and limits while ranks take the same number of batches (`uneven_train`, `uneven_eval`).

A fetcher tells its loop which batch is the last one. By that the loop steps, validates and ends its epoch. For a loader
with a length, the fetcher counts, and in an even pass it counts up to the common length, where the ranks know it.
Otherwise it fetches one batch ahead, as it does for a loader without a length, so that it calls the last batch which
all ranks have the last one.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from countoff._adapter.even_loaders import fetches_ahead, finished
from countoff._adapter.hooks import MethodHook, PlacedValue
from countoff._adapter.loader_observer import samples_in
from countoff.core import Guard

__all__ = ["CommonEstimate", "EvenFetches", "EvenLimits", "EvenLoaders"]


class EvenFetches:
    """What a data fetcher iterates in one even pass in the place of its combined loader, until it is removed.

    A pickle or a deep copy holds the combined loader of the copy there.

    Args:
        guard: The guard. The pass belongs to its innermost open span.
        fetcher: The data fetcher. It has its iterator for this pass, and the loop has not got a batch of it.
        proven: Whether the fit's plan proves the length of its loader.
        saved: Whether Lightning saves the loader's state. The state is then the one after the last batch that the loop
            has got, as if nothing was fetched ahead.
        common: What the ranks have agreed on as the length of this pass, from the lengths that their loaders report;
            None if they have not.
        evaluation: The loop of the evaluation, where the pass is one. Nothing there needs to know the last batch before
            the end, so its loader is not read ahead if it reports a length.
    """

    def __init__(
        self,
        guard: Guard,
        fetcher: Any,
        *,
        proven: bool = False,
        saved: bool = False,
        common: int | None = None,
        evaluation: Any = None,
    ) -> None:
        self._guard = guard
        self._loader = fetcher.combined_loader
        self._length = fetcher.length
        fetches = hasattr(fetcher, "batches")  # without them, training_step fetches by itself
        held = list(fetcher.batches) if fetches else []
        resumed_at = fetcher.fetched - len(held)
        own_states = getattr(self._loader, "_state_dicts", None) if saved else None
        self._state: Any = own_states() if own_states is not None else None
        snapshot = own_states if self._state else None
        self._common = common if fetches and self._length and not self._state else None
        self._evaluation = evaluation
        self._ahead = fetches and self._common is None and (evaluation is None or self._length is None)
        self._taken = resumed_at
        flattened = self._loader.flattened
        self._even = guard.even(
            self._limited(resumed_at, held, fetcher.iterator),
            samples=samples_in,
            snapshot=snapshot,
            ahead=self._ahead,
            prefetches=all(map(fetches_ahead, flattened)) and len(flattened) == 1,
            proven=proven,
            length=None if self._common is None else self._length,
        )
        self._resumable: Any = getattr(self._even, "resumable", None)
        self._hook: MethodHook | None = None
        if self._resumable is not None:
            self._hook = MethodHook(self._loader, "_state_dicts", instead=lambda _: self._states())
        self._placed = PlacedValue(fetcher, "iterator", self), PlacedValue(fetcher, "length", self._common)
        fetcher.fetched, fetcher.done = resumed_at, False
        if fetches:
            fetcher.batches = []
        if self._ahead:
            try:
                _fetch_one(fetcher)
            except BaseException:  # of the loader, or a verdict: nobody else could take this back
                self.remove()
                raise

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        began = time.perf_counter()
        if self._ahead and self._resumable is not None:
            self._state = self._resumable.state  # the loop has what was fetched until now, and not yet this batch
        try:
            batch = next(self._even)
        except StopIteration:
            if self._evaluation is not None:
                self._evaluation.batch_progress.is_last_batch = True  # it was, as is known only now
            raise
        finally:
            self._guard.waited(time.perf_counter() - began)
        self._taken += 1
        if self._taken == self._common and (conclude := getattr(self._even, "conclude", None)) is not None:
            conclude()  # the fetcher calls it the last batch, and Lightning asks for no other one
        return batch

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._loader,)

    def remove(self) -> None:
        """Gives the fetcher and the loader back what was theirs. Does nothing when called again."""
        if self._hook is not None:
            self._hook.remove()
        iterator, length = self._placed
        if iterator.remove():  # else Lightning has set both anew
            length.remove()

    def _limited(self, done: int, held: list[Any], iterator: Iterator[Any]) -> Iterator[Any]:
        """Ends where Lightning ends a pass: at the length that the loader reports, or at the user's limit."""
        batches = itertools.chain(held, _rest(iterator))
        return batches if self._length is None else itertools.islice(batches, max(0, self._length - done))

    def _states(self) -> list[Any]:
        """The states of the loaders where the loop is."""
        states = self._state if self._ahead else self._resumable.state
        return [finished(state) for state in states] if self._resumable.over else states


class EvenLoaders:
    """What an evaluation's fetcher iterates in the place of several loaders in a row, until it is removed.

    Each loader is a pass of its own, which is made even, in a span of its own.

    Args:
        guard: The guard, with the span of the first loader open.
        loop: The evaluation loop. Its fetcher has its iterator, and the loop has not got a batch of it.
        next_loader: Called with the index of each loader but the first one, when the loader before it has ended on all
            ranks; it opens the span of that loader.
    """

    def __init__(self, guard: Guard, loop: Any, next_loader: Callable[[int], None]) -> None:
        fetcher = loop._data_fetcher
        self._guard = guard
        self._loop = loop
        self._loader = fetcher.combined_loader
        self._next_loader = next_loader
        self._index = 0
        self._pending = list(fetcher.batches)
        fetcher.fetched -= len(self._pending)
        self._length = fetcher.length
        self._placed = PlacedValue(fetcher, "iterator", self), PlacedValue(fetcher, "length", None)
        fetcher.batches, fetcher.done = [], False
        self._even = self._pass()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while True:
            began = time.perf_counter()
            try:
                return next(self._even)
            except StopIteration:
                if self._index + 1 >= len(self._loader.flattened):
                    self._loop.batch_progress.is_last_batch = True  # it was, as is known only now
                    raise
            finally:
                self._guard.waited(time.perf_counter() - began)
            self._index += 1
            self._next_loader(self._index)
            self._even = self._pass()

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._loader,)

    def remove(self) -> None:
        """Gives the fetcher back what was its own. Does nothing when called again."""
        iterator, length = self._placed
        if iterator.remove():  # else Lightning has set both anew
            length.remove()

    def _pass(self) -> Iterator[Any]:
        return self._guard.even(self._batches(self._index), samples=samples_in)

    def _batches(self, index: int) -> Iterator[Any]:
        """The batches of one loader."""
        in_a_row = self._loader._iterator
        while not self._pending and in_a_row._iterator_idx < index:  # what is left of the loader before
            in_a_row._use_next_iterator()
        while True:
            if not self._pending:
                try:
                    self._pending.append(next(self._loader))
                except StopIteration:
                    return
            if self._pending[0][2] > index:  # the first batch of a loader after this one
                return
            yield self._pending.pop()


class CommonEstimate:
    """Lets `trainer.estimated_stepping_batches` follow from the common length before the fit begins.

    Schedules are made of it in `configure_optimizers`. Lightning loads the train loader for it, and all ranks meet in a
    barrier there, so they can tell one another their lengths at that place.

    Args:
        trainer: Lightning's Trainer.
        agree: Collective: returns the batches of an epoch on every rank, from those of this rank; None if they do not
            follow.
    """

    def __init__(self, trainer: Any, agree: Callable[[int | None], int | None]) -> None:
        self._loop = trainer.fit_loop
        self._agree = agree
        self._placed: PlacedValue | None = None
        self._hook = MethodHook(self._loop, "setup_data", after=lambda *_: self._share())

    def remove(self) -> None:
        """Gives Lightning its own number back. Does nothing when called again."""
        self._hook.remove()
        if self._placed is not None:
            self._placed.remove()

    def _share(self) -> None:
        self._hook.remove()
        own = self._loop.max_batches
        common = self._agree(None if math.isinf(own) else int(own))
        if common and common != own:
            self._placed = PlacedValue(self._loop, "max_batches", common)


class EvenLimits:
    """Lightning's own numbers that come from the length of one rank's loader, set to what holds for all ranks.

    Args:
        trainer: Lightning's Trainer.
        common: Batches of an epoch on every rank; None if they are known only at its end.
    """

    def __init__(self, trainer: Any, common: int | None) -> None:
        self._trainer = trainer
        self._common = common
        self._placed: dict[str, PlacedValue] = {}

    def set(self) -> None:
        """Sets them. Lightning computes them anew when it loads the train loader again."""
        trainer, loop = self._trainer, self._trainer.fit_loop
        interval, common = trainer.val_check_interval, self._common
        if isinstance(interval, float) and getattr(trainer, "val_check_batch", None) is not None:
            if interval == 1.0:
                self._place(trainer, "val_check_batch", math.inf)  # after the batch that the fetcher calls the last one
            elif common:
                self._place(trainer, "val_check_batch", max(1, int(common * interval)))
        if common:
            self._place(loop, "max_batches", common)
        elif not hasattr(loop._data_fetcher, "batches"):
            # training_step fetches by itself: without this, a short rank would leave without asking for the end.
            self._place(loop, "max_batches", math.inf)

    def remove(self) -> None:
        """Gives Lightning its own numbers back, where they have not been set anew. Does nothing when called again."""
        for placed in self._placed.values():
            placed.remove()

    def _place(self, owner: Any, name: str, value: float) -> None:
        if getattr(owner, name) != value:
            self._placed[name] = PlacedValue(owner, name, value)


def _fetch_one(fetcher: Any) -> None:
    """Fetches the batch ahead of the first one; without any, the fetcher is done."""
    try:
        batch = next(fetcher)
    except StopIteration:
        return
    fetcher.batches.append(batch)


def _rest(iterator: Iterator[Any]) -> Iterator[Any]:
    """The batches that an iterator still has. A combined loader is its own iterator, and `iter` begins it anew."""
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        yield batch


def _itself(loader: Any) -> Any:
    """Returns what it is given: how a copy of a fetcher iterates the combined loader of the copy."""
    return loader

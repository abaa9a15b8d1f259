"""Counts the loops over what Accelerate has prepared, in programs that attach nothing.

Accelerate's own objects show what trains: an optimizer that it has prepared steps, while the loop has a batch of a
loader that it has prepared. The first such step begins the fit, when the loop asks for its next batch: the ranks have
met in the step, so all of them are at the same place. A pass without one, as an evaluation, is passed on as it is.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from countoff._accelerate.accelerator import is_prepared_optimizer
from countoff._accelerate.beginning import begin_loop, goes_on_with
from countoff._accelerate.loaders import followers, same_source, skipped_batches, watch_local_sgd
from countoff._accelerate.observation import watch_joins
from countoff._adapter.iterator_proxy import IteratorProxy
from countoff._adapter.observed_loop import ObservedLoop, active_loops
from countoff._adapter.torch_facts import on_optimizer_step
from countoff._run.unobserved import say_unobserved
from countoff.core import DivergenceError, Settings, constants
from countoff.core.data.fingerprint import Begun, begin_fingerprint
from countoff.core.ending.shutdown import print_line

__all__ = ["PreparedLoops"]

_NOT_EVEN = "the ranks of this loop are not made even: that needs attach() in the code."


@dataclass(eq=False)
class _Begun:
    """A pass in which no optimizer has stepped so far.

    Attributes:
        accelerator: The Accelerator that has prepared the loader.
        loader: The loader that is iterated.
        prepared: The one that was prepared, of which it may skip the first batches.
        taken: Batches that the loop has taken.
        thread: The thread that has taken the last one.
        steps: The optimizers that have stepped since then on that thread.
        read: The fingerprints of its first batches.
    """

    accelerator: Any
    loader: Any
    prepared: Any
    taken: int = 0
    thread: int = 0
    steps: list[Any] = field(default_factory=list[Any])
    read: list[Begun | None] = field(default_factory=list["Begun | None"])


class PreparedLoops:
    """The loops of a program over the loaders that Accelerators have prepared.

    A loop that the program has attached, or that has a callback, counts instead, and nothing is counted here any more.
    Nor is a pass that begins where ranks may be uneven, or whose batches are taken on another thread than its steps.

    Attributes:
        closed: Whether nothing is counted any more.
    """

    def __init__(self) -> None:
        self.closed = False
        self._accelerators: weakref.WeakSet[Any] = weakref.WeakSet()
        self._loop: ObservedLoop | None = None
        self._train: Callable[[], Any] = _nothing  # the loader whose length the loop's totals are made of
        self._begun: dict[int, _Begun] = {}  # by their ids; threads of the program change it too
        self._apart = 0  # the contexts that the program is in, inside of which ranks may be uneven
        self._hooks = contextlib.ExitStack()
        self._hooks.callback(on_optimizer_step(self._stepped).remove)
        self._hooks.callback(followers.add(self._follow))
        self._hooks.callback(watch_joins(self._joined))
        self._hooks.callback(watch_local_sgd(self._averages))

    @functools.cached_property
    def settings(self) -> Settings:
        """The user's settings, as they are when the first pass begins."""
        return Settings.resolve()

    def add(self, accelerator: Any) -> None:
        """Counts the loops over the loaders that an Accelerator has prepared, and that it prepares later."""
        if accelerator.num_processes > 1:
            self._accelerators.add(accelerator)

    def close(self) -> None:
        """Counts nothing any more, and takes back what was put on Accelerate's classes."""
        self.closed = True
        loop, self._loop = self._loop, None
        self._hooks.close()
        if loop is not None:
            loop.abandon()

    def takes(self, begun: _Begun, batch: Any) -> None:
        """Counts a batch of a pass that is not known to train, and reads the first ones."""
        begun.taken += 1
        if self.settings.compare_data and len(begun.read) < constants.FINGERPRINT_BATCHES:
            begun.read.append(begin_fingerprint(batch))
        if self._loop is not None:
            self._loop.guard.evidence.elsewhere += 1

    def forget(self, begun: _Begun) -> None:
        """Looks for no optimizer step in a pass any more."""
        self._begun.pop(id(begun), None)

    def count(self, begun: _Begun, batches: Iterator[Any]) -> Iterator[Any]:
        """Returns the iterator of the rest of a pass that trains."""
        self.forget(begun)
        if self._counted_by_others():
            return batches
        try:
            loop = self._loop_of(begun)
            if loop.guard.open_span is not None:  # this is another loader of a loop whose epoch is counted
                return batches
            counted = self._rest_of(loop, begun, batches)
        except DivergenceError:
            raise
        except Exception as error:
            self._give_up(error)
            return batches
        for optimizer in begun.steps:
            loop.step(optimizer)
        return counted

    def _follow(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any] | None:
        """Returns the iterator of a pass that begins; None for one that is left alone."""
        if self._counted_by_others() or self._apart:
            return None
        try:
            begun = self._of_prepared(loader) if self.settings.enabled else None
        except Exception as error:
            self._give_up(error)
            return None
        if begun is None:
            return None
        self._begun[id(begun)] = begun
        return _Pass(self, begun, batches)

    def _of_prepared(self, loader: Any) -> _Begun | None:
        for accelerator in self._accelerators:
            for prepared in accelerator._dataloaders if accelerator._models else ():
                if same_source(prepared, loader):
                    return _Begun(accelerator, loader, prepared)
        return None

    def _loop_of(self, begun: _Begun) -> ObservedLoop:
        """Returns the loop. The first pass that trains begins its fit."""
        loop = self._loop
        if loop is None or loop not in active_loops():
            settings = self._settings_of(begun.accelerator)
            self._loop = loop = begin_loop(begun.accelerator, settings, train=begun.prepared, counts_passes=False)
            loop.passes.expects_more = False
            self._train = weakref.ref(begun.prepared)
        return loop

    def _settings_of(self, accelerator: Any) -> Settings:
        """Returns the settings without what must be known when a pass begins; rank 0 says what it leaves out."""
        settings = self.settings
        if settings.keeps_even and accelerator.process_index == 0:
            print_line(0, _NOT_EVEN)
        uneven_eval = "warn" if settings.uneven_eval == "stop" else settings.uneven_eval
        return replace(settings, uneven_train="raise", uneven_eval=uneven_eval)

    def _rest_of(self, loop: ObservedLoop, begun: _Begun, batches: Iterator[Any]) -> Iterator[Any]:
        """Begins the pass in the loop, with the batches that were taken of it."""
        loader = begun.loader
        if self._train() is not begun.prepared:
            goes_on_with(loop, begun.accelerator, begun.prepared)
            self._train = weakref.ref(begun.prepared)
        known = {"position": skipped_batches(loader), "ahead": loader, "loader": loader}
        return loop.passes.follow(batches, None, taken=begun.taken, read=begun.read, **known)

    def _stepped(self, optimizer: Any) -> None:
        thread = threading.get_ident()
        for each in list(self._begun.values()):
            if each.taken and each.thread == thread and is_prepared_optimizer(each.accelerator, optimizer):
                each.steps.append(optimizer)

    def _counted_by_others(self) -> bool:
        """Whether nothing is counted here any more; so it is once another loop of the program is."""
        if any(each is not self._loop for each in active_loops()):
            self.close()
        return self.closed

    def _give_up(self, error: Exception) -> None:
        """Leaves the program alone where something is not as it was expected, as in another version of Accelerate."""
        say_unobserved("this loop over Accelerate's loaders", f"{type(error).__name__}: {error}")
        self.close()

    def _averages(self, accelerator: Any, inside: bool) -> None:
        """The program enters or leaves `LocalSGD`."""
        del accelerator
        self._apart += 1 if inside else -1

    @contextlib.contextmanager
    def _joined(self, accelerator: Any) -> Iterator[None]:
        del accelerator
        self._apart += 1
        try:
            yield
        finally:
            self._apart -= 1


def _nothing() -> Any:
    """The loader of a loop that has none yet."""


class _Pass(IteratorProxy):
    """The iterator of one pass: from the optimizer step on that shows that it trains, its batches are counted.

    Args:
        loops: Who counts.
        begun: The pass.
        batches: The loader's own iterator.
    """

    def __init__(self, loops: PreparedLoops, begun: _Begun, batches: Iterator[Any]) -> None:
        super().__init__(batches)
        self.__loops = loops
        self.__begun = begun
        self.__batches = batches
        self.__counted = False

    def __next__(self) -> Any:
        loops, begun = self.__loops, self.__begun
        if begun.steps and not self.__counted:
            self.__counted = True
            self.__batches = loops.count(begun, self.__batches)
        if self.__counted:
            return next(self.__batches)
        begun.thread = threading.get_ident()
        try:
            batch = next(self.__batches)
        except StopIteration:
            loops.forget(begun)
            raise
        loops.takes(begun, batch)
        return batch

    def __del__(self) -> None:
        self.__loops.forget(self.__begun)

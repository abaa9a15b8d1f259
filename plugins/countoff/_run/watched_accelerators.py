"""Finds the train loader of a script that does not mention countoff, by watching: its batches precede optimizer steps.

Until a loader is found, passes over prepared loaders are passed on as they are, and their batches counted. The first
optimizer step inside of one shows that it trains. The fit begins when the loop asks for the batch after that step: in
the step itself ranks have waited for one another, so all of them ask at the same time.

It is a guess which loader trains, so what is found in such a fit warns at most.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from countoff._accelerate.accelerator import is_prepared_optimizer
from countoff._accelerate.beginning import begin_loop, goes_on_with
from countoff._accelerate.loaders import followers, same_source, skipped_batches, watch_local_sgd
from countoff._accelerate.observation import watch_joins
from countoff._adapter.observed_loop import ObservedLoop, active_loops
from countoff._adapter.torch_facts import on_optimizer_step
from countoff._run.unobserved import say_unobserved
from countoff.core import DivergenceError, Settings
from countoff.core.ending.shutdown import print_line

__all__ = ["WatchedAccelerators"]

_WAIT_SECONDS = 10.0
"""How long the start of a fit that was found waits for other ranks, which have made the same optimizer step."""
_FOUND = "Found by watching, so it ends nothing; with attach() in the code it would end the job."
_NOT_EVEN = "this loop was found by watching, so its ranks are not made even: that needs attach() in the code."
_END = object()


@dataclass(eq=False)
class _Noticed:
    """A pass that is not known to train.

    Attributes:
        accelerator: The Accelerator that has prepared the loader.
        loader: The loader that is iterated.
        prepared: The one that was prepared, of which it may skip the first batches.
        taken: Batches that the loop has taken.
        thread: The thread that has taken the last one.
        stepped: The optimizers that have stepped since on that thread, in that order.
    """

    accelerator: Any
    loader: Any
    prepared: Any
    taken: int = 0
    thread: int = 0
    stepped: list[Any] = field(default_factory=list[Any])


class WatchedAccelerators:
    """The Accelerators of a script that attaches nothing. The first loader that a script trains on begins the fit.

    A loop that the script has attached, or that has a callback, counts instead. Then nothing is watched any more. Nor
    is a loop whose ranks train apart when it begins, or which takes its batches on another thread than its steps.
    """

    def __init__(self) -> None:
        self._accelerators: weakref.WeakSet[Any] = weakref.WeakSet()
        self._noticed: list[_Noticed] = []
        self._loop: ObservedLoop | None = None
        self._trained: weakref.WeakSet[Any] = weakref.WeakSet()
        self._train: Callable[[], Any] = lambda: None  # the loader whose length the loop's totals are made of
        self._apart = 0  # the contexts that the script is in, inside of which ranks may be uneven
        self._hooks = contextlib.ExitStack()
        for remove in (
            followers.add(self._follow),
            on_optimizer_step(self._stepped).remove,
            watch_joins(self._joins),
            watch_local_sgd(self._local_sgd),
        ):
            self._hooks.callback(remove)

    def add(self, accelerator: Any) -> None:
        """Watches the loaders that an Accelerator has prepared, and those that it prepares later."""
        if accelerator.num_processes > 1:
            self._accelerators.add(accelerator)

    def close(self) -> None:
        """Watches nothing any more, and gives back what is watched."""
        loop, self._loop = self._loop, None
        self._hooks.close()
        if loop is not None:
            loop.abandon()

    def _follow(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any] | None:
        if any(each is not self._loop for each in active_loops()):
            self.close()
            return None
        try:
            return self._find(loader, batches)
        except DivergenceError:
            raise
        except Exception as error:
            self._give_up(error)
            return None

    def _find(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any] | None:
        """Returns the iterator of a pass over a prepared loader; None for another one."""
        for accelerator in self._accelerators:
            for prepared in accelerator._dataloaders:
                if same_source(prepared, loader):
                    return self._pass(_Noticed(accelerator, loader, prepared), batches)
        return None

    def _pass(self, noticed: _Noticed, batches: Iterator[Any]) -> Iterator[Any] | None:
        loop = self._loop
        if loop in active_loops() and noticed.prepared in self._trained and torch.is_grad_enabled():
            return self._counted(loop, noticed, batches)
        return None if self._apart else self._until_it_trains(noticed, batches)

    def _until_it_trains(self, noticed: _Noticed, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches of one pass; from the optimizer step on that shows that it trains, they are counted."""
        self._noticed.append(noticed)
        try:
            while not noticed.stepped:
                noticed.thread = threading.get_ident()
                batch = next(batches, _END)
                if batch is _END:
                    return
                noticed.taken += 1
                if self._loop is not None:
                    self._loop.guard.evidence.elsewhere += 1
                yield batch
        finally:
            self._noticed.remove(noticed)
        yield from self._trains(noticed, batches)

    def _trains(self, noticed: _Noticed, batches: Iterator[Any]) -> Iterator[Any]:
        """Returns the iterator of the rest of a pass that trains."""
        if any(each is not self._loop for each in active_loops()):
            return batches
        try:
            loop = self._loop_of(noticed)
            if loop.guard.open_span is not None:  # this is another loader of a loop whose epoch is counted
                return batches
            counted = self._counted(loop, noticed, batches, taken=noticed.taken)
        except DivergenceError:
            raise
        except Exception as error:
            self._give_up(error)
            return batches
        for optimizer in noticed.stepped:
            loop.step(optimizer)
        return counted

    def _give_up(self, error: Exception) -> None:
        """Leaves the program alone where something is not as it was expected, as in another version of Accelerate."""
        say_unobserved("this loop over Accelerate's loaders", f"{type(error).__name__}: {error}")
        self.close()

    def _counted(
        self, loop: ObservedLoop, noticed: _Noticed, batches: Iterator[Any], *, taken: int = 0
    ) -> Iterator[Any]:
        """Returns the iterator of a pass that trains, as `LoaderPasses.follow` does."""
        if loop.guard.open_span is None and self._train() is not noticed.prepared:
            goes_on_with(loop, noticed.accelerator, noticed.prepared)
        self._train = weakref.ref(noticed.prepared)
        self._trained.add(noticed.prepared)
        loader, position = noticed.loader, skipped_batches(noticed.loader)
        return loop.passes.follow(batches, None, position=position, ahead=loader, loader=loader, taken=taken)

    def _stepped(self, optimizer: Any) -> None:
        thread = threading.get_ident()
        for each in self._noticed:
            if each.taken and each.thread == thread and is_prepared_optimizer(each.accelerator, optimizer):
                each.stepped.append(optimizer)

    def _loop_of(self, noticed: _Noticed) -> ObservedLoop:
        """Returns the loop. The first pass that trains begins its fit, which is collective."""
        loop = self._loop
        if loop is None or loop not in active_loops():
            accelerator, train = noticed.accelerator, noticed.prepared
            settings = _settings(accelerator)
            loop = begin_loop(accelerator, settings, train=train, evaluations={}, found_by=_FOUND)
            loop.passes.expects_more = False
            self._loop, self._train = loop, weakref.ref(train)
            self._trained.clear()
        return loop

    @contextlib.contextmanager
    def _joins(self, accelerator: Any) -> Iterator[None]:
        self._local_sgd(accelerator, True)
        try:
            yield
        finally:
            self._local_sgd(accelerator, False)

    def _local_sgd(self, accelerator: Any, inside: bool) -> None:
        del accelerator
        self._apart += 1 if inside else -1


def _settings(accelerator: Any) -> Settings:
    """Returns the user's settings, without what a guess must not do; rank 0 says what it leaves out."""
    settings = Settings.resolve()
    if settings.keeps_even:
        if accelerator.is_main_process:
            print_line(accelerator.process_index, _NOT_EVEN)
        uneven_eval = "warn" if settings.uneven_eval == "stop" else settings.uneven_eval
        settings = replace(settings, uneven_train="raise", uneven_eval=uneven_eval)
    waits = min(settings.deadline_seconds, _WAIT_SECONDS)
    return replace(settings, deadline_seconds=waits, levels={**settings.levels, "LateRank": "off"})

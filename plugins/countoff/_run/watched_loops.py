"""Finds the loader on which a script trains that does not mention countoff: its batches precede optimizer steps.

Until a loader is found, passes over loaders are passed on as they are, and their batches counted. Optimizer steps
inside of one show that it trains. The fit begins when the loop asks for the batch after such a step: in the step itself
ranks have met, so all of them are at the same place.

It is a guess which loader trains, so what is found in such a fit warns at most, and its start waits for no other rank
longer than a moment.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from countoff._adapter.iterator_proxy import IteratorProxy
from countoff._adapter.observed_loop import ObservedLoop, active_loops
from countoff._adapter.torch_facts import on_optimizer_step
from countoff._run.unobserved import say_unobserved
from countoff.core import DivergenceError, Settings, constants
from countoff.core.data.fingerprint import Begun, begin_fingerprint
from countoff.core.ending.shutdown import print_line

__all__ = ["FOUND", "Noticed", "WatchedLoops"]

FOUND = "Found by watching, so it ends nothing; with attach() in the code it would end the job."
_NOT_EVEN = "this loop was found by watching, so its ranks are not made even: that needs attach() in the code."
_steps = 0
"""The optimizer steps of this process inside of passes that are watched or counted."""


@dataclass(eq=False)
class Steps:
    """Optimizer steps of one optimizer after one batch.

    Attributes:
        optimizer: The optimizer.
        taken: Batches that the loop had taken then.
        times: How often it has stepped.
    """

    optimizer: Any
    taken: int
    times: int = 1


@dataclass(eq=False)
class Noticed:
    """A pass that is not known to train.

    Attributes:
        owner: What the loader belongs to: an Accelerator; None where a loader belongs to nothing.
        loader: The loader that is iterated.
        source: The loader that stands for it, of which it may skip the first batches.
        taken: Batches that the loop has taken.
        thread: The thread that has taken the last one.
        steps: The optimizer steps that were made on that thread.
        read: The fingerprints of its first batches.
    """

    owner: Any
    loader: Any
    source: Any
    taken: int = 0
    thread: int = 0
    steps: list[Steps] = field(default_factory=list[Steps])
    read: list[Begun | None] = field(default_factory=list["Begun | None"])

    def stepped(self, optimizer: Any) -> None:
        """Takes note of an optimizer step."""
        for each in reversed(self.steps):
            if each.taken != self.taken:
                break
            if each.optimizer is optimizer:
                each.times += 1
                return
        self.steps.append(Steps(optimizer, self.taken))


class WatchedLoops:
    """The loops of a script that attaches nothing. The first loader that a script trains on begins the fit.

    A loop that the script has attached, or that has a callback, counts instead. Then nothing is watched any more. Nor
    is a loop whose ranks train apart when it begins, or which takes its batches on another thread than its steps.

    Args:
        what: What is watched, in words.

    Attributes:
        loop: The loop that was found; None while there is none.
        hooks: What to take back when nothing is watched any more.
        closed: Whether nothing is watched any more.
        lost: Whether nothing is to be watched any more from the next batch on: it cannot close in the hook of a step,
            which is a hook itself.
    """

    def __init__(self, what: str) -> None:
        self.loop: ObservedLoop | None = None
        self.hooks = contextlib.ExitStack()
        self.closed = self.lost = False
        self._what = what
        self._noticed: dict[int, Noticed] = {}  # by their ids; threads of the script change it too
        self._train: Callable[[], Any] = lambda: None  # the loader whose length the loop's totals are made of
        self._apart = 0  # the contexts that the script is in, inside of which ranks may be uneven
        self.hooks.callback(on_optimizer_step(self._stepped).remove)

    @functools.cached_property
    def settings(self) -> Settings:
        """The user's settings, as they are when the first pass begins."""
        return Settings.resolve()

    def settings_of_fit(self, rank: int) -> Settings:
        """Returns the settings without what a guess must not do; rank 0 says what it leaves out."""
        settings = self.settings
        if settings.keeps_even and rank == 0:
            print_line(rank, _NOT_EVEN)
        uneven_eval = "warn" if settings.uneven_eval == "stop" else settings.uneven_eval
        levels = {**settings.levels, "LateRank": "off"}
        return replace(settings, uneven_train="raise", uneven_eval=uneven_eval, levels=levels)

    def noticed(self, loader: Any) -> Noticed | None:
        """Returns a pass over a loader that is about to begin; None for a loader that is not watched."""
        raise NotImplementedError

    def steps_together(self, noticed: Noticed, optimizer: Any) -> bool:
        """Returns whether an optimizer steps on all ranks alike, by what the loader of a pass belongs to."""
        raise NotImplementedError

    def begin(self, noticed: Noticed) -> ObservedLoop:
        """Returns a loop whose fit has begun, over the loader of a pass that trains."""
        raise NotImplementedError

    def trains(self, noticed: Noticed) -> bool:
        """Returns whether a pass in which optimizers have stepped is known to train on what its loader gives."""
        del noticed
        return True

    def counted_step(self, optimizer: Any, batches: int) -> None:
        """Takes note of an optimizer step inside of a pass that is counted.

        Args:
            optimizer: The optimizer.
            batches: Batches of the pass until then.
        """

    def goes_on_with(self, loop: ObservedLoop, noticed: Noticed) -> None:
        """Takes the loader of another pass for the train loader of the loop, from its next epoch on."""
        raise NotImplementedError

    def where(self, loader: Any) -> dict[str, Any]:
        """Returns where in its epoch a pass over a loader begins, as `LoaderPasses.follow` takes it."""
        del loader
        return {}

    def steps(self) -> int:
        """Returns where a loop is found, as `found_at` of `Evidence`: equal on ranks that have stepped alike."""
        return _steps

    def train_apart(self, inside: bool) -> None:
        """Takes note that the script enters or leaves a context in which ranks may be uneven."""
        self._apart += 1 if inside else -1

    def close(self) -> None:
        """Watches nothing any more, and gives back what is watched."""
        self.closed = True
        loop, self.loop = self.loop, None
        self.hooks.close()
        if loop is not None:
            loop.abandon()

    def follow(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any] | None:
        """Returns the iterator of a pass that begins; None for one that is not watched.

        Args:
            loader: The loader that is about to be iterated.
            batches: Its own iterator.
        """
        if self.lost or any(each is not self.loop for each in active_loops()):
            self.close()
        if self.closed:
            return None
        try:
            noticed = self.noticed(loader) if self.settings.enabled else None
        except Exception as error:
            self._give_up(error)
            return None
        return None if noticed is None or self._apart else _of_kind(batches)(self, noticed, batches)

    def notice(self, noticed: Noticed) -> None:
        """Counts the batches of a pass, and the optimizer steps inside of it, until it is known to train."""
        self._noticed[id(noticed)] = noticed

    def forget(self, noticed: Noticed) -> None:
        """Ends that."""
        self._noticed.pop(id(noticed), None)

    def takes(self, noticed: Noticed, batch: Any) -> None:
        """Counts a batch of a pass that is not known to train, and reads the first ones."""
        noticed.taken += 1
        if self.settings.compare_data and len(noticed.read) < constants.FINGERPRINT_BATCHES:
            noticed.read.append(begin_fingerprint(batch))
        if self.loop is not None:
            self.loop.guard.evidence.elsewhere += 1

    def count(self, noticed: Noticed, batches: Iterator[Any]) -> Iterator[Any]:
        """Returns the iterator of the rest of a pass that trains."""
        self.forget(noticed)
        if self.closed or any(each is not self.loop for each in active_loops()):
            return batches
        try:
            loop = self._loop_of(noticed)
            if loop.guard.open_span is not None:  # this is another loader of a loop whose epoch is counted
                return batches
            counted = self._counted(loop, noticed, batches)
            _make_up(loop, noticed)
        except DivergenceError:
            raise
        except Exception as error:
            self._give_up(error)
            return batches
        return counted

    def _give_up(self, error: Exception) -> None:
        """Leaves the program alone where something is not as it was expected, as in another version of a package."""
        say_unobserved(self._what, f"{type(error).__name__}: {error}")
        self.close()

    def _counted(self, loop: ObservedLoop, noticed: Noticed, batches: Iterator[Any]) -> Iterator[Any]:
        """Returns the iterator of a pass that trains, as `LoaderPasses.follow` does."""
        if loop.guard.open_span is None and self._train() is not noticed.source:
            self.goes_on_with(loop, noticed)
        self._train = weakref.ref(noticed.source)
        loader = noticed.loader
        known = {"taken": noticed.steps[0].taken, "read": noticed.read, **self.where(loader)}
        return loop.passes.follow(batches, None, loader=loader, **known)

    def _stepped(self, optimizer: Any) -> None:
        try:
            self._take_note(optimizer)
        except Exception as error:
            say_unobserved(self._what, f"{type(error).__name__}: {error}")
            self.lost = True

    def _take_note(self, optimizer: Any) -> None:
        global _steps
        thread, loop = threading.get_ident(), self.loop
        inside = [each for each in list(self._noticed.values()) if each.taken and each.thread == thread]
        stepped = [each for each in inside if self.steps_together(each, optimizer)]
        for each in stepped:
            each.stepped(optimizer)
        counts = loop is not None and loop.guard.open_span is not None
        if loop is not None and counts:
            self.counted_step(optimizer, loop.guard.train_batches)
        _steps += bool(stepped) or counts

    def _loop_of(self, noticed: Noticed) -> ObservedLoop:
        """Returns the loop. The first pass that trains begins its fit."""
        loop = self.loop
        if loop is None or loop not in active_loops():
            self.loop = loop = self.begin(noticed)
            loop.passes.expects_more = False
            self._train = weakref.ref(noticed.source)
        return loop


class _Pass(IteratorProxy):
    """The iterator of one pass: from the optimizer step on that shows that it trains, its batches are counted.

    Args:
        loops: Who watches.
        noticed: The pass.
        batches: The loader's own iterator.
    """

    def __init__(self, loops: WatchedLoops, noticed: Noticed, batches: Iterator[Any]) -> None:
        super().__init__(batches)
        self.__loops = loops
        self.__noticed = noticed
        self.__batches = batches
        self.__counted = False
        loops.notice(noticed)

    def __next__(self) -> Any:
        loops, noticed = self.__loops, self.__noticed
        if self.__counted:
            if loops.lost:
                loops.close()
            return next(self.__batches)
        if noticed.steps and loops.trains(noticed):
            self.__counted = True
            self.__batches = loops.count(noticed, self.__batches)
            return next(self.__batches)
        noticed.thread = threading.get_ident()
        try:
            batch = next(self.__batches)
        except StopIteration:
            loops.forget(noticed)
            raise
        loops.takes(noticed, batch)
        return batch

    def __del__(self) -> None:
        self.__loops.forget(self.__noticed)


class _SizedPass(_Pass):
    """The iterator of a pass whose own one has a length."""

    def __len__(self) -> int:
        return len(self._Pass__batches)  # pyright: ignore[reportAttributeAccessIssue]


def _of_kind(batches: Iterator[Any]) -> type[_Pass]:
    return _SizedPass if hasattr(type(batches), "__len__") else _Pass


def _make_up(loop: ObservedLoop, noticed: Noticed) -> None:
    """Counts what the loop has done in a pass since its first step, with which the pass has begun."""
    counters = loop.guard.span
    before = counters.started - noticed.steps[0].taken
    for each in noticed.steps:
        counters.started = before + each.taken
        for _ in range(each.times):
            loop.step(each.optimizer)
    counters.started = before + noticed.taken
    loop.guard.look()

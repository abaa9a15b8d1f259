"""A training loop that a person writes: ``for batch in countoff.train(loader)`` says what is counted.

Nothing of a loader is used but `iter()` and `next()`, which the loop itself would have called, and what its class is
known to store.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from countoff._adapter.counted_loop import CountedLoop
from countoff._adapter.even_loaders import even_pass
from countoff._adapter.fit import Fit, OwnRank
from countoff._adapter.messages import Messages
from countoff._adapter.passes import Count
from countoff._adapter.weakly import weakly
from countoff.core import Guard, LoaderFacts, Settings

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Batch", "OwnLoop", "Pass"]

Batch = TypeVar("Batch")


class OwnLoop(ABC):
    """What the `Countoff` of each module has that is for loops without a trainer.

    The fit begins with the first batch of `train`, where all ranks meet. It ends with `close()`, with the ``with``
    block, when the same ranks begin the fit of another `Countoff`, or with the program. A copy of the object, also one
    by pickle, counts nothing, so that what holds it can be copied.

    Args:
        settings: The user's choices.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._loop = self._new_loop()
        self._record: Mapping[str, Any] | None = None
        self._planned: Callable[[], list[Any]] = weakly(())  # the loader whose length the fit's plan has
        self._planned_length: int | None = None
        self._trained_on: Callable[[], list[Any]] = weakly(())
        self._begun_before = False
        self._claims: dict[str | None, Claim] = {}  # those of the last pass of each kind

    def train(self, loader: Iterable[Batch], *, epoch: int | None = None, position: int = 0) -> Pass[Batch]:
        """Returns an iterator over one train epoch, which counts each batch as it hands it out.

        Collective: every rank must take its first batch. The first one of a fit waits for the other ranks, at most
        `deadline_seconds`. `len()` of the iterator, which tqdm shows, is that of the loader; where the loader has none,
        or the same wrong one as before, it is the number of batches that epochs have shown; with `uneven_train`, it is
        that of every rank, where that is proven. A pass that was asked for no batch is none.

        Args:
            loader: A DataLoader, or anything else that can be iterated, such as ``range(steps)`` in a loop without a
                loader.
            epoch: Number of the epoch, at least 0. None: the next one.
            position: Batches of this rank and epoch that were trained on before the checkpoint from which it resumes,
                and that this pass does not have.

        Raises:
            DivergenceError: From the iterator, if ranks are out of step.

        Example:
            >>> from countoff.torch import Countoff
            >>> countoff = Countoff()
            >>> [batch for batch in countoff.train(range(2))], countoff.guard.train_batches
            ([0, 1], 2)
        """
        return Pass(self, loader, None, None if epoch is None else int(epoch), int(position))  # numpy's, say

    def eval(self, loader: Iterable[Batch], name: str = "validation") -> Pass[Batch]:
        """Returns an iterator over one evaluation, which counts each batch as it hands it out.

        It is compared with those of the other ranks as `uneven_eval` says. An evaluation before the fit has begun is
        not compared. Where one rank evaluates alone, iterate the loader itself.

        Args:
            loader: A DataLoader, or anything else that can be iterated.
            name: The evaluation's name, equal on all ranks.
        """
        return Pass(self, loader, name if isinstance(name, str) else str(name), None, 0)

    def start(self) -> None:
        """Begins the fit before the first batch, to compare the ranks' plans earlier. Collective: every rank must.

        The train loader is not known by then, and nothing of it is compared in the plan. It does nothing where the fit
        has begun.

        Raises:
            PlanMismatch: If ranks begin with different plans.
        """
        self._begin(None)

    @property
    def guard(self) -> Guard:
        """The guard of the fit."""
        return self._loop.guard

    def progress(self) -> dict[str, float]:
        """Returns the true totals as known by now, and this rank's progress, under the names of the logged metrics.

        After an evaluation, it also has the samples that all ranks have read there, where they are proven.
        """
        return self._loop.progress()

    @property
    def totals(self) -> str:
        """What is known of the run by now, in words: ``print(countoff.totals)``.

        Example:
            >>> from countoff.torch import Countoff
            >>> print(Countoff().totals)
            Nothing is known yet.
        """
        return self._loop.totals

    def micro_batch(self) -> None:
        """Counts a micro-batch: one forward and backward pass for training. Call it on every rank, or on none."""
        self._loop.micro_batch()

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """A context in which passes are not compared, for what may be uneven on purpose, such as `Join`."""
        self.compare(False)
        try:
            yield
        finally:
            self.compare(True)

    def state_dict(self) -> dict[str, Any]:
        """Returns how far this rank has come, for a checkpoint: plain types, which load without countoff.

        It is empty before the fit, and where countoff is off. It takes no part in what the run computes.
        """
        if not self._settings.enabled:
            return {}
        return self._loop.record() if self._begun_before else dict(self._record or {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what `state_dict` has returned, for the fit that the next train epoch begins.

        It restores nothing of the run: the epoch and the batch at which the loop goes on are up to the loop. From its
        first batches and steps, countoff warns if it repeats or skips data, or if its learning rate jumps. Where the
        fit has begun, another one begins. Collective then: every rank must call it.

        Args:
            state: What `state_dict` has returned, on any rank; an empty mapping where the checkpoint was written
                without countoff. With that, nothing is compared.
        """
        if not self._settings.enabled:
            return
        if self._loop.ended:
            self._record = state
        else:
            self._loop.resume_from(state)

    def close(self) -> None:
        """Ends the fit. Does nothing where none has begun.

        Raises:
            DivergenceError: If another rank goes on, or has diverged before.
        """
        self._loop.end()
        self._loop.fit.reads.release()  # also of a pass that was never asked for a batch

    def __reduce__(self) -> tuple[Any, ...]:
        return _copy_of, (type(self),)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._loop.leave_by(error)

    @abstractmethod
    def _new_loop(self) -> CountedLoop:
        """Returns the loop of a fit that has not begun."""

    @abstractmethod
    def _tell_of(self, loop: CountedLoop, loader: Any) -> LoaderFacts:
        """Tells a loop of its train loader; returns what is known of it. None stands for a loader that is not known."""

    @abstractmethod
    def _epoch_length(self, loader: Any) -> int | None:
        """Returns the batches of an epoch that a loader reports now, where that calls nothing of the user's."""

    def _source(self, loader: Any) -> Any:
        """Returns the loader that the user has made."""
        return loader

    @abstractmethod
    def _begin_fit(self, loop: CountedLoop, loader: Any, facts: LoaderFacts, **known: Any) -> None:
        """Begins the fit.

        Args:
            loop: The loop.
            loader: The train loader; None if it is not known.
            facts: What is known of it.
            known: What else `CountedLoop.begin` takes.
        """

    def _ways(self, loader: Any, name: str | None, position: int) -> dict[str, Any]:
        """Returns what else `Passes.count` takes for a pass over a loader, which goes on at a position."""
        even = functools.partial(even_pass, loader=loader, proven=self._proves(loader, name))
        return {"loader": loader, "position": position, "even": even}

    def _proves(self, loader: Any, name: str | None) -> bool:
        """Whether the fit's plan proves the length of a pass.

        It is one over the loader with which the fit began, and that has not changed its batch size since.
        """
        if self._settings.uneven_train == "raise":
            return False  # nobody asks
        planned = name is None and any(each is loader for each in self._planned())
        return planned and self._epoch_length(loader) == self._planned_length

    def _begin(self, loader: Any) -> None:
        if not self._settings.enabled or not self._loop.ended:
            return
        if self._begun_before:
            before, self._loop = self._loop, self._new_loop()
            self._loop.compare(before.passes.comparing)
            self._loop.fit.reads = before.fit.reads  # the pass has been begun with it
        loop, record = self._loop, self._record
        facts = self._tell_of(loop, loader)
        self._planned = weakly(() if loader is None else (loader,))
        self._planned_length = facts.reported_batches
        self._begin_fit(loop, loader, facts, record=record, compare=not self._begun_before)
        self._record, self._begun_before = None, True

    def expects(self, loader: Any) -> None:
        """Takes note that a pass over a train loader is about to begin: its workers read ahead at once."""
        self._loop.fit.expects(self._source(loader))

    def compare(self, comparing: bool) -> None:
        """Says whether what begins from here on is compared with other ranks; also before a fit has begun."""
        self._loop.compare(comparing)

    def claim_before(self, name: str | None) -> Claim:
        """Returns what `len` of a loader gave in the last pass of that kind."""
        return self._claims.get(name, Claim())

    def count_pass(
        self, batches: Iterator[Any], loader: Any, claim: Claim, name: str | None, epoch: int | None, position: int
    ) -> Count | None:
        """Returns what counts the batches of a pass that begins; None where it is not counted."""
        self._claims[name] = claim
        if not self._settings.enabled or (name is not None and self._loop.ended):
            return None
        if name is None:
            if self._loop.ended:
                if epoch is not None:
                    self._loop.passes.epoch = epoch
                self._begin(loader)
            elif not any(each is loader for each in self._trained_on()):
                self._tell_of(self._loop, loader)
                self._loop.fit.changes_loader(planned=any(each is loader for each in self._planned()))
        elif (train := next(iter(self._trained_on()), None)) is not None:
            self._loop.fit.evaluates(self._source(train), self._source(loader))
        self._trained_on = weakly((loader,)) if name is None else self._trained_on
        return self._loop.passes.count(batches, name, epoch=epoch, **self._ways(loader, name, position))

    def length_of(self, loader: Any, claims: tuple[Claim, Claim], name: str | None, position: int) -> int:
        """Returns what `len` of a pass gives, which goes on at a position.

        Args:
            loader: The loader.
            claims: What `len` of it gave in the pass before, and gives in this one, which is set.
            name: The evaluation's name; None for a train epoch.
            position: The position.

        Raises:
            TypeError: If the loader has no length, and its passes have shown none.
        """
        observed = self._observed_length(loader, name)
        try:
            length = len(loader)
        except TypeError:
            if observed is None:
                raise
            return max(0, observed - position)
        before, this = claims
        this.length = length
        if observed is not None and before.length == length:  # else it may be another one by now
            return max(0, observed - position)
        if name is not None or self._settings.uneven_train == "raise" or not self._settings.enabled:
            return length
        self._begin(loader)
        common = self._loop.guard.common_length if self._proves(loader, name) else None
        return length if common is None or length != self._loop.own_length else common

    def _observed_length(self, loader: Any, name: str | None) -> int | None:
        ends_alike = self._settings.uneven_train if name is None else self._settings.uneven_eval
        if not self._settings.enabled or ends_alike == "stop":
            return None  # another pass may end elsewhere
        last = name is not None or any(each is loader for each in self._trained_on())
        return self._loop.observed_length(loader, name) if last else None


def _copy_of(kind: type[OwnLoop]) -> OwnLoop:
    """Returns a copy of a `Countoff`, which is off: what holds it may be an average of a model, or in a worker."""
    copied, settings = kind.__new__(kind), Settings(enabled=False)
    loop = CountedLoop(Fit(settings, Messages("", "{}", {}), OwnRank(0, 1, 0, 1)), own=True)
    vars(copied).update(_settings=settings, _loop=loop, _claims={})
    return copied


@dataclass
class Claim:
    """What `len` of a loader gives in a pass; None as long as nobody has asked."""

    length: int | None = None


class Pass(Generic[Batch]):
    """The iterator of one pass. It holds nothing but what the pass needs, and has no place in a reference cycle."""

    def __init__(
        self, owner: OwnLoop, loader: Iterable[Batch], name: str | None, epoch: int | None, position: int
    ) -> None:
        self._owner = owner
        self._loader = loader
        self._asked = name, epoch, position
        self._claims = owner.claim_before(name), Claim()
        self._batches: Iterator[Any] | None = None
        self._count: Count | None = None
        self._take: Callable[[], Any] | None = None
        self._turn = threading.RLock()  # two threads may ask for the first batch at once

    def __iter__(self) -> Pass[Batch]:
        if self._batches is None:
            if self._asked[0] is None:
                self._owner.expects(self._loader)
            self._batches = iter(self._loader)
        return self

    def __next__(self) -> Batch:
        take = self._take
        return self._first() if take is None else take()

    def __len__(self) -> int:
        name, _, position = self._asked
        return self._owner.length_of(self._loader, self._claims, name, position)

    def close(self) -> None:
        """Ends the pass, as where the loop lets go of it."""
        if self._count is not None:
            self._count.drop()

    def __del__(self) -> None:
        self.close()

    def _first(self) -> Any:
        with self._turn:
            if (take := self._take) is None:
                iter(self)
                batches: Any = self._batches
                self._count = count = self._owner.count_pass(batches, self._loader, self._claims[1], *self._asked)
                self._take = take = batches.__next__ if count is None else count.take
        return take()

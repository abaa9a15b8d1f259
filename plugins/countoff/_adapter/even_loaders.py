"""Loaders whose passes give the same number of batches on every rank (`uneven_train`, `uneven_eval`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from countoff._adapter.class_swap import own_class
from countoff._adapter.hooks import PlacedValue
from countoff._adapter.loader_observer import samples_in
from countoff._adapter.torch_facts import is_data_loader, iterates_as_torch
from countoff.core import Guard, Settings
from countoff.core.arithmetic.totals import Totals
from countoff.core.data.plain import ABSENT, in_class

__all__ = [
    "even_inside",
    "even_pass",
    "fetches_ahead",
    "finished",
    "keeps_length",
    "proven_length",
    "saves_state",
]

_FINISHED = "_iterator_finished"
"""A key of torchdata's state: the next pass begins with another epoch."""
_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
"""Samplers that draw from no global generator once a pass has begun, and know nothing of the training."""
_LIBRARIES = ("accelerate.data_loader", "torchdata.stateful_dataloader")
"""Modules whose samplers and loaders are as those of torch."""


def saves_state(loader: Any) -> bool:
    """Returns whether a loader can report its state, from which a run resumes in mid-epoch."""
    kind = type(loader)
    return all(in_class(kind, name) is not ABSENT for name in ("state_dict", "load_state_dict"))


def keeps_length(loader: Any) -> bool:
    """Returns whether every pass over a loader has as many batches as the first one.

    A DistributedSampler fixes its number of samples when it is made. Any other sampler follows a data set that grows,
    and a loader that resumes in mid-epoch has less in that pass.
    """
    fixed = is_data_loader(loader) and type(loader.sampler) is DistributedSampler
    return fixed and iterates_as_torch(loader) and not saves_state(loader)


def proven_length(loader: Any, totals: Totals, settings: Settings) -> int | None:
    """Returns the batches per epoch that a fit's plan proves of its train loader; None if it proves none.

    Where it tells how many batches every epoch has, it must hold for every pass.
    """
    holds = settings.uneven_train == "raise" or keeps_length(loader)
    return totals.plan.batches_per_epoch if holds else None


def fetches_ahead(loader: Any) -> bool:
    """Returns whether a loader's own processes fetch ahead, so that nobody sees whether a batch is taken sooner.

    Any other loader may draw random numbers for a batch, fill the memory of the last batch again, or follow the
    training. So may a sampler of the user's, which runs in this process.
    """
    own: Any = own_class(type(loader))
    if not is_data_loader(loader) or not issubclass(own, DataLoader) or not loader.num_workers:
        return False
    as_torchs = own.__iter__ is DataLoader.__iter__ and own._get_iterator is DataLoader._get_iterator
    if not (as_torchs or own.__module__.startswith(_LIBRARIES)):
        return False
    if isinstance(loader.dataset, IterableDataset):
        return True
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while type(sampler) is BatchSampler or type(sampler).__module__.startswith(_LIBRARIES):
        inner = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
        if inner is None:  # a random sampler of the library
            return True
        sampler = inner
    return type(sampler) in _SAMPLERS


def even_pass(
    guard: Guard,
    batches: Iterator[Any],
    begun: list[Any],
    *,
    loader: Any,
    ahead: bool = False,
    proven: bool = False,
) -> Iterator[Any]:
    """Returns the batches of one pass, made even. Its span must be open.

    Args:
        guard: The guard.
        batches: The loader's own iterator.
        begun: Keeps the even pass for a later call. With one in it, that one goes on with these batches: its loader has
            failed, and was begun again.
        loader: The loader, or any other source of batches.
        ahead: Whether the loop's own loader fetches one batch ahead of the one that it hands out.
        proven: Whether this is the loader whose length the fit's plan proves.
    """
    if begun:
        begun[0].go_on_with(batches)
        return begun[0]
    even = guard.even(
        batches,
        samples=samples_in,
        ahead=ahead,
        # A loader that can report its state is to report the one where the loop is.
        prefetches=fetches_ahead(loader) and not saves_state(loader),
        proven=proven,
    )
    if even is not batches:
        begun.append(even)
    return even


def even_inside(
    guard: Guard,
    batches: Iterator[Any],
    begun: list[Any],
    *,
    owner: Any,
    name: str,
    ahead: bool,
    proven: bool = False,
    begins: Callable[[], None] = lambda: None,
) -> Iterator[Any]:
    """Returns the batches of one pass, which is made even where a loader inside of the framework's one is iterated.

    While the framework's loader begins its pass, something else stands in the place of the loader inside.

    Args:
        guard: The guard.
        batches: The iterator of the framework's loader, which has not begun to iterate the other one.
        begun: As for `even_pass`; so are `ahead` and `proven`.
        owner: The framework's loader.
        name: Its attribute that holds the other one.
        ahead: Whether it fetches one batch ahead of the one that it hands out.
        proven: Whether it is the loader whose length the fit's plan proves.
        begins: Called when it begins to iterate the other one, where the pass is made even.
    """
    inner = getattr(owner, name)

    def iterate() -> Iterator[Any]:
        if guard.makes_even:
            begins()
        return even_pass(guard, iter(inner), begun, loader=inner, ahead=ahead, proven=proven)

    return _EvenInside(batches, owner, name, _Inner(inner, iterate))


class _Inner:
    """Stands for the loader inside of a framework's one, with all of its attributes, and another iterator."""

    def __init__(self, own: Any, iterate: Callable[[], Iterator[Any]]) -> None:
        self._own, self._iterate = own, iterate

    def __iter__(self) -> Iterator[Any]:
        return self._iterate()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


class _EvenInside:
    """The iterator of a framework's loader, which begins its pass over another loader than its own."""

    def __init__(self, batches: Iterator[Any], owner: Any, name: str, inner: _Inner) -> None:
        self._batches = batches
        self._place: Callable[[], PlacedValue] | None = functools.partial(PlacedValue, owner, name, inner)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if (place := self._place) is None:
            return next(self._batches)
        self._place, placed = None, place()
        try:
            return next(self._batches)
        finally:
            placed.remove()


def finished(state: Any) -> Any:
    """Returns the state of a loader at a common end: what a longer rank has left is not taken in the next epoch."""
    return {**state, _FINISHED: True} if isinstance(state, dict) and _FINISHED in state else state

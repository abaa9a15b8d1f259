"""Loaders whose passes give the same number of batches on every rank (`uneven_train`, `uneven_eval`).

A rank may have fetched batches that its loop has not got, so a loader that can report its state reports the one after
the last batch that the loop got.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
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

from countoff._adapter.class_swap import own_class, swap_class
from countoff._adapter.loader_observer import samples_in
from countoff._adapter.torch_facts import iterates_as_torch
from countoff.core import Guard, Settings
from countoff.core.totals import Totals

__all__ = [
    "STATE_METHODS",
    "cover_state",
    "even_inside",
    "even_pass",
    "fetches_ahead",
    "finished",
    "forget_state",
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
_resumable: dict[int, tuple[weakref.ref[Any], Any]] = {}
"""By the id of a loader, which need not be hashable: a reference to it, and where the loop is in its last even pass."""


def saves_state(loader: Any) -> bool:
    """Returns whether a loader can report its state, from which a run resumes in mid-epoch."""
    own = own_class(type(loader))
    return callable(getattr(own, "state_dict", None)) and callable(getattr(own, "load_state_dict", None))


def keeps_length(loader: Any) -> bool:
    """Returns whether every pass over a loader has as many batches as the first one.

    A DistributedSampler fixes its number of samples when it is made. Any other sampler follows a data set that grows,
    and a loader that resumes in mid-epoch has less in that pass.
    """
    fixed = isinstance(getattr(loader, "sampler", None), DistributedSampler) and iterates_as_torch(loader)
    return fixed and not saves_state(loader)


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
    if not issubclass(own, DataLoader) or not loader.num_workers:
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


@contextlib.contextmanager
def even_pass(
    guard: Guard,
    batches: Iterator[Any],
    *,
    loader: Any,
    again: Callable[[], Iterator[Any]] | None = None,
    proven: bool = False,
) -> Iterator[Iterator[Any]]:
    """A context with the batches of one pass, made even. Its span must be open.

    Args:
        guard: The guard.
        batches: The loader's own iterator.
        loader: The loader, or any other source of batches.
        again: Returns another iterator over it; None: the loader's own one.
        proven: Whether this is the loader whose length the fit's plan proves.
    """
    yield _even(guard, batches, loader, again=again, ahead=False, proven=proven)


@contextlib.contextmanager
def even_inside(
    guard: Guard,
    batches: Iterator[Any],
    *,
    inner: Any,
    ahead: bool,
    proven: bool = False,
    begun: Callable[[], None] = lambda: None,
) -> Iterator[Iterator[Any]]:
    """A context with the batches of one pass, which is made even where a loader inside of the loop's one is iterated.

    Args:
        guard: The guard.
        batches: The iterator of the loop's loader, which has not begun to iterate the other one.
        inner: The loader that it iterates.
        ahead: Whether it fetches one batch ahead of the one that it hands out.
        proven: Whether it is the loader whose length the fit's plan proves.
        begun: Called when the loop's loader has begun to iterate the other one, where the pass is to end with the
            shortest rank.
    """

    def observe(loader: Any, own: Iterator[Any]) -> Iterator[Any]:
        if guard.even_policy == "stop":
            begun()
        return _even(guard, own, loader, again=None, ahead=ahead, proven=proven)

    give_back = swap_class(inner, observe, methods=STATE_METHODS)
    try:
        yield batches
    finally:
        give_back()


def _even(
    guard: Guard,
    batches: Iterator[Any],
    loader: Any,
    *,
    again: Callable[[], Iterator[Any]] | None,
    ahead: bool,
    proven: bool,
) -> Iterator[Any]:
    own = own_class(type(loader))
    snapshot = functools.partial(own.state_dict, loader) if saves_state(loader) else None
    even = guard.even(
        batches,
        again or functools.partial(own.__iter__, loader),
        samples=samples_in,
        snapshot=snapshot,
        ahead=ahead,
        prefetches=fetches_ahead(loader),
        proven=proven,
    )
    resumable = getattr(even, "resumable", None)
    if resumable is not None:
        _remember(loader, resumable)
    return even


def finished(state: Any) -> Any:
    """Returns the state of a loader at a common end: what a longer rank has left is not taken in the next epoch."""
    return {**state, _FINISHED: True} if isinstance(state, dict) and _FINISHED in state else state


def cover_state(loader: Any) -> Callable[[], None]:
    """Lets a loader report the state where the loop is from here on; returns a function that ends that.

    It does nothing for a loader that cannot report its state, or whose class cannot be exchanged.
    """
    if saves_state(loader):
        forget_state(loader)
        with contextlib.suppress(TypeError):
            return swap_class(loader, lambda _, batches: batches, methods=STATE_METHODS)
    return lambda: None


def forget_state(loader: Any) -> None:
    """Lets a loader report its own state again, until an even pass over it begins."""
    if saves_state(loader):
        _resumable.pop(id(loader), None)


def _remember(loader: Any, resumable: Any) -> None:
    key = id(loader)
    with contextlib.suppress(TypeError):  # of a class without weak references, whose methods cannot be replaced either
        _resumable[key] = weakref.ref(loader, lambda _: _resumable.pop(key, None)), resumable


def _state_dict(loader: Any, own: Callable[[], Any]) -> Any:
    if id(loader) not in _resumable:
        return own()
    _, resumable = _resumable[id(loader)]
    state = copy.deepcopy(resumable.state)  # Accelerate changes what it gets
    return finished(state) if resumable.over else state


def _load_state_dict(loader: Any, own: Callable[..., Any], state: Any) -> Any:
    _resumable.pop(id(loader), None)
    return own(state)


STATE_METHODS: Mapping[str, Callable[..., Any]] = {"state_dict": _state_dict, "load_state_dict": _load_state_dict}
"""What `swap_class` puts over the methods of a loader that can report its state."""

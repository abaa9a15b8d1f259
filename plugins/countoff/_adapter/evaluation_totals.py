"""How many samples the evaluations of a fit have read, where the arithmetic of their loaders proves it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from countoff._adapter.class_swap import own_class
from countoff._adapter.mesh_position import loader_position
from countoff._adapter.torch_facts import is_data_loader, loader_facts
from countoff._adapter.weakly import reference
from countoff.core import LoaderFacts
from countoff.core.arithmetic.totals import evaluation_metrics

__all__ = ["EvaluationTotals", "ObservedLengths", "evaluation_facts"]

_KNOWN_ORDERS = [sampler.__iter__ for sampler in (DistributedSampler, RandomSampler, SequentialSampler)]


class ObservedLengths:
    """How many batches the loaders of evaluations have had, as long as every evaluation has had the same.

    Attributes:
        known: Batches of each loader, by its name or its place; none of a loader whose evaluations have differed.
    """

    def __init__(self) -> None:
        self.known: dict[int | str, int] = {}
        self._lengths: dict[int | str, set[int]] = {}

    def ended(self, batches: Mapping[Any, int]) -> None:
        """Takes note of an evaluation that has had so many batches of each loader, and none left."""
        for name, length in batches.items():
            self._lengths.setdefault(name, set()).add(length)
        self.known = {name: min(lengths) for name, lengths in self._lengths.items() if len(lengths) == 1}

    def forget(self, name: int | str) -> None:
        """Lets go of a loader's batches: another one has taken its place."""
        self._lengths.pop(name, None)
        self.known.pop(name, None)


class EvaluationTotals:
    """The samples that the last pass of each evaluation has read.

    Args:
        facts_of: Returns the facts of a loader; None if they cannot prove what all ranks read.
        dp_degree: Shares into which the data is cut, at least 1.
        unnamed: The evaluation whose metrics do not have its name in theirs.
    """

    def __init__(
        self, facts_of: Callable[[Any], LoaderFacts | None], *, dp_degree: int, unnamed: str = "validation"
    ) -> None:
        self._facts_of = facts_of
        self._dp_degree = dp_degree
        self._unnamed = unnamed
        self._found: dict[str, dict[str, float]] = {}
        self._observed = ObservedLengths()
        self._loaders: dict[str, Callable[[], Any]] = {}

    @property
    def metrics(self) -> Mapping[str, float]:
        """The numbers that are known, under the names with which every adapter logs them."""
        return {metric: value for found in self._found.values() for metric, value in found.items()}

    def ended(self, name: str, loader: Any, batches: int | None) -> None:
        """Updates the numbers after a pass. It raises nothing, whatever the user's own objects raise.

        Args:
            name: The evaluation's name.
            loader: Its loader.
            batches: Batches that this rank has read of it; None if the loop has left it before its end.
        """
        self._found[name] = {}
        if batches is not None:
            if not self._observes(name, loader):
                self._observed.forget(name)
                self._loaders[name] = reference(loader)
            self._observed.ended({name: batches})
        with contextlib.suppress(Exception):  # of the user's own loader and sampler
            if batches is not None and (facts := self._facts_of(loader)) is not None:
                label = "" if name == self._unnamed else name
                self._found[name] = evaluation_metrics(facts, batches=batches, dp_degree=self._dp_degree, name=label)

    def observed_length(self, name: str, loader: Any) -> int | None:
        """Returns the batches that every whole pass over a loader has had; None if there is no such number."""
        return self._observed.known.get(name) if self._observes(name, loader) else None

    def _observes(self, name: str, loader: Any) -> bool:
        """Whether what is observed of an evaluation is of this loader; it never is of one without weak references."""
        return name in self._loaders and self._loaders[name]() is loader


def evaluation_facts(loader: Any, *, dp_rank: int, dp_degree: int, **known: Any) -> LoaderFacts | None:
    """Returns the facts of a torch DataLoader; None if they cannot prove which samples all ranks read.

    A class of the user's own may read other samples in as many batches.

    Args:
        loader: The loader.
        dp_rank: The dp_rank of this rank.
        dp_degree: Shares into which the data is cut, at least 1.
        known: Facts that the caller knows better; they replace what is read from the loader.
    """
    if not is_data_loader(loader) or own_class(type(loader)).__iter__ is not DataLoader.__iter__:
        return None
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if type(sampler).__iter__ not in _KNOWN_ORDERS:
        return None
    if isinstance(sampler, DistributedSampler) and loader_position(loader) != (dp_rank, dp_degree):
        return None
    return loader_facts(loader, **known)

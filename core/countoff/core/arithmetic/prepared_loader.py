"""Batches and samples of one pass over a loader that Accelerate has prepared, and the optimizer steps of such a pass.

``prepare()`` turns a loader into one of three kinds. Each has its own way to give all processes the same number of
batches, or does not do so. With ``split_batches``, ``len()`` of two of these kinds is wrong, so everything is counted
from the original loader. The kinds have the names of Accelerate's classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from countoff.core.arithmetic.batches import batches_of_samples, check_count, strided_share
from countoff.core.arithmetic.facts import LoaderPass

__all__ = ["PreparedFacts", "PreparedKind", "prepared_pass"]

PreparedKind = Literal["BatchSamplerShard", "IterableDatasetShard", "DataLoaderDispatcher"]


@dataclass(frozen=True)
class PreparedFacts:
    """What an adapter reads off a prepared loader: facts of the original loader, and how Accelerate shards it.

    Attributes:
        kind: The class that shards: ``BatchSamplerShard`` (a ``DataLoaderShard`` over map-style data),
            ``IterableDatasetShard`` (a ``DataLoaderShard`` over iterable data), ``DataLoaderDispatcher`` (process 0
            reads for all).
        samples: Samples that one pass over the original loader draws, at least 0; None if this number cannot be
            trusted, as the length that an iterable dataset reports.
        batch_size: Samples per batch of the original loader, at least 1; None if it has a custom batch sampler.
        num_processes: Processes among which Accelerate shards, at least 1: the number of dp_ranks.
        drop_last: ``drop_last`` of the original loader.
        split_batches: Whether a batch is cut into one piece per process.
        even_batches: Whether processes are filled up to the same number of batches; only ``BatchSamplerShard`` uses it.
        all_different: Whether all of these samples are different; they are not if samples are drawn with replacement,
            or if the sampler is sharded already.
        iterable: Whether the dataset is iterable; never with ``BatchSamplerShard``.
        num_workers: Workers of the loader, at least 0; each of them reads a whole iterable dataset.

    Raises:
        ValueError: If a number is outside its domain.

    Example:
        >>> PreparedFacts("BatchSamplerShard", samples=100, batch_size=8, num_processes=4, drop_last=False,
        ...     split_batches=True).batch_size_per_rank
        2
    """

    kind: PreparedKind
    samples: int | None
    batch_size: int | None
    num_processes: int
    drop_last: bool
    split_batches: bool = False
    even_batches: bool = True
    all_different: bool = True
    iterable: bool = False
    num_workers: int = 0

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"kind must be one of {', '.join(_KINDS)}, got {self.kind!r}")
        check_count("num_processes", self.num_processes, minimum=1)
        check_count("num_workers", self.num_workers, minimum=0)
        if self.samples is not None:
            check_count("samples", self.samples, minimum=0)
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size, minimum=1)

    @property
    def batch_size_per_rank(self) -> int | None:
        """Samples of a full batch on one process: the ``batch_size`` of ``LoaderFacts``."""
        if self.batch_size is None or not self.split_batches:
            return self.batch_size
        return max(self.batch_size // self.num_processes, 1)

    def reported_batches(self, process_index: int) -> int | None:
        """Returns ``len(loader)`` of the prepared loader on this process; None if samples or batch_size are not known.

        Sources, accelerate 1.15.0: ``data_loader.py:170`` (shard), ``:333`` (iterable shard; the loader around it
        then divides by its own batch size), ``:957`` (dispatcher).
        """
        if self.samples is None or self.batch_size is None:
            return None
        batches = batches_of_samples(self.samples, batch_size=self.batch_size, drop_last=self.drop_last)
        if self.kind == "IterableDatasetShard":
            unit = self.batch_size * self.num_processes
            length = batches_of_samples(self.samples, batch_size=unit, drop_last=self.drop_last) * self.batch_size
            return batches_of_samples(length, batch_size=self.batch_size_per_rank or 1, drop_last=self.drop_last)
        if self.split_batches:
            return batches
        if self.kind == "BatchSamplerShard" and not self.even_batches and not self.drop_last:
            return strided_share(batches, parts=self.num_processes, part=process_index)
        return batches_of_samples(batches, batch_size=self.num_processes, drop_last=self.drop_last)


def prepared_pass(facts: PreparedFacts, *, process_index: int) -> LoaderPass:
    """Returns the batches and samples of one pass over a prepared loader, on this process and on all.

    Sources, accelerate 1.15.0: ``data_loader.py:188`` (``BatchSamplerShard.__iter__``), ``:340``
    (``IterableDatasetShard.__iter__``), ``:872`` (``DataLoaderDispatcher.__iter__``).

    Args:
        facts: What was read off the loader.
        process_index: This process, from 0 up to, but not including, num_processes.

    Returns:
        The pass; its ``unknown_because`` is the reason if it cannot be counted.

    Raises:
        ValueError: If process_index is outside its domain.

    Example:
        >>> facts = PreparedFacts("BatchSamplerShard", samples=13, batch_size=2, num_processes=2, drop_last=False)
        >>> one = prepared_pass(facts, process_index=1)
        >>> one.batches, one.samples, one.unique
        (4, 16, 13)
    """
    if check_count("process_index", process_index, minimum=0) >= facts.num_processes:
        raise ValueError(f"process_index must be below {facts.num_processes}, got {process_index}")
    if facts.samples is None or facts.batch_size is None:
        return LoaderPass(batches=None, unknown_because=_missing_number(facts))
    if reason := _why_not_countable(facts, facts.samples, facts.batch_size):
        return LoaderPass(batches=None, unknown_because=reason)
    # A round takes this many samples from the original loader and gives every process a full batch.
    round_size = facts.batch_size if facts.split_batches else facts.batch_size * facts.num_processes
    rounds, rest = divmod(facts.samples, round_size)
    last_round = [0] * facts.num_processes  # samples of each process
    if rest and not facts.drop_last:
        last_round = _KINDS[facts.kind](facts, rest, facts.samples)
    batches = [rounds + bool(samples) for samples in last_round]
    if facts.kind == "DataLoaderDispatcher":  # it also gives out an empty piece of the last batch
        batches = [max(batches)] * facts.num_processes
    samples = rounds * round_size + sum(last_round)
    full = rounds + (min(last_round) == round_size // facts.num_processes)
    unique = rounds * round_size + (rest if any(last_round) else 0)
    return LoaderPass(
        batches=batches[process_index],
        fewest_batches=min(batches),
        most_batches=max(batches),
        full_batches=full,
        samples=samples,
        unique=unique if facts.all_different else None,
    )


def _missing_number(facts: PreparedFacts) -> str:
    if facts.batch_size is None:
        return "the batch size is not known (a batch sampler of the user's own)"
    return "the samples are not known (an iterable dataset, or a sampler of the user's own)"


def _why_not_countable(facts: PreparedFacts, samples: int, batch_size: int) -> str:
    """Returns why Accelerate cannot iterate this loader, or why it cannot be counted; empty if it can."""
    if facts.split_batches and batch_size % facts.num_processes:
        return f"batches of {batch_size} cannot be split evenly among {facts.num_processes} processes"
    if (facts.iterable or facts.kind == "IterableDatasetShard") and facts.num_workers > 1:
        return f"what each of the {facts.num_workers} workers reads depends on the iterable dataset"
    enough = batch_size * (1 if facts.split_batches else facts.num_processes) if facts.drop_last else 1
    if facts.kind == "DataLoaderDispatcher" and samples < enough:
        return "DataLoaderDispatcher has no batch to hand out, and fails"
    return ""


def _last_of_shard(facts: PreparedFacts, rest: int, samples: int) -> list[int]:
    """Returns the samples of each process in the last round, which is not full, of a ``BatchSamplerShard``."""
    del samples
    size = facts.batch_size_per_rank or 1
    if facts.even_batches:
        return [size] * facts.num_processes
    return [min(size, max(rest - size * process, 0)) for process in range(facts.num_processes)]


def _last_of_iterable_shard(facts: PreparedFacts, rest: int, samples: int) -> list[int]:
    """Returns the samples of each process in the last round of an ``IterableDatasetShard``: always full batches."""
    del rest, samples
    return [facts.batch_size_per_rank or 1] * facts.num_processes


def _last_of_dispatcher(facts: PreparedFacts, rest: int, samples: int) -> list[int]:
    """Returns the samples of each process in the last round of a dispatcher.

    It appends the first samples of the first batch if the rest does not divide, and cuts that into equal pieces.
    """
    processes = facts.num_processes
    size = -(-rest // processes)
    available = rest if rest % processes == 0 else rest + min(samples, processes)
    return [min(size, max(available - size * process, 0)) for process in range(processes)]


_KINDS: dict[str, Callable[[PreparedFacts, int, int], list[int]]] = {
    "BatchSamplerShard": _last_of_shard,
    "IterableDatasetShard": _last_of_iterable_shard,
    "DataLoaderDispatcher": _last_of_dispatcher,
}

"""What one pass over a loader that Accelerate has prepared holds: the arithmetic behind ``prepared_pass``.

``prepare()`` turns a loader into one of three kinds, each with another way to make the processes even, or not to.
``len()`` of a prepared loader is wrong for two of them under ``split_batches``, so the truth is counted from the
undivided loader. The names of the kinds are those of Accelerate's classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from countoff.core.arithmetic.batches import batches_of_samples, check_count, strided_share
from countoff.core.arithmetic.facts import LoaderPass

__all__ = ["PreparedFacts", "PreparedKind", "accumulated_steps", "prepared_pass"]

PreparedKind = Literal["BatchSamplerShard", "IterableDatasetShard", "DataLoaderDispatcher"]


@dataclass(frozen=True)
class PreparedFacts:
    """What is read off a prepared loader: of the undivided loader inside it, and of how Accelerate divides it.

    Attributes:
        kind: What divides: ``BatchSamplerShard`` (a ``DataLoaderShard`` over map-style data), ``IterableDatasetShard``
            (a ``DataLoaderShard`` over iterable data), ``DataLoaderDispatcher`` (process 0 reads for all).
        samples: Samples that one pass over the undivided loader draws, at least 0; None if that cannot be trusted,
            as of an iterable dataset with a length of its own making.
        batch_size: Samples per batch of the undivided loader, at least 1; None if it was given batches of its own
            making.
        num_processes: Processes among which Accelerate divides: its data ranks, at least 1.
        drop_last: The undivided loader's flag.
        split_batches: Whether a batch is cut into one piece per process.
        even_batches: Whether processes are filled up to as many batches; only ``BatchSamplerShard`` asks.
        all_different: Whether those samples are all different, as neither drawing with replacement nor a sampler that
            is divided already makes them.
        iterable: Whether the dataset is iterable, which any kind but ``BatchSamplerShard`` may read.
        num_workers: Workers of the loader, at least 0; each of them reads an iterable dataset for itself.

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
        """Samples of a full batch on one process: the batch size that ``LoaderFacts`` asks for."""
        if self.batch_size is None or not self.split_batches:
            return self.batch_size
        return max(self.batch_size // self.num_processes, 1)

    def reported_batches(self, process_index: int) -> int | None:
        """``len(loader)`` once it is prepared, on that process; None if the samples or the batches are not known.

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
    """Returns what one pass over a prepared loader holds on this process and on all.

    Sources, accelerate 1.15.0: ``data_loader.py:188`` (``BatchSamplerShard.__iter__``), ``:340``
    (``IterableDatasetShard.__iter__``), ``:872`` (``DataLoaderDispatcher.__iter__``).

    Args:
        facts: What was read off the loader.
        process_index: This process among those that divide the data, from 0 up to, but not including, num_processes.

    Returns:
        The batches and samples, or the reason why they cannot be known.

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
        return LoaderPass(batches=None, unknown_because=_why_unknown(facts))
    if refusal := _refusal(facts, facts.samples, facts.batch_size):
        return LoaderPass(batches=None, unknown_because=refusal)
    # A round takes this many samples from the undivided loader and gives every process a full batch.
    whole_round = facts.batch_size if facts.split_batches else facts.batch_size * facts.num_processes
    rounds, rest = divmod(facts.samples, whole_round)
    last = [0] * facts.num_processes
    if rest and not facts.drop_last:
        last = _KINDS[facts.kind](facts, rest, facts.samples)
    batches = [rounds + bool(samples) for samples in last]
    if facts.kind == "DataLoaderDispatcher":  # a piece of the last batch may be empty, and is handed out all the same
        batches = [max(batches)] * facts.num_processes
    samples = rounds * whole_round + sum(last)
    full = rounds + (min(last) == whole_round // facts.num_processes)
    unique = rounds * whole_round + (rest if any(last) else 0)
    return LoaderPass(
        batches=batches[process_index],
        fewest_batches=min(batches),
        most_batches=max(batches),
        full_batches=full,
        samples=samples,
        unique=unique if facts.all_different else None,
    )


def accumulated_steps(
    batches: int, *, gradient_accumulation_steps: int, carried: int = 0, at_end: bool = True
) -> tuple[int, int]:
    """Returns the optimizer steps of one pass under ``accelerator.accumulate``, and the batches carried over from it.

    Source, accelerate 1.15.0: ``accelerator.py:1230`` (``_do_sync``). The last batch of a loader always takes a step,
    and the next one begins anew; any other takes one when it completes the accumulation, wherever that has begun.

    Args:
        batches: Batches of this pass and process, at least 0.
        gradient_accumulation_steps: Batches per optimizer step, at least 1.
        carried: Batches that an earlier pass has left without a step, at least 0 and below the accumulation.
        at_end: Whether the pass reaches the end of its loader, and ``sync_with_dataloader`` is on; False for a loop
            that leaves it before.

    Raises:
        ValueError: If a number is outside its domain.

    Example:
        >>> accumulated_steps(11, gradient_accumulation_steps=4)
        (3, 0)
        >>> accumulated_steps(11, gradient_accumulation_steps=4, carried=3, at_end=False)
        (3, 2)
    """
    check_count("batches", batches, minimum=0)
    check_count("gradient_accumulation_steps", gradient_accumulation_steps, minimum=1)
    if check_count("carried", carried, minimum=0) >= gradient_accumulation_steps:
        raise ValueError(f"carried must be below {gradient_accumulation_steps}, got {carried}")
    if at_end and batches:
        return (carried + batches - 1) // gradient_accumulation_steps + 1, 0
    return divmod(carried + batches, gradient_accumulation_steps)


def _why_unknown(facts: PreparedFacts) -> str:
    if facts.batch_size is None:
        return "the batch size is not known (a batch sampler of the user's own)"
    return "the samples are not known (an iterable dataset, or a sampler of the user's own)"


def _refusal(facts: PreparedFacts, samples: int, batch_size: int) -> str:
    """Why Accelerate cannot iterate this loader, or why nobody can count it; empty if it is counted."""
    if facts.split_batches and batch_size % facts.num_processes:
        return f"Accelerate cannot split batches of {batch_size} evenly among {facts.num_processes} processes"
    if (facts.iterable or facts.kind == "IterableDatasetShard") and facts.num_workers > 1:
        return f"what each of the {facts.num_workers} workers reads is up to the iterable dataset"
    enough = batch_size * (1 if facts.split_batches else facts.num_processes) if facts.drop_last else 1
    if facts.kind == "DataLoaderDispatcher" and samples < enough:
        return "DataLoaderDispatcher has no batch to hand out, and fails"
    return ""


def _last_of_shard(facts: PreparedFacts, rest: int, samples: int) -> list[int]:
    """Samples of each process in the last round of a ``BatchSamplerShard``, which is not full."""
    del samples
    size = facts.batch_size_per_rank or 1
    if facts.even_batches:
        return [size] * facts.num_processes
    return [min(size, max(rest - size * process, 0)) for process in range(facts.num_processes)]


def _last_of_iterable_shard(facts: PreparedFacts, rest: int, samples: int) -> list[int]:
    """The same of an ``IterableDatasetShard``, which is always filled up."""
    del rest, samples
    return [facts.batch_size_per_rank or 1] * facts.num_processes


def _last_of_dispatcher(facts: PreparedFacts, rest: int, samples: int) -> list[int]:
    """The same of a dispatcher, which cuts what there is, lengthened by the beginning of the first batch."""
    processes = facts.num_processes
    size = -(-rest // processes)
    there = rest if rest % processes == 0 else rest + min(samples, processes)
    return [min(size, max(there - size * process, 0)) for process in range(processes)]


_KINDS: dict[str, Callable[[PreparedFacts, int, int], list[int]]] = {
    "BatchSamplerShard": _last_of_shard,
    "IterableDatasetShard": _last_of_iterable_shard,
    "DataLoaderDispatcher": _last_of_dispatcher,
}

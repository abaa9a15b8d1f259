"""Batches and samples of one epoch of a mosaicml-streaming ``StreamingDataset``: the arithmetic of ``streaming_pass``.

``len()`` of a streaming loader is ``ceil(epoch_size / ranks)`` cut into batches. Ranks get another number if canonical
nodes round up, if dataset and loader have different batch sizes, if a batching method drops the rest of a stream, or
after a resume in mid-epoch. So the partition itself is computed here, on integers. If the library would refuse to
iterate a configuration, the result is the reason instead of a number.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from countoff._composer.streaming_facts import StreamFacts, StreamingFacts
from countoff._composer.streaming_partition import Partition
from countoff.core.arithmetic.batches import batches_of_samples, check_count, strided_share
from countoff.core.arithmetic.facts import LoaderPass

__all__ = ["streaming_pass"]

# Of at most this many samples that a loader drops, it is computed which of them are repeats.
_MOST_DROPPED = 1 << 17

# At most this many ways to round the portions of a stratified batch are compared.
_MOST_ROUNDINGS = 1000


class _CannotBeKnown(Exception):
    """The length of a pass cannot be known; the message is the reason."""


def streaming_pass(facts: StreamingFacts, *, rank: int) -> LoaderPass:
    """Returns the batches and samples of one epoch of a streaming loader; after a resume, those of the rest of it.

    Sources, mosaicml-streaming 0.13.0: the methods of ``base/batching/``, ``base/partition/orig.py:17``,
    ``base/dataset.py:534`` (``length``), ``:691`` (``_resume``), ``:1012`` (``_get_work``), ``base/world.py:117``
    (``replicate``), ``base/shuffle/py1e.py:75``.

    Args:
        facts: What was read off the dataset and its loader.
        rank: This rank, from 0 up to, but not including, nodes × ranks_per_node.

    Returns:
        The pass. Its ``unknown_because`` is the reason if it cannot be known, also if streaming refuses to iterate.

    Raises:
        ValueError: If the rank is outside its domain.

    Example:
        >>> facts = StreamingFacts(epoch_size=129, nodes=2, ranks_per_node=4, dataset_batch_size=4, batch_size=4,
        ...     drop_last=False, num_workers=2)
        >>> one = streaming_pass(facts, rank=5)
        >>> one.batches, one.samples, one.unique, one.uneven
        (5, 136, 129, False)
    """
    if check_count("rank", rank, minimum=0) >= facts.nodes * facts.ranks_per_node:
        raise ValueError(f"rank must be below {facts.nodes * facts.ranks_per_node}, got {rank}")
    method = _METHODS.get(facts.batching_method)
    try:
        if method is None:
            raise _CannotBeKnown(f"the batching method {facts.batching_method!r} is not one that countoff knows")
        return method(_Epoch.of(facts), rank // (facts.replication or 1))
    except _CannotBeKnown as reason:
        return LoaderPass(batches=None, unknown_because=str(reason))


@dataclass(frozen=True)
class _Epoch:
    """The facts of an epoch with all defaults filled in, and how the samples of one rank become batches."""

    facts: StreamingFacts
    batch_size: int
    chunk: int  # consecutive samples of one worker: the dataset's batch size
    nodes: int
    ranks_per_node: int
    dp_degree: int

    @classmethod
    def of(cls, facts: StreamingFacts) -> _Epoch:
        if facts.dataset_batch_size is None:
            raise _CannotBeKnown("StreamingDataset was given no batch_size, and refuses to be iterated without one")
        if facts.batch_size is None:
            raise _CannotBeKnown("the loader makes no batches of its own (batch_size=None)")
        nodes = facts.parallel_nodes
        return cls(facts, facts.batch_size, facts.dataset_batch_size, nodes, facts.dp_degree // nodes, facts.dp_degree)

    @property
    def global_chunk(self) -> int:
        return self.chunk * self.dp_degree

    @property
    def finished_chunks(self) -> int:
        """Complete global batches of an earlier run; the batching methods that merge streams resume after them."""
        return self.facts.drop_first // self.global_chunk

    def partition(self, samples: int, *, nodes: int, drop_first: int = 0) -> Partition:
        canonical = self.facts.canonical_nodes
        if max(canonical, nodes) % min(canonical, nodes):
            raise _CannotBeKnown(self._why_not_divisible(canonical, nodes))
        if drop_first > samples + self.dp_degree - samples % self.dp_degree:
            raise _CannotBeKnown(f"streaming refuses to resume at sample {drop_first} of an epoch of {samples}")
        if self.facts.shuffle and self.facts.shuffle_algo == "py1e" and samples < canonical:
            raise _CannotBeKnown(f"streaming refuses to shuffle {samples} samples among {canonical} canonical nodes")
        partition = Partition(samples, canonical, nodes, self.ranks_per_node, drop_first)
        if partition.is_refused():
            raise _CannotBeKnown(
                f"streaming fails to share {samples} samples of {canonical} canonical nodes among {nodes} nodes"
            )
        return partition

    def _why_not_divisible(self, canonical: int, nodes: int) -> str:
        if self.facts.partition_algo == "orig" or self.facts.initial_nodes is None:
            return f"streaming refuses {canonical} canonical nodes on {nodes} nodes: one must divide the other"
        return (
            f"this epoch began on {self.facts.initial_nodes} nodes and {canonical} canonical nodes do not divide among "
            f"{nodes}, so the samples are partitioned again; it cannot be known before the first epoch is over"
        )

    def shares(self, samples: int) -> list[int]:
        """Returns the samples of each worker of a rank; workers take chunks in turns, and the last one may be short."""
        workers = max(self.facts.num_workers, 1)
        chunks, rest = divmod(samples, self.chunk)
        shares = [strided_share(chunks, parts=workers, part=worker) * self.chunk for worker in range(workers)]
        shares[chunks % workers] += rest
        return shares

    def batches(self, samples: int) -> int:
        drop_last, size = self.facts.drop_last, self.batch_size
        return sum(batches_of_samples(share, batch_size=size, drop_last=drop_last) for share in self.shares(samples))

    def full_batches(self, samples: int) -> int:
        if self.facts.drop_last:
            return self.batches(samples)
        if self.chunk == self.batch_size:
            return samples // self.batch_size
        shares = self.shares(samples)
        return min(shares) // self.batch_size * len(shares)

    def processed(self, samples: int) -> int:
        dropped = sum(share % self.batch_size for share in self.shares(samples)) if self.facts.drop_last else 0
        return samples - dropped

    def dropped_places(self, samples: int) -> Iterator[int]:
        """Yields the places, in the order of a rank's samples, that ``drop_last`` drops: the rest of each worker."""
        if self.facts.drop_last:
            shares = self.shares(samples)
            for worker, share in enumerate(shares):
                for place in range(share - share % self.batch_size, share):
                    turn, offset = divmod(place, self.chunk)
                    yield (turn * len(shares) + worker) * self.chunk + offset

    def loader_pass(self, per_rank: Iterable[int], dp_rank: int, unique: int | None) -> LoaderPass:
        """Returns the pass that follows from the samples of every dp_rank before the loader drops any."""
        samples = list(per_rank)
        batches = {count: self.batches(count) for count in set(samples)}
        return LoaderPass(
            batches=batches[samples[dp_rank]],
            fewest_batches=min(batches.values()),
            most_batches=max(batches.values()),
            full_batches=self.full_batches(min(samples)),
            samples=sum(self.processed(count) for count in samples),
            unique=unique if not self.facts.drop_first else None,
        )


def _random(epoch: _Epoch, dp_rank: int) -> LoaderPass:
    facts = epoch.facts
    partition = epoch.partition(facts.epoch_size, nodes=epoch.nodes, drop_first=facts.drop_first)
    samples = partition.per_rank
    dropped = list(epoch.dropped_places(samples))
    unique = _distinct(facts, [(partition, dropped)])
    return epoch.loader_pass([samples] * epoch.dp_degree, dp_rank, unique)


def _per_stream(epoch: _Epoch, dp_rank: int) -> LoaderPass:
    """Every global batch has samples of one stream; the rest of a stream after its last full batch is dropped."""
    kept: list[tuple[Partition, list[int]]] = []
    chunks = 0
    for number, stream in enumerate(_streams(epoch.facts)):
        partition = epoch.partition(stream.choose, nodes=epoch.nodes)
        full = partition.per_rank // epoch.chunk
        if not full:
            raise _CannotBeKnown(
                f"streaming refuses per_stream batching: stream {number} fills no batch of every rank's"
            )
        chunks += full
        kept.append((partition, list(range(full * epoch.chunk, partition.per_rank))))
    samples = max(chunks - epoch.finished_chunks, 0) * epoch.chunk
    unique = _distinct(epoch.facts, kept) if epoch.processed(samples) == samples else None
    return epoch.loader_pass([samples] * epoch.dp_degree, dp_rank, unique)


def _stratified(epoch: _Epoch, dp_rank: int) -> LoaderPass:
    """Every global batch has a fixed portion of each stream; the first stream without samples ends the epoch."""
    streams = _streams(epoch.facts)
    given = [epoch.partition(stream.choose, nodes=1).per_rank * epoch.ranks_per_node for stream in streams]
    found: set[tuple[int, bool]] = set()
    for portions in _portions(streams, epoch.global_chunk):
        chunks = [samples // portion for samples, portion in zip(given, portions, strict=True)]
        used = [chunks[0] * portion for portion in portions]
        found.add((min(chunks), used == given))
    if len(found) > 1:
        raise _CannotBeKnown(
            "streams have an equal claim to a sample of every stratified batch, and which gets it depends on how numpy "
            "sorts; it cannot be known before the first epoch is over"
        )
    chunk_count, everything = found.pop()
    samples = max(chunk_count - epoch.finished_chunks, 0) * epoch.chunk
    unique = _distinct(epoch.facts, []) if everything and epoch.processed(samples) == samples else None
    return epoch.loader_pass([samples] * epoch.dp_degree, dp_rank, unique)


def _device_per_stream(epoch: _Epoch, dp_rank: int) -> LoaderPass:
    """Every batch of a rank has samples of one stream; ranks take batches in turns, and the last turn may be short."""
    canonical = epoch.facts.canonical_nodes
    if canonical % epoch.nodes:
        raise _CannotBeKnown(
            f"streaming refuses device_per_stream batching: {canonical} canonical nodes do not divide among "
            f"{epoch.nodes} nodes"
        )
    chunks, rests = 0, 0
    for number, stream in enumerate(_streams(epoch.facts)):
        partition = epoch.partition(stream.choose, nodes=canonical)
        full, rest = divmod(canonical // epoch.nodes * partition.per_rank * epoch.ranks_per_node, epoch.chunk)
        if not full:
            raise _CannotBeKnown(
                f"streaming refuses device_per_stream batching: stream {number} fills no batch of one rank's"
            )
        chunks, rests = chunks + full * epoch.nodes, rests + rest
    ranks = range(epoch.dp_degree)
    per_rank = [
        max(strided_share(chunks, parts=len(ranks), part=rank) - epoch.finished_chunks, 0) * epoch.chunk
        for rank in ranks
    ]
    everything = not rests and all(epoch.processed(samples) == samples for samples in per_rank)
    return epoch.loader_pass(per_rank, dp_rank, _distinct(epoch.facts, []) if everything else None)


_METHODS = {
    "random": _random,
    "per_stream": _per_stream,
    "stratified": _stratified,
    "device_per_stream": _device_per_stream,
}


def _streams(facts: StreamingFacts) -> tuple[StreamFacts, ...]:
    """Returns the streams, of which each must give at least one sample.

    Raises:
        _CannotBeKnown: If the streams are not known, or one gives no sample.
    """
    if not facts.streams:
        raise _CannotBeKnown(
            f"the sizes of the streams are not known, on which {facts.batching_method} batching depends; it cannot be "
            "known before the first epoch is over"
        )
    for number, stream in enumerate(facts.streams):
        if not stream.choose:
            raise _CannotBeKnown(f"streaming refuses {facts.batching_method} batching: stream {number} gives no sample")
    return facts.streams


def _portions(streams: tuple[StreamFacts, ...], global_batch: int) -> Iterator[list[int]]:
    """Yields the samples of each stream in a stratified global batch: rounded down, then the largest rests rounded up.

    If rests are equal, every way to round is yielded: streaming uses the one that numpy's sort happens to give.
    """
    total = sum(stream.choose for stream in streams)
    proportions = [stream.choose / total if stream.proportion is None else stream.proportion for stream in streams]
    portions = [int(proportion * global_batch) for proportion in proportions]
    rests = [global_batch * proportion - portion for proportion, portion in zip(proportions, portions, strict=True)]
    missing = min(global_batch - sum(portions), len(streams))
    least = sorted(rests, reverse=True)[missing - 1] if missing > 0 else math.inf
    certain = [number for number, rest in enumerate(rests) if rest > least]
    equal = [number for number, rest in enumerate(rests) if rest == least]
    still_missing = max(missing - len(certain), 0)
    if math.comb(len(equal), still_missing) > _MOST_ROUNDINGS:
        raise _CannotBeKnown(f"{len(equal)} streams have an equal claim to a sample of every stratified batch")
    for chosen in itertools.combinations(equal, still_missing):
        rounded = [portion + (number in certain or number in chosen) for number, portion in enumerate(portions)]
        if min(rounded) < 1:
            raise _CannotBeKnown(
                f"streaming refuses stratified batching: stream {rounded.index(min(rounded))} has no sample in a "
                f"global batch of {global_batch}"
            )
        yield rounded


def _distinct(facts: StreamingFacts, dropped: list[tuple[Partition, list[int]]]) -> int | None:
    """Returns the number of different samples in an epoch in which each rank drops these places of each partition.

    A stream that gives more samples than it has repeats some; then the number is known only if nothing is dropped.
    """
    if sum(len(places) * partition.nodes * partition.ranks_per_node for partition, places in dropped) > _MOST_DROPPED:
        return None
    lost = sum(partition.samples_lost(places) for partition, places in dropped)
    if any(stream.choose > stream.samples for stream in facts.streams) and lost:
        return None
    drawn = [min(stream.choose, stream.samples) for stream in facts.streams] or [facts.epoch_size]
    return sum(drawn) - lost

"""What an adapter reads off a mosaicml-streaming dataset and its loader: the input of ``streaming_pass``.

Attributes are copied as they are; what streaming derives from them later, at its first iteration, is derived here.
"""

from __future__ import annotations

from dataclasses import dataclass

from countoff.core.arithmetic.batches import batches_of_samples, check_count

__all__ = ["StreamFacts", "StreamingFacts"]


@dataclass(frozen=True)
class StreamFacts:
    """What is read off one stream of a dataset.

    Attributes:
        samples: Samples that the stream has (``samples_per_stream[i]``), at least 1.
        choose: Samples of it that an epoch draws (``stream.choose``), at least 0.
        proportion: Its share of an epoch (``stream.proportion``), from 0 to 1; None for choose by the sum of all.

    Raises:
        ValueError: If a number is outside its domain.
    """

    samples: int
    choose: int
    proportion: float | None = None

    def __post_init__(self) -> None:
        check_count("samples", self.samples, minimum=1)
        check_count("choose", self.choose, minimum=0)
        if self.proportion is not None and not 0.0 <= self.proportion <= 1.0:
            raise ValueError(f"proportion must be from 0.0 to 1.0, got {self.proportion}")


@dataclass(frozen=True)
class StreamingFacts:
    """What is read off a ``StreamingDataset``, the loader over it and the job, on this rank.

    Attributes:
        epoch_size: Samples that an epoch draws over all ranks (``dataset.epoch_size``), at least 1.
        nodes: Hosts of the job, at least 1.
        ranks_per_node: Ranks on each of them, at least 1.
        dataset_batch_size: ``dataset.batch_size``, samples per rank, at least 1; None if the user gave none.
        batch_size: ``loader.batch_size``, samples per rank, at least 1; None if the loader does not batch.
        drop_last: The loader's flag.
        num_workers: The loader's workers, at least 0.
        batching_method: ``dataset.batching_method``.
        num_canonical_nodes: ``dataset.num_canonical_nodes``, at least 1; None where the library sets it at the first
            iteration.
        shuffle: ``dataset.shuffle``, which moves samples and changes no count, but may be refused.
        shuffle_algo: ``dataset.shuffle_algo``, on which the default of num_canonical_nodes depends.
        replication: ``dataset.replication``: ranks in a row that read the same, at least 1; None for 1.
        drop_first: Samples of this epoch, over all ranks, that an earlier run has processed
            (``sample_in_epoch`` of the state that was loaded), at least 0.
        partition_algo: ``dataset.partition_algo``.
        initial_nodes: Hosts on which this epoch began (``initial_physical_nodes`` of that state); None if on these.
        streams: What the dataset draws from, in its order; empty if it cannot be read, which only ``random`` allows.

    Raises:
        ValueError: If a number is outside its domain.

    Example:
        >>> StreamingFacts(epoch_size=100, nodes=2, ranks_per_node=4, dataset_batch_size=4, batch_size=4,
        ...     drop_last=True, num_workers=0, replication=2).dp_degree
        4
    """

    epoch_size: int
    nodes: int
    ranks_per_node: int
    dataset_batch_size: int | None
    batch_size: int | None
    drop_last: bool
    num_workers: int
    batching_method: str = "random"
    num_canonical_nodes: int | None = None
    shuffle: bool = False
    shuffle_algo: str = "py1e"
    replication: int | None = None
    drop_first: int = 0
    partition_algo: str = "relaxed"
    initial_nodes: int | None = None
    streams: tuple[StreamFacts, ...] = ()

    def __post_init__(self) -> None:
        for name in ("epoch_size", "nodes", "ranks_per_node"):
            check_count(name, getattr(self, name), minimum=1)
        for name in ("num_workers", "drop_first"):
            check_count(name, getattr(self, name), minimum=0)
        for name in ("dataset_batch_size", "batch_size", "num_canonical_nodes", "replication", "initial_nodes"):
            value: object = getattr(self, name)
            if value is not None:
                check_count(name, value, minimum=1)
        if self.nodes * self.ranks_per_node % (self.replication or 1):
            raise ValueError(
                f"replication must divide the {self.nodes * self.ranks_per_node} ranks, got {self.replication}"
            )

    @property
    def dp_degree(self) -> int:
        """Shares into which the samples are cut: ranks that replicate each other count as one."""
        return self.nodes * self.ranks_per_node // (self.replication or 1)

    @property
    def parallel_nodes(self) -> int:
        """Hosts as streaming counts them once replication has made the ranks fewer (``World.replicate``)."""
        return self.dp_degree // self.ranks_per_node if self.dp_degree % self.ranks_per_node == 0 else 1

    @property
    def canonical_nodes(self) -> int:
        """``num_canonical_nodes``, or what the library makes of None (``StreamingDataset._resume``)."""
        return self.num_canonical_nodes or self.parallel_nodes * (64 if self.shuffle_algo in ("py1s", "py2s") else 1)

    @property
    def dataset_length(self) -> int:
        """``len(dataset)``: the epoch's samples by the dp_ranks, rounded up (``StreamingDataset.__init__``)."""
        return -(-self.epoch_size // self.dp_degree)

    @property
    def reported_batches(self) -> int | None:
        """``len(loader)``: that length, cut into the loader's batches; None if the loader does not batch."""
        if self.batch_size is None:
            return None
        return batches_of_samples(self.dataset_length, batch_size=self.batch_size, drop_last=self.drop_last)

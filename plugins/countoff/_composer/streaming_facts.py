"""What an adapter reads off a mosaicml-streaming dataset and its loader: the input of ``streaming_pass``.

An adapter copies attributes. The numbers that streaming derives from them at its first iteration are derived here.
"""

from __future__ import annotations

from dataclasses import dataclass

from countoff.core.arithmetic.batches import batches_of_samples, check_count

__all__ = ["StreamFacts", "StreamingFacts"]


@dataclass(frozen=True)
class StreamFacts:
    """What is read off one stream of a dataset.

    Attributes:
        samples: Samples of the stream (``samples_per_stream[i]``), at least 1.
        choose: Samples of the stream that an epoch draws (``stream.choose``), at least 0.
        proportion: The stream's fraction of an epoch (``stream.proportion``), from 0 to 1; None: ``choose`` divided by
            the sum of ``choose`` over all streams.

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
    """What an adapter reads off a ``StreamingDataset``, its loader and the job, on this rank.

    Attributes:
        epoch_size: Samples that an epoch draws over all ranks (``dataset.epoch_size``), at least 1.
        nodes: Hosts of the job, at least 1.
        ranks_per_node: Ranks per host, at least 1.
        dataset_batch_size: ``dataset.batch_size``, samples per rank and batch, at least 1; None if the user gave none.
        batch_size: ``loader.batch_size``, samples per rank and batch, at least 1; None if the loader does not batch.
        drop_last: ``drop_last`` of the loader.
        num_workers: ``num_workers`` of the loader, at least 0.
        batching_method: ``dataset.batching_method``.
        num_canonical_nodes: ``dataset.num_canonical_nodes``, at least 1; None if the library sets it at the first
            iteration.
        shuffle: ``dataset.shuffle``; it changes no count, but streaming may refuse it.
        shuffle_algo: ``dataset.shuffle_algo``, on which the default of num_canonical_nodes depends.
        replication: ``dataset.replication``: consecutive ranks that read the same data, at least 1; None for 1.
        drop_first: Samples of this epoch, over all ranks, that an earlier run has processed
            (``sample_in_epoch`` of the loaded state), at least 0.
        partition_algo: ``dataset.partition_algo``.
        initial_nodes: Hosts on which this epoch started (``initial_physical_nodes`` of the loaded state); None if it
            started on the hosts of this job.
        streams: The streams of the dataset, in its order; empty if they cannot be read. Only the batching method
            ``random`` can be counted without them.

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
        """Hosts as streaming counts them after replication has reduced the number of ranks (``World.replicate``)."""
        return self.dp_degree // self.ranks_per_node if self.dp_degree % self.ranks_per_node == 0 else 1

    @property
    def canonical_nodes(self) -> int:
        """``num_canonical_nodes``, or the library's default for it (``StreamingDataset._resume``)."""
        return self.num_canonical_nodes or self.parallel_nodes * (64 if self.shuffle_algo in ("py1s", "py2s") else 1)

    @property
    def dataset_length(self) -> int:
        """``len(dataset)``: the epoch's samples divided by dp_degree, rounded up (``StreamingDataset.__init__``)."""
        return -(-self.epoch_size // self.dp_degree)

    @property
    def reported_batches(self) -> int | None:
        """``len(loader)``: dataset_length cut into the loader's batches; None if the loader does not batch."""
        if self.batch_size is None:
            return None
        return batches_of_samples(self.dataset_length, batch_size=self.batch_size, drop_last=self.drop_last)

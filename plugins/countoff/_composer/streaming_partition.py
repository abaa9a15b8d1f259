"""How mosaicml-streaming partitions an order of samples among nodes and their ranks, on integers instead of an array.

Source: mosaicml-streaming 0.13.0, ``get_partitions_orig`` (``base/partition/orig.py:17``). Shuffling permutes the
samples later and keeps the places, so it changes no count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Partition"]


@dataclass(frozen=True)
class Partition:
    """An order of samples, given to canonical nodes in blocks, then to nodes and their ranks in turns.

    Attributes:
        samples: Samples of the order.
        canonical_nodes: Canonical nodes, each with one block of samples.
        nodes: Hosts among which the blocks are interleaved.
        ranks_per_node: Ranks per host, which take the samples of their host in turns.
        drop_first: Samples at the start of the order, over all ranks, that an earlier run has processed.
    """

    samples: int
    canonical_nodes: int
    nodes: int
    ranks_per_node: int
    drop_first: int

    @property
    def block(self) -> int:
        """Samples per canonical node, rounded up."""
        return -(-self.samples // self.canonical_nodes)

    @property
    def node_ratio(self) -> int:
        """Nodes per canonical node, at least 1."""
        return max(self.nodes // self.canonical_nodes, 1)

    @property
    def padding(self) -> int:
        """Samples added to a block so that it divides among its nodes."""
        return -self.block % self.node_ratio

    @property
    def per_node(self) -> int:
        """Samples per node in this epoch, without those dropped at its start."""
        padded_samples = self.canonical_nodes * (self.block + self.padding)
        return max(padded_samples // self.nodes - self.drop_first // self.nodes, 0)

    @property
    def per_rank(self) -> int:
        """Samples per rank, rounded up."""
        return -(-self.per_node // self.ranks_per_node)

    def samples_lost(self, dropped: list[int]) -> int:
        """Returns the number of samples that no rank gets if every rank drops these places of its own samples."""
        lost = Counter(
            self.sample_at(node, place * self.ranks_per_node + rank)
            for place in dropped
            for node in range(self.nodes)
            for rank in range(self.ranks_per_node)
        )
        extra = Counter(self.extra_samples())
        return sum(count == 1 + extra[sample] for sample, count in lost.items())

    def sample_at(self, node: int, place: int) -> int:
        """Returns the sample at a place of a node's order, in an epoch from its start; ranks take places in turns."""
        if place >= self.per_node:  # repeated so that all ranks of a node have the same number
            missing = self.per_rank * self.ranks_per_node - self.per_node
            first = self.per_node - self.ranks_per_node - missing + 1
            place -= self.per_node
            place = place + first if first >= 0 else place % self.per_node
        column, row = divmod(place * self.nodes + node, self.canonical_nodes)
        return self._sample_of_block(row, column)

    def extra_samples(self) -> Iterator[int]:
        """Yields every repeat of a sample: a sample that is there three times is yielded twice."""
        blocks = range(self.canonical_nodes)
        if self._too_few:
            tiled = range(self.samples, len(blocks) * (self.block + self.padding))
            yield from (place % self.samples for place in tiled)
        else:
            for row in blocks:
                start, stop = self._bounds(row)
                yield from range(stop - 1, start + self.block - 1)  # a short block repeats its last sample
                yield from (self._sample_of_block(row, self.block + column) for column in range(self.padding))
        filled = range(self.per_node, self.per_rank * self.ranks_per_node)
        yield from (self.sample_at(node, place) for node in range(self.nodes) for place in filled)

    @property
    def _too_few(self) -> bool:
        """Whether there are too few samples for the canonical nodes, so that the whole order is repeated."""
        if self.samples == self.canonical_nodes:
            return self.canonical_nodes < self.nodes
        return self.samples < self.canonical_nodes

    def _bounds(self, row: int) -> tuple[int, int]:
        return row * self.samples // self.canonical_nodes, (row + 1) * self.samples // self.canonical_nodes

    def _padded_from(self) -> tuple[int, int]:
        """Returns the first column of a block that its padding repeats, and the column after the last one."""
        stop = self.block - self.node_ratio + 1
        return max(stop - self.padding, 0), max(stop, 0)

    def is_refused(self) -> bool:
        """Whether numpy fails to pad the blocks, because they are too short for the nodes that share them."""
        start, stop = self._padded_from()
        return bool(self.padding) and not self._too_few and stop - start not in (1, self.padding)

    def _sample_of_block(self, row: int, column: int) -> int:
        if self._too_few:
            return (row * (self.block + self.padding) + column) % self.samples
        start, stop = self._bounds(row)
        if column >= self.block:
            source, after = self._padded_from()
            column = source + (column - self.block if after - source > 1 else 0)
        return min(start + column, stop - 1)

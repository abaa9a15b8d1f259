"""How mosaicml-streaming deals one order of samples to nodes and their ranks, on integers instead of an array.

Source: mosaicml-streaming 0.13.0, ``get_partitions_orig`` (``base/partition/orig.py:17``). Shuffling permutes samples
afterwards and moves no place, so it changes none of the counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Partition"]


@dataclass(frozen=True)
class Partition:
    """One order of samples, dealt to canonical nodes in blocks, then to nodes and their ranks in turns."""

    samples: int
    canonical_nodes: int
    nodes: int
    ranks_per_node: int
    drop_first: int

    @property
    def block(self) -> int:
        """Samples of one canonical node, rounded up."""
        return -(-self.samples // self.canonical_nodes)

    @property
    def node_ratio(self) -> int:
        """Nodes that share one canonical node, at least 1."""
        return max(self.nodes // self.canonical_nodes, 1)

    @property
    def padding(self) -> int:
        """What is added to a block so that the nodes that share it get as many samples each."""
        return -self.block % self.node_ratio

    @property
    def per_node(self) -> int:
        """Samples of one node in this epoch, without those dropped at its start."""
        whole_order = self.canonical_nodes * (self.block + self.padding)
        return max(whole_order // self.nodes - self.drop_first // self.nodes, 0)

    @property
    def per_rank(self) -> int:
        """Samples of one rank, rounded up."""
        return -(-self.per_node // self.ranks_per_node)

    def samples_lost(self, dropped: list[int]) -> int:
        """How many samples nobody gets if every rank throws away these places among its own."""
        lost = Counter(
            self.sample_at(node, place * self.ranks_per_node + rank)
            for place in dropped
            for node in range(self.nodes)
            for rank in range(self.ranks_per_node)
        )
        given = Counter(self.extra_samples())
        return sum(count == 1 + given[sample] for sample, count in lost.items())

    def sample_at(self, node: int, place: int) -> int:
        """The sample at a place of a node's order, of an epoch from its beginning; ranks take places in turns."""
        if place >= self.per_node:  # filled up so that the ranks of a node get as many each
            missing = self.per_rank * self.ranks_per_node - self.per_node
            first = self.per_node - self.ranks_per_node - missing + 1
            place -= self.per_node
            place = place + first if first >= 0 else place % self.per_node
        column, row = divmod(place * self.nodes + node, self.canonical_nodes)
        return self._sample_of_block(row, column)

    def extra_samples(self) -> Iterator[int]:
        """Every sample that is there once more than once, as often as that."""
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
        """Whether the samples are repeated as a whole until every canonical node has some."""
        if self.samples == self.canonical_nodes:
            return self.canonical_nodes < self.nodes
        return self.samples < self.canonical_nodes

    def _bounds(self, row: int) -> tuple[int, int]:
        return row * self.samples // self.canonical_nodes, (row + 1) * self.samples // self.canonical_nodes

    def _padded_from(self) -> tuple[int, int]:
        """The columns of a block that its padding repeats: from, and up to but not including."""
        stop = self.block - self.node_ratio + 1
        return max(stop - self.padding, 0), max(stop, 0)

    def is_refused(self) -> bool:
        """Whether numpy refuses to fill up the blocks, which are too short for so many nodes each."""
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

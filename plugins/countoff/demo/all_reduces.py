"""Reads what the recorder has written: which batches each all-reduce of gradients averaged."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from countoff.core.words import names_of
from countoff.demo.launcher import DemoFailed, Run


@dataclass(frozen=True)
class AllReduce:
    """One all-reduce of gradients.

    Attributes:
        number: Its number in the run, from 1.
        positions: Epoch, from 0, and batch, from 1, of each rank whose gradients were averaged.

    >>> print(AllReduce(19, ((0, 19), (0, 19), (1, 1))))
    ranks 0, 1: epoch 0 batch 19 + rank 2: epoch 1 batch 1
    """

    number: int
    positions: tuple[tuple[int, int], ...]

    @property
    def mixed(self) -> bool:
        """Whether the ranks were at different batches."""
        return len(set(self.positions)) > 1

    @property
    def epoch_count(self) -> int:
        """How many different epochs the batches belong to."""
        return len({epoch for epoch, _ in self.positions})

    def __str__(self) -> str:
        groups: dict[tuple[int, int], list[int]] = {}
        for rank, position in enumerate(self.positions):
            groups.setdefault(position, []).append(rank)
        return " + ".join(f"{names_of(ranks)}: epoch {epoch} batch {batch}" for (epoch, batch), ranks in groups.items())


def all_reduces(run: Run) -> list[AllReduce]:
    """Returns the all-reduces of a run, in order, from the rank that recorded the most.

    Raises:
        DemoFailed: If two ranks have different records, or a rank did not get its own position back.
    """
    records = [list(_of_rank(run.file(rank, "all_reduces"), rank)) for rank in range(run.spec.data.ranks)]
    longest = max(records, key=len)
    if any(record != longest[: len(record)] for record in records):
        raise run.failure("the ranks have different records of which gradients were averaged")
    return longest


def count_so_far(run: Run) -> int:
    """Returns how many all-reduces rank 0 has recorded, without reading them."""
    try:
        return run.file(0, "all_reduces").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def excerpt(recorded: Sequence[AllReduce]) -> list[AllReduce]:
    """Returns the few to show: the last one before the first mixed one, the first three mixed ones, and the last."""
    mixed = [one for one in recorded if one.mixed]
    if not mixed:
        return list(recorded[-1:])
    before = recorded[max(0, mixed[0].number - 2) : mixed[0].number - 1]
    return [*before, *mixed[:3], *mixed[3:][-1:]]


def _of_rank(path: Path, rank: int) -> Iterator[AllReduce]:
    lines = path.read_text().splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        record = json.loads(line)
        positions = tuple((epoch, batch) for epoch, batch in record["averaged"])
        if positions[rank] != tuple(record["own"]):
            raise DemoFailed(f"all-reduce {number} returned to rank {rank} a position that it did not send")
        yield AllReduce(number, positions)

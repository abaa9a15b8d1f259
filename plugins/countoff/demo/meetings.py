"""What the witness wrote down, read back: which batches each all-reduce of gradients has averaged."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from countoff.core.verdict import names_of
from countoff.demo.launcher import DemoFailed, Run


@dataclass(frozen=True)
class Meeting:
    """One all-reduce of gradients.

    Attributes:
        number: Which one, from 1.
        places: Epoch and batch of every rank, both from 0, whose gradients were averaged.

    >>> print(Meeting(19, ((0, 18), (0, 18), (1, 0))))
    ranks 0, 1: epoch 0 batch 18 + rank 2: epoch 1 batch 0
    """

    number: int
    places: tuple[tuple[int, int], ...]

    @property
    def mixed(self) -> bool:
        """Whether ranks were at different batches."""
        return len(set(self.places)) > 1

    @property
    def of_epochs(self) -> int:
        """From how many epochs the batches were."""
        return len({epoch for epoch, _ in self.places})

    def __str__(self) -> str:
        groups: dict[tuple[int, int], list[int]] = {}
        for rank, place in enumerate(self.places):
            groups.setdefault(place, []).append(rank)
        return " + ".join(f"{names_of(ranks)}: epoch {epoch} batch {batch}" for (epoch, batch), ranks in groups.items())


def meetings(run: Run) -> list[Meeting]:
    """All of a run, in their order, from the rank that lived to see most of them.

    Raises:
        DemoFailed: If ranks have seen different things, or a rank something else of itself.
    """
    seen = [list(_of_rank(run.file(rank, "met"), rank)) for rank in range(run.order.data.ranks)]
    longest = max(seen, key=len)
    if any(one != longest[: len(one)] for one in seen):
        raise run.failure("the ranks have different accounts of what their gradients met")
    return longest


def count(run: Run) -> int:
    """How many there are so far, cheaply."""
    try:
        return run.file(0, "met").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def informative(all_of_them: Sequence[Meeting]) -> list[Meeting]:
    """The few that tell the story: the last one before ranks mixed, the first three mixed ones, and the last one."""
    mixed = [meeting for meeting in all_of_them if meeting.mixed]
    if not mixed:
        return list(all_of_them[-1:])
    before = all_of_them[max(0, mixed[0].number - 2) : mixed[0].number - 1]
    return [*before, *mixed[:3], *mixed[3:][-1:]]


def _of_rank(path: Path, rank: int) -> Iterator[Meeting]:
    lines = path.read_text().splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        account = json.loads(line)
        places = tuple((epoch, batch) for epoch, batch in account["met"])
        if places[rank] != tuple(account["own"]):
            raise DemoFailed(f"all-reduce {number} brought rank {rank} back another batch than it had put in")
        yield Meeting(number, places)

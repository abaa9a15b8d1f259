"""Which own numbers the `__iter__` of a dataset reads, without a call of its code."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import get_rank, get_world_size

from countoff._adapter.rank_reads import OwnNumbers, own_numbers

RANK, RANKS, BOTH = 1, 2, OwnNumbers(("self.rank",), ("self.world_size",))


class Told:
    """Is told its numbers, and must not be asked for anything."""

    def __init__(self) -> None:
        self.rank, self.world_size, self.rows = 1, 2, range(96)

    def __len__(self) -> int:
        raise AssertionError

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


class InIslice(Told):
    def __iter__(self) -> Iterator[int]:
        yield from itertools.islice(self.rows, self.rank, None, self.world_size)


class InAMethod(Told):
    def __iter__(self) -> Iterator[int]:
        return iter(self._share())

    def _share(self) -> range:
        rank, ranks = self.rank, self.world_size
        return self.rows[rank::ranks]


class InAProperty(Told):
    @property
    def share(self) -> range:
        return self.rows[self.rank :: self.world_size]

    def __iter__(self) -> Iterator[int]:
        return iter(self.share)


class InAGenerator(Told):
    def __iter__(self) -> Iterator[int]:
        return (row for row in self.rows if row % self.world_size == self.rank)


class ByGlobals:
    def __iter__(self) -> Iterator[int]:
        return iter(range(RANK, 96, RANKS))


class ByTorch:
    def __iter__(self) -> Iterator[int]:
        return iter(range(dist.get_rank(), 96, dist.get_world_size()))


class ByImportedFunctions:
    def __iter__(self) -> Iterator[int]:
        return iter(range(get_rank(), 96, get_world_size()))


class Seeded(Told):
    def __iter__(self) -> Iterator[int]:
        seed = 7 * self.world_size + self.rank
        order = list(self.rows)
        random.Random(seed).shuffle(order)
        random.Random(self.rank + self.world_size).shuffle(order)
        return iter(order)


class Logs(Told):
    def __iter__(self) -> Iterator[int]:
        print("rank", self.rank, "of", self.world_size)
        logging.getLogger().info(
            "rank %d of %d",
            self.rank,
            self.world_size,
        )
        return iter(self.rows)


class NamesFile(Told):
    def __iter__(self) -> Iterator[int]:
        cache = Path(f"rows-{self.rank:05}-of-{self.world_size}-{dist.get_rank()}-{len(self.rows)}.bin")
        return iter(() if cache.name else self.rows)


class LogsItsShare(Told):
    def __iter__(self) -> Iterator[int]:
        print(f"rank {self.rank} of {self.world_size}")
        return iter(self.rows[self.rank :: self.world_size])


class Silent(Told):
    def __iter__(self) -> Iterator[int]:
        return iter(self.rows)


class Truths(Told):
    def __init__(self) -> None:
        super().__init__()
        self.rank = True

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows[self.rank :: self.world_size])


class Computed(Told):
    """Its number is computed, and by a property that is no part of the class's own reading of rows."""

    rank = property(lambda self: 1 / 0)

    def __init__(self) -> None:
        self.__dict__.update(rows=range(96), world_size=2)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows[self.rank :: self.world_size])


def around(rank: int, ranks: int) -> Any:
    class Around:
        def __iter__(self) -> Iterator[int]:
            return iter(range(rank, 96, ranks))

    return Around()


@pytest.mark.parametrize(
    ("dataset", "numbers"),
    [
        (InIslice(), BOTH),
        (InAMethod(), BOTH),
        (InAProperty(), BOTH),
        (InAGenerator(), BOTH),
        (ByGlobals(), OwnNumbers(("RANK",), ("RANKS",))),
        (ByTorch(), OwnNumbers(("get_rank()",), ("get_world_size()",))),
        (ByImportedFunctions(), OwnNumbers(("get_rank()",), ("get_world_size()",))),
        (around(1, 2), OwnNumbers(("rank",), ("ranks",))),
        (Seeded(), OwnNumbers()),
        (Logs(), OwnNumbers()),
        (NamesFile(), OwnNumbers()),
        (LogsItsShare(), BOTH),
        (Silent(), OwnNumbers()),
        (Truths(), OwnNumbers((), ("self.world_size",))),
        (Computed(), OwnNumbers((), ("self.world_size",))),
        (range(3), OwnNumbers()),
    ],
    ids=lambda each: type(each).__name__,
)
def test_the_numbers_that_the_code_reads_are_named(dataset: Any, numbers: OwnNumbers) -> None:
    assert own_numbers(dataset, 1, 2) == numbers


def test_those_of_accelerate_are_known() -> None:
    accelerate = pytest.importorskip("accelerate")
    state = accelerate.PartialState(cpu=True)

    class OfAccelerate:
        def __init__(self) -> None:
            self.state = state

        def __iter__(self) -> Iterator[int]:
            return iter(range(self.state.process_index, 96, accelerate.PartialState().num_processes))

    assert own_numbers(OfAccelerate(), 1, 2) == OwnNumbers(
        ("self.state.process_index",), ("accelerate.PartialState.num_processes",)
    )

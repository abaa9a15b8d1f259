"""Scikit-learn's digits, as data of the integration tests: any numbers of batches on each rank."""

import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from integration_tests.rank import tell

BATCH_SIZE = 4


@functools.cache
def pixels() -> np.ndarray[Any, Any]:
    """scikit-learn's file of the digits, a row each: 64 pixels of 0 to 16, and which digit it is.

    Read without scikit-learn: its import, with SciPy and pandas, takes a program of a few seconds one second of a core.
    """
    package = find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    return np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", np.float32, delimiter=",")


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """All images, scaled to 0–1, and their labels."""
    rows = torch.tensor(pixels())
    return rows[:, :-1] / 16, rows[:, -1].long()


def own_rank() -> int:
    """This process's rank, from torchrun's environment."""
    return int(os.environ["RANK"])


def weights(model: Any) -> str:
    """Its weights, as a hash of their bits."""
    bits = b"".join(each.detach().cpu().numpy().tobytes() for each in model.parameters())
    return hashlib.sha256(bits).hexdigest()


class Share(IterableDataset[Any]):
    """One rank's share of the digits: with as many batches as the test asks for.

    `before` is called with the number of the sample that is about to be yielded.
    """

    def __init__(self, batches: int, before: Callable[[int], None] | None = None) -> None:
        self._batches = batches
        self._before = before

    def __iter__(self) -> Iterator[Any]:
        images, labels = digits()
        for number in range(self._batches * BATCH_SIZE):
            if self._before is not None:
                self._before(number)
            index = (number * 7 + own_rank() * 31) % len(images)
            yield images[index], labels[index]


class SizedShare(Share):
    """A share that also reports a length in samples, right or wrong."""

    def __init__(self, batches: int, reported: int, before: Callable[[int], None] | None = None) -> None:
        super().__init__(batches, before)
        self._reported = reported

    def __len__(self) -> int:
        return self._reported * BATCH_SIZE


def share_loader(batches: int, reported: int | None = None, before: Callable[[int], None] | None = None) -> Any:
    """A loader over this rank's share; unsized unless `reported` (batches) is given."""
    share = Share(batches, before) if reported is None else SizedShare(batches, reported, before)
    return DataLoader(share, batch_size=BATCH_SIZE)


class Listed:
    """A train loader without a length, which can be pickled while it is iterated."""

    def __init__(self, batches: int) -> None:
        images, labels = digits()
        self._batches = [(images[start : start + 4], labels[start : start + 4]) for start in range(0, 4 * batches, 4)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def sleep_once(rank: int, sample: int, seconds: float, number: int) -> None:
    """Lets one rank's loader sleep before one sample: a `before`, with all but the last argument bound."""
    if number == sample and own_rank() == rank:
        tell("asleep")
        time.sleep(seconds)

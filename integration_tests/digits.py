"""Scikit-learn's digits, as data of the integration tests: any numbers of batches on each rank."""

import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, IterableDataset

from integration_tests.rank import tell

BATCH_SIZE = 4


@functools.cache
def pixels() -> Any:
    """All images and their labels as scikit-learn has them: it parses a text, 0.1 s of a core each time."""
    return load_digits(return_X_y=True)


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """All images, scaled to 0–1, and their labels."""
    images, labels = pixels()
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


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

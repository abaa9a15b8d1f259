"""A batch is referred to without keeping its tensors in memory."""

from typing import Any

import pytest
import torch

from countoff._adapter.held_batch import HeldBatch


class Slots:
    """An object that cannot be referred to weakly."""

    __slots__ = ()


SLOTS = Slots()
TENSOR = torch.ones(2)


@pytest.mark.parametrize(
    "batch",
    [TENSOR, (TENSOR, TENSOR), [TENSOR, 3, "text"], {"ids": TENSOR, "length": 2, "more": (TENSOR, [])}, 5, SLOTS],
    ids=lambda batch: type(batch).__name__,
)
def test_a_batch_that_is_there_is_returned(batch: Any) -> None:
    found = HeldBatch(batch).get()
    assert type(found) is type(batch)
    assert str(found) == str(batch)


@pytest.mark.parametrize("make", [lambda each: each, lambda each: [each], lambda each: {"ids": (each, 1)}])
def test_a_batch_of_which_a_tensor_is_gone_is_gone(make: Any) -> None:
    batch = make(torch.ones(2))
    held = HeldBatch(batch)
    assert held.get() is not None
    del batch
    assert held.get() is None


def test_a_batch_that_contains_itself_is_held() -> None:
    batch: list[Any] = [TENSOR]
    batch.append(batch)
    found = HeldBatch(batch).get()
    assert found[0] is TENSOR
    assert found[1][1][1] is batch


def test_a_long_list_of_numbers_is_kept_as_it_is() -> None:
    """To walk through it would cost as much as many batches."""
    numbers = list(range(1000))
    assert HeldBatch((TENSOR, numbers)).get()[1] is numbers

"""How many batches the loaders of evaluations have had."""

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from countoff._adapter.evaluation_totals import EvaluationTotals


def test_a_length_that_is_observed_is_of_the_loader_that_had_it() -> None:
    """One of another evaluation or another loader tells nothing, nor does one that is not always the same."""
    first, second = (DataLoader[Any](TensorDataset(torch.arange(4))) for _ in range(2))
    totals = EvaluationTotals(lambda _: None, dp_degree=1)
    totals.ended("validation", first, None)
    assert totals.observed_length("validation", first) is None
    totals.ended("validation", first, 10)
    totals.ended("validation", first, 10)
    assert [totals.observed_length("validation", each) for each in (first, second)] == [10, None]
    assert totals.observed_length("test", first) is None
    totals.ended("validation", second, 9)
    assert [totals.observed_length("validation", each) for each in (first, second)] == [None, 9]
    totals.ended("validation", second, 8)
    assert totals.observed_length("validation", second) is None


def test_the_length_of_a_list_is_not_observed() -> None:
    """It cannot be held weakly, so the next one may be another list."""
    totals, batches = EvaluationTotals(lambda _: None, dp_degree=1), [1, 2]
    totals.ended("validation", batches, 2)
    assert totals.observed_length("validation", batches) is None

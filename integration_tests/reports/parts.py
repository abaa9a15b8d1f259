"""What the programs have in common: the digits, a linear model, and a checkpoint of a plain loop."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from integration_tests.digits import digits


def rows(count: int = 160) -> TensorDataset:
    """The first so many digits: 20 batches of 4 for each of two ranks."""
    images, labels = digits()
    return TensorDataset(images[:count], labels[:count])


def net() -> Any:
    torch.manual_seed(0)
    return torch.nn.Linear(64, 10)


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    images, labels = batch
    return cross_entropy(model(images), labels)

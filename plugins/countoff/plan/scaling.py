"""The two rules by which a learning rate is scaled to another global batch, each with its source."""

from __future__ import annotations

import math
from typing import Literal

from countoff.core.counts.batches import check_count

__all__ = ["scaled_learning_rate"]


def scaled_learning_rate(
    learning_rate: float, *, tuned_batch_size: int, global_batch_size: int, rule: Literal["linear", "square root"]
) -> float:
    """Returns a learning rate for one global batch size, from one that was tuned for another.

    The linear rule, ``B / B0``, is for SGD with a warm-up: Goyal et al. 2017, "Accurate, Large Minibatch SGD" (arXiv
    1706.02677). The square root of that is for Adam and similar optimizers: Krizhevsky 2014, "One weird trick" (arXiv
    1404.5997); for Adam, Malladi et al. 2022 (arXiv 2205.10287).

    Args:
        learning_rate: The rate that was tuned, above 0.
        tuned_batch_size: The global batch size B0 for which it was tuned, at least 1.
        global_batch_size: The global batch size B of the run, at least 1.
        rule: The rule.

    Raises:
        ValueError: If a number is outside its domain.

    Example:
        >>> scaled_learning_rate(0.1, tuned_batch_size=256, global_batch_size=8192, rule="linear")
        3.2
        >>> round(scaled_learning_rate(0.1, tuned_batch_size=256, global_batch_size=8192, rule="square root"), 3)
        0.566
    """
    if not (math.isfinite(learning_rate) and learning_rate > 0):
        raise ValueError(f"learning_rate must be a finite number above 0, got {learning_rate!r}")
    check_count("tuned_batch_size", tuned_batch_size, minimum=1)
    ratio = check_count("global_batch_size", global_batch_size, minimum=1) / tuned_batch_size
    return learning_rate * (ratio if rule == "linear" else math.sqrt(ratio))

"""The two rules by which a learning rate is scaled to another global batch, each with its source."""

from __future__ import annotations

import math

from countoff.core.arithmetic.batches import check_count

__all__ = ["linear_scaled", "square_root_scaled"]


def linear_scaled(learning_rate: float, *, tuned_batch_size: int, global_batch_size: int) -> float:
    """Returns the learning rate times ``B / B0``: the rule for SGD, used with a warm-up at the start.

    Source: Goyal et al. 2017, "Accurate, Large Minibatch SGD" (arXiv 1706.02677).

    Args:
        learning_rate: The rate that was tuned, above 0.
        tuned_batch_size: The global batch size B0 for which it was tuned, at least 1.
        global_batch_size: The global batch size B of the run, at least 1.

    Raises:
        ValueError: If a number is outside its domain.

    Example:
        >>> linear_scaled(0.1, tuned_batch_size=256, global_batch_size=8192)
        3.2
    """
    return _checked(learning_rate) * _ratio(tuned_batch_size, global_batch_size)


def square_root_scaled(learning_rate: float, *, tuned_batch_size: int, global_batch_size: int) -> float:
    """Returns the learning rate times ``√(B / B0)``: the rule for Adam and similar optimizers.

    Source: Krizhevsky 2014, "One weird trick" (arXiv 1404.5997); for Adam, Malladi et al. 2022 (arXiv 2205.10287).

    Args:
        learning_rate: The rate that was tuned, above 0.
        tuned_batch_size: The global batch size B0 for which it was tuned, at least 1.
        global_batch_size: The global batch size B of the run, at least 1.

    Raises:
        ValueError: If a number is outside its domain.

    Example:
        >>> round(square_root_scaled(0.1, tuned_batch_size=256, global_batch_size=8192), 3)
        0.566
    """
    return _checked(learning_rate) * math.sqrt(_ratio(tuned_batch_size, global_batch_size))


def _checked(learning_rate: float) -> float:
    if not (math.isfinite(learning_rate) and learning_rate > 0):
        raise ValueError(f"learning_rate must be a finite number above 0, got {learning_rate!r}")
    return learning_rate


def _ratio(tuned_batch_size: int, global_batch_size: int) -> float:
    check_count("tuned_batch_size", tuned_batch_size, minimum=1)
    return check_count("global_batch_size", global_batch_size, minimum=1) / tuned_batch_size

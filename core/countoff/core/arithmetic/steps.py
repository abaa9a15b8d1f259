"""How many optimizer steps, and the batches that they take: pure functions behind ``countoff.core.plan``.

A step is an optimizer step. What becomes of a last accumulation that is short differs from framework to framework, so
the caller says it, and Lightning's own estimate, which believes the reported length, stands beside the truth.
"""

from __future__ import annotations

import math

from countoff.core.arithmetic.batches import batches_of_samples, check_count

__all__ = ["batches_until_step", "estimated_stepping_batches", "steps_in_epoch"]


def steps_in_epoch(batches: int, *, gradient_accumulation_steps: int, partial_applied: bool) -> int:
    """Returns the optimizer steps of an epoch whose accumulation begins anew at its start.

    Source: Lightning's ``_accumulated_batches_reached() or _num_ready_batches_reached()``: the last accumulation, when
    it is short, is applied only if the loop knows that this batch is the last one.

    Args:
        batches: Batches of this epoch and rank, at least 0.
        gradient_accumulation_steps: Batches per optimizer step, at least 1.
        partial_applied: Whether a last accumulation that is short becomes a step; if not, its gradients are lost.

    Raises:
        ValueError: If a count is not an integer in its domain.

    Example:
        >>> steps_in_epoch(11, gradient_accumulation_steps=4, partial_applied=True)
        3
    """
    check_count("batches", batches, minimum=0)
    check_count("gradient_accumulation_steps", gradient_accumulation_steps, minimum=1)
    return batches_of_samples(batches, batch_size=gradient_accumulation_steps, drop_last=not partial_applied)


def batches_until_step(
    step: int, *, batches_per_epoch: int, steps_per_epoch: int, gradient_accumulation_steps: int
) -> int:
    """Returns the batches that a rank has trained on when the given optimizer step has been taken, over all epochs.

    Source: Lightning's fit loop, which leaves as soon as ``global_step`` reaches ``max_steps``.

    Args:
        step: Optimizer steps from the start of training, at least 0.
        batches_per_epoch: Batches of one whole epoch and rank, at least 0.
        steps_per_epoch: Optimizer steps of one whole epoch, at least 1.
        gradient_accumulation_steps: Batches per optimizer step, at least 1.

    Raises:
        ValueError: If a count is not an integer in its domain.

    Example:
        >>> batches_until_step(4, batches_per_epoch=11, steps_per_epoch=3, gradient_accumulation_steps=4)
        15
    """
    check_count("batches_per_epoch", batches_per_epoch, minimum=0)
    check_count("steps_per_epoch", steps_per_epoch, minimum=1)
    check_count("gradient_accumulation_steps", gradient_accumulation_steps, minimum=1)
    if not check_count("step", step, minimum=0):
        return 0
    epochs, earlier = divmod(step - 1, steps_per_epoch)
    return epochs * batches_per_epoch + min((earlier + 1) * gradient_accumulation_steps, batches_per_epoch)


def estimated_stepping_batches(
    reported_batches: int | None, *, gradient_accumulation_steps: int, max_epochs: int, max_steps: int
) -> int | float:
    """Returns what Lightning gives to ``configure_optimizers`` as the length of the run in optimizer steps.

    Source: ``Trainer.estimated_stepping_batches``, which believes the reported length; a learning-rate schedule that
    was built on it is as wrong as that length.

    Args:
        reported_batches: ``num_training_batches``, limit included, at least 0; None where Lightning has infinity.
        gradient_accumulation_steps: Batches per optimizer step, at least 1.
        max_epochs: Epochs, at least 0; -1 for no limit. Like Lightning, 0 is taken for 1.
        max_steps: Optimizer steps, at least 0; -1 for no limit.

    Returns:
        Steps; infinity or -1 where Lightning says infinity or -1 because nothing limits the run.

    Raises:
        ValueError: If a count is not an integer in its domain.

    Example:
        >>> estimated_stepping_batches(11, gradient_accumulation_steps=4, max_epochs=2, max_steps=-1)
        6
    """
    check_count("max_epochs", max_epochs, minimum=-1)
    check_count("max_steps", max_steps, minimum=-1)
    if max_epochs == -1:
        return math.inf if max_steps == -1 else max_steps
    if reported_batches is None:
        return max_steps
    steps = max(max_epochs, 1) * steps_in_epoch(
        reported_batches, gradient_accumulation_steps=gradient_accumulation_steps, partial_applied=True
    )
    return steps if max_steps == -1 else min(steps, max_steps)

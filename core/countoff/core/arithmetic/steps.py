"""Numbers of optimizer steps, and of the batches that they take: pure functions behind ``arithmetic.plan``.

A step is an optimizer step. Frameworks differ in what they do with a last accumulation that is not complete, so the
caller passes it. Lightning's own estimate, which trusts the reported length, is here as well.
"""

from __future__ import annotations

from countoff.core.arithmetic.batches import batches_of_samples, check_count

__all__ = ["batches_until_step", "steps_in_epoch"]


def steps_in_epoch(batches: int, *, gradient_accumulation_steps: int, partial_applied: bool) -> int:
    """Returns the optimizer steps of an epoch in which accumulation starts at zero.

    Source: Lightning's ``_accumulated_batches_reached() or _num_ready_batches_reached()``: a last accumulation that is
    not complete is applied only if the loop knows that this batch is the last one.

    Args:
        batches: Batches of this epoch on one rank, at least 0.
        gradient_accumulation_steps: Batches per optimizer step, at least 1.
        partial_applied: Whether a last accumulation that is not complete becomes a step; if not, its gradients are
            lost.

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
    """Returns the batches, over all epochs, on which a rank has trained after the given optimizer step.

    Source: Lightning's fit loop, which ends as soon as ``global_step`` reaches ``max_steps``.

    Args:
        step: Optimizer steps since the start of training, at least 0.
        batches_per_epoch: Batches of one complete epoch on one rank, at least 0.
        steps_per_epoch: Optimizer steps of one complete epoch, at least 1.
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

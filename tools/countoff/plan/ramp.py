"""A global batch that grows with the samples seen: they are the only number that does not depend on the batch."""

from __future__ import annotations

from dataclasses import dataclass

from countoff.core.arithmetic.batches import check_count
from countoff.core.arithmetic.plan import BatchPlan
from countoff.core.arithmetic.samples import product

__all__ = ["Ramp", "ramped_steps"]


@dataclass(frozen=True)
class Ramp:
    """A global batch that grows with the samples seen, as with Megatron's ``--rampup-batch-size``.

    Source: Megatron's ``RampupBatchsizeNumMicroBatchesCalculator``: the increments are spread evenly over the samples
    of the ramp, and the batch is ``start + increment * floor(seen * increments / samples)`` while at most ``samples``
    have been seen.

    Attributes:
        start: Samples of the first global batch, at least 1.
        increment: Samples by which the global batch grows each time, at least 1.
        samples: Samples over which it grows, at least 1.
        global_batch_size: Samples of the global batch after the ramp, at least start; start plus whole increments.

    Raises:
        ValueError: If a number is outside its domain.

    Example:
        >>> Ramp(start=8, increment=8, samples=100, global_batch_size=32).pieces()
        [(8, 5), (16, 2), (24, 2)]
    """

    start: int
    increment: int
    samples: int
    global_batch_size: int

    def __post_init__(self) -> None:
        for name in ("start", "increment", "samples", "global_batch_size"):
            check_count(name, getattr(self, name), minimum=1)
        if self.global_batch_size < self.start or (self.global_batch_size - self.start) % self.increment:
            raise ValueError(
                f"a ramp from {self.start} in increments of {self.increment} does not reach {self.global_batch_size}"
            )

    def batch_after(self, seen: int) -> int:
        """Returns the global batch of the step that begins after the given number of samples.

        Args:
            seen: Samples seen over all dp_ranks, at least 0.

        Raises:
            ValueError: If seen is not an integer of at least 0.
        """
        increments = (self.global_batch_size - self.start) // self.increment
        if check_count("seen", seen, minimum=0) > self.samples or not increments:
            return self.global_batch_size
        return self.start + self.increment * min(seen * increments // self.samples, increments)

    def pieces(self, *, divisor: int = 1, total_steps: int | None = None) -> list[tuple[int, int]]:
        """Returns each global batch with its number of optimizer steps, in order.

        Args:
            divisor: Every global batch must be a multiple of this: batch_size × dp_degree.
            total_steps: Optimizer steps of the run, at least 0; None: only the steps before the full global batch,
                because the run has no end.

        Raises:
            ValueError: If a number is outside its domain, or a global batch of the ramp, or the full one, does not
                divide.
        """
        check_count("divisor", divisor, minimum=1)
        if total_steps is not None:
            check_count("total_steps", total_steps, minimum=0)
        found: list[tuple[int, int]] = []
        seen = taken = 0
        while (batch := self.batch_after(seen)) < self.global_batch_size and taken != total_steps:
            if batch % divisor:
                raise ValueError(f"the ramp's global batch {batch} is no multiple of {divisor}")
            steps = found.pop()[1] if found and found[-1][0] == batch else 0
            found.append((batch, steps + 1))
            seen += batch
            taken += 1
        if self.global_batch_size % divisor:
            raise ValueError(f"the global batch {self.global_batch_size} is no multiple of {divisor}")
        if total_steps is not None and total_steps > taken:
            found.append((self.global_batch_size, total_steps - taken))
        return found


def ramped_steps(plan: BatchPlan, *, start: int, increment: int, samples: int) -> list[tuple[int, int]]:
    """Returns a run with a global batch that grows: each global batch with its number of optimizer steps.

    Args:
        plan: The run with its full global batch.
        start: Samples of the first global batch, at least 1.
        increment: Samples by which the global batch grows each time until it is global_batch_size, at least 1.
        samples: Samples over which it grows, at least 1.

    Returns:
        Pairs of global batch and optimizer steps, in order, up to total_steps; without total_steps up to, but not
        including, the full global batch.

    Raises:
        ValueError: If a number is outside its domain, a global batch of the ramp does not divide by batch_size ×
            dp_degree, the batch size is not known, or epochs end: a ramp counts samples, not epochs.
    """
    total, divisor = plan.global_batch_size, product(plan.facts.batch_size, plan.dp_degree)
    if total is None or divisor is None:
        raise ValueError("a ramp cannot be counted without the batch size")
    if plan.batches_per_epoch is not None:
        raise ValueError("a ramp is counted in steps over data without an end: give the steps, not the dataset")
    ramp = Ramp(start=start, increment=increment, samples=samples, global_batch_size=total)
    return ramp.pieces(divisor=divisor, total_steps=plan.total_steps)

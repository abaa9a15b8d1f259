"""Does the framework count the job that runs? Adapters look for that, by what they know of their framework.

A loader may report the batches of all ranks (`WrongLength`), a total may count each batch once per process
(`WrongTotal`), or optimizer steps that a loop does not make, and each process may train as the only one
(`NotDistributed`).
"""

from __future__ import annotations

from countoff.core.arithmetic.plan import BatchPlan
from countoff.core.arithmetic.steps import steps_in_epoch
from countoff.core.messages import count_of
from countoff.core.verdict import Cause, Verdict, VerdictKind

__all__ = ["CUT_BATCHES", "NOT_DISTRIBUTED", "STEPS", "WRONG_LENGTH", "WRONG_TOTAL", "judge_length", "judge_steps"]

STEPS, CUT_BATCHES = "steps", "cut batches"
"""The subjects of a `WrongTotal` of optimizer steps: each batch has one, or one batch has one for each of its parts."""
_MORE = Cause(
    "Each step has the samples of fewer batches than planned. A learning-rate schedule for the planned steps ends "
    "before the run."
)

WRONG_LENGTH = VerdictKind(
    "WrongLength",
    "`len(loader)` is not the number of batches of one rank, for example because it counts those of all ranks",
    default="warns, and shows the true totals",
    ends=False,
)
"""**Cause.** `len(loader)` counts the batches of all ranks, or is what the author of an iterable dataset wrote, such as
`len(self.samples)` where `__iter__` yields one rank's share.

**Fix.** Return one rank's share. In Lightning and Composer, `totals="fix"` sets a number that is proved.
"""
WRONG_TOTAL = VerdictKind(
    "WrongTotal",
    "the framework's total batch size counts each batch once per process (`split_batches`), or an epoch has more "
    "optimizer steps than its gradient accumulation makes",
    ends=False,
    causes={STEPS: _MORE, CUT_BATCHES: _MORE},
)
"""**Cause.** With `split_batches`, the processes share one batch of `per_device_train_batch_size` samples. The Trainer
multiplies that number by the number of processes.

**Fix.** Leave `split_batches` off, or go by countoff's totals.

### More steps than the accumulation makes

With Accelerate, an epoch may have more optimizer steps than `gradient_accumulation_steps` makes: a loop never calls
`accumulate()`, or cuts its batches up inside of it, and Accelerate steps after each part of the last batch of a loader.
Let the loader give the parts as its batches. In a loop of your own and in Fabric, this is not compared.
"""
NOT_DISTRIBUTED = VerdictKind(
    "NotDistributed",
    "several processes were launched, but the framework treats each as the only one",
    ends=False,
)
"""**Cause.** Under torchrun on a machine without GPUs, Accelerate does not use the other processes unless it is told
to.

**Fix.** Set `ACCELERATE_USE_CPU=true`.
"""


def judge_length(plan: BatchPlan, *, counted_by: str, consequences: str | None = None) -> Verdict | None:
    """Returns a `WrongLength` if a loader reports another number of batches than it has.

    Args:
        plan: The plan of this rank's loader.
        counted_by: Who goes by the reported number.
        consequences: What that does, as one or more sentences; None for what it does in any framework.
    """
    true, reported = plan.loader_batches, plan.reported_batches
    if true is None or reported is None or plan.wrong_length_factor is None:
        return None
    why = ""
    if plan.size_taken_for_length:
        why = (
            f"{reported} is the size of the dataset over all {plan.dp_degree} data ranks (`size`), not one rank's "
            "`length`."
        )
    if consequences is None:
        consequences = (
            "Progress, validation intervals and schedules that depend on it are off by a factor of "
            f"{plan.wrong_length_factor:g}."
        )
    sentence = f"{counted_by} counts on {count_of(reported, 'batch')} per epoch and rank; there are {true}."
    return WRONG_LENGTH.found(f"{sentence} {consequences}", why=why)


def judge_steps(
    epoch: str, steps: int, gradient_accumulation_steps: int, *, batches: int, passes: int
) -> Verdict | None:
    """Returns a `WrongTotal` if a train epoch has had more optimizer steps than its gradient accumulation makes.

    Args:
        epoch: The name of the epoch.
        steps: Its optimizer steps, at least 0.
        gradient_accumulation_steps: Micro-batches per optimizer step, at least 1.
        batches: Its batches on this rank, at least 0.
        passes: Its micro-batches, at least as many.

    Example:
        >>> print(judge_steps("train epoch 0", 39, 10, batches=30, passes=300).sentence)
        train epoch 0 had 39 optimizer steps in 300 micro-batches: gradient_accumulation_steps=10 makes at most 30.
        >>> judge_steps("train epoch 0", 30, 4, batches=120, passes=120) is None
        True
    """
    accumulation = gradient_accumulation_steps
    most = steps_in_epoch(passes, gradient_accumulation_steps=accumulation, partial_applied=True)
    if steps <= most:
        return None
    counted = count_of(passes, "micro-batch") if passes > batches else count_of(batches, "batch")
    sentence = f"{epoch} had {count_of(steps, 'optimizer step')} in {counted}"
    return WRONG_TOTAL.found(
        f"{sentence}: gradient_accumulation_steps={accumulation} makes at most {most}.",
        subject=CUT_BATCHES if batches < steps < passes else STEPS,
    )

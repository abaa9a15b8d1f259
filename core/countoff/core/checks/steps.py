"""Do ranks apply their optimizer steps after the same batches? `StepMismatch`, at sync points and at ticks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from countoff.core import constants
from countoff.core.checks.check import Check, RankState, TickPart
from countoff.core.messages import count_of
from countoff.core.protocol.counters import SpanCounters, TickPlace
from countoff.core.protocol.rule import Divergence
from countoff.core.verdict import Cause, Verdict, VerdictKind

__all__ = ["FORWARD_PASSES", "MICRO_BATCHES", "STEP_MISMATCH", "StepCheck", "compare_steps", "judge_steps"]

MICRO_BATCHES = "micro-batches"
"""Subject of a `StepMismatch` whose steps are equal, and whose micro-batches are not; see `micro_batches`."""
FORWARD_PASSES = "forward passes"
"""Subject of a `StepMismatch` whose steps are equal, and whose forward passes of a sharded model are not; likewise."""
SAME_FORWARD_PASSES = (
    "run as many forward passes of the model on every rank, also those under no_grad, to log or to generate. Where "
    "that number depends on the data: all-reduce it, take the maximum, and let ranks with fewer run empty passes, any "
    "valid input whose result is not used, or in training with a loss of 0 (loss * 0)."
)
SAME_MICRO_BATCHES = (
    "run as many forward and backward passes in each step on every rank. Where that number depends on the data: "
    "all-reduce it, take the maximum, and let ranks with fewer run empty micro-batches, any valid input with a loss of "
    "0 (loss * 0)."
)

STEP_MISMATCH = VerdictKind(
    "StepMismatch",
    "ranks took different numbers of optimizer steps, after different batches, or with different numbers of "
    "micro-batches, or of forward passes of a sharded model",
    default="raises; different micro-batches and forward passes warn",
    level="raise",
    restart="useless",
    causes={
        "": Cause(
            "Ranks that do not step after the same batches have different weights from there on.",
            "let all ranks step after the same batches: no condition of one rank around optimizer.step().",
        ),
        MICRO_BATCHES: Cause(
            "In one step, the ranks ran different numbers of passes. That is right where each rank weights its losses "
            "by the samples. Otherwise the step averages gradients of different amounts of data.",
            f"{SAME_MICRO_BATCHES}\n"
            "if the ranks weight their losses by their samples, or the extra pass is no part of the training, ignore "
            "this.",
        ),
        FORWARD_PASSES: Cause(
            "A forward pass gathers the shards of all ranks, also without gradients: it is a collective. One that a "
            "rank runs alone waits for ever, or pairs with a later collective of the others, and from there on the "
            "ranks use weights or gradients of different steps.",
            SAME_FORWARD_PASSES,
        ),
    },
)
"""**Cause.** A condition of one rank around `optimizer.step()`, such as its own loss; a gradient scaler that skips a
step on one rank; an accumulation that starts one batch later on one rank.

**Fix.** Decide on a value that all ranks have: all-reduce the loss before the condition.

Different numbers of [micro-batches](data-identity.md#work-inside-a-batch) are right where each rank weights its losses
by the samples. [Forward passes of a sharded model](data-identity.md#forward-passes-of-a-sharded-model) are collectives,
also under `no_grad`: all ranks must run as many.
"""


class StepCheck(Check):
    """Compares optimizer steps at ticks. Sync points have them too.

    Args:
        state: This rank's state.
    """

    def __init__(self, state: RankState) -> None:
        self._state = state

    def tick(self, span: SpanCounters) -> Callable[[TickPlace], TickPart]:  # noqa: D102
        return partial(self._part, self._state.steps, self._state.step_hash)

    def left_keys(self, span: SpanCounters) -> Iterable[str]:  # noqa: D102
        if span.evaluation:
            return ()
        every = constants.TICK_BATCHES
        last = span.started // every * every
        first = max(every, last - constants.KEPT_TICKS * every)
        return (TickPlace(span.opened, batch, span.name).key for batch in range(first, last + 1, every))

    @staticmethod
    def _part(steps: int, step_hash: int, at: TickPlace) -> TickPart:
        record = {"steps": steps, "step_hash": step_hash}
        return TickPart(record, compare_steps(record, at.in_words))


def compare_steps(own: Mapping[str, Any], where: str) -> Callable[[Mapping[str, Any], tuple[int, int]], Verdict | None]:
    """Returns what compares this rank's steps with those of the rank that wrote first at a tick.

    Args:
        own: This rank's record.
        where: The batch and its span, in words.

    >>> compare = compare_steps({"steps": 8, "step_hash": 5}, "batch 64 of train epoch 0")
    >>> compare({"steps": 7, "step_hash": 4}, (0, 1)).sentence
    'at batch 64 of train epoch 0, rank 0 had applied 7 optimizer steps and rank 1 8.'
    """

    def compare(logged: Mapping[str, Any], ranks: tuple[int, int]) -> Verdict | None:
        if (logged["steps"], logged["step_hash"]) == (own["steps"], own["step_hash"]):
            return None
        first, second = ranks
        counts = f"rank {first} had applied {logged['steps']} optimizer steps and rank {second} {own['steps']}"
        suffix = "" if logged["steps"] != own["steps"] else ", but after other batches"
        return STEP_MISMATCH.found(f"at {where}, {counts}{suffix}.", ranks, standing="differ")

    return compare


def judge_steps(divergence: Divergence, rank: int) -> Verdict:
    """Returns a `StepMismatch` that a sync point has shown.

    Args:
        divergence: What the rule proved.
        rank: The rank that proved it.
    """
    logged = divergence.logged
    theirs, mine = count_of(logged.steps, "optimizer step"), count_of(divergence.count, "optimizer step")
    where = f"after {count_of(logged.at, 'batch')} of {logged.span}"
    sentence = f"{where}, rank {logged.rank} had applied {theirs} and rank {rank} {mine}"
    return STEP_MISMATCH.found(
        sentence + ("." if logged.steps != divergence.count else ", but after other batches."),
        (logged.rank, rank),
        time=logged.time,
        sync_index=divergence.sync_index,
        standing="differ",
    )

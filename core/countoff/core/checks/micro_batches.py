"""Do ranks run equally many micro-batches for each optimizer step? A `StepMismatch` that may be legitimate.

Of a model that all ranks hold in shards, its forward passes are compared instead, also those without a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from countoff.core.checks.check import Check, RankState, TickPart
from countoff.core.checks.steps import FORWARD_PASSES, MICRO_BATCHES, STEP_MISMATCH
from countoff.core.messages import count_of
from countoff.core.protocol.counters import SpanCounters, TickPlace
from countoff.core.protocol.records import MicroCounts
from countoff.core.protocol.rule import Divergence
from countoff.core.verdict import Verdict

__all__ = ["MicroBatchCheck", "batches_of", "compare_micro_batches", "judge_micro_batches"]


class MicroBatchCheck(Check):
    """Compares micro-batches at ticks. Sync points have them too.

    Args:
        state: This rank's state.
    """

    def __init__(self, state: RankState) -> None:
        self._state = state

    def tick(self, span: SpanCounters) -> Callable[[TickPlace], TickPart]:  # noqa: D102
        return partial(self._part, self._state.micro_batches.take(), self._state.steps)

    @staticmethod
    def _part(mine: MicroCounts, steps: int, at: TickPlace) -> TickPart:
        return TickPart(mine.to_json(), compare_micro_batches(mine, f"at {at.in_words}", steps))


def compare_micro_batches(
    mine: MicroCounts, where: str, steps: int
) -> Callable[[Mapping[str, Any], tuple[int, int]], Verdict | None]:
    """Returns what compares this rank's micro-batches with those of the rank that wrote first at a tick.

    Args:
        mine: What this rank has counted.
        where: The place at which they are compared, as the beginning of a sentence.
        steps: Optimizer steps of this rank.
    """

    def compare(logged: Mapping[str, Any], ranks: tuple[int, int]) -> Verdict | None:
        theirs = MicroCounts.from_json(logged)
        return _mismatch(theirs, mine, ranks, where=where, steps=steps) if theirs.differ(mine) else None

    return compare


def judge_micro_batches(divergence: Divergence, rank: int) -> Verdict | None:
    """Returns a `StepMismatch` of micro-batches that a sync point has shown; None if its micro-batches are equal.

    Args:
        divergence: What the rule proved.
        rank: The rank that proved it.
    """
    logged, own = divergence.logged, divergence.own
    if own is None or not divergence.micro_batches:
        return None
    where, ranks = f"after {count_of(logged.at, 'batch')} of {own.micro.span}", (logged.rank, rank)
    more = {"time": logged.time, "sync_index": divergence.sync_index}
    return _mismatch(logged.micro, own.micro, ranks, where=where, steps=own.steps, **more)


def _mismatch(
    theirs: MicroCounts, mine: MicroCounts, ranks: tuple[int, int], *, where: str, steps: int, **more: Any
) -> Verdict:
    sentence = _sentence_of(theirs, mine, ranks, where=where, steps=steps)
    more = {**more, "standing": "differ", "harmful": False}
    return STEP_MISMATCH.found(sentence, ranks, subject=FORWARD_PASSES if mine.sharded else MICRO_BATCHES, **more)


def batches_of(first: int, last: int) -> str:
    """The batches of a step, in words."""
    return f"batch {last}" if first == last else f"batches {first} to {last}"


def _sentence_of(theirs: MicroCounts, mine: MicroCounts, ranks: tuple[int, int], *, where: str, steps: int) -> str:
    """The sentence of two ranks with equal steps and different micro-batches; with the batch, where it is known.

    Args:
        theirs: What the rank that wrote first has counted.
        mine: What this rank has counted.
        ranks: That rank and this one.
        where: The place at which they were compared.
        steps: Optimizer steps of both.
    """
    pairs = zip(theirs.counts, mine.counts, mine.batches, strict=False)
    found = next((pair for pair in pairs if pair[0] != pair[1]), None) if theirs.since == mine.since else None
    if found is None:
        applied = count_of(steps, "optimizer step")
        both = f"ranks {min(ranks)} and {max(ranks)}"
        counted = f"{FORWARD_PASSES} of the sharded model" if mine.sharded else MICRO_BATCHES
        return f"{where}, {both} had applied {applied}, but of different numbers of {counted}."
    *counts, (first, last) = found
    batches = batches_of(first, last)
    (more, many), (fewer, few) = sorted(zip(ranks, counts, strict=True), key=lambda side: -side[1])
    ran = f"{count_of(many, 'forward pass')} of the sharded model" if mine.sharded else count_of(many, "micro-batch")
    return f"in {batches} of {mine.span}, rank {more} ran {ran}, rank {fewer} {few}."

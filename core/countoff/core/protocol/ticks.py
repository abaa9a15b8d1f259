"""Ticks: what must be equal in the middle of a span, compared every `tick_batches` without anybody waiting.

The first rank to get there writes its record under the batch's own key, later ones compare. So a skipped optimizer
step, steps after other batches, or a learning rate of one rank's own is found within seconds, not at the epoch's end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.state import State
from countoff.core.verdict import Verdict

if TYPE_CHECKING:
    from countoff.core.runtime.channel import Channel

_RATES = 8


def tick(state: State, tally: SpanCounters, rates: Sequence[float]) -> Callable[[Channel], None]:
    """A job for the speaker that compares this rank's counts, as they are now, with those of the others.

    Args:
        state: This rank's state.
        tally: The train span under way.
        rates: Learning rates in force; the first eight are compared.
    """
    own = [float(rate) for rate in rates[:_RATES]]  # a trainer's own numbers, of numpy say, look otherwise in the store
    record = {"rank": state.rank, "steps": state.steps, "chain": state.chain, "rates": own}
    opened, at, name = tally.opened, tally.started, tally.name

    def job(channel: Channel) -> None:
        standing = channel.claim(f"tick/{opened}/{at}", record)
        verdict = compare_ticks(standing, record, f"batch {at} of {name}")
        if verdict is not None:
            state.propose(verdict)

    return job


def compare_ticks(standing: Mapping[str, Any], own: Mapping[str, Any], where: str) -> Verdict | None:
    """Compares what two ranks had in the middle of a span.

    >>> tick = {"rank": 0, "steps": 8, "chain": 5, "rates": [0.1]}
    >>> compare_ticks(tick, {**tick, "rank": 1, "rates": [0.2]}, "batch 64 of train epoch 0").kind
    'LearningRateMismatch'
    """
    ranks = int(standing["rank"]), int(own["rank"])
    if (standing["steps"], standing["chain"]) != (own["steps"], own["chain"]):
        counts = f"rank {ranks[0]} had applied {standing['steps']} optimizer steps and rank {ranks[1]} {own['steps']}"
        suffix = "" if standing["steps"] != own["steps"] else ", but after other batches"
        return Verdict("StepMismatch", f"at {where}, {counts}{suffix}.", ranks, time=time.time())
    if str(standing["rates"]) != str(own["rates"]):  # as text, in which a NaN equals itself
        rates = f"rank {ranks[0]} trains with learning rate {standing['rates']} and rank {ranks[1]} with {own['rates']}"
        return Verdict("LearningRateMismatch", f"at {where}, {rates}.", ranks, time=time.time())
    return None

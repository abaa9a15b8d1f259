"""Ticks: what must be equal in the middle of a span. Ranks compare it every `tick_batches`, and nobody waits.

The first rank to reach the batch writes its record under the batch's own key, later ones compare with it. So a skipped
optimizer step, a step after another batch, or a learning rate of one rank alone is found within seconds, not at the
end of the epoch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from countoff.core.protocol.counters import SpanCounters
from countoff.core.verdict import Verdict

_COMPARED_RATES = 8


@dataclass(frozen=True)
class Tick:
    """What one rank had after one batch of a train span.

    Attributes:
        key: Where in the store the first rank writes it; equal on all ranks.
        where: The batch and its span, in words.
        record: The rank's steps and learning rates, as JSON types.
    """

    key: str
    where: str
    record: dict[str, Any]

    @classmethod
    def of(
        cls, rank: int, span: SpanCounters, batch: int, *, steps: int, step_hash: int, rates: Sequence[float]
    ) -> Tick:
        """The tick of a rank's counters after one batch.

        Args:
            rank: This rank.
            span: The train span, which may have gone on since then.
            batch: Number of the batch, from 1: batches of this rank started in the span.
            steps: Optimizer steps applied since the fit began.
            step_hash: Hash of the batches after which they were applied.
            rates: Learning rates in force, of which the first eight are compared.
        """
        own = [float(rate) for rate in rates[:_COMPARED_RATES]]  # numpy's floats would have another text
        record = {"rank": rank, "steps": steps, "step_hash": step_hash, "rates": own}
        return cls(f"tick/{span.opened}/{batch}", f"batch {batch} of {span.name}", record)

    def compare(self, standing: Mapping[str, Any]) -> Verdict | None:
        """Returns a verdict if the rank that wrote first had other steps or learning rates.

        Args:
            standing: That rank's record.

        >>> first = {"rank": 0, "steps": 8, "step_hash": 5, "rates": [0.1]}
        >>> own = Tick("tick/1/64", "batch 64 of train epoch 0", {**first, "rank": 1, "rates": [0.2]})
        >>> own.compare(first).kind
        'LearningRateMismatch'
        """
        own = self.record
        ranks = first, second = int(standing["rank"]), int(own["rank"])
        if (standing["steps"], standing["step_hash"]) != (own["steps"], own["step_hash"]):
            counts = f"rank {first} had applied {standing['steps']} optimizer steps and rank {second} {own['steps']}"
            suffix = "" if standing["steps"] != own["steps"] else ", but after other batches"
            return Verdict("StepMismatch", f"at {self.where}, {counts}{suffix}.", ranks, time=time.time())
        if str(standing["rates"]) != str(own["rates"]):  # as text, in which a NaN equals itself
            rates = f"rank {first} trains with learning rate {standing['rates']} and rank {second} with {own['rates']}"
            return Verdict("LearningRateMismatch", f"at {self.where}, {rates}.", ranks, time=time.time())
        return None


def tick_keys(span: SpanCounters, every: int) -> list[str]:
    """The keys of all ticks of a closed span, to be deleted once all ranks have compared them."""
    return [f"tick/{span.opened}/{batch}" for batch in range(every, span.started + 1, every)]

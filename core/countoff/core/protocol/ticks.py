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
from countoff.core.protocol.judgement import MICRO_BATCHES_DIFFER, STEPS_DIFFER
from countoff.core.protocol.micro_batches import MICRO_BATCHES, sentence_of
from countoff.core.protocol.rates import compared_rates, parse_rates, rate_mismatch, rates_differ
from countoff.core.protocol.records import NO_MICRO_COUNTS, MicroCounts
from countoff.core.verdict import Verdict

COMPARED_STEPS = 2
"""Optimizer steps of a fit after which the learning rates are compared at once.

Schedules of different lengths differ after the first call of `step()` at the latest, unless they begin alike.
"""


@dataclass(frozen=True)
class Tick:
    """What one rank had after one batch of a train span.

    Attributes:
        key: Where in the store the first rank writes it; equal on all ranks.
        where: The batch and its span, in words.
        record: The rank's steps and learning rates, as JSON types.
        micro: The micro-batches of its steps.
    """

    key: str
    where: str
    record: dict[str, Any]
    micro: MicroCounts = NO_MICRO_COUNTS

    @classmethod
    def of(
        cls,
        rank: int,
        span: SpanCounters,
        batch: int,
        *,
        steps: int,
        step_hash: int,
        rates: Sequence[float],
        micro: MicroCounts = NO_MICRO_COUNTS,
    ) -> Tick:
        """The tick of a rank's counters after one batch.

        Args:
            rank: This rank.
            span: The train span, which may have gone on since then.
            batch: Number of the batch, from 1: batches of this rank started in the span.
            steps: Optimizer steps applied since the fit began.
            step_hash: Hash of the batches after which they were applied.
            rates: Learning rates in force, of which the first eight are compared.
            micro: The micro-batches of the steps.
        """
        own = list(compared_rates(rates))
        record = {"rank": rank, "steps": steps, "step_hash": step_hash, "rates": own, **micro.to_json()}
        return cls(tick_key(span, batch), f"batch {batch} of {span.name}", record, micro)

    def compare(self, standing: Mapping[str, Any]) -> Verdict | None:
        """Returns what is wrong if the rank that wrote first had other steps, learning rates or micro-batches.

        Its subject is `MICRO_BATCHES` where nothing but these differ. That may be legitimate, and is a warning.

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
            sentence = f"at {self.where}, {counts}{suffix}."
            return Verdict("StepMismatch", sentence, ranks, why=STEPS_DIFFER, time=time.time(), standing="differ")
        theirs, mine = parse_rates(standing), parse_rates(own)
        if rates_differ(theirs, mine):
            return rate_mismatch(f"at {self.where}", self.key, ranks, theirs, mine)
        micro = MicroCounts.from_json(standing)
        if micro.differ(self.micro):
            where = f"at {self.where}"
            return Verdict(
                "StepMismatch",
                sentence_of(micro, self.micro, ranks, where=where, steps=own["steps"]),
                ranks,
                why=MICRO_BATCHES_DIFFER,
                time=time.time(),
                subject=MICRO_BATCHES,
                standing="differ",
            )
        return None


@dataclass(frozen=True)
class StepRates:
    """The learning rates with which one rank has taken one of the first optimizer steps of a fit.

    Attributes:
        rank: This rank.
        step: Number of the step, from 1.
        where: The batch and the span in which this rank took it, in words.
        rates: The learning rates in force, of which the first eight are compared.
    """

    rank: int
    step: int
    where: str
    rates: tuple[float, ...]

    @property
    def key(self) -> str:
        """Where in the store the first rank writes it; equal on all ranks."""
        return step_key(self.step)

    @property
    def record(self) -> dict[str, Any]:
        """The record, as JSON types."""
        return {"rank": self.rank, "rates": list(self.rates)}

    def compare(self, standing: Mapping[str, Any]) -> Verdict | None:
        """Returns what is wrong if the rank that wrote first took the step with other learning rates.

        Args:
            standing: That rank's record.

        >>> StepRates(1, 2, "batch 2 of train epoch 0", (0.2,)).compare({"rank": 0, "rates": [0.1]}).sentence
        'at optimizer step 2 (batch 2 of train epoch 0), rank 0 trains with learning rate 0.1 and rank 1 with 0.2.'
        """
        theirs, ranks = parse_rates(standing), (int(standing["rank"]), self.rank)
        if not rates_differ(theirs, self.rates):
            return None
        where = f"at optimizer step {self.step} ({self.where})"
        return rate_mismatch(where, self.key, ranks, theirs, self.rates, step=True)


def step_key(step: int) -> str:
    """The key of one of the first optimizer steps of a fit."""
    return f"step/{step}"


def tick_key(span: SpanCounters, batch: int) -> str:
    """The key of the tick of a span after one batch."""
    return f"tick/{span.opened}/{batch}"


def tick_keys(span: SpanCounters, every: int) -> list[str]:
    """The keys of all ticks of a closed span, to be deleted once all ranks have compared them."""
    return [tick_key(span, batch) for batch in range(every, span.started + 1, every)]

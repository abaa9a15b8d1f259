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
from countoff.core.protocol.records import NO_MICRO_COUNTS, MicroCounts
from countoff.core.verdict import Verdict, number_of

_COMPARED_RATES = 8
_RATES_DIFFER = (
    "Every rank computes its learning rate by itself, and the ranks' schedules differ. The rates are compared every "
    "`tick_batches` batches, so they may have differed before, even from the start."
)


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
        own = [float(rate) for rate in rates[:_COMPARED_RATES]]  # numpy's floats would have another text
        record = {"rank": rank, "steps": steps, "step_hash": step_hash, "rates": own, **micro.to_json()}
        return cls(f"tick/{span.opened}/{batch}", f"batch {batch} of {span.name}", record, micro)

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
        if str(standing["rates"]) != str(own["rates"]):  # as text, in which a NaN equals itself
            theirs, mine = _rates_in_words(standing["rates"], own["rates"])
            sentence = f"at {self.where}, rank {first} trains with {theirs} and rank {second} with {mine}."
            return Verdict(
                "LearningRateMismatch", sentence, ranks, why=_RATES_DIFFER, time=time.time(), standing="differ"
            )
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


def _rates_in_words(theirs: Sequence[float], mine: Sequence[float]) -> tuple[str, str]:
    """Two ranks' learning rates, with as few digits as tell them apart, and equal ones of one rank once."""
    for digits in range(3, 18):
        words = [
            ", ".join(dict.fromkeys(number_of(float(rate), digits) for rate in rates)) or "none"
            for rates in (theirs, mine)
        ]
        if words[0] != words[1]:
            return f"learning rate {words[0]}", words[1]
    groups = [", ".join(number_of(float(rate)) for rate in rates) for rates in (theirs, mine)]
    return f"the learning rates {groups[0]}", groups[1]  # the same rates, of other parameter groups


def tick_keys(span: SpanCounters, every: int) -> list[str]:
    """The keys of all ticks of a closed span, to be deleted once all ranks have compared them."""
    return [f"tick/{span.opened}/{batch}" for batch in range(every, span.started + 1, every)]

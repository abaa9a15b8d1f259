"""What one rank says at a mark, and at which batch its training thread looks up next: read off its state."""

from __future__ import annotations

import time
from typing import Any

from countoff.core.protocol.counters import SpanCounters, folded
from countoff.core.protocol.log import Mark, MarkKind, Reason
from countoff.core.protocol.state import NEVER, State
from countoff.core.runtime import shutdown

__all__ = ["announcement", "ask", "next_alarm", "own_mark"]


def own_mark(state: State, tally: SpanCounters, kind: MarkKind, span: str, reason: Reason) -> Mark:
    """The mark that this rank passes now.

    Args:
        state: This rank's state.
        tally: The innermost open span, or the last one.
        kind: What the mark is.
        span: Name of the span that it opens or closes.
        reason: How that was closed; it means nothing outside of the spans that are compared.
    """
    inside = bool(state.spans) and not tally.silent
    at, reason = (tally.started, reason) if inside else (0, reason if kind == "fit_end" else "")
    counts = folded(tally.counts) if kind == "eval_end" else ()
    return Mark(kind, span, at, reason, state.steps, state.chain, counts, state.rank, time.time())


def announcement(state: State, tally: SpanCounters) -> dict[str, Any]:
    """The log's entry that says with which batch this rank will close a span, before it does."""
    kind: MarkKind = "eval_end" if tally.evaluation else "train_end"
    mark = Mark(kind, tally.name, at=tally.started, reason="exhausted", rank=state.rank, time=time.time())
    return {"type": "announcement", "opened": tally.opened, "mark": mark.to_json()}


def ask(state: State, tally: SpanCounters) -> None:
    """Notes that this rank goes on to another batch of the train epoch, before it can be known whether it gets one.

    For a framework in which ranks meet in a collective before each batch, where one that has stopped alone is missed.

    Args:
        state: This rank's state.
        tally: The innermost open span; nothing is noted of an evaluation.

    Raises:
        DivergenceError: If ranks are known to be out of step.
    """
    if tally.evaluation:
        return
    tally.requested = tally.started + 1
    if not state.alarm:
        state.look()
        if state.proposed is not None or state.end is not None:
            shutdown.raise_verdict(state)


def next_alarm(state: State, tally: SpanCounters, *, watched: bool) -> int:
    """Batches started in the innermost span at which the training thread must look up; call it under the state's lock.

    Args:
        state: This rank's state.
        tally: The innermost open span.
        watched: Whether there is anybody to talk to.
    """
    if not watched or (state.end is not None and state.settings.on_divergence == "warn"):
        return NEVER
    if state.end is not None or state.proposed is not None or state.ledger.is_behind(state.spans):
        return 0
    every = state.settings.tick_batches
    return NEVER if tally.evaluation else (tally.started // every + 1) * every

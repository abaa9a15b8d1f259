"""Puts what was proved into a verdict: who, what, both counts, and which ranks are in the minority."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.records import Mark
from countoff.core.protocol.rule import Divergence
from countoff.core.verdict import Kind, Verdict, count_of

_DECISION = "decision"
_DECIDE_TOGETHER = (
    "look for a break, a limit or a condition that only some ranks meet, and let all ranks decide together (all-reduce "
    "the flag before anybody acts on it)."
)


def judge(divergence: Divergence, rank: int) -> Verdict:
    """Turns a divergence that this rank has proved into a verdict that names both ranks and both counts.

    Args:
        divergence: What the rule proved.
        rank: The rank that proved it.
    """
    standing, own = divergence.standing, divergence.own
    if standing.reason == "exited":
        return _lost_by_exit(standing, standing.rank, rank, standing.time)
    if own is not None and own.reason == "exited":
        return _lost_by_exit(own, rank, standing.rank, standing.time)
    if divergence.kind == "StepMismatch":
        return _step_mismatch(divergence, rank)
    return _uneven_batches(divergence, rank)


def _lost_by_exit(mark: Mark, exited: int, other: int, proved: float) -> Verdict:
    sentence = f"rank {exited} {describe_mark(mark)}, where rank {other} goes on."
    why = "The others wait for it in vain."
    return Verdict("LostRank", sentence, (exited,), why=why, gone=True, time=proved)


def _step_mismatch(divergence: Divergence, rank: int) -> Verdict:
    standing = divergence.standing
    theirs, mine = count_of(standing.steps, "optimizer step"), count_of(divergence.count, "optimizer step")
    where = f"after {count_of(standing.at, 'batch')} of {standing.span}"
    sentence = f"{where}, rank {standing.rank} had applied {theirs} and rank {rank} {mine}"
    sentence += "." if standing.steps != divergence.count else ", but after other batches."
    ranks = standing.rank, rank
    return Verdict("StepMismatch", sentence, ranks, time=standing.time, mark_index=divergence.mark_index)


def _uneven_batches(divergence: Divergence, rank: int) -> Verdict:
    standing, own = divergence.standing, divergence.own
    if own is not None:
        action = describe_mark(own)
    else:
        verb = "asks for" if divergence.requested else "has" if standing.reason == "exhausted" else "has begun"
        action = f"{verb} batch {divergence.count}"
    decision = not divergence.evaluation and _is_decision(divergence)
    return Verdict(
        "UnevenBatches",
        f"rank {standing.rank} {describe_mark(standing)}; rank {rank} {action}.",
        (standing.rank, rank),
        why=_cause(divergence),
        time=standing.time,
        subject=_DECISION if decision else "",
        mark_index=divergence.mark_index,
        announced=divergence.announced,
    )


def _cause(divergence: Divergence) -> str:
    if divergence.evaluation:
        return "The ranks' evaluation loaders differ in length; a metric that synchronises per batch hangs there."
    if _is_decision(divergence):
        return "The ranks took different decisions from the same counts (a break, a limit, or a condition of one rank)."
    return (
        "The ranks' loaders differ in length. Every gradient from here on would average batches of different "
        "places, until a collective without a partner hangs."
    )


def _is_decision(divergence: Divergence) -> bool:
    """Whether a rank took another path although its loader held more."""
    standing, own = divergence.standing, divergence.own
    stopped = own is not None and own.kind == standing.kind and own.reason == "stopped"
    return standing.reason != "exhausted" or stopped


def describe_mark(mark: Mark) -> str:
    """What the rank that passed this mark did, as the rest of a sentence that begins with its name."""
    batches = count_of(mark.at, "batch")
    if mark.reason == "exited":
        return "left the job (sys.exit)" + (f" in batch {mark.at} of {mark.span}" if mark.kind != "fit_end" else "")
    if mark.kind in ("train_end", "eval_end"):
        listed = f" ({' + '.join(str(count) for count in mark.counts)})" if len(mark.counts) > 1 else ""
        verb = "ran out of data" if mark.reason == "exhausted" else "stopped"
        return f"{verb} after {batches}{listed} of {mark.span}"
    if mark.kind == "eval_start":
        return f"began {mark.span}" + (f" after {count_of(mark.at, 'train batch')}" if mark.at else "")
    if mark.kind == "train_start":
        return f"began {mark.span}"
    return "ended the fit" if mark.kind == "fit_end" else "began the fit"


def lost_rank(rank: int, event: str, why: str = "", *, gone: bool = True) -> Verdict:
    """Returns the verdict that a rank is gone, stopped or silent, or that it has failed and reports that itself.

    Args:
        rank: The rank.
        event: What happened to it, as the rest of a sentence that begins with its name.
        why: The cause, where it is known.
        gone: False if the rank has failed and can still answer.
    """
    return Verdict("LostRank", f"rank {rank} {event}.", (rank,), why=why, gone=gone, time=time.time())


def remedy_for(verdict: Verdict, remedies: Mapping[Kind, str]) -> str:
    """Returns the adapter's remedy, preceded by "decide together" for a decision of one rank.

    Args:
        verdict: The verdict.
        remedies: The adapter's remedies by kind.
    """
    known = remedies.get(verdict.kind, "")
    if verdict.kind != "UnevenBatches" or verdict.subject != _DECISION:
        return known
    return f"{_DECIDE_TOGETHER} Or else: {known}" if known else _DECIDE_TOGETHER


def row(rank: int, span: SpanCounters | None, steps: int, state: str) -> dict[str, Any]:
    """One rank's line in the table of a verdict, as JSON types.

    Args:
        rank: The rank.
        span: Its innermost span; None if none has been open.
        steps: Its optimizer steps since the fit began.
        state: What it is doing, in words.
    """
    where, started, fetched = ("no span", 0, 0) if span is None else (span.name, span.started, span.fetched)
    return {"rank": rank, "where": where, "batches": started, "fetched": fetched, "steps": steps, "state": state}


def odd_ranks(rows: Iterable[Mapping[str, Any]], proven: Sequence[int]) -> tuple[int, ...]:
    """The ranks in the minority: of those that agree with the disputed mark and those that do not, the fewer.

    Args:
        rows: One row per rank that answered; its `side` is None for a rank that has not reached the mark.
        proven: The two ranks of the proof, one of each side. They are named where either side could still become the
            minority.

    >>> odd_ranks([{"rank": rank, "side": rank == 2} for rank in range(4)], (2, 0))
    (2,)
    """
    sides = {int(line["rank"]): line.get("side") for line in rows}
    groups = [sorted(rank for rank, side in sides.items() if side is which) for which in (True, False)]
    fewer, more = sorted(groups, key=len)
    undecided = len(sides) - len(fewer) - len(more)
    return tuple(fewer) if fewer and len(fewer) + undecided < len(more) else tuple(proven)

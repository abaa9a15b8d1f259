"""The table of a verdict: a row for each rank, and what all rows together tell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from countoff.core.protocol.counters import SpanCounters


def row(rank: int, span: SpanCounters | None, steps: int, state: str) -> dict[str, Any]:
    """One rank's line in the table of a verdict, as JSON types.

    Args:
        rank: The rank.
        span: Its innermost span; None if none has been open.
        steps: Its optimizer steps since the fit began.
        state: What it is doing, in words.
    """
    where, started, fetched = ("no span", 0, 0) if span is None else (span.name, span.started, span.delivered)
    return {"rank": rank, "where": where, "batches": started, "fetched": fetched, "steps": steps, "state": state}


def outlier_ranks(rows: Iterable[Mapping[str, Any]]) -> tuple[int, ...]:
    """The ranks in the minority: of those that agree with the disputed sync point and those that do not, the fewer.

    Args:
        rows: One row per rank that answered; its `side` is None for a rank that has not reached the sync point.

    Returns:
        The ranks; none where either side could still become the minority.

    >>> outlier_ranks([{"rank": rank, "side": rank == 2} for rank in range(4)])
    (2,)
    """
    sides = {int(line["rank"]): line.get("side") for line in rows}
    groups = [sorted(rank for rank, side in sides.items() if side is which) for which in (True, False)]
    fewer, more = sorted(groups, key=len)
    undecided = len(sides) - len(fewer) - len(more)
    return tuple(fewer) if fewer and len(fewer) + undecided < len(more) else ()


def ranks_behind(rows: Mapping[int, Mapping[str, Any]], first: int) -> tuple[int, ...]:
    """The ranks that are in the same span as a rank that has ended it, and have begun no batch beyond.

    Args:
        rows: One row per rank that answered, by rank.
        first: The rank that has ended the span.
    """
    if first not in rows:
        return ()
    where, batches = rows[first]["where"], rows[first]["batches"]
    return tuple(
        rank
        for rank, line in sorted(rows.items())
        if rank != first
        and line.get("side") is None
        and line["where"] == where
        and line["batches"] <= batches
        and str(line["state"]).startswith("in batch")
    )

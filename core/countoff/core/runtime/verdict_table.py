"""The table of a verdict: what every rank had counted when it received it, gathered by rank 0 and printed by all."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from countoff.core.protocol.judgement import lost_rank, odd_ranks, ranks_behind, remedy_for
from countoff.core.protocol.records import Records, parse_standing
from countoff.core.protocol.state import State
from countoff.core.runtime import shutdown
from countoff.core.runtime.gathering import Gathering
from countoff.core.verdict import TABLE_ROWS, Remedies, Verdict

if TYPE_CHECKING:
    from countoff.core.runtime.channel import Channel

_POLL_SECONDS = 0.005
_SETTLE_SECONDS = 0.3
_GATHER_SECONDS = 1.5
_ACKNOWLEDGE_SECONDS = 1.0
_MOST_SPREAD_SECONDS = 30.0
"""A longer time until all ranks knew is no measurement: the hosts' clocks differ."""


def print_with_table(channel: Channel, state: State) -> None:
    """Prints the verdict on this rank, with the table of what every rank had counted. Runs on the speaker thread.

    Every rank posts its row once its training thread has received the verdict, or is evidently blocked. Rank 0 gathers
    and publishes the table, and all ranks print it.
    """
    verdict = state.end
    if verdict is None or state.printed.is_set():
        return
    state.answered.wait(_SETTLE_SECONDS)
    channel.set(f"row/{state.rank}", state.final_row())
    gone = verdict.ranks if verdict.gone else ()
    if state.rank == 0:
        known = state.present or range(state.world_size)
        # A plan that is still in the store came after the roll call: from a late rank, but from one that counts.
        present = [rank for rank in range(state.world_size) if rank in known or channel.has(f"plan/{rank}")]
        _gather_and_publish(channel, state, verdict, [rank for rank in present if rank not in gone])
    elif 0 not in gone:
        deadline = time.monotonic() + _SETTLE_SECONDS + _GATHER_SECONDS + 0.2
        _poll_until(lambda: channel.has("table"), deadline)
    shutdown.print_verdict(state, with_table(channel, verdict, state.remedies, state.world_size))
    channel.set(f"told/{state.rank}", {"told": True})
    if state.rank == 0:  # it may host the store: it leaves after the others have printed
        told = [f"told/{rank}" for rank in range(1, state.world_size) if rank not in gone]
        _poll_until(lambda: not told or channel.has(*told), time.monotonic() + _ACKNOWLEDGE_SECONDS)
    state.printed.set()


def _gather_and_publish(channel: Channel, state: State, verdict: Verdict, owed: list[int]) -> None:
    def publish(rows: Records, missing: list[int]) -> None:
        del missing
        publish_table(channel, verdict, rows, complete=len(rows) == len(owed) == state.world_size)

    gathering = Gathering("row", owed, time.monotonic() + _GATHER_SECONDS, publish)
    while not gathering.poll(channel):
        time.sleep(_POLL_SECONDS)


def publish_table(channel: Channel, verdict: Verdict, rows: Records, *, complete: bool) -> None:
    """Writes the table for all ranks to print, and names the ranks out of step.

    Args:
        channel: The speaker's channel.
        verdict: The verdict.
        rows: The rows that have come, by rank.
        complete: Whether these are the rows of all ranks of the job.
    """
    disputed = verdict.mark_index >= 0
    odd = odd_ranks(rows.values()) if disputed else ()
    behind = ranks_behind(rows, verdict.ranks[0]) if disputed and verdict.ranks else ()
    named = odd or verdict.ranks
    places = {rank: place for place, rank in enumerate(named)}
    order = sorted(rows, key=lambda rank: (places.get(rank, len(places)), rank))
    for place, rank in enumerate(order[:TABLE_ROWS]):
        channel.set(f"table/{place}", rows[rank])
    spread = max((row["known"] for row in rows.values()), default=0.0) - verdict.time
    failed = next(((rank, rows[rank]["failure"]) for rank in sorted(rows) if rows[rank]["failure"]), None)
    header = {
        "rows": len(order),
        "odd": list(named[:8]),
        "standing": "out of step" if odd else verdict.standing,
        "behind": list(behind[:8]),
        "spread": spread if complete and 0 <= spread < _MOST_SPREAD_SECONDS else None,
        "failed": failed,
    }
    channel.set("table", header)


def with_table(channel: Channel, verdict: Verdict, remedies: Remedies, world_size: int) -> Verdict:
    """Returns the verdict with the table that rank 0 has published, if it has.

    A rank that failed by itself is the better cause: what other ranks proved is how its failure looked to them.

    Args:
        channel: The speaker's channel.
        verdict: The verdict in the log.
        remedies: The adapter's remedies.
        world_size: Ranks in the job.
    """
    if not channel.has("table"):
        return verdict
    header = channel.get("table")
    counted = int(header["rows"])
    keys = [f"table/{place}" for place in range(min(counted, TABLE_ROWS))]
    rows = tuple(channel.get_many(keys)) if keys and channel.has(*keys) else ()
    if header["failed"] is not None:
        rank, failure = header["failed"]
        failed = lost_rank(int(rank), str(failure), gone=False)
        remedy = remedy_for(failed, remedies)
        return replace(failed, rows=rows, counted=counted, world_size=world_size, remedy=remedy)
    return replace(
        verdict,
        ranks=tuple(int(rank) for rank in header["odd"]),
        standing=parse_standing(header.get("standing")),
        behind=tuple(int(rank) for rank in header.get("behind", ())),
        rows=rows,
        counted=counted,
        world_size=world_size,
        spread_seconds=None if header["spread"] is None else float(header["spread"]),
    )


def _poll_until(done: Callable[[], bool], deadline: float) -> None:
    while not done() and time.monotonic() <= deadline:
        time.sleep(_POLL_SECONDS)

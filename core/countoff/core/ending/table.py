"""The table of a verdict: what every rank had counted when it received it, gathered by rank 0."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from countoff.core.checks.learning_rates import outlier_rates, with_rates
from countoff.core.checks.lost import AHEAD, DIED, raised
from countoff.core.ending import shutdown
from countoff.core.messages import clip, count_of, listed
from countoff.core.protocol.failures import Failure, alike, told_as_one
from countoff.core.protocol.rates import parse_rates
from countoff.core.protocol.records import Records, parse_count, parse_standing, ranks_from_json, ranks_to_json
from countoff.core.protocol.rows import outlier_ranks, ranks_behind
from countoff.core.protocol.step_log import Apart, first_apart
from countoff.core.session.liveness import hosts, stacks
from countoff.core.session.state import FAIL_SECONDS, State
from countoff.core.session.store.gathering import Gathering
from countoff.core.verdict import TABLE_ROWS, Remedies, Verdict, at_hosts, remedy_for
from countoff.core.waiting import until

if TYPE_CHECKING:
    from countoff.core.session.liveness.heartbeats import Heartbeats
    from countoff.core.session.store.channel import Channel

_COUNTED = ("where", "batches", "fetched", "steps", "rate", "state")
"""What ranks of one line of the table have in common."""
_POLL_SECONDS = 0.005
_SETTLE_SECONDS = 0.3
_LOOK_SECONDS = 0.05
_MOST_GROUPS = 8
"""So many different failures are told of at most."""
_NAMED_ROWS = 8
"""Of more ranks that have raised, the table begins with the first of each group."""
_GATHER_SECONDS = 1.5
_TOLD_SECONDS = 1.0
_ACKNOWLEDGE_SECONDS = 1.0
_MOST_SPREAD_SECONDS = 30.0
"""A longer time until all ranks knew is no measurement: the hosts' clocks differ."""


def print_with_table(channel: Channel, state: State, heartbeats: Heartbeats) -> None:
    """Prints the verdict on this rank, with the table of what every rank had counted. Runs on the writer thread.

    Every rank posts its row once its training thread has received the verdict, or is evidently blocked. Rank 0 gathers
    and publishes the table. One rank per host prints it, then the others print one line.

    Args:
        channel: The guard's channel.
        state: This rank's state.
        heartbeats: The heartbeats of this process, which know the other ranks of this host.
    """
    verdict = state.end
    if verdict is None or state.printed.is_set():
        return
    latest = time.monotonic() + FAIL_SECONDS + _GATHER_SECONDS + 0.2
    _wait_for_answer(state, verdict)
    rows: Records = {}
    post_row(channel, state)
    if state.observer is not None:
        state.observer.posted(channel)
    gone = verdict.ranks if verdict.gone else ()
    first = state.ranks[0]
    if state.leads:
        if state.alerts.is_wanted:
            _is_teller(channel, state, verdict)  # before the table, for which others wait: trackers have their run here
        known = state.present or state.ranks
        # A plan that is still in the store came after the roll call: from a late rank, but from one that counts.
        present = [rank for rank in state.ranks if rank in known or channel.has_reports("plan", [rank])]
        owed = [rank for rank in present if rank not in gone or channel.has_reports("row", [rank])]
        rows = _gather_and_publish(channel, state, verdict, owed)
    elif first not in gone:
        until(lambda: channel.has("table"), latest, _POLL_SECONDS)
    if state.observer is not None:
        state.observer.gathered(channel, rows)
    whole = with_table(channel, verdict, state.remedies, state.world_size, state.part)
    whole = at_hosts(whole, hosts.names(channel.whole, whole.ranks))
    # A verdict may come before this rank has looked for its neighbours. Those that have posted a row are there now.
    heartbeats.find_neighbours(channel.whole)
    reporter = heartbeats.reporter(whole)
    prints_whole = reporter == state.rank or not _has_told(channel, reporter)
    shutdown.print_verdict(state, whole, None if prints_whole else reporter, lambda: _is_teller(channel, state, whole))
    channel.report("told", state.rank, {"told": True})
    if state.leads:  # it may host the store: it leaves after the others have printed
        told = [rank for rank in state.ranks if rank not in (first, *gone)]
        until(lambda: channel.has_reports("told", told), time.monotonic() + _ACKNOWLEDGE_SECONDS, _POLL_SECONDS)
    state.printed.set()


def _wait_for_answer(state: State, verdict: Verdict) -> None:
    """Waits a moment until the training thread has received the verdict, is blocked, or has failed by itself.

    Where another rank has raised an exception, this one may be about to raise the same: it has longer for that, unless
    it waits for other ranks.
    """
    deadline = time.monotonic() + FAIL_SECONDS
    if state.answered.wait(_SETTLE_SECONDS) or verdict.begun is None:
        return
    while time.monotonic() < deadline and stacks.thread(state.evidence.trainer).state != "collective":
        if state.answered.wait(_LOOK_SECONDS):
            return


def post_row(channel: Channel, state: State) -> None:
    """Posts this rank's row: for a verdict, or before one, where this rank may be gone when there is one.

    Args:
        channel: The guard's channel.
        state: This rank's state.
    """
    channel.report("row", state.rank, {**state.final_row(), "host": hosts.own_name()})


def _is_teller(channel: Channel, state: State, verdict: Verdict) -> bool:
    """Whether this rank tells the user's own sinks: the first one that says so in the store."""
    try:
        return channel.compare_and_set("teller", {"rank": state.rank})["rank"] == state.rank
    except (RuntimeError, OSError):  # the store has ended, with rank 0
        return shutdown.is_first_left(state, verdict)


def _has_told(channel: Channel, rank: int) -> bool:
    """Whether a rank has printed the verdict in time: it cannot if something holds its interpreter."""
    with contextlib.suppress(RuntimeError, OSError):  # the store has ended, with rank 0
        return until(lambda: channel.has_reports("told", [rank]), time.monotonic() + _TOLD_SECONDS, _POLL_SECONDS)
    return False


def _gather_and_publish(channel: Channel, state: State, verdict: Verdict, owed: list[int]) -> Records:
    gathered: Records = {}

    def publish(rows: Records, missing: list[int]) -> None:
        del missing
        gathered.update(rows)
        publish_table(channel, verdict, rows, complete=len(rows) == len(owed) == state.world_size)

    gathering = Gathering("row", owed, time.monotonic() + _GATHER_SECONDS, publish)
    until(lambda: gathering.poll(channel), math.inf, _POLL_SECONDS)  # its own deadline ends it
    return gathered


def publish_table(channel: Channel, verdict: Verdict, rows: Records, *, complete: bool) -> None:
    """Writes the table for all ranks to print, and names the ranks out of step.

    Args:
        channel: The writer's channel.
        verdict: The verdict.
        rows: The rows that have come, by rank.
        complete: Whether these are the rows of all ranks of the job.
    """
    if verdict.point:
        rows = {rank: {**line, "rates": parse_rates(line)} for rank, line in rows.items()}
    disputed = verdict.sync_index >= 0
    outliers = outlier_ranks(rows.values()) if disputed else outlier_rates(rows) if verdict.point else ()
    behind = ranks_behind(rows, verdict.ranks[0]) if disputed and verdict.ranks else ()
    named = outliers or verdict.ranks
    if verdict.point and not outliers:  # two ranks of a dispute in which no side is the larger one
        named = tuple(rank for rank in sorted(rows) if rows[rank].get("rates")) or named
    groups = _groups(verdict, rows)
    if groups:
        ranks = [rank for each, _ in groups for rank in each]
        named = [] if len(groups) == 1 and len(ranks) == len(rows) else ranks
        named = named if len(named) <= _NAMED_ROWS else [each[0] for each, _ in groups]
    apart = first_apart(rows, verdict.ranks[:2]) if len(verdict.ranks) > 1 else None
    rows = {rank: {name: cell for name, cell in line.items() if name != "stepped"} for rank, line in rows.items()}
    lines = _lines(with_rates(rows) if verdict.point else rows, named)
    for place, line in enumerate(lines):
        channel.set(f"table/{place}", line)
    for place, (ranks, event) in enumerate(groups):
        channel.set(f"failed/{place}", {**ranks_to_json(ranks), "event": clip(event, 420)})
    spread = max((row["known"] for row in rows.values()), default=0.0) - verdict.time
    header = {
        **ranks_to_json(named),
        "rows": len(rows),
        "lines": len(lines),
        "standing": "out of step" if outliers else verdict.standing,
        "behind": list(behind[:8]),
        "spread": spread if complete and 0 <= spread < _MOST_SPREAD_SECONDS else None,
        "groups": len(groups),
        "failed": (groups[0][0][0], clip(groups[0][1], 300)) if groups else None,  # for another version
        **({"apart": list(apart)} if apart else {}),
    }
    channel.set("table", header)


def _groups(verdict: Verdict, rows: Records) -> list[tuple[list[int], str]]:
    """The ranks that have failed by themselves, and how: together, where they have raised the same.

    The rank that the verdict names is the first that was known to fail. Where a process is gone, what the others raised
    came after that, as at the launcher's signal.
    """
    if verdict.subject in (DIED, AHEAD):
        return []
    failures = {rank: Failure.from_json(row["failure"]) for rank, row in rows.items() if row["failure"]}
    first = next((rank for rank in verdict.ranks if rank in failures), None)
    grouped = alike(failures, first)[:_MOST_GROUPS]
    return [(ranks, told_as_one({rank: failures[rank] for rank in ranks})) for ranks in grouped]


def with_table(
    channel: Channel, verdict: Verdict, remedies: Remedies, world_size: int, part: tuple[int, ...] = ()
) -> Verdict:
    """Returns the verdict with the table that rank 0 has published, if it has.

    Ranks that failed by themselves are the better cause: what others proved is how that looked to them.

    Args:
        channel: The writer's channel.
        verdict: The verdict in the log.
        remedies: The adapter's remedies.
        world_size: Ranks that are compared.
        part: Which ranks these are, if they are a part of the job.
    """
    verdict = replace(verdict, part=part)
    header = channel.find("table")
    if header is None:
        return verdict
    counted = parse_count(header["rows"])
    lines = parse_count(header.get("lines", min(counted, TABLE_ROWS)), TABLE_ROWS + 1)  # older ones do not write it
    keys = [f"table/{place}" for place in range(lines)]
    rows = tuple(channel.get_many(keys)) if keys and channel.has(*keys) else ()
    for line in rows:
        parse_count(line.get("ranks", 1))
    if header["failed"] is not None:
        failed = raised(_failed(channel, header), world_size, part)
        more = {"rows": rows, "counted": counted, "world_size": world_size, "part": part, "time": verdict.time}
        return replace(failed, remedy=remedy_for(failed, remedies), **more)
    apart = Apart.from_json(header.get("apart"))  # another version may not write it
    return replace(
        verdict,
        sentence=verdict.sentence if apart is None else f"{verdict.sentence.removesuffix('.')}: {apart.in_words}.",
        ranks=ranks_from_json(header),
        standing=parse_standing(header.get("standing")),
        behind=tuple(int(rank) for rank in header.get("behind", ())),
        rows=rows,
        counted=counted,
        world_size=world_size,
        spread_seconds=None if header["spread"] is None else float(header["spread"]),
    )


def _failed(channel: Channel, header: Mapping[str, Any]) -> list[tuple[Sequence[int], str]]:
    groups = parse_count(header.get("groups", 0), _MOST_GROUPS + 1)  # another version may not write it
    if not groups:
        rank, event = header["failed"]
        return [((int(rank),), str(event))]
    told = channel.get_many([f"failed/{place}" for place in range(groups)])
    return [(ranks_from_json(each), str(each["event"])) for each in told]


def _lines(rows: Records, named: Sequence[int]) -> list[dict[str, Any]]:
    """The lines of the table, at most `TABLE_ROWS`: the named ranks first, then the others.

    Where the others are too many for a line each, those that have counted the same share one.
    """
    first = [rows[rank] for rank in named if rank in rows][:TABLE_ROWS]
    others = [rows[rank] for rank in sorted(rows) if rank not in named]
    if len(first) + len(others) <= TABLE_ROWS:
        return [*first, *others]
    classes: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in others:
        classes.setdefault(tuple(line.get(cell) for cell in _COUNTED), []).append(line)
    shared = sorted(classes.values(), key=len, reverse=True)
    return [*first[: TABLE_ROWS // 2], *map(_shared_line, shared)][:TABLE_ROWS]


def _shared_line(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One line for ranks that have counted the same."""
    places = {str(line.get("host", "")) for line in rows}
    host = places.pop() if len(places) == 1 else count_of(len(places), "host")
    ranks = [line["rank"] for line in rows]
    return {**rows[0], "rank": listed(ranks), "host": host, "ranks": len(ranks)}

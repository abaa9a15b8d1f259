"""The directory of hosts: where each rank is, so that a message can say it wherever there is more than one host.

Every rank writes one record about itself. Nobody reads the whole directory: a reader asks for the ranks of a message.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from countoff.core.messages import clip
from countoff.core.protocol.records import parse_rank
from countoff.core.session.liveness.processes import Process

if TYPE_CHECKING:
    from countoff.core.session.store.channel import Channel

_NAME_BYTES = 66
"""A name has 64 characters at most on Linux, and two quotes as JSON."""
_MOST_NAMED = 16


def register(channel: Channel, rank: int, host: str) -> int:
    """Tells the others on which host this rank is, and the ranks of that host which process it is.

    Args:
        channel: The channel of the whole process.
        rank: This rank.
        host: The id of this host; see `host_id`.

    Returns:
        This rank's place on its host, from 1.
    """
    place = channel.add(f"host/{host}", 1)
    if place == 1:
        channel.add("hosts", 1)
    channel.report("rank", rank, own_record(channel, host))
    # Last: a rank that is known to be there has a record in the directory.
    channel.set(f"host/{host}/{place}", Process.own(rank).to_json())
    return place


def forget(channel: Channel, rank: int, host: str, place: int) -> None:
    """Removes what `register` has written, where no rank looks any more."""
    channel.take_back("rank", rank)
    channel.delete(f"host/{host}/{place}")
    if place == 1:
        channel.delete(f"host/{host}")
        channel.delete("hosts")


def own_record(channel: Channel, host: str) -> dict[str, Any]:
    """What a rank tells the others about its host; see `register`."""
    return {"host": host, "name": own_name(), "address": channel.own_address()}


def own_name() -> str:
    """The name of this host, as messages have it."""
    return clip(socket.gethostname(), _NAME_BYTES)


def several(channel: Channel) -> bool:
    """Whether ranks on more than one host have registered; `channel` is that of the whole process."""
    return channel.add("hosts", 0) > 1


def names(channel: Channel, ranks: Sequence[int]) -> dict[int, str]:
    """The names of the hosts of these ranks, by rank; none with one host, and none of a rank that has not begun.

    Two hosts of the message that have one name (containers) get their addresses behind it.

    Args:
        channel: The channel of the whole process.
        ranks: The ranks of a message. Only of the first 16 the hosts are named.
    """
    if not ranks or not several(channel):
        return {}
    return names_from(channel.reports("rank", list(dict.fromkeys(ranks[:_MOST_NAMED]))))


def names_from(records: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
    """The names of the hosts of ranks that have registered so, by rank; see `names`."""
    hosts = {str(record["host"]): str(record["name"]) for record in records.values()}
    times = Counter(hosts.values())
    return {
        rank: f"{record['name']} ({record['address']})" if times[str(record["name"])] > 1 else str(record["name"])
        for rank, record in records.items()
    }


def ranks_on(channel: Channel, rank: int, ranks: Sequence[int]) -> list[int]:
    """The ranks on a rank's host, ascending.

    Args:
        channel: The channel of the whole process.
        rank: A rank that has registered.
        ranks: The ranks that meet.
    """
    host = str(channel.get(f"rank/{rank}")["host"])
    places = min(channel.add(f"host/{host}", 0), len(ranks))
    keys = [f"host/{host}/{place}" for place in range(1, places + 1)]
    records = channel.get_many(keys if channel.has(*keys) else [key for key in keys if channel.has(key)])
    return sorted({rank, *(parse_rank(record["rank"], ranks) for record in records)})

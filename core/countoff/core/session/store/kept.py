"""Connections to the job's store that one fit leaves to the next one, for as long as the job has that store.

To connect, torch's client looks up a name for a line of its log. That takes seconds where no name server answers.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from countoff.core.at_exit import at_exit
from countoff.core.session.store.rendezvous import StoreAddress, default_store, tcp_store

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]  # no stubs

    from countoff.core.session.store.channel import Channel

__all__ = ["keep", "keeps", "take"]

_kept: WeakKeyDictionary[Store, list[Channel]] = WeakKeyDictionary()
_lock = threading.Lock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def keep(store: Store | None, channel: Channel) -> None:
    """Keeps a connection to the store of the job's default process group, if the job still has that group.

    Those to other groups' stores are not kept: a program may have many groups, and each would hold connections.

    Args:
        store: That in which the ranks have found one another; None where it is not known.
        channel: The connection. Nobody uses it any more, and no call on it has failed.
    """
    if store is None or store is not default_store():
        return
    own = tcp_store(store)
    free = None if own is None else channel.renewed(own.port, "")
    if free is not None:
        with _lock:
            _kept.setdefault(store, []).append(free)


def take(store: Store | None, place: StoreAddress) -> Channel | None:
    """Returns a kept connection for the place where the next fit meets; None if there is none that still stands.

    Args:
        store: That in which the ranks have found one another; None where it is not known.
        place: The place.
    """
    while (channel := _pop(store)) is not None:
        if (renewed := channel.renewed(place.port, place.prefix)) is not None:
            return renewed
    return None


def keeps(store: Store) -> bool:
    """Whether this process has connections that an earlier fit has left."""
    with _lock:
        return bool(_kept.get(store))


def _pop(store: Store | None) -> Channel | None:
    with _lock:
        channels = None if store is None else _kept.get(store)
        return channels.pop() if channels else None


def _forget() -> None:
    with _lock:
        _kept.clear()


at_exit(_forget)  # registered before any fit is, so called when all of them have ended

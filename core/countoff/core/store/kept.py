"""Connections to the job's store that one fit leaves to the next one, for as long as the job has that store.

To connect, torch's client looks up a name for a line of its log. That takes seconds where no name server answers.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from countoff.core.at_exit import at_exit
from countoff.core.store.rendezvous import Place, tcp_store

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]  # no stubs

    from countoff.core.store.channel import Channel

__all__ = ["keep", "keeps", "take"]

_kept: WeakKeyDictionary[Store, list[Channel]] = WeakKeyDictionary()
_lock = threading.Lock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def keep(store: Store | None, channel: Channel) -> None:
    """Keeps a connection that nobody uses any more, if it is one to the job's own store.

    Args:
        store: The job's store, in which the ranks find one another; None where it is not known.
        channel: The connection.
    """
    own = None if store is None else tcp_store(store)
    free = None if own is None else channel.renewed(own.port, "")
    if store is not None and free is not None:
        with _lock:
            _kept.setdefault(store, []).append(free)


def take(store: Store | None, place: Place) -> Channel | None:
    """Returns a kept connection for the place where the next fit meets; None if there is none that still stands.

    Args:
        store: As above.
        place: The place.
    """
    while store is not None:
        with _lock:
            channels = _kept.get(store)
            if not channels:
                break
            channel = channels.pop()
        if (renewed := channel.renewed(place.port, place.prefix)) is not None:
            return renewed
    return None


def keeps(store: Store) -> bool:
    """Whether this process has connections that an earlier fit has left."""
    with _lock:
        return bool(_kept.get(store))


def _forget() -> None:
    with _lock:
        _kept.clear()


at_exit(_forget)  # registered before any fit is, so called when all of them have ended

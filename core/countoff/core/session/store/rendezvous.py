"""The rendezvous: how the ranks agree on where a guard meets.

torchrun keeps one store for all attempts of an elastic run, so an attempt finds there what the one before it has left.
Nothing that ranks are given is equal on all hosts of one attempt and different in the next one: the store's port stays,
and `TORCHELASTIC_RESTART_COUNT` grows only on the host of the rank that has failed. So a rank asks before it accepts a
place. It adds 1 to a counter, which only grows, and rank 0 publishes its place with the count that it has read. A place
with a smaller count than this rank's own is older than its question, and may be that of an earlier attempt.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]  # no stubs

from countoff.core.at_exit import at_exit
from countoff.core.protocol.records import parse_count
from countoff.core.session.store.channel import decode, encode
from countoff.core.session.store.room import host_of, lack_of_room
from countoff.core.waiting import first_pause

_ASKED = "countoff/asked"
_LONGEST_PAUSE = 0.25
_numbers: WeakKeyDictionary[Store, Iterator[int]] = WeakKeyDictionary()
_SHARE = 0.1
"""A pause between two looks is so much of the time that has passed: a long wait gets hardly longer by it."""


def default_store() -> Store | None:
    """The store of the job's default process group, or None without torch.distributed."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


def next_number(store: Store | None) -> int:
    """Numbers the guards of this process that meet in a store, from 0.

    Ranks of a process group have begun the same guards in it, however many each process has begun before.

    Args:
        store: A process group's; None where there is none.
    """
    return 0 if store is None else next(_numbers.setdefault(store, itertools.count()))


def store_of(group: Any) -> Store:
    """The store of a process group: the job's, with keys of its own.

    Raises:
        RuntimeError: If the group was destroyed.
    """
    found = dist.distributed_c10d._world.pg_map.get(group)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    if found is None:
        raise RuntimeError("the process group was destroyed")
    return found[1]


@dataclass(frozen=True)
class StoreAddress:
    """Where the ranks of a job meet.

    Attributes:
        host: The store's host, by the address at which this rank reaches it.
        port: Its port.
        nonce: What no earlier run can have used. All keys begin with it.
        hosted: The store that this rank hosts for the others, to be kept alive; None where the job's own one is used.
        refused: Why the ranks do not meet; empty if they do.
    """

    host: str
    port: int
    nonce: str
    hosted: TCPStore | None = field(default=None, compare=False)
    refused: str = ""

    @property
    def prefix(self) -> str:
        """The beginning of all keys; those of one guard go on with its number."""
        return prefix_of(self.nonce)


def prefix_of(nonce: str) -> str:
    """The beginning of all keys of a place, by its nonce."""
    return f"countoff/{nonce}/"


def choose_place(store: Store, ranks: int = 1) -> StoreAddress:
    """Returns a new place for rank 0 to publish: the job's own store, or one that it hosts where that is no TCPStore.

    Args:
        store: The job's default store.
        ranks: How many ranks may connect to it; 0 where they have kept their connections.

    Returns:
        The place; one that is refused where the store's host may not open the connections of so many ranks.

    Raises:
        RuntimeError: If the job's store lacks a method by which the ranks meet.
    """
    nonce, own = os.urandom(6).hex(), tcp_store(store)
    if own is None:
        _require_methods(store)
    if why := lack_of_room(os.getpid() if own is None else host_of(own.port), ranks):
        return StoreAddress("", 0, nonce, refused=why)
    if own is not None:
        return StoreAddress(own.host, own.port, nonce)
    host = socket.gethostname()
    hosted = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return StoreAddress(host, hosted.port, nonce, hosted)


def publish(store: Any, number: int, place: StoreAddress) -> int:
    """Publishes rank 0's place for the ranks that have asked by now.

    Args:
        store: The job's default store.
        number: Number of the guard among those of the store; equal on all ranks.
        place: The place.

    Returns:
        How often ranks have asked, in this attempt and in earlier ones.
    """
    asked = store.add(_ASKED, 0)
    record = {"nonce": place.nonce, "asked": asked, "hosted": place.hosted is not None, "refused": place.refused}
    store.set(_key(number), encode({**record, "host": place.host, "port": place.port}))
    return asked


def keep_publishing(store: Any, number: int, place: StoreAddress, ranks: int, over: Callable[[float], bool]) -> None:
    """Publishes rank 0's place again whenever a rank has asked.

    Args:
        store: The job's default store.
        number: Number of the guard among those of the store; equal on all ranks.
        place: The place.
        ranks: How many ranks look into the store: those of the job, or of its parts up to this one.
        over: Waits so many seconds, and returns whether no other rank can ask any more.
    """
    began, answered = time.monotonic(), -1
    while not over(pause_since(began, ranks)):
        if store.add(_ASKED, 0) != answered:
            answered = publish(store, number, place)


def take_back(store: Any, number: int) -> None:
    """Removes rank 0's place once all ranks have read it. Fits would leave one key each."""
    store.delete_key(_key(number))


def take_refusal(store: Any, place: StoreAddress) -> None:
    """Says that this rank has read why rank 0 compares nothing."""
    store.add(_refusals(place), 1)


def keep_refusing(store: Any, number: int, place: StoreAddress, ranks: int, others: int) -> None:
    """Publishes why rank 0 compares nothing, until each other rank has read it or this process ends.

    Rank 0 trains on meanwhile, and its guard may be closed: a rank that gets no answer would wait for it.

    Args:
        store: The job's default store.
        number: Number of the guard among those of the store; equal on all ranks.
        place: The place, with the reason.
        ranks: How many ranks look into the store: those of the job, or of its parts up to this one.
        others: How many other ranks ask.
    """
    ends = threading.Event()
    unregister = at_exit(ends.set)
    try:
        keep_publishing(
            store,
            number,
            place,
            ranks,
            lambda seconds: ends.wait(seconds) or store.add(_refusals(place), 0) >= others,
        )
    finally:
        unregister()


class Question:
    """A rank's question where a guard meets the others.

    Args:
        store: The job's default store.
        number: Number of the guard among those of the store; equal on all ranks.

    Raises:
        RuntimeError: If the job's store lacks a method by which the ranks meet.
    """

    def __init__(self, store: Any, number: int) -> None:
        if tcp_store(store) is None:
            _require_methods(store)
        self._store = store
        self._key = _key(number)
        self._ticket = store.add(_ASKED, 1)

    def answer(self) -> StoreAddress | None:
        """The place, if rank 0 has answered by now."""
        if not self._store.check([self._key]):
            return None
        record = decode(self._store.get(self._key))
        # A rank 0 of an older version does not count those who ask.
        if parse_count(record.get("asked", self._ticket)) < self._ticket:
            return None
        refused = str(record.get("refused", ""))
        place = StoreAddress(
            str(record["host"]), parse_count(record["port"], 1 << 16), str(record["nonce"]), refused=refused
        )
        # Each rank has an address of its own for the job's store, which may not be that of rank 0.
        own = None if record.get("hosted") else tcp_store(self._store)
        return place if own is None else replace(place, host=own.host, port=own.port)


def find_place(
    store: Any, number: int, ranks: int, *, deadline: float, given_up: Callable[[], bool] = lambda: False
) -> StoreAddress:
    """Returns the place where a guard meets the others, once rank 0 has answered.

    Args:
        store: The job's default store.
        number: Number of the guard among those of the store; equal on all ranks.
        ranks: How many ranks look into the store: those of the job, or of its parts up to this one.
        deadline: When to give up, by `time.monotonic()`.
        given_up: Whether to give up at once.

    Raises:
        TimeoutError: If rank 0 has not answered before the deadline.
    """
    question, began = Question(store, number), time.monotonic()
    while (place := question.answer()) is None:
        if given_up() or time.monotonic() > deadline:
            raise TimeoutError("rank 0 has not counted off: is countoff on there?")
        time.sleep(pause_since(began, ranks))
    return place


def pause_since(began: float, ranks: int) -> float:
    """How long to wait before the next look, in seconds.

    Args:
        began: When the first one was, by `time.monotonic()`.
        ranks: How many ranks look into the store.
    """
    return min(max((time.monotonic() - began) * _SHARE, first_pause(ranks)), _LONGEST_PAUSE)


def _key(number: int) -> str:
    return f"countoff/{number}"


def _refusals(place: StoreAddress) -> str:
    return f"countoff/{place.nonce}/refused"


def _require_methods(store: Any) -> None:
    """Calls what the ranks need to meet, so that all of them know at once if the job's store lacks it.

    Raises:
        RuntimeError: If a store of a class in Python lacks it.
    """
    try:
        store.add(_ASKED, 0)
        store.check([_ASKED])
    except RuntimeError as error:
        lacks = re.search(r"pure virtual function .*Store::(\w+)", str(error))
        if lacks is None:
            raise
        raise RuntimeError(
            f"the job's store is of a Python class that has no {lacks[1]}(), or the program keeps no reference to it"
        ) from None


def tcp_store(store: Store) -> TCPStore | None:
    """The TCPStore below a store's prefixes; None where there is another kind of store."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, TCPStore) else None

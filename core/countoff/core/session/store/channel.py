"""The control channel: a client of our own on the job's c10d store, and nothing else of torch.

Requirements that shaped it, all measured:

- A client serialises its calls, so each thread that uses the store has a client of its own.
- A `wait` that times out prints warnings, so it lasts days before it begins again, and it is interrupted by shutting
  its socket down.
- A value over 8 MiB breaks a client for good, and an empty value can be overwritten, so values are JSON objects of at
  most `RECORD_BYTES`.
- A request that names many keys takes the store's host time by the square of their number: 2.2 s for the values of
  32,768 keys, and 0.1 s in requests of 256 or 1,024. So a request names few of them.
- The store has no authentication, so what comes back is checked, and never executed.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # no stubs

from countoff.core.protocol.records import RECORD_BYTES, Records, parse_count, record_text
from countoff.core.session.store.keepalive import keep_alive
from countoff.core.session.store.shared_sockets import copy_of

_LONGEST = timedelta(days=7)
_CALL = timedelta(seconds=30)
_CONNECT_SECONDS = 30.0
TRY_SECONDS = 6.0
"""One try to connect; longer than a lost look-up of a name (5 s)."""
_PIECE, _MOST_PIECES = 500, 1 << 11
"""Characters of a piece of a long record, which its own text may double, and how many pieces it has at most."""
_MOST_KEYS = 512
"""Keys in one request."""
_connecting: dict[int, threading.Lock] = {}
"""By port: held while this process connects to it."""
os.register_at_fork(after_in_child=_connecting.clear)  # a thread that is not there may hold one


class ChannelError(RuntimeError):
    """The store holds something that this version of countoff did not write."""


def encode(record: Mapping[str, Any]) -> str:
    """A record as the store's value.

    Raises:
        ChannelError: If it is too long.
    """
    text = record_text(record)
    if len(text) > RECORD_BYTES:
        raise ChannelError(f"a record must be at most {RECORD_BYTES} bytes, got {len(text)}: {text[:80]}…")
    return text


def decode(value: bytes | str) -> dict[str, Any]:
    """A record from the store's value, as untrusted input.

    Raises:
        ChannelError: If it is not a JSON object, or too long.
    """
    return _object(value, RECORD_BYTES)


def _object(value: bytes | str, most: int) -> dict[str, Any]:
    try:
        record = json.loads(value) if len(value) <= most else None
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise ChannelError(f"expected a JSON object of at most {most} bytes, got {value[:80]!r}")
    return record


class Channel:
    """One connection to the store; not to be shared between threads.

    Args:
        host: The store's host.
        port: Its port.
        prefix: The beginning of all keys of this channel.
        given_up: Whether to give up instead of trying again.

    Raises:
        RuntimeError: If there is no connection after 30 s, or the store answers with something else.
    """

    def __init__(self, host: str, port: int, prefix: str, given_up: Callable[[], bool] = lambda: False) -> None:
        self._store: Any
        self._store, self.sockets = _connect(host, port, given_up)
        self._port = port
        self._pid = os.getpid()
        self._prefix = prefix
        self._whole: Channel | None = None

    def at(self, prefix: str) -> Channel:
        """The part of this channel whose keys begin with a further prefix: the same connection, and the same thread."""
        part = copy.copy(self)
        part._prefix += prefix
        part._whole = self.whole
        return part

    def at_root(self, prefix: str) -> Channel:
        """The same connection, and the same thread, with other keys."""
        other = copy.copy(self)
        other._prefix, other._whole = prefix, None
        return other

    def renewed(self, port: int, prefix: str) -> Channel | None:
        """The same connection with other keys, for another thread once the one that has used it is gone.

        Args:
            port: The port that it must lead to.
            prefix: The beginning of all keys.

        Returns:
            The channel; None if the connection is over, was shut, or is that of a process that has forked this one.
        """
        if self._pid != os.getpid() or self._port != port:
            return None
        found = [_has_ended(end) for end in self._ends()]  # none where the connection is over at both ends
        return self.at_root(prefix) if found and not any(found) else None

    @property
    def whole(self) -> Channel:
        """The channel that this one is a part of, or itself."""
        return self._whole or self

    def set(self, key: str, record: Mapping[str, Any]) -> None:
        """Writes a record, over an existing one too; the store does not acknowledge it."""
        self._store.set(self._prefix + key, encode(record))

    def compare_and_set(self, key: str, record: Mapping[str, Any]) -> dict[str, Any]:
        """Writes a record if the key has none, and returns the key's record; racing writers get the same one."""
        return decode(self._store.compare_set(self._prefix + key, "", encode(record)))

    def has(self, *keys: str) -> bool:
        """Whether all of the keys exist."""
        return all(map(self._store.check, self._requests(keys)))

    def get(self, key: str) -> dict[str, Any]:
        """The record of a key that is known to exist (a missing one blocks)."""
        return decode(self._store.get(self._prefix + key))

    def get_many(self, keys: Sequence[str]) -> list[dict[str, Any]]:
        """The records of keys that are known to exist, in few round trips, each of few keys."""
        return [decode(value) for request in self._requests(keys) for value in self._store.multi_get(request)]

    def _requests(self, keys: Sequence[str]) -> Iterator[list[str]]:
        """Keys as the store has them, as many at a time as one request may name."""
        for first in range(0, len(keys), _MOST_KEYS):
            yield [self._prefix + key for key in keys[first : first + _MOST_KEYS]]

    def wait(self, key: str) -> dict[str, Any]:
        """Blocks until the key exists or the socket is shut down, and returns its record."""
        while True:
            began = time.monotonic()
            self._store.set_timeout(_LONGEST)  # a `get` of torch's client waits for its key first
            try:
                return self.get(key)
            except RuntimeError:
                if time.monotonic() - began < _LONGEST.total_seconds():
                    raise

    def add(self, key: str, amount: int) -> int:
        """Adds to an integer key and returns the sum; 0 reads it."""
        return self._store.add(self._prefix + key, amount)

    def delete(self, key: str) -> None:
        """Removes a key."""
        self._store.delete_key(self._prefix + key)

    # What follows from these operations.

    def find(self, key: str) -> dict[str, Any] | None:
        """The record of a key that never changes once it is written; None if it is not there yet."""
        return self.get(key) if self.has(key) else None

    def report(self, name: str, rank: int, record: Mapping[str, Any]) -> None:
        """Writes the record of one rank under a name that all ranks share, over an earlier one too."""
        self.set(f"{name}/{rank}", record)

    def report_long(self, name: str, rank: int, record: Mapping[str, Any]) -> None:
        """Writes the same where the record may be too long for one value: in pieces, which `reports` reads once."""
        text = record_text(record)
        if len(text) > RECORD_BYTES:
            pieces = [text[first : first + _PIECE] for first in range(0, len(text), _PIECE)]
            for number, piece in enumerate(pieces):
                self.set(f"{name}/{rank}/{number}", {"piece": piece})
            record = {"pieces": len(pieces)}
        self.report(name, rank, record)  # last: all pieces are there by then

    def take_back(self, name: str, rank: int) -> None:
        """Removes what this rank has reported under a name."""
        self.delete(f"{name}/{rank}")

    def has_reports(self, name: str, ranks: Sequence[int]) -> bool:
        """Whether all of these ranks have reported under a name."""
        return not ranks or self.has(*(f"{name}/{rank}" for rank in ranks))

    def reports(self, name: str, ranks: Sequence[int]) -> Records:
        """What these ranks have reported under a name, by rank; those that have not are left out."""
        there = ranks if self.has_reports(name, ranks) else [rank for rank in ranks if self.has(f"{name}/{rank}")]
        records = self.get_many([f"{name}/{rank}" for rank in there])
        return {rank: self._as_a_whole(f"{name}/{rank}", each) for rank, each in zip(there, records, strict=True)}

    def _as_a_whole(self, key: str, record: dict[str, Any]) -> dict[str, Any]:
        """A record that a rank has reported, put together and deleted where it is one of pieces."""
        if "pieces" not in record:
            return record
        keys = [f"{key}/{number}" for number in range(parse_count(record["pieces"], _MOST_PIECES + 1))]
        if not self.has(*keys):
            raise ChannelError(f"expected {len(keys)} pieces of {key}")
        text = "".join(str(each.get("piece")) for each in self.get_many(keys))
        for each in keys:
            self.delete(each)
        return _object(text, _MOST_PIECES * _PIECE)

    def forget(self, name: str, ranks: Sequence[int]) -> None:
        """Removes what these ranks have reported under a name; for the one that has gathered it."""
        for rank in ranks:
            self.delete(f"{name}/{rank}")

    def own_address(self) -> str:
        """The address of this host as the store's host sees it; empty if it cannot be told."""
        return next((plain_address(end.getsockname()[0]) for end in self._ends()), "")

    def store_address(self) -> str:
        """The address at which this host has reached the store; empty if it cannot be told."""
        return next((plain_address(end.getpeername()[0]) for end in self._ends()), "")

    def be_patient(self, seconds: float) -> None:
        """Lets a call wait so long for a store whose process stands still; by default 30 s."""
        self._store.set_timeout(timedelta(seconds=max(seconds, _CALL.total_seconds())))

    def keep_alive(self, seconds: float) -> None:
        """Lets a `wait` end with an error once the store's host has not answered for so long (`keepalive`)."""
        for end in self._ends():
            keep_alive(end, seconds)

    def is_over(self) -> bool:
        """Whether the store has closed this connection. It makes no call: torch prints a C++ warning if that fails."""
        return any(map(_has_ended, self._ends()))

    def shut(self) -> None:
        """Ends the connection, from any thread. A thread that is blocked in a call gets an error within milliseconds.

        torch prints a C++ warning about it, so it is the last resort.
        """
        if self._pid == os.getpid():  # a forked child shares the socket: its parent still needs it
            for end in self._ends():
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        self.sockets = set()

    def _ends(self) -> Iterator[socket.socket]:
        """Copies of this connection's sockets, each open until the next one."""
        for descriptor in self.sockets:
            with contextlib.suppress(OSError), to_port(descriptor, self._port) as end:
                yield end

    def release(self) -> None:
        """Closes the connection once its thread has ended; nothing else may be called after that."""
        self._store = None


def _connect(host: str, port: int, given_up: Callable[[], bool]) -> tuple[TCPStore, set[int]]:
    """Returns a client of the store and its socket, after as many short tries as it takes.

    torch's client tries again by itself for as long as its time-out lasts, up to twice as long where it is refused. In
    that time no other guard of this process can connect to the same port, so its tries are short.
    """
    deadline = time.monotonic() + _CONNECT_SECONDS
    lock = _connecting.setdefault(port, threading.Lock())
    while True:
        with lock:  # the connection to this port that appears in that time is this one
            if given_up():
                raise TimeoutError("the guard was closed before it was connected")
            began, before = time.monotonic(), _descriptors()
            try:
                store = TCPStore(
                    host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=TRY_SECONDS)
                )
            except RuntimeError:
                if time.monotonic() - began < TRY_SECONDS / 2 or time.monotonic() > deadline:
                    raise
            else:
                store.set_timeout(_CALL)
                return store, {new for new in _descriptors() - before if _is_connection(new, port)}
        time.sleep(0.05)  # others may connect first


def _has_ended(end: socket.socket) -> bool:
    try:
        return not end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _descriptors() -> set[int]:
    def is_open(descriptor: int) -> bool:
        with contextlib.suppress(OSError):
            return bool(os.fstat(descriptor))
        return False

    # The listing holds a descriptor of its own, closed by now, whose number the next socket may get.
    return {int(name) for name in os.listdir("/dev/fd") if name.isdigit() and is_open(int(name))}


def _is_connection(descriptor: int, port: int) -> bool:
    with contextlib.suppress(OSError), to_port(descriptor, port):
        return True
    return False


@contextlib.contextmanager
def to_port(descriptor: int, port: int) -> Iterator[socket.socket]:
    """A copy of one of this connection's descriptors, as a socket.

    Raises:
        OSError: If it is no socket to that port. Another thread may have opened it in the moment of connecting.
    """
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        raise OSError(f"descriptor {descriptor} is no socket")
    with copy_of(descriptor) as end:
        if end.family not in (socket.AF_INET, socket.AF_INET6) or end.getpeername()[1] != port:
            raise OSError(f"descriptor {descriptor} is no connection to the store")
        yield end


def probe(host: str, port: int) -> Literal["open", "closed", "silent"]:
    """Whether an address accepts connections or refuses them, or its host is silent; takes half a second at most."""
    try:
        socket.create_connection((host, port), timeout=0.5).close()
    except (ConnectionRefusedError, ConnectionResetError):
        return "closed"
    except OSError:
        return "silent"
    return "open"


def plain_address(address: str) -> str:
    """An address as its user writes it.

    >>> plain_address("::ffff:192.0.2.1"), plain_address("2001:db8::1")
    ('192.0.2.1', '2001:db8::1')
    """
    return address.removeprefix("::ffff:")

"""Lifelines: one idle connection from each other host to rank 0, by which their kernels tell that a host is gone.

A heartbeat comes from a thread of Python, so its silence cannot tell a dead host from a busy interpreter. A kernel
answers keepalive probes also for a process that holds the interpreter or is stopped. It closes the connection if that
process ends. If no answer comes, the host is gone, or the way to it.

The first rank of each other host has the lifeline of its host. It greets rank 0 with its rank and a nonce from the
store, rank 0 answers with another nonce, and nothing else is sent but one byte as a goodbye: an end without it is that
of a process that was killed, or crashed. Where rank 0 cannot be reached, as behind a firewall, heartbeats decide.
Where a part of the job's ranks meets, "rank 0" below is the first of them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import ipaddress
import logging
import os
import resource
import selectors
import socket
import struct
import sys
import termios
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from countoff.core.checks.lost import DIED, loss_of, lost_host
from countoff.core.protocol.records import Absence, parse_count
from countoff.core.session.liveness import hosts
from countoff.core.session.liveness.heartbeats import Heartbeats
from countoff.core.session.store.channel import plain_address
from countoff.core.session.store.keepalive import keep_alive
from countoff.core.verdict import Verdict

if TYPE_CHECKING:
    from countoff.core.session.store.channel import Channel

_log = logging.getLogger("countoff")
GREETING = struct.Struct(">16sI")  # rank 0's nonce, and the rank that has connected
_ANSWER_BYTES = 16
_GOODBYE = b"."
GREETING_SECONDS = 5.0
"""After so long, rank 0 closes a connection that has not greeted it."""
ARRIVALS = 64
"""Connections that rank 0 has accepted and that have not greeted it; more than that wait in the kernel."""
CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 60.0
"""Rank 0 may hold the interpreter for a while before it answers."""
_TRIES = 3
_RETRY_SECONDS = 10.0
_LEARNED = 64
"""Hosts whose names and ranks rank 0 learns in one second; each takes it about 15 calls to the store."""
_RANKS = 100
"""Ranks of rank 0's host that are in its record; more do not fit."""
_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)
_all: weakref.WeakSet[Lifelines] = weakref.WeakSet()


@dataclass(frozen=True)
class Hub:
    """Rank 0, as it introduces itself to the other hosts.

    Attributes:
        host: The id of its host.
        port: Where it listens; 0 if it cannot.
        nonce: What a connection must begin with.
        answer: What it answers.
        addresses: Its addresses, as far as it knows them.
        has_store: Whether its host is that of the job's store.
        ranks: The ranks on its host; none as long as ranks are missing.
    """

    host: str
    port: int
    nonce: bytes
    answer: bytes
    addresses: tuple[str, ...]
    has_store: bool
    ranks: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The record in the store; `from_json` is its inverse."""
        return {
            "host": self.host,
            "port": self.port,
            "nonce": self.nonce.hex(),
            "answer": self.answer.hex(),
            "addresses": list(self.addresses),
            "has_store": self.has_store,
            "ranks": list(self.ranks[:_RANKS]),
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Hub:
        """Reads what rank 0 has written about itself.

        Raises:
            KeyError, TypeError, ValueError: If it is not that.
        """
        return cls(
            str(record["host"]),
            parse_count(record["port"], 1 << 16),
            bytes.fromhex(record["nonce"]),
            bytes.fromhex(record["answer"]),
            tuple(_numeric(address) for address in record["addresses"]),
            bool(record["has_store"]),
            tuple(parse_count(rank) for rank in record["ranks"]),
        )


@dataclass(frozen=True)
class Loss:
    """A lifeline that has broken.

    Attributes:
        ranks: The ranks that this concerns: the one at the other end, or all of its host.
        host: The name of the host that does not answer; empty if the process at the other end is gone.
        seconds: For how long that host has not answered.
        has_store: Whether that host is known to be the one of the job's store.
        at: When that was seen, by `time.monotonic()`.
    """

    ranks: tuple[int, ...]
    host: str = ""
    seconds: float = 0.0
    has_store: bool = False
    at: float = field(default_factory=time.monotonic)

    def verdict(self, before: str = "") -> Verdict:
        """The verdict about it.

        Args:
            before: What may have led to it, in sentences.
        """
        return lost_host(self.host, self.ranks, self.seconds) if self.host else loss_of(self.absence(before))

    def absence(self, before: str = "") -> Absence:
        """What it says about the rank whose process is gone.

        Args:
            before: As above.
        """
        why = f"Its connection to another host was closed: it was killed, or it crashed. {before}".strip()
        return Absence(self.ranks[0], "is gone", why, DIED, certain=True)


class Lifelines:
    """The lifelines of one process: those of all other hosts on rank 0, at most that of its own host on another rank.

    `open`, `tend`, `vouches` and `withdraw` are for the writer thread, `poll` is for the watchdog. None of them waits
    for another process, except for the store.

    Args:
        rank: This rank.
        ranks: The ranks that meet, ascending; the others have their lifelines to the first one.
        seconds: The setting `lost_seconds`.
        heartbeats: Those of this rank, which know its neighbours.

    Attributes:
        hub: The first rank, once it is known here.
        losses: The lifelines that have broken, the first one first.
        ends: This process's ends of all connections.
        arrivals: The connections that rank 0 has accepted and that have not greeted it.
        sockets: The lifelines, by the rank at the other end.
        known_hosts: The name and the ranks of the host at the other end, by that rank, on rank 0.
        addresses: The addresses of the hosts at the other ends.
        call: The connection that this rank is making to rank 0.
        tries: How often it has tried.
        closed: Whether `close` was called.
    """

    def __init__(self, rank: int, ranks: Sequence[int], seconds: float, heartbeats: Heartbeats) -> None:
        self.hub: Hub | None = None
        self.losses: list[Loss] = []
        self._rank = rank
        self._ranks = ranks
        self._first = ranks[0]
        self._seconds = seconds
        self._heartbeats = heartbeats
        self._lock = threading.Lock()  # held for no longer than it takes to look at sockets that are ready
        self._selector: selectors.BaseSelector | None = None
        self.ends: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self.arrivals: dict[socket.socket, _Arrival] = {}
        self._answered_at: dict[socket.socket, tuple[int, float]] = {}  # the rank there; until the answer has arrived
        self.sockets: dict[int, socket.socket] = {}
        self.known_hosts: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.addresses: dict[socket.socket, str] = {}
        self.call: _Call | None = None
        self.tries = 0
        self._next_try = 0.0
        self._told = False
        self.closed = False
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        allowed = len(ranks) if limit == resource.RLIM_INFINITY else limit // 2  # the job needs descriptors too
        self._most = min(len(ranks) - 1, allowed) + ARRIVALS
        _all.add(self)

    # The writer.

    def open(self, channel: Channel) -> None:
        """Lets rank 0 listen, and tell the others where; it does nothing on other ranks, if closed, or the second time.

        Args:
            channel: The channel of the whole process.
        """
        if self._rank != self._first or self.hub is not None:
            return
        own, store, port = channel.own_address(), channel.store_address(), 0
        with self._lock:
            if self.closed:
                return
            try:
                self._listener = listener = _listen()
                self._watch(listener, selectors.EVENT_READ, self._accept)
                port = listener.getsockname()[1]
            except OSError as error:
                self._drop(self._listener)
                self._listener = None
                _log.debug("rank 0 cannot listen for lifelines, so heartbeats decide which hosts are there: %s", error)
        self.hub = Hub(
            self._heartbeats.host,
            port,
            os.urandom(16),
            os.urandom(_ANSWER_BYTES),
            tuple(dict.fromkeys(address for address in (own, _outward()) if port and _is_reachable(address))),
            # A host that has its own name at 127.0.1.1 (Debian, Ubuntu) reaches its store there from 127.0.0.1.
            bool(store) and (own == store or not _is_reachable(store)),
        )
        channel.set("lifeline", self.hub.to_json())

    def tend(self, channel: Channel) -> None:
        """Does what is due; to be called about once a second.

        Args:
            channel: The channel of the whole process.
        """
        if self._rank == self._first:
            self._tend_all(channel)
            return
        hub, heartbeats = self.hub, self._heartbeats
        missing = hub is None or (hub.host != heartbeats.host and not hub.ranks and heartbeats.all_registered)
        if missing and channel.has("lifeline"):
            self.hub = hub = Hub.from_json(channel.get("lifeline"))
        if hub is not None and hub.host != heartbeats.host:
            self._tend_own(channel, hub)

    def vouches(self, channel: Channel, rank: int) -> bool:
        """Whether a lifeline stands between this host and a rank's: both hosts are there, whatever the rank does.

        Args:
            channel: The channel of the whole process.
            rank: The first rank, or on that one any other.
        """
        if self._rank == self._first:
            known = list(self.known_hosts.items())
            if any(rank in ranks and other in self.sockets for other, (_, ranks) in known):
                return True
            # Not known as long as ranks are missing. No other rank gets here twice in a fit: it is lost then.
            return any(other in self.sockets for other in hosts.ranks_on(channel, rank, self._ranks))
        if self._is_hosts_first():
            return self._first in self.sockets
        key = f"lifeline/{self._hosts_first()}"  # nobody removes it: a `get` of a missing one would block
        return channel.has(key) and channel.get(key)["stands"] is True

    def withdraw(self, channel: Channel) -> None:
        """Takes back that the lifeline stands, before it is closed; this waits for no answer.

        Args:
            channel: The channel of the whole process.
        """
        if self._told:
            self.tell(channel, stands=False)

    def _tend_all(self, channel: Channel) -> None:
        heartbeats, hub = self._heartbeats, self.hub
        if hub is None or not heartbeats.all_registered:
            return
        if len(heartbeats.neighbours) == len(self._ranks):
            with self._lock:
                self._drop(self._listener)  # all ranks are on this host
                self._listener = None
        elif not hub.ranks:
            ranks = tuple(hosts.ranks_on(channel, self._first, self._ranks))
            self.hub = hub = replace(hub, ranks=ranks)
            channel.set("lifeline", hub.to_json())
        for rank in [rank for rank in list(self.sockets) if rank not in self.known_hosts][:_LEARNED]:
            name = hosts.names(channel, [self._first, rank]).get(rank, "")
            self.known_hosts[rank] = name, tuple(hosts.ranks_on(channel, rank, self._ranks))

    def _tend_own(self, channel: Channel, hub: Hub) -> None:
        stands, now = self._first in self.sockets, time.monotonic()
        if stands != self._told:
            self.tell(channel, stands=stands)
        due = not stands and self.call is None and not self.losses and self.tries < _TRIES and now >= self._next_try
        if due and self._is_hosts_first():
            self.tries += 1
            self._next_try = now + _RETRY_SECONDS
            store = [channel.store_address()] if hub.has_store and hub.port else []  # it has been reached there
            addresses = [address for address in dict.fromkeys((*store, *hub.addresses)) if address]
            with self._lock:
                self.call = _Call(hub, addresses)
                self._dial(self.call)

    def tell(self, channel: Channel, *, stands: bool) -> None:
        """Tells the ranks of this host whether its lifeline stands.

        Args:
            channel: The channel of the whole process.
            stands: Whether it does.
        """
        self._told = stands
        channel.set(f"lifeline/{self._rank}", {"stands": stands})

    def _is_hosts_first(self) -> bool:
        return self._hosts_first() == self._rank

    def _hosts_first(self) -> int | None:
        """The first rank of this host that is left, whose lifeline is that of the host."""
        for rank, process in list(self._heartbeats.neighbours.items()):
            if rank == self._rank or process.state() != "gone":
                return rank
        return None

    # The watchdog.

    def poll(self) -> list[Loss]:
        """Receives connections, and looks at those that stand; it waits for nothing.

        Returns:
            The lifelines that have broken since the last time.
        """
        with self._lock:
            before = len(self.losses)
            if self._selector is not None:
                for key, _ in self._selector.select(0):
                    if key.fileobj in self.ends:  # what came before may have closed it
                        key.data()
            now = time.monotonic()
            for end in [end for end, arrival in self.arrivals.items() if now > arrival.deadline]:
                self._drop(end)
            self._look_at_answers(now)
            if self.call is not None and self.call.end is not None and now > self.call.deadline:
                self.redial(self.call, "it does not answer")
            return self.losses[before:]

    def close(self) -> None:
        """Closes all connections with a goodbye, from any thread, any number of times."""
        with self._lock:
            self.closed = True
            for end in (*self.sockets.values(), self.call and self.call.end):
                _say_goodbye(end)
            self.forget()

    def _accept(self) -> None:
        assert self._listener is not None
        while len(self.arrivals) < ARRIVALS:
            try:
                end, address = self._listener.accept()
            except OSError:  # nobody is there, or this process may open nothing more
                return
            if len(self.ends) >= self._most:
                end.close()
                continue
            arrival = _Arrival(end, time.monotonic() + GREETING_SECONDS)
            self.arrivals[end], self.addresses[end] = arrival, plain_address(address[0])
            with self._dropping(end):
                end.setblocking(False)
                keep_alive(end, self._seconds)
                self._watch(end, selectors.EVENT_READ, lambda arrival=arrival: self._greeted(arrival))
                self._greeted(arrival)

    def _greeted(self, arrival: _Arrival) -> None:
        end, hub = arrival.end, self.hub
        with self._dropping(end):
            if hub is None or not arrival.receive(GREETING.size):
                return
            nonce, rank = GREETING.unpack(arrival.received)
            known = hmac.compare_digest(nonce, hub.nonce) and rank in self._ranks[1:]
            # It waited in the kernel while this process held the interpreter: the other end may have lost patience.
            if not known or not _is_quiet(end):
                raise ConnectionError("a connection that is none of ours, or that is over")
            end.send(hub.answer)
            del self.arrivals[end]
            self._stand(rank, end)
            self._answered_at[end] = rank, time.monotonic()

    def _look_at_answers(self, now: float) -> None:
        """Finds a host that is gone before rank 0's answer has arrived: until it has, TCP sends no keepalive probe.

        TCP sends the answer again after twice the time before. So if an outage ends within the time that a host may
        take, the answer has arrived within twice that time.
        """
        for end, (rank, at) in list(self._answered_at.items()):
            if has_arrived(end):
                del self._answered_at[end]
            elif now - at > 2 * self._seconds + 1:
                self._lose_host(rank, end)
                del self.sockets[rank]
                self._drop(end)

    def _stand(self, rank: int, end: socket.socket) -> None:
        older = self.sockets.pop(rank, None)
        _say_goodbye(older)
        self._drop(older)
        self.known_hosts.pop(rank, None)
        self.sockets[rank] = end
        self._watch(end, selectors.EVENT_READ, lambda: self.look_at(rank, end))

    def look_at(self, rank: int, end: socket.socket) -> None:
        """Looks at why a lifeline that stands has something to say: it has broken, or it is a goodbye."""
        try:
            found = len(end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return
        except (ConnectionResetError, BrokenPipeError):
            found = 0
        except OSError as error:
            found = error.errno or -1
            if error.errno in _SILENT:
                self._lose_host(rank, end)
        if found == 0:
            self.losses.append(Loss((rank,)))
        del self.sockets[rank]
        self._drop(end)

    def _lose_host(self, rank: int, end: socket.socket) -> None:
        has_store = False
        if self._rank != self._first and self.hub is not None:
            name, ranks, has_store = self._heartbeats.hosts.get(self._first, ""), self.hub.ranks, self.hub.has_store
        else:
            name, ranks = self.known_hosts.get(rank, ("", ()))
        name = name or self.addresses.get(end, "?")
        self.losses.append(Loss(ranks or (rank,), name, self._seconds, has_store))

    # The call of another host's first rank.

    def _dial(self, call: _Call) -> None:
        """Begins to connect to the next address; without one, heartbeats decide."""
        while call.addresses and not self.closed:
            address = call.addresses.pop(0)
            try:
                end = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
            except OSError as error:
                call.errors.append(f"{address}: {error}")
                continue
            self.ends.add(end)
            self.addresses[end] = address
            call.end, call.address, call.deadline = end, address, time.monotonic() + CONNECT_SECONDS
            try:
                end.setblocking(False)
                keep_alive(end, self._seconds)
                code = end.connect_ex((address, call.hub.port))
                if code not in (0, errno.EINPROGRESS):
                    raise OSError(code, os.strerror(code))
                self._watch(end, selectors.EVENT_WRITE, lambda: self._connected(call))
            except OSError as error:
                call.errors.append(f"{address}: {error}")
                self._drop(end)
                continue
            return
        self.call = None
        if self.tries == 1 or self.tries == _TRIES:
            tried = "; ".join(call.errors) or "it has no address that others can reach"
            _log.debug("no lifeline to rank 0, so heartbeats decide whether its host is there: %s", tried)

    def redial(self, call: _Call, why: str) -> None:
        """Gives an address up, and connects to the next one.

        Args:
            call: The connection under way.
            why: What was wrong with the address.
        """
        call.errors.append(f"{call.address}: {why}")
        _say_goodbye(call.end)  # rank 0 may have let it stand in this moment
        self._drop(call.end)
        call.end, call.received = None, b""
        self._dial(call)

    def _connected(self, call: _Call) -> None:
        end = call.end
        assert end is not None
        try:
            code = end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            end.send(GREETING.pack(call.hub.nonce, self._rank))
        except OSError as error:
            self.redial(call, str(error))
            return
        call.deadline = time.monotonic() + _ANSWER_SECONDS
        self._watch(end, selectors.EVENT_READ, lambda: self._answered(call))

    def _answered(self, call: _Call) -> None:
        end = call.end
        assert end is not None
        try:
            received = end.recv(_ANSWER_BYTES - len(call.received))
        except BlockingIOError:
            return
        except OSError as error:
            self.redial(call, str(error))
            return
        call.received += received
        if not received or not call.hub.answer.startswith(call.received):
            self.redial(call, "it is not rank 0")
        elif len(call.received) == _ANSWER_BYTES:
            self.call = None
            self._stand(self._first, end)

    # Sockets. All of this is called under the lock.

    def _watch(self, end: socket.socket, events: int, act: Callable[[], None]) -> None:
        self.ends.add(end)
        if self._selector is None:
            self._selector = selectors.DefaultSelector()
        if end in self._selector.get_map():
            self._selector.modify(end, events, act)
        else:
            self._selector.register(end, events, act)

    def _drop(self, end: socket.socket | None) -> None:
        if end is None:
            return
        self.ends.discard(end)
        self.arrivals.pop(end, None)
        self._answered_at.pop(end, None)
        self.addresses.pop(end, None)
        if self._selector is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(end)
        end.close()

    @contextlib.contextmanager
    def _dropping(self, end: socket.socket) -> Any:
        """Closes a connection that breaks, or that is not ours."""
        try:
            yield
        except BlockingIOError:
            pass
        except (OSError, ValueError):
            self._drop(end)

    def forget(self) -> None:
        """Closes this process's descriptors without a word, and changes nothing that a process could share with it."""
        for end in self.ends:
            with contextlib.suppress(OSError):  # the user's code may have closed all descriptors
                end.close()
        if self._selector is not None:
            with contextlib.suppress(OSError):
                self._selector.close()  # not `unregister`: a forked process and its parent share the epoll instance
        self.ends.clear()
        self.arrivals.clear()
        self._answered_at.clear()
        self.addresses.clear()
        self.sockets.clear()
        self._listener = self.call = self._selector = None


@dataclass
class _Arrival:
    """A connection that rank 0 has accepted and that has not greeted it yet.

    Attributes:
        end: This end of it.
        deadline: Until when it may greet, by `time.monotonic()`.
        received: What has come of its greeting.
    """

    end: socket.socket
    deadline: float
    received: bytes = b""

    def receive(self, size: int) -> bool:
        """Receives what there is; whether it is all.

        Raises:
            OSError: If the connection is over, or nothing is there.
        """
        received = self.end.recv(size - len(self.received))
        if not received:
            raise ConnectionError("the other end has closed the connection")
        self.received += received
        return len(self.received) == size


@dataclass
class _Call:
    """The connection that this rank makes to rank 0, until rank 0 has answered.

    Attributes:
        hub: Rank 0.
        addresses: Its addresses that are yet to be tried.
        end: This end of the connection under way.
        address: The address under way.
        deadline: Until when its next step may take, by `time.monotonic()`.
        received: What has come of the answer.
        errors: What was wrong with the addresses tried so far.
    """

    hub: Hub
    addresses: list[str]
    end: socket.socket | None = None
    address: str = ""
    deadline: float = 0.0
    received: bytes = b""
    errors: list[str] = field(default_factory=list[str])


def _listen() -> socket.socket:
    """A socket that listens on a free port of all addresses, of both families where there are both."""
    try:
        listener = socket.create_server(("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    except (OSError, ValueError):
        listener = socket.create_server(("", 0), backlog=1024)
    listener.setblocking(False)
    return listener


def _is_quiet(end: socket.socket) -> bool:
    """Whether the other end has neither sent anything more nor closed the connection.

    Raises:
        OSError: If the connection has broken.
    """
    try:
        end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    return False


def has_arrived(end: socket.socket) -> bool:
    """Whether the other host has acknowledged all that was sent on a connection."""
    left = fcntl.ioctl(end, termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(left, sys.byteorder) == 0


def _say_goodbye(end: socket.socket | None) -> None:
    """Tells the other end of a connection, if it can, that its end is no loss."""
    if end is not None:
        with contextlib.suppress(OSError):
            end.send(_GOODBYE, socket.MSG_DONTWAIT)


def _outward() -> str:
    """The address with which this host reaches others; empty if there is no such way. Nothing is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("198.51.100.1", 9))  # of no host: reserved for documentation
        return probe.getsockname()[0]
    return ""


def _is_reachable(address: str) -> bool:
    """Whether other hosts may reach an address of this one: it is one, and is not the loopback's."""
    return bool(address) and not ipaddress.ip_address(address).is_loopback


def _numeric(address: object) -> str:
    """Reads an address out of a record. A name would have to be looked up, which may take seconds.

    Raises:
        ValueError: If it is none.
    """
    return str(ipaddress.ip_address(str(address)))


def _forget_in_child() -> None:
    """A forked process (a loader's worker) must not keep a connection open whose process is gone."""
    for lifelines in list(_all):
        lifelines.forget()


os.register_at_fork(after_in_child=_forget_in_child)

"""How the ranks of one host come to one voice, and the threads of the rank that is it.

The first rank that asks for it becomes the voice of its host. It listens on the loopback interface, and its own
requests take the same way as those of the other ranks. A voice whose guards are closed stays until the others have
left, for a short while.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import os
import queue
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from countoff.core.liveness.processes import Process
from countoff.core.protocol.records import parse_count, parse_rank
from countoff.core.store.channel import Channel, ChannelError
from countoff.core.store.voice import Voice
from countoff.core.store.voiced import VoicedChannel, VoiceLostError, Way, tell_fallen
from countoff.core.threads.join import join
from countoff.core.waiting import until

__all__ = ["HostVoice", "find_voice"]

_SIZE = struct.Struct("!I")
_MOST_BYTES = 1 << 26
_GREETING_BYTES = 256
GREETING_SECONDS = 5.0
"""After so long, a voice closes a connection that has not greeted it."""
ARRIVALS = 64
"""Connections that a voice has open besides the two of each rank; more than that wait in the kernel."""
PAUSE_SECONDS = 0.1
"""So long a voice that can open no more connections looks for none."""
_PATIENCE_SECONDS = 5.0
_LOOK_SECONDS = 0.25
"""So often a rank that waits for an answer looks whether its voice's process is there."""
_ANSWER_SECONDS = 30.0
"""A rank waits no longer for an answer of its voice."""
_LINGER_SECONDS = 0.5
_ELECTIONS = 16
_NONSENSE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What is raised about a request or an answer that is none. What is wrong with the store is another `RuntimeError`."""
_all: weakref.WeakSet[HostVoice] = weakref.WeakSet()


def find_voice(
    direct: Channel,
    rank: int,
    ranks: Sequence[int],
    host: str,
    *,
    every: float,
    patience: float,
    connect: Callable[[], Channel],
    lost: threading.Event,
) -> tuple[HostVoice | None, Callable[[], VoicedChannel] | None]:
    """Finds the voice of this host, or becomes it. Every rank of a host calls this, at its own time.

    Args:
        direct: A channel of this rank's own to the job's store, of the whole process. If this rank becomes the voice,
            it is the voice's from then on.
        rank: This rank.
        ranks: The ranks that meet.
        host: The id of this host.
        every: Seconds between two heartbeats of a host.
        patience: Seconds without any sign of a rank after which others would report it.
        connect: Returns another channel of this rank's own to the job's store.
        lost: Is set once a thread of this rank has lost the voice.

    Returns:
        The voice, if this rank has become it; and what returns a channel through the voice of this host, one for each
        thread. None: this rank is alone on its host, or cannot reach the host's voice, or cannot be it.
    """
    if os.environ.get("LOCAL_WORLD_SIZE") == "1":  # of torchrun: there is no other rank to speak for
        return None, None
    # A voice that does not answer must not make its ranks look lost or stalled: they go on alone before that.
    patience = min(_ANSWER_SECONDS, patience / 2)
    listener: socket.socket | None = None
    with contextlib.ExitStack() as opened:
        for election in range(_ELECTIONS):
            key = f"voice/{host}/{election}"
            standing = direct.find(key)
            if standing is None:
                try:
                    if listener is None:
                        listener = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1024))
                except OSError:  # there is no loopback interface, or this process may open nothing more
                    break
                nonces = os.urandom(16), os.urandom(16)
                told = {"nonce": nonces[0].hex(), "answer": nonces[1].hex()}
                own = {**Process.own(rank).to_json(), "port": listener.getsockname()[1], **told}
                standing = direct.claim(key, own)
                if standing == own:
                    number = _number_of(direct, host)
                    try:
                        voice = HostVoice(
                            direct, connect, listener, nonces, number, ranks, every=every, follows=election > 0
                        )
                        voice.start()
                    except (OSError, RuntimeError):  # this process may open, or start, nothing more
                        break
                    opened.pop_all()
                    return voice, _Door(standing, rank, patience, connect, lost).open
            door = _Door(standing, rank, patience, connect, lost)
            with contextlib.suppress(VoiceLostError):
                door.first = door.open()
                return None, door.open_next
            if door.voice.pid != os.getpid() and door.voice.state() != "gone":
                break  # it is there, but not for this rank: two voices of one host would contradict each other
    tell_fallen(direct, rank)  # a voice that reads this rank's greeting late says that it speaks for it
    return None, None


def _number_of(direct: Channel, host: str) -> int:
    """The number of this host among those that have a voice; an earlier voice of the host had the same."""
    key = f"voice/{host}"
    known = direct.find(key) or direct.claim(key, {"number": direct.add("voices", 1)})
    return parse_count(known["number"])


@dataclass
class _Door:
    """Where a voice is reached.

    Attributes:
        standing: What the voice has written about itself.
        rank: This rank.
        patience: For how many seconds it waits for an answer.
        connect: Returns a channel of this rank's own to the job's store.
        lost: Set once a thread of this rank has lost the voice.
        first: A channel that was opened to see whether the voice is there.
        opened: Whether the channel of the thread that tells of this rank was opened: the first one.
    """

    standing: dict[str, Any]
    rank: int
    patience: float
    connect: Callable[[], Channel]
    lost: threading.Event
    first: VoicedChannel | None = None
    opened: bool = False

    @property
    def voice(self) -> Process:
        """The voice's process."""
        return Process.from_json(self.standing)

    def open_next(self) -> VoicedChannel:
        """Returns another channel, beginning with the one that was opened first."""
        first, self.first = self.first, None
        return first or self.open()

    def open(self) -> VoicedChannel:
        """Returns a channel through the voice; the second one is without it, if it is not there any more.

        Raises:
            VoiceLostError: If it is not there for the first channel.
        """
        try:
            return self._open()
        except VoiceLostError:
            if not self.opened:
                raise
            self.lost.set()
            return VoicedChannel.alone(self.rank, self.connect())

    def _open(self) -> VoicedChannel:
        try:
            end = socket.create_connection(("127.0.0.1", parse_count(self.standing["port"])), _PATIENCE_SECONDS)
        except OSError as error:
            raise VoiceLostError(str(error)) from None
        line = SocketLine(end, self.voice, self.patience, self.lost)
        try:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            answer, number, own, store = line.ask(["hello", str(self.standing["nonce"]), self.rank])
            if not hmac.compare_digest(bytes.fromhex(answer), bytes.fromhex(self.standing["answer"])):
                raise ValueError("another process answers at the port of this host's voice")
        except (OSError, RuntimeError, *_NONSENSE) as error:
            line.shut()
            raise VoiceLostError(str(error)) from None
        first, self.opened = not self.opened, True
        return VoicedChannel(Way(line, self.rank, number, (own, store), self.connect, tells=first, lost=self.lost))


class SocketLine:
    """The connection of one thread to the voice of its host.

    Args:
        end: This end of it.
        voice: The voice's process.
        patience: For how many seconds this rank waits for an answer; for an entry of the log, as long as it takes.
        lost: Set once another thread of this rank has lost the voice.
    """

    def __init__(self, end: socket.socket, voice: Process, patience: float, lost: threading.Event) -> None:
        self._end = end
        self._voice = voice
        self._patience = patience
        self._lost = lost
        self._received = bytearray()
        self._asked: list[str] = []  # the names of the requests that are not answered yet
        self._pid = os.getpid()
        end.settimeout(_LOOK_SECONDS)
        _lines.add(self)

    def ask(self, request: Sequence[Any]) -> Any:
        """Returns the voice's answer; see `voiced.Line`."""
        patience = math.inf if request[0] == "wait" else self._patience
        try:
            self._asked.append(request[0])
            _send(self._end, request)
            while (answer := self._answer()) is None:
                if not self._receive():
                    patience -= _LOOK_SECONDS
                    self._give_up_if_lost(patience)
        except (OSError, ValueError) as error:
            raise VoiceLostError(str(error)) from None
        if "error" in answer:
            raise (ChannelError if answer.get("foreign") else RuntimeError)(answer["error"])
        return answer["is"]

    def leave(self) -> None:
        """See `voiced.Line`."""
        with contextlib.suppress(OSError):
            self._end.setblocking(False)
            self._asked.append("leave")
            _send(self._end, ["leave"])

    def late_answers(self) -> dict[str, Any]:
        """See `voiced.Line`."""
        found: dict[str, Any] = {}
        try:
            while self._asked:
                name = self._asked[0]
                if (answer := self._answer()) is not None:
                    found[name] = answer.get("is")
                elif part := self._end.recv(1 << 16):
                    self._received += part
                else:
                    found["over"] = True
                    self._asked.clear()
        except BlockingIOError:
            return found
        except (OSError, ValueError):
            found["over"] = bool(self._asked)
            self._asked.clear()
        self.shut()  # all is answered, or nothing more will be
        return found

    def _answer(self) -> dict[str, Any] | None:
        """The next answer, if it has come whole."""
        if len(self._received) < _SIZE.size:
            return None
        [size] = _SIZE.unpack_from(self._received)
        if size > _MOST_BYTES:
            raise VoiceLostError(f"expected an answer of at most {_MOST_BYTES} bytes, got {size}")
        end = _SIZE.size + size
        if len(self._received) < end:
            return None
        answer = json.loads(self._received[_SIZE.size : end])
        del self._received[:end], self._asked[0]
        return answer

    def _receive(self) -> bool:
        """Receives what comes next; False if nothing has come for a while."""
        try:
            part = self._end.recv(1 << 16)
        except TimeoutError:
            self._end.setblocking(False)
            try:
                part = self._end.recv(1 << 16)  # it may have come while another thread held the interpreter
            except BlockingIOError:
                return False
            finally:
                self._end.settimeout(_LOOK_SECONDS)
        if not part:
            raise VoiceLostError("the voice of this host has closed the connection")
        self._received += part
        return True

    def _give_up_if_lost(self, patience: float) -> None:
        if self._voice.state() != "alive" or patience < 0:
            raise VoiceLostError("the voice of this host does not answer")
        if self._lost.is_set():
            raise VoiceLostError("another thread has lost the voice of this host")

    def shut(self) -> None:
        """Ends the connection, from any thread."""
        if self._pid == os.getpid():  # a forked child shares the socket: its parent still needs it
            with contextlib.suppress(OSError):
                self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()


_lines: weakref.WeakSet[SocketLine] = weakref.WeakSet()


def _send(end: socket.socket, message: Any) -> None:
    text = json.dumps(message, separators=(",", ":")).encode()
    end.sendall(_SIZE.pack(len(text)) + text)


@dataclass
class _Client:
    """A connection of a rank of this host.

    Attributes:
        end: This end of it.
        deadline: Until when it may say which rank it is, by `time.monotonic()`.
        rank: The rank; None until it has said so.
        received: What has come of its next request.
    """

    end: socket.socket
    deadline: float
    rank: int | None = None
    received: bytearray = field(default_factory=bytearray)

    def receive(self) -> bool:
        """Receives some of what there is; False if the connection is over.

        Raises:
            OSError: If it has broken, or nothing is there.
        """
        received = self.end.recv(_GREETING_BYTES - len(self.received) if self.rank is None else 1 << 16)
        self.received += received
        return bool(received)

    def requests(self) -> Iterator[Any]:
        """Takes the requests that have come whole, each once the one before it has been answered.

        Raises:
            ValueError: If there is something else.
        """
        while len(self.received) >= _SIZE.size:
            [size] = _SIZE.unpack_from(self.received)
            most = _GREETING_BYTES - _SIZE.size if self.rank is None else _MOST_BYTES
            if size > most:
                raise ValueError(f"expected a request of at most {most} bytes, got {size}")
            if len(self.received) < _SIZE.size + size:
                return
            request = self.received[_SIZE.size : _SIZE.size + size]
            del self.received[: _SIZE.size + size]
            yield json.loads(request)


class HostVoice:
    """The voice of this host and its two threads: one answers the ranks, one waits for the log.

    Args:
        up: The channel to the job's store with which the first one writes.
        connect: Returns another one, for the second.
        listener: Where the ranks connect.
        nonces: What they must know, and what the voice answers, so that they know it.
        number: The number of this host among those that have a voice.
        ranks: The ranks that meet.
        every: Seconds between two heartbeats of the host.
        follows: Whether this host had a voice before.
    """

    def __init__(
        self,
        up: Channel,
        connect: Callable[[], Channel],
        listener: socket.socket,
        nonces: tuple[bytes, bytes],
        number: int,
        ranks: Sequence[int],
        *,
        every: float,
        follows: bool,
    ) -> None:
        self._up = up
        self._connect = connect
        self._listener = listener
        self._nonces = nonces
        self._number = number
        self._ranks = ranks
        self._addresses = up.own_address(), up.store_address()
        self._wanted: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._heard: queue.SimpleQueue[tuple[int, dict[str, Any]] | Exception] = queue.SimpleQueue()
        self._expected = _expected()
        self._voice = Voice(up, number, self._wanted.put, every=every, expected=self._expected, follows=follows)
        self._log: Channel | None = None
        self._clients: dict[socket.socket, _Client] = {}
        self._arrivals: dict[socket.socket, _Client] = {}  # those that have not said which rank they are, in order
        self._pausing_until: float | None = None
        self._selector = selectors.DefaultSelector()
        self._wakes, self._waker = socket.socketpair()
        self._closing_at: float | None = None
        self._speaks = threading.Thread(target=self._speak, name="countoff voice", daemon=True)
        self._listens = threading.Thread(target=self._listen, name="countoff voice's listener", daemon=True)
        _all.add(self)

    def start(self) -> None:
        """Starts the threads.

        Raises:
            OSError, RuntimeError: If this process may open, or start, no more. Nothing of this voice stays then but
                the listener.
        """
        for end in (self._listener, self._wakes, self._waker):
            end.setblocking(False)
        try:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._selector.register(self._wakes, selectors.EVENT_READ, self._take_news)
            self._listens.start()  # first: nobody must wait for the log with a voice that does not
            self._speaks.start()
        except (OSError, RuntimeError):
            self._end_listening()
            for end in (self._wakes, self._waker):
                end.close()
            self._selector.close()
            raise

    def close(self) -> None:
        """Ends the threads once all ranks have left, or after a short while; from any thread."""
        self._closing_at = time.monotonic() + _LINGER_SECONDS
        self._wake()
        self._speaks.join(2 * _LINGER_SECONDS)
        join(self._speaks, lambda: self._up)  # the store may not answer
        self._end_listening()
        self._up.release()

    def wait_for_others(self) -> None:
        """Waits a short while until the other ranks have left: they get the signal that ends this process too."""
        until(lambda: len(self._voice.ranks) <= 1, time.monotonic() + _LINGER_SECONDS)

    def _end_listening(self) -> None:
        self._wanted.put(None)
        join(self._listens, lambda: self._log)  # it may wait for an entry that nobody writes any more
        if self._log is not None:
            self._log.release()

    def forget(self) -> None:
        """Closes a forked process's copies of the sockets; it has no threads."""
        for end in (self._listener, self._wakes, self._waker, *self._clients):
            with contextlib.suppress(OSError):
                end.close()
        with contextlib.suppress(OSError):
            self._selector.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"w")

    # The thread that waits for the log.

    def _listen(self) -> None:
        try:
            self._log = log = self._connect()
            while (index := self._wanted.get()) is not None:
                self._heard.put((index, log.wait(f"log/{index}")))
                self._wake()
        except Exception as error:  # the store is lost, or this process is closing
            self._heard.put(error)
            self._wake()

    # The thread that answers.

    def _speak(self) -> None:
        try:
            while not self._is_over():
                for key, _ in self._selector.select(min(self._voice.tend(), self._tend_connections())):
                    key.data()
            self._voice.end()
        except Exception as error:
            if not self._can_be_done_without(error):
                self._tell_all(error)  # they decide what that means
        finally:
            for end in (self._listener, self._wakes, self._waker, *self._clients):
                end.close()
            self._selector.close()

    def _can_be_done_without(self, error: Exception) -> bool:
        """Whether the ranks can go on with the store themselves: only the voice's connection to it has broken."""
        if isinstance(error, ChannelError) or not isinstance(error, RuntimeError) or self._voice.owes:
            return False
        if self._up.knock() != "open":
            return False
        time.sleep(_LOOK_SECONDS)  # a process that is killed does not close all its connections at once
        return self._up.knock() == "open"

    def _is_over(self) -> bool:
        return self._closing_at is not None and (not self._clients or time.monotonic() > self._closing_at)

    def _tend_connections(self) -> float:
        """Does what is due about connections; returns after how many seconds something is due again."""
        due = [] if self._closing_at is None else [_LOOK_SECONDS / 5]
        now = time.monotonic()
        if self._pausing_until is not None and now >= self._pausing_until:
            self._pausing_until = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        for late in [client for client in self._arrivals.values() if now > client.deadline]:
            self._serve(late)  # its greeting may have come while this process held the interpreter
            if late.rank is None:
                self._drop(late)
        if self._pausing_until is not None:
            due.append(self._pausing_until - now)
        if self._arrivals:
            due.append(next(iter(self._arrivals.values())).deadline - now)
        return max(0.0, min(due, default=math.inf))

    def _accept(self) -> None:
        if len(self._clients) >= 2 * max(self._expected, len(self._voice.ranks)) + ARRIVALS:
            self._pause()
            return
        try:
            end, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # it is over already
            return
        except OSError:  # this process may open nothing more
            self._pause()
            return
        self._clients[end] = self._arrivals[end] = client = _Client(end, time.monotonic() + GREETING_SECONDS)
        end.setblocking(False)
        self._selector.register(end, selectors.EVENT_READ, lambda: self._serve(client))
        with contextlib.suppress(OSError):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _pause(self) -> None:
        """Looks for no connection for a while: the one that waits would be reported at once, again and again."""
        self._selector.unregister(self._listener)
        self._pausing_until = time.monotonic() + PAUSE_SECONDS

    def _take_news(self) -> None:
        with contextlib.suppress(OSError):
            self._wakes.recv(4096)
        while not self._heard.empty():
            news = self._heard.get()
            if isinstance(news, Exception):
                raise news
            self._voice.hear(*news)

    def _serve(self, client: _Client) -> None:
        try:
            if not client.receive():
                self._drop(client)
                return
        except BlockingIOError:
            return
        except OSError:
            self._drop(client)
            return
        try:
            for request in client.requests():
                self._answer(client, request)
        except _NONSENSE:  # it is none of our ranks, or of another version
            self._drop(client)

    def _answer(self, client: _Client, request: Any) -> None:
        if client.rank is None:
            word, nonce, rank = request
            if word != "hello" or not hmac.compare_digest(bytes.fromhex(nonce), self._nonces[0]):
                raise ValueError("a connection that is none of ours")
            client.rank = parse_rank(rank, self._ranks)
            del self._arrivals[client.end]
            self._voice.join(client.rank)
            self._reply(client, {"is": [self._nonces[1].hex(), self._number, *self._addresses]})
            return
        try:
            self._voice.answer(client.rank, request, lambda answer: self._reply(client, {"is": answer}))
        except ChannelError as error:
            self._reply(client, {"error": str(error), "foreign": True})

    def _reply(self, client: _Client, answer: Any) -> None:
        try:
            client.end.settimeout(_PATIENCE_SECONDS)
            _send(client.end, answer)
            client.end.setblocking(False)
        except OSError:
            self._drop(client)

    def _drop(self, client: _Client) -> None:
        if self._clients.pop(client.end, None) is None:
            return
        self._arrivals.pop(client.end, None)
        self._selector.unregister(client.end)
        client.end.close()
        if client.rank is not None and all(other.rank != client.rank for other in self._clients.values()):
            self._voice.leave(client.rank)

    def _tell_all(self, error: Exception) -> None:
        answer = {"error": str(error) or type(error).__name__, "foreign": isinstance(error, ChannelError)}
        for client in list(self._clients.values()):
            self._reply(client, answer)


def _expected() -> int:
    """Ranks of this host, as torchrun says; 1 where it does not."""
    with contextlib.suppress(ValueError):
        return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return 1


def _forget_in_child() -> None:
    for voice in list(_all):
        voice.forget()
    for line in list(_lines):
        line.shut()


os.register_at_fork(after_in_child=_forget_in_child)

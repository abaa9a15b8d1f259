"""The voice of a host and its connections, on a real store: two ranks, in one process."""

import contextlib
import errno
import json
import os
import resource
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from countoff.core.liveness.processes import Process
from countoff.core.store.channel import Channel, ChannelError
from countoff.core.store.voiced import VoicedChannel, VoiceLostError
from countoff.core.threads import host_voice
from countoff.core.threads.host_voice import HostVoice, SocketLine, find_voice
from tests.relay import Relay

PREFIX = "countoff/0123456789ab/"
BROKEN = r"recv|send|reset|closed|Broken"
HELLO = ["hello", "00" * 16, 0]


class Host:
    """One host on a real store; each rank that joins gets two channels, as its two threads have."""

    def __init__(self, store: Any, port: int = 0) -> None:
        self.store = store
        self.port = port or store.port
        self.opened: list[VoicedChannel] = []
        self.voices: list[HostVoice] = []

    def connect(self) -> Channel:
        return Channel("127.0.0.1", self.port, PREFIX)

    def find(self, rank: int, patience: float = 60.0) -> tuple[HostVoice | None, Callable[[], VoicedChannel] | None]:
        how: dict[str, Any] = {"every": 1.0, "patience": patience, "connect": self.connect, "lost": threading.Event()}
        found = find_voice(self.connect(), rank, range(4), "a-1", **how)
        if found[0] is not None:
            self.voices.append(found[0])
        return found

    def open_door(self, rank: int, patience: float = 60.0) -> Callable[[], VoicedChannel]:
        _, door = self.find(rank, patience)
        assert door is not None
        return door

    def join(self, rank: int) -> list[VoicedChannel]:
        door = self.open_door(rank)
        channels = [door(), door()]
        self.opened += channels
        return channels

    def speak(self, listener: socket.socket) -> HostVoice:
        """A voice with the nonce of `HELLO`, which is yet to be started."""
        voice = HostVoice(
            self.connect(), self.connect, listener, (bytes(16), bytes(16)), 1, range(4), every=1.0, follows=False
        )
        self.voices.append(voice)
        return voice

    def leave(self) -> None:
        for channel in self.opened:
            channel.release()
        for voice in self.voices:
            voice.close()


class Listener(socket.socket):
    """A socket that counts how often a connection was looked for."""

    tried = 0

    def accept(self) -> tuple[socket.socket, Any]:
        self.tried += 1
        return super().accept()


def ports() -> list[tuple[int, int]]:
    """The ports of this process's TCP sockets: their own, and that of the other end, or 0."""
    found: list[tuple[int, int]] = []
    for descriptor in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as end:
                    if end.family == socket.AF_INET:
                        found.append((end.getsockname()[1], 0))
                        found[-1] = found[-1][0], end.getpeername()[1]
    return found


@pytest.fixture
def host() -> Iterator[Host]:
    """A host, on a store of its own; nothing of it may be left."""
    before = len(os.listdir("/dev/fd"))
    store: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    host = Host(store)
    yield host
    host.leave()
    assert [thread.name for thread in threading.enumerate() if "voice" in thread.name] == []
    del store, host.store
    assert len(os.listdir("/dev/fd")) <= before + 4  # the store's own, which torch closes later


def address(host: Host) -> tuple[str, int, str]:
    """Where the voice listens, and what its ranks must know."""
    record = host.connect().get("voice/a-1/0")
    return "127.0.0.1", record["port"], record["nonce"]


def test_the_first_rank_is_the_voice_of_the_others(host: Host):
    [speaking, listening], [other, _] = host.join(1), host.join(0)
    assert len(host.voices) == 1
    heard: list[Any] = []
    waits = threading.Thread(target=lambda: heard.append(listening.wait("log/0")))
    waits.start()
    assert other.at("0/").at("").claim("x", {"rank": 0}) == {"rank": 0}
    assert other.claim("log/0", {"rank": 0}) == {"rank": 0}
    waits.join(20)
    assert heard == [{"rank": 0}]
    assert speaking.store_address() == "127.0.0.1"
    for rank, channel in enumerate((other, speaking)):
        channel.report("plan", rank, {"batch_size": 8})
    assert other.reports("plan", [0, 1]) == {0: {"batch_size": 8}, 1: {"batch_size": 8}}


def test_a_rank_goes_on_alone_where_the_voice_has_closed(host: Host):
    host.join(1)
    [speaking, listening] = host.join(0)
    speaking.report("row", 0, {"batches": 3})
    for channel in host.opened[:2]:
        channel.release()
    host.voices.pop().close()
    assert speaking.claim("log/0", {"rank": 0}) == listening.wait("log/0") == {"rank": 0}
    assert host.connect().reports("row", [0]) == {0: {"batches": 3}}
    assert host.find(2)[1] is not None  # in this process, so it takes the place of the one that was closed
    assert len(host.voices) == 1


def test_a_voice_that_is_there_and_out_of_reach_has_no_second_one_beside_it(host: Host):
    direct = host.connect()
    parent = Process.own(0)
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        assert parent.pid != os.getppid()
        direct.claim("voice/a-1/0", record_of_parent(free.getsockname()[1]))
        assert host.find(1) == (None, None)
    # That voice may read a greeting late, and say that it speaks for this rank.
    assert (direct.add("fallen", 0), direct.get("fallen/1"), direct.get("via/1")) == (1, {"rank": 1}, {"via": 0})


def refuse(*_: object, **__: object) -> Any:
    raise OSError(errno.EMFILE, "Too many open files")


def test_a_rank_that_cannot_listen_speaks_for_itself(host: Host, monkeypatch: pytest.MonkeyPatch):
    """There may be no loopback interface, and this process may open nothing more."""
    monkeypatch.setattr(host_voice.socket, "create_server", refuse)
    assert host.find(0) == (None, None)
    assert host.connect().get("fallen/1") == {"rank": 0}


def test_a_rank_that_cannot_be_the_voice_leaves_nothing_of_it(host: Host, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_voice.selectors, "DefaultSelector", refuse)
    assert host.find(0) == (None, None)
    monkeypatch.undo()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address(host)[:2])


@pytest.mark.parametrize("refused", ["countoff voice", "countoff voice's listener"])
def test_a_voice_that_can_start_one_thread_of_two_has_none(host: Host, monkeypatch: pytest.MonkeyPatch, refused: str):
    """Ranks would wait for ever for an entry of the log that nobody waits for."""
    start = threading.Thread.start

    def start_some(thread: threading.Thread) -> None:
        if thread.name == refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    assert host.find(0) == (None, None)
    assert [thread.name for thread in threading.enumerate() if "voice" in thread.name] == []


class Held(socket.socket):
    """The socket of a process whose interpreter another thread holds: each wait is over before it has looked."""

    def recv(self, *how: Any) -> bytes:
        if self.gettimeout():
            raise TimeoutError
        return super().recv(*how)


def test_an_answer_that_came_while_the_interpreter_was_held_is_read():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        own = Held(fileno=socket.create_connection(listener.getsockname()).detach())
        voice, _ = listener.accept()
    text = json.dumps({"is": 2}).encode()
    voice.sendall(struct.pack("!I", len(text)) + text)
    wait_until_readable(own)
    line = SocketLine(own, Process.own(0), 0.0, threading.Event())
    assert line.ask(["add", "hosts", 1]) == 2
    with pytest.raises(VoiceLostError, match="does not answer"):
        line.ask(["add", "hosts", 1])
    line.shut()
    voice.close()


def record_of_parent(port: int) -> dict[str, Any]:
    """What a voice would write whose process is the one above this one."""
    return {"rank": 0, "pid": os.getppid(), "began": 0, "port": port, "nonce": "00" * 16, "answer": "11" * 16}


@pytest.mark.parametrize("answer", [["00" * 16, 1, "127.0.0.1", "127.0.0.1"], "yes", None])
def test_another_process_at_the_port_of_a_voice_is_not_taken_for_it(host: Host, answer: Any):
    """It has read the greeting, but not the store."""
    text = json.dumps({"is": answer}).encode()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host.connect().claim("voice/a-1/0", record_of_parent(listener.getsockname()[1]))

        def answers() -> None:
            end, _ = listener.accept()
            with end:
                end.recv(1024)
                end.sendall(struct.pack("!I", len(text)) + text)

        thread = threading.Thread(target=answers)
        thread.start()
        assert host.find(1) == (None, None)
        thread.join(20)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("!I", 5) + b"12345",
        struct.pack("!I", 2) + b"{}",
        struct.pack("!I", 1 << 31),
        struct.pack("!I", 14) + b'["hello","",0]',
        struct.pack("!I", 18) + b'["hello",[1,2],{}]',
        struct.pack("!I", 200_000) + b"[" * 200_000,
    ],
)
def test_a_stranger_is_shown_the_door_and_no_rank_notices(host: Host, sent: bytes):
    [speaking, _] = host.join(1)
    stranger = socket.create_connection(address(host)[:2], timeout=20)
    with stranger, contextlib.suppress(ConnectionError):  # it may be closed before all is sent
        stranger.sendall(sent)
        with contextlib.suppress(OSError):
            stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(100) == b""
    assert speaking.claim("log/0", {"rank": 1}) == {"rank": 1}


@pytest.mark.parametrize(
    "request_text",
    [
        '["shutdown","now"]',
        '["wait"]',
        '["wait",0]',
        '["wait","plan"]',
        '["get","host/nobody"]',
        '["get_many",["log/0"],"all"]',
        '["has",7]',
        '["claim",{},{}]',
        '["add","log/0",1e999]',
        '["beat",{"heartbeat":1}]',
        '["report","plan"]',
        '["report","plan","text"]',
        '["report","\\ud800",{}]',
        '["take_back","\\ud800"]',
        '["count","even",0.5]',
        "[" * 200_000,
        "7",
        "[]",
    ],
)
def test_a_rank_that_asks_for_what_there_is_not_is_not_served(host: Host, request_text: str):
    """Not then, and not when what it has asked for would be written: each other rank is served."""
    [speaking, _] = host.join(1)
    _, port, nonce = address(host)
    end = socket.create_connection(("127.0.0.1", port))
    line = SocketLine(end, Process.own(0), 60.0, threading.Event())
    assert line.ask(["hello", nonce, 0])[1] == 1
    end.sendall(struct.pack("!I", len(request_text)) + request_text.encode())
    with pytest.raises(VoiceLostError):
        line.ask(["has", ["log/0"]])
    line.shut()
    speaking.report("row", 1, {"batches": 3})
    assert speaking.claim("log/0", {"rank": 1}) == {"rank": 1}  # the voice writes all reports first
    assert speaking.count("even", 1) == 1


def test_a_greeting_is_short(host: Host):
    host.join(1)
    _, port, nonce = address(host)
    hello = json.dumps(["hello", nonce, 0]).ljust(256)
    with socket.create_connection(("127.0.0.1", port), timeout=20) as end:
        end.sendall(struct.pack("!I", len(hello)) + hello.encode())
        with contextlib.suppress(ConnectionResetError):
            assert end.recv(100) == b""


@pytest.mark.parametrize("sent", [b"", struct.pack("!I", 200) + b"["])
def test_a_connection_that_does_not_greet_the_voice_is_closed(host: Host, sent: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_voice, "GREETING_SECONDS", 0.2)
    [speaking, _] = host.join(1)
    with socket.create_connection(address(host)[:2], timeout=20) as stranger:
        stranger.sendall(sent)
        assert stranger.recv(100) == b""
    assert speaking.claim("log/0", {"rank": 1}) == {"rank": 1}


def test_a_greeting_that_has_come_while_the_voice_was_held_is_in_time(host: Host, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_voice, "GREETING_SECONDS", -1.0)
    listener = socket.create_server(("127.0.0.1", 0))
    voice = host.speak(listener)
    line = SocketLine(socket.create_connection(listener.getsockname()), Process.own(0), 60.0, threading.Event())
    answers: list[Any] = []
    asks = threading.Thread(target=lambda: answers.append(line.ask(HELLO)))
    asks.start()
    while not select.select([listener], [], [], 0)[0]:
        pass
    voice.start()
    asks.join(20)
    line.shut()
    assert [answer[1] for answer in answers] == [1]


def test_strangers_wait_once_there_are_many(host: Host):
    [speaking, _] = host.join(1)
    _, port, _ = address(host)
    most = 2 + host_voice.ARRIVALS
    with contextlib.ExitStack() as opened:
        for _ in range(most):
            opened.enter_context(socket.create_connection(("127.0.0.1", port)))
        for _ in range(2 * most):  # it looks for connections, too, each time that it looks for requests
            speaking.add("hosts", 0)
        assert sum(local == port and bool(other) for local, other in ports()) <= most
    assert host.join(0)[0].claim("log/0", {"rank": 0}) == {"rank": 0}


def test_a_voice_that_can_open_nothing_more_looks_for_connections_now_and_then(host: Host):
    listener = Listener(fileno=socket.create_server(("127.0.0.1", 0)).detach())
    voice = host.speak(listener)
    voice.start()
    ends = [socket.create_connection(listener.getsockname()), socket.socket()]
    served, waiting = (SocketLine(end, Process.own(0), 60.0, threading.Event()) for end in ends)
    served.ask(HELLO)
    host.connect().claim("log/0", {"rank": 3})
    served.ask(["wait", "log/0"])  # the voice's other thread has its connection then
    tried, trips = listener.tried, 300
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(free := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        ends[1].connect(listener.getsockname())
        began = time.monotonic()
        for _ in range(trips):
            served.ask(["add", "hosts", 0])
        tries, most = listener.tried - tried, 2 + (time.monotonic() - began) / host_voice.PAUSE_SECONDS
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert 0 < tries <= most < trips
    assert waiting.ask(HELLO)[1] == 1
    for line in (served, waiting):
        line.shut()


def test_what_another_program_has_written_is_one_ranks_error(host: Host):
    [speaking, _], [other, _] = host.join(1), host.join(0)
    client = TCPStore("127.0.0.1", host.port, is_master=False, wait_for_workers=False)
    client.set(f"{PREFIX}log/0", "no record")
    with pytest.raises(ChannelError, match="expected a JSON object"):
        speaking.claim("log/0", {"rank": 1})
    assert other.claim("log/1", {"rank": 0}) == {"rank": 0}


@pytest.fixture
def behind_a_relay() -> Iterator[tuple[Host, Relay]]:
    """A host whose ranks reach the store through a relay."""
    store: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    relay = Relay(store.port)
    host = Host(store, relay.port)
    yield host, relay
    host.leave()
    relay.close()


@pytest.mark.parametrize(
    ("patience", "waits"), [pytest.param(10.0, 5.0, id="half of a rank's"), pytest.param(600.0, 30.0, id="no more")]
)
def test_a_rank_waits_for_its_voice_less_long_than_others_wait_for_it(
    host: Host, monkeypatch: pytest.MonkeyPatch, patience: float, waits: float
):
    made: list[float] = []

    def line(end: socket.socket, voice: Process, seconds: float, lost: threading.Event) -> SocketLine:
        made.append(seconds)
        return SocketLine(end, voice, seconds, lost)

    monkeypatch.setattr(host_voice, "SocketLine", line)
    for rank in (0, 1):
        host.opened.append(host.open_door(rank, patience)())
    assert made == [waits, waits]


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_a_rank_learns_that_its_voice_has_ended_without_an_answer(reset: bool):
    """What it has not answered is not done. What it has answered late is."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        own = socket.create_connection(listener.getsockname())
        voice, _ = listener.accept()
    line = SocketLine(own, Process.own(0), 0.0, threading.Event())
    with pytest.raises(VoiceLostError, match="does not answer"):
        line.ask(["count", "even/3/0", 1])
    line.leave()
    assert line.late_answers() == {}
    text = json.dumps({"is": 2}).encode()
    voice.sendall(struct.pack("!I", len(text)) + text)
    wait_until_readable(own)
    assert line.late_answers() == {"count": 2}
    if not reset:  # the kernel resets a connection that is closed with something unread
        voice.recv(1 << 16)
    voice.close()
    wait_until_readable(own)
    assert line.late_answers() == {"over": True}
    assert line.late_answers() == {}


def wait_until_readable(end: socket.socket) -> None:
    assert select.select([end], [], [], 10.0)[0]


def test_a_voice_whose_connection_breaks_is_left_by_its_ranks(behind_a_relay: tuple[Host, Relay]):
    """The store is there: each rank goes on with it by itself, and none of them hears of an error."""
    host, relay = behind_a_relay
    channels = [host.join(1)[0], host.join(0)[0]]
    relay.drop_all()
    assert [channel.claim(f"log/{rank}", {"rank": rank}) for rank, channel in enumerate(channels)] == [
        {"rank": 0},
        {"rank": 1},
    ]
    assert host.connect().add("fallen", 0) == 2


def test_an_addition_that_breaks_off_ends_the_comparing(behind_a_relay: tuple[Host, Relay]):
    """Whether the store has it is not known, so no rank may add it again."""
    host, relay = behind_a_relay
    adding, counting = [host.join(1)[0], host.join(0)[0]]
    relay.drop_all()
    with pytest.raises(RuntimeError, match=BROKEN):
        adding.add("steps", 1)
    with pytest.raises(RuntimeError, match=BROKEN):
        counting.count("steps", 1)


def test_a_count_that_the_store_lacks_ends_the_comparing(behind_a_relay: tuple[Host, Relay]):
    """A voice whose connection breaks cannot bring it there, and the rank that has counted has its answer."""
    host, relay = behind_a_relay
    counting, other = [host.join(1)[0], host.join(0)[0]]
    assert counting.count("steps", 1) is None
    relay.drop_all()
    with pytest.raises(RuntimeError, match=BROKEN):
        other.claim("log/0", {"rank": 0})


def test_a_lost_store_is_told_to_all_ranks_as_such():
    """It is no reason to look for the store oneself."""
    store: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    relay = Relay(store.port)
    host = Host(store, relay.port)
    channels = [host.join(1)[0], host.join(0)[0]]
    relay.close()
    for channel in channels:
        with pytest.raises(RuntimeError, match=BROKEN):
            channel.add("hosts", 1)
    host.leave()


def test_a_forked_process_closes_its_copies_alone(host: Host):
    [speaking, _] = host.join(1)
    _, port, _ = address(host)
    assert sum(port in pair for pair in ports()) == 5  # where the voice listens, and both ends of two connections
    child = os.fork()
    if child == 0:
        os._exit(sum(port in pair for pair in ports()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert speaking.claim("log/0", {"rank": 1}) == {"rank": 1}

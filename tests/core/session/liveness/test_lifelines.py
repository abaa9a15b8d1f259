"""Lifelines on real sockets of one process: who connects to whom, what rank 0 refuses, and what a broken one tells."""

import contextlib
import errno
import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from countoff.core.session.liveness import hosts
from countoff.core.session.liveness import lifelines as module
from countoff.core.session.liveness.heartbeats import Heartbeats
from countoff.core.session.liveness.lifelines import Hub, Lifelines
from countoff.core.session.liveness.processes import Process
from countoff.core.session.store.keepalive import keep_alive
from tests.fake_store import FakeStore


class _LocalStore(FakeStore):
    """A store on rank 0's host, which other hosts reach at the loopback."""

    def own_address(self) -> str:
        return "127.0.0.1"

    store_address = own_address


class Job:
    """The lifelines of some ranks, two on each host, all in this process.

    Attributes:
        store: Their store.
        ranks: Their lifelines, by rank.
    """

    def __init__(self, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = _LocalStore()
        self.ranks: list[Lifelines] = []
        self._beats: list[Heartbeats] = []
        for rank in range(ranks):
            host = f"host-{rank // 2}"
            monkeypatch.setattr(hosts.socket, "gethostname", lambda rank=rank: f"node-{rank // 2}")
            beats = Heartbeats(rank, range(ranks))
            beats.host = host
            lines = Lifelines(rank, range(ranks), 15.0, beats)
            lines.open(self.store)
            beats.register(self.store)
            self._beats.append(beats)
            self.ranks.append(lines)
        for beats in self._beats:
            beats.find_neighbours(self.store, complete=True)

    @property
    def hub(self) -> Hub:
        assert self.ranks[0].hub is not None
        return self.ranks[0].hub

    def turn(self) -> None:
        """Lets every rank do what is due."""
        for lines in self.ranks:
            lines.tend(self.store)
            lines.poll()

    def until(self, done: Callable[[], bool]) -> None:
        patience = time.monotonic() + 10
        while not done():
            assert time.monotonic() < patience
            self.turn()

    def standing(self) -> list[tuple[int, ...]]:
        """The ranks to which each rank has a lifeline."""
        return [tuple(sorted(lines.sockets)) for lines in self.ranks]

    def end_process(self, rank: int) -> None:
        """From here on, its neighbours see that a rank's process is gone."""
        for beats in self._beats:
            if rank in beats.neighbours:
                beats.neighbours[rank] = Process(rank, os.getpid(), 1)

    def kill(self, rank: int) -> None:
        """Lets the kernel close a rank's connections, as it does when a process is killed."""
        self.ranks[rank].forget()

    def connect(self, greeting: bytes = b"") -> socket.socket:
        """A connection to rank 0 that is none of the job's."""
        stranger = socket.create_connection(("127.0.0.1", self.hub.port), timeout=5)
        stranger.sendall(greeting)
        return stranger


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Job]]:
    """Makes a job of so many ranks; all of its lifelines are closed in the end."""
    with contextlib.ExitStack() as stack:

        def make(ranks: int) -> Job:
            job = Job(ranks, monkeypatch)
            for lines in job.ranks:
                stack.callback(lines.close)
            return job

        yield make


def is_closed(job: Job, stranger: socket.socket) -> bool:
    """Whether rank 0 closes a connection, without a word on it, when it has had time to look at it."""
    for _ in range(3):
        job.turn()
    stranger.setblocking(False)
    try:
        return stranger.recv(64) == b""
    except ConnectionResetError:
        return True
    except BlockingIOError:
        return False


def test_each_other_host_has_one_lifeline(start: Callable[[int], Job]) -> None:
    """The first rank of each other host has one, and it vouches for all ranks of both hosts."""
    job = start(6)
    job.until(lambda: job.standing() == [(2, 4), (), (0,), (), (0,), ()])
    job.turn()
    assert all(job.ranks[0].vouches(job.store, rank) for rank in range(2, 6))
    assert all(job.ranks[rank].vouches(job.store, 0) for rank in range(2, 6))
    assert job.hub.ranks == (0, 1)


def test_to_vouch_takes_rank_0_and_first_ranks_no_call(start: Callable[[int], Job]) -> None:
    """They know it without the store, except for a host that rank 0 has not learned yet."""
    job = start(6)
    job.until(lambda: job.standing() == [(2, 4), (), (0,), (), (0,), ()] and len(job.ranks[0].known_hosts) == 2)
    no_store: Any = None
    assert all(job.ranks[0].vouches(no_store, rank) for rank in range(2, 6))
    assert job.ranks[2].vouches(no_store, 0)
    job.ranks[0].known_hosts.clear()
    assert all(job.ranks[0].vouches(job.store, rank) for rank in range(2, 6))


def test_who_withdraws_its_lifeline_vouches_for_its_host_no_more(start: Callable[[int], Job]) -> None:
    """Its neighbours rely on what it has written: it says so before it closes the lifeline."""
    job = start(4)
    job.until(lambda: job.ranks[3].vouches(job.store, 0))
    job.ranks[2].withdraw(job.store)
    assert not job.ranks[3].vouches(job.store, 0)


def test_rank_0_soon_knows_all_hosts(start: Callable[[int], Job]) -> None:
    """Until then, a loss is told by an address and with one rank."""
    job = start(130)
    job.until(lambda: len(job.standing()[0]) == 64)
    job.ranks[0].known_hosts.clear()
    job.ranks[0].tend(job.store)
    assert len(job.ranks[0].known_hosts) == 64
    assert job.ranks[0].known_hosts[128] == ("node-64", (128, 129))


def test_a_job_on_one_host_has_none(start: Callable[[int], Job]) -> None:
    """Rank 0 does not listen any more once all ranks are known to be on its host."""
    job = start(2)
    job.connect().close()
    for _ in range(5):
        job.turn()
    assert job.standing() == [(), ()]
    with pytest.raises(ConnectionRefusedError):
        job.connect()


def test_a_process_that_is_killed_is_told_to_both_ends(start: Callable[[int], Job]) -> None:
    job = start(6)
    job.until(lambda: job.standing()[0] == (2, 4) and job.standing()[4] == (0,))
    job.kill(2)
    job.until(lambda: bool(job.ranks[0].losses))
    assert [loss.ranks for loss in job.ranks[0].losses] == [(2,)]
    verdict = job.ranks[0].losses[0].verdict("Before that, it was there.")
    assert (verdict.sentence, verdict.ranks, verdict.subject) == ("rank 2 is gone.", (2,), "died")
    assert verdict.why.endswith("it crashed. Before that, it was there.")
    job.kill(0)
    job.until(lambda: bool(job.ranks[4].losses))
    assert job.ranks[4].losses[0].verdict().sentence == "rank 0 is gone."


def test_a_process_that_ends_in_order_is_no_loss(start: Callable[[int], Job]) -> None:
    """Whichever end it is, also if it ends after its greeting and before it has read the answer."""
    job = start(6)
    job.until(lambda: job.standing()[0] == (2, 4) and job.standing()[4] == (0,))
    job.ranks[2].close()
    job.until(lambda: job.standing()[0] == (4,))
    job.ranks[0].close()
    job.until(lambda: job.standing()[4] == ())
    assert [lines.losses for lines in job.ranks] == [[]] * 6


@pytest.mark.parametrize("how", ["it ends", "it has no patience"])
def test_a_call_that_ends_before_the_answer_is_no_loss(start: Callable[[int], Job], how: str) -> None:
    job = start(4)
    own = job.ranks[2]
    job.ranks[0].tend(job.store)
    own.tend(job.store)
    patience = time.monotonic() + 10
    while not job.standing()[0]:  # rank 2 says its greeting, and does not look for an answer
        assert time.monotonic() < patience
        if own.call is not None and own.call.deadline < time.monotonic() + module.CONNECT_SECONDS:
            own.poll()
        job.ranks[0].poll()
    if how == "it ends":
        own.close()
    else:
        assert own.call is not None
        own.redial(own.call, "it does not answer")
    patience = time.monotonic() + 10
    while job.standing()[0]:
        assert time.monotonic() < patience
        job.ranks[0].poll()
    assert job.ranks[0].losses == []


def test_the_next_rank_of_a_host_takes_over(start: Callable[[int], Job]) -> None:
    """The lifeline of a host is that of its first rank that is left."""
    job = start(4)
    job.until(lambda: job.standing() == [(2,), (), (0,), ()])
    job.end_process(2)
    job.kill(2)
    job.until(lambda: job.standing() == [(3,), (), (), (0,)])
    job.turn()
    assert job.ranks[0].vouches(job.store, 2)


@pytest.mark.parametrize(
    ("number", "name", "ranks"),
    [(errno.ETIMEDOUT, "node-1", (2, 3)), (errno.EHOSTUNREACH, "node-1", (2, 3)), (errno.ENETUNREACH, "", (2,))],
)
def test_a_host_that_does_not_answer_is_told_with_its_ranks(
    start: Callable[[int], Job], number: int, name: str, ranks: tuple[int, ...]
) -> None:
    """As far as they are known: if not, it is the address with the rank at the other end."""

    class Silent:
        """A socket of a host that does not answer."""

        def recv(self, *_: int) -> bytes:
            raise OSError(number, os.strerror(number))

        def close(self) -> None:
            pass

    job = start(4)
    job.until(lambda: job.standing()[0] == (2,) and bool(job.ranks[0].known_hosts))
    if not name:
        job.ranks[0].known_hosts.clear()
    silent: Any = Silent()
    job.ranks[0].addresses[silent] = "192.0.2.2"
    job.ranks[0].look_at(2, silent)
    verdict = job.ranks[0].losses[0].verdict()
    listed = "ranks 2, 3" if name else "rank 2"
    assert verdict.sentence == f"host {name or '192.0.2.2'} with {listed} does not answer."
    assert (verdict.ranks, verdict.gone, verdict.subject) == (ranks, True, "host")
    assert "has not answered for 15 s" in verdict.why


def test_a_host_that_is_gone_before_the_answer_has_come_is_told_too(
    start: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TCP sends no keepalive probe before that, and tries again for a quarter of an hour. The loss is known sooner."""
    job, clock = start(4), [time.monotonic()]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(module, "has_arrived", lambda end: False)
    for _ in range(100):
        job.turn()
    assert job.standing()[0] == (2,)
    clock[0] += 30.0
    assert job.ranks[0].poll() == []  # an outage of up to `lost_seconds` may still be over by then
    clock[0] += 2.0
    [loss] = job.ranks[0].poll()
    assert (loss.ranks, loss.host) == ((2, 3), "node-1")
    assert job.standing()[0] == ()


def test_an_answer_that_has_come_is_looked_at_no_more(
    start: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start(4)
    job.until(lambda: job.standing()[0] == (2,) and job.standing()[2] == (0,))
    job.turn()
    monkeypatch.setattr(module, "has_arrived", lambda end: pytest.fail("it has arrived"))
    job.turn()
    assert job.standing()[0] == (2,)


def test_rank_0_closes_what_is_not_of_the_job(start: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another nonce, a rank that is none, garbage, and silence; and it reads no more than a greeting of anybody."""
    job = start(4)
    nonce, greeting = job.hub.nonce, module.GREETING
    for wrong in (
        greeting.pack(bytes(16), 2),
        greeting.pack(nonce, 0),
        greeting.pack(nonce, 4),
        b"GET / HTTP/1.1\r\n\r\n  ",
    ):
        with job.connect(wrong) as stranger:
            assert is_closed(job, stranger), wrong
    with job.connect(nonce) as stranger:  # it may send the rest later
        assert not is_closed(job, stranger)
        assert len(job.ranks[0].arrivals) == 1
    with job.connect(bytes(100_000)) as stranger:
        assert is_closed(job, stranger)
    monkeypatch.setattr(module, "GREETING_SECONDS", 0.0)
    with job.connect() as stranger:
        assert is_closed(job, stranger)
    assert job.ranks[0].losses == []
    job.until(lambda: job.standing() == [(2,), (), (0,), ()])


def test_what_comes_after_the_greeting_ends_the_lifeline(start: Callable[[int], Job]) -> None:
    """Nothing is ever sent on a lifeline, so that is no loss of a rank, and heartbeats decide from there on."""
    job = start(4)
    with job.connect(module.GREETING.pack(job.hub.nonce, 3)) as stranger:
        stranger.settimeout(5)
        job.ranks[0].poll()
        assert stranger.recv(64) == job.hub.answer
        stranger.sendall(b"more")
        assert is_closed(job, stranger)
    assert 3 not in job.ranks[0].sockets
    assert job.ranks[0].losses == []


@pytest.mark.parametrize("how", ["closed", "reset", "goodbye"])
def test_a_call_that_has_ended_before_rank_0_sees_it_never_stands(start: Callable[[int], Job], how: str) -> None:
    """Rank 0 held the interpreter while it came; the next call of the same rank is the one that stands."""
    job = start(4)
    stranger = job.connect(module.GREETING.pack(job.hub.nonce, 2) + (b"." if how == "goodbye" else b""))
    if how == "reset":
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stranger.close()
    job.ranks[0].poll()
    assert job.standing()[0] == ()
    job.until(lambda: job.standing() == [(2,), (), (0,), ()])
    assert job.ranks[0].losses == []


def test_a_lifeline_that_another_one_replaces_is_no_loss(start: Callable[[int], Job]) -> None:
    """Neither on rank 0 nor at its other end."""
    job = start(4)
    job.until(lambda: job.standing() == [(2,), (), (0,), ()])
    with job.connect(module.GREETING.pack(job.hub.nonce, 2)) as newer:
        newer.settimeout(5)
        job.ranks[0].poll()
        assert newer.recv(64) == job.hub.answer
        job.until(lambda: job.ranks[2].sockets.get(0) is None)
        job.turn()
        assert job.standing()[0] == (2,)
        assert [lines.losses for lines in job.ranks] == [[]] * 4


def test_many_connections_are_left_in_the_kernel(start: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 accepts a bounded number that have not greeted it, and the job's own gets through after them."""
    monkeypatch.setattr(module, "ARRIVALS", 4)
    monkeypatch.setattr(module, "GREETING_SECONDS", 0.2)
    job = start(4)
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(job.connect())
        job.ranks[0].poll()
        assert len(job.ranks[0].ends) <= 5
        job.until(lambda: job.standing() == [(2,), (), (0,), ()])


def test_rank_0_leaves_descriptors_to_the_job(start: Callable[[int], Job], monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no more than half of what its process may open."""
    monkeypatch.setattr(module.resource, "getrlimit", lambda _: (4, 4))
    monkeypatch.setattr(module, "ARRIVALS", 1)
    job = start(12)
    for _ in range(50):
        job.turn()
    assert 0 < len(job.standing()[0]) <= 2


def test_whoever_else_listens_at_rank_0s_port_is_not_rank_0(
    start: Callable[[int], Job], caplog: pytest.LogCaptureFixture
) -> None:
    """A lifeline stands only once rank 0 has answered; without one, the log says once that heartbeats decide."""
    job = start(4)
    with socket.create_server(("127.0.0.1", 0)) as other, caplog.at_level(logging.DEBUG, "countoff"):
        other.setblocking(False)
        job.ranks[0].tend(job.store)  # its record is complete
        job.store.set("lifeline", {**job.hub.to_json(), "port": other.getsockname()[1], "addresses": []})
        accepted: list[socket.socket] = []

        def answer() -> bool:
            with contextlib.suppress(BlockingIOError):
                end, _ = other.accept()
                end.sendall(b"220 mail.example\r\n")
                accepted.append(end)
            return any("no lifeline to rank 0" in line for line in caplog.messages)

        job.until(answer)
        for _ in range(5):
            job.turn()
        for end in accepted:
            end.close()
    assert job.standing() == [()] * 4
    assert job.ranks[2].losses == []
    assert [line for line in caplog.messages if "lifeline" in line] == [
        "no lifeline to rank 0, so heartbeats decide whether its host is there: 127.0.0.1: it is not rank 0"
    ]
    assert not job.ranks[2].vouches(job.store, 0)


def test_closed_lifelines_leave_no_descriptor(start: Callable[[int], Job]) -> None:
    before = len(os.listdir("/dev/fd"))
    job = start(6)
    job.until(lambda: job.standing() == [(2, 4), (), (0,), (), (0,), ()])
    strangers = [job.connect() for _ in range(3)]
    job.turn()
    for lines in job.ranks:
        lines.close()
        lines.close()
    for stranger in strangers:
        stranger.close()
    assert len(os.listdir("/dev/fd")) == before
    assert job.ranks[0].poll() == []


@pytest.mark.parametrize(
    ("own", "store", "has_store"),
    [
        ("192.0.2.1", "192.0.2.1", True),
        ("127.0.0.1", "127.0.1.1", True),
        ("::1", "::1", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("", "", False),
    ],
)
def test_rank_0_knows_whether_the_store_is_on_its_host(own: str, store: str, has_store: bool) -> None:
    """Debian and Ubuntu have a host's own name at 127.0.1.1. Where nothing is known, it is not."""

    class Store(FakeStore):
        def own_address(self) -> str:
            return own

        def store_address(self) -> str:
            return store

    lines = Lifelines(0, range(4), 15.0, Heartbeats(0, range(4)))
    lines.open(Store())
    lines.close()
    assert lines.hub is not None
    assert lines.hub.has_store is has_store


def test_lifelines_that_are_closed_open_no_port() -> None:
    """A guard may be closed while its writer is still connecting."""
    store, lines = _LocalStore(), Lifelines(0, range(4), 15.0, Heartbeats(0, range(4)))
    before = len(os.listdir("/dev/fd"))
    lines.close()
    lines.open(store)
    assert len(os.listdir("/dev/fd")) == before
    assert not store.has("lifeline")


def test_a_process_without_descriptors_has_no_lifelines(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no reason to give the store up, on either end, and what was opened is closed."""

    def fail() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    store, beats = _LocalStore(), [Heartbeats(rank, range(2)) for rank in range(2)]
    own, other = (Lifelines(rank, range(2), 15.0, beats[rank]) for rank in range(2))
    for rank in range(2):
        beats[rank].host = f"host-{rank}"
        beats[rank].register(store)
    beats[1].find_neighbours(store)
    with monkeypatch.context() as patch, socket.create_server(("127.0.0.1", 0)) as listener:
        patch.setattr(module.selectors, "DefaultSelector", fail)
        before = len(os.listdir("/dev/fd"))
        own.open(store)
        assert own.hub is not None
        assert own.hub.port == 0
        port = listener.getsockname()[1]
        store.set("lifeline", {**own.hub.to_json(), "port": port, "addresses": ["127.0.0.1"]})
        other.tend(store)
        assert other.tries == 1
        assert len(os.listdir("/dev/fd")) == before


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of os.fork, where other tests have left threads
def test_a_forked_process_keeps_no_lifeline_open(start: Callable[[int], Job]) -> None:
    """A killed rank's loader workers live on for seconds; its end is told at once all the same."""
    job = start(4)
    job.until(lambda: job.standing() == [(2,), (), (0,), ()])
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)  # until the test has seen it
        os._exit(0)
    try:
        job.kill(2)
        job.until(lambda: bool(job.ranks[0].losses))
        assert job.standing()[0] == ()
    finally:
        os.close(writer)
        os.waitpid(child, 0)
        os.close(reader)


@pytest.mark.parametrize(
    "record", [{"port": 1 << 16}, {"addresses": ["node-0"]}, {"nonce": "not hex"}, {"ranks": [-1]}]
)
def test_a_record_that_is_not_rank_0s_is_refused(start: Callable[[int], Job], record: dict[str, object]) -> None:
    """A name is refused too: to look it up could take seconds."""
    with pytest.raises(ValueError, match=r"expected a whole number|address|hexadecimal"):
        Hub.from_json({**start(2).hub.to_json(), **record})


@pytest.mark.parametrize("seconds", [0.5, 1, 6, 14.5, 15, 60, 600, 1e6])
def test_the_kernel_is_as_patient_as_the_setting(seconds: float) -> None:
    """It gives up no sooner after the last answer, and hardly later; it asks once a second, or in each fifteenth."""
    with socket.socket() as end:
        keep_alive(end, seconds)
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, interval, probes = (
            end.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
    assert idle == interval <= max(1, seconds / 15)
    assert seconds <= idle + probes * interval <= max(2, seconds + interval)

"""The channel on a real store: what it passes on, what it refuses, and how a blocked call is ended."""

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from countoff.core.protocol.records import RECORD_BYTES
from countoff.core.session.store.channel import Channel, ChannelError, decode, encode, probe, to_port
from tests.fake_store import FakeStore

Connect = Callable[[], Channel]


@pytest.fixture
def store() -> Any:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def connect(store: Any) -> Connect:
    """Opens channels of one rendezvous."""
    return lambda: Channel("127.0.0.1", store.port, "countoff/test/")


@pytest.fixture(params=["real", "fake"])
def connect_any(request: pytest.FixtureRequest) -> Connect:
    """Opens channels to one real store, or to the one that unit tests use in its place."""
    if request.param == "real":
        return request.getfixturevalue("connect")
    fake = FakeStore()
    return lambda: fake


def soon(holds: Callable[[], bool]) -> bool:
    patience = time.monotonic() + 5
    while not holds() and time.monotonic() < patience:
        time.sleep(0.001)
    return holds()


class Waiter:
    """A thread that waits for a key, as the reader does."""

    def __init__(self, channel: Channel, key: str) -> None:
        self.outcome: list[Any] = []
        self._began = threading.Event()
        self.thread = threading.Thread(target=self._wait, args=(channel, key), daemon=True)
        self.thread.start()
        assert self._began.wait(5)

    def _wait(self, channel: Channel, key: str) -> None:
        self._began.set()
        try:
            self.outcome.append(channel.wait(key))
        except Exception as error:  # torch names a lost store by several exceptions
            self.outcome.append(error)

    def joined(self) -> Any:
        self.thread.join(5)
        assert not self.thread.is_alive()
        return self.outcome[0]


def test_a_record_of_exactly_the_limit_passes_both_ways() -> None:
    """A record of exactly 1024 bytes is encoded and decoded."""
    record = {"a": "x" * (RECORD_BYTES - len('{"a":""}'))}
    assert len(encode(record)) == RECORD_BYTES
    assert decode(encode(record).encode()) == record


def test_a_record_over_the_limit_is_refused() -> None:
    """A record of one byte more than the limit is refused before it is set."""
    with pytest.raises(ChannelError, match="at most 1024 bytes, got 1025"):
        encode({"a": "x" * (RECORD_BYTES + 1 - len('{"a":""}'))})


def test_bytes_are_counted_and_not_characters() -> None:
    with pytest.raises(ChannelError):
        encode({"a": "会" * 200})


GARBAGE = [b"", b"not JSON", b'{"a":1', b"[1]", b'"text"', b"7", b"null", b"\xff\xfe\x00", b"\x80", b" " * 1024]


@pytest.mark.parametrize("value", [*GARBAGE, b'{"a":"' + b"x" * RECORD_BYTES + b'"}'])
def test_what_countoff_cannot_have_written_is_refused(value: bytes) -> None:
    """A value that is no JSON object of at most 1024 bytes is refused."""
    with pytest.raises(ChannelError, match="expected a JSON object of at most 1024 bytes"):
        decode(value)


def test_a_value_nested_too_deeply_is_refused() -> None:
    with pytest.raises(ChannelError):
        decode(b"[" * RECORD_BYTES)


def test_a_refused_value_is_shown_in_part() -> None:
    """The error shows only the beginning of a refused value, however long it is."""
    with pytest.raises(ChannelError) as caught:
        decode(b"x" * 8_000_000)
    assert len(str(caught.value)) < 200


def test_a_long_record_is_reported_in_pieces(connect_any: Connect) -> None:
    """Each piece is a value of the store, and none of them stays there. A short record is one value, as ever."""
    writer, reader = connect_any(), connect_any()
    long, short = {"marks": 'é"\\' * 5000}, {"marks": "x"}
    writer.report_long("answer", 0, long)
    writer.report_long("answer", 1, short)
    assert reader.reports("answer", [0, 1, 2]) == {0: long, 1: short}
    assert not reader.has("answer/0/0")
    reader.forget("answer", [0, 1])
    assert not reader.has("answer/0")


@pytest.mark.parametrize("pieces", [-1, 1 << 20, "2", 1])
def test_pieces_that_countoff_cannot_have_written_are_refused(pieces: Any) -> None:
    store = FakeStore()
    store.set("answer/0", {"pieces": pieces})
    with pytest.raises((ChannelError, ValueError)):
        store.reports("answer", [0])
    store.set("answer/0/0", {"piece": "[1]"})
    with pytest.raises((ChannelError, ValueError)):
        store.reports("answer", [0])


def test_two_clients_that_claim_a_key_get_the_same_record(connect_any: Connect) -> None:
    first, second = connect_any(), connect_any()
    assert first.compare_and_set("log/0", {"rank": 0}) == {"rank": 0}
    assert second.compare_and_set("log/0", {"rank": 1}) == {"rank": 0}
    assert first.compare_and_set("log/0", {"rank": 0}) == {"rank": 0}


def test_many_clients_that_race_for_a_key_agree(connect: Connect) -> None:
    found: list[Any] = []
    start = threading.Barrier(4)

    def race(rank: int) -> None:
        channel = connect()
        start.wait(10)
        found.append([channel.compare_and_set(f"log/{index}", {"rank": rank}) for index in range(50)])

    threads = [threading.Thread(target=race, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == [found[0]] * 4


def test_records_are_read_one_by_one_or_together(connect_any: Connect) -> None:
    writer, reader = connect_any(), connect_any()
    writer.set("row/0", {"rank": 0})
    writer.set("row/1", {"rank": 1})
    assert reader.get_many(["row/1", "row/0"]) == [{"rank": 1}, {"rank": 0}]
    assert reader.get_many([]) == []
    assert reader.get("row/1") == {"rank": 1}


def test_has_is_true_if_all_keys_exist(connect_any: Connect) -> None:
    """`has` is true if all of the keys exist; a deleted key does not, and may be deleted again."""
    channel = connect_any()
    channel.set("a", {"x": 1})
    assert channel.has("a")
    assert not channel.has("a", "b")
    channel.delete("a")
    channel.delete("a")
    assert not channel.has("a")


def test_many_keys_are_asked_for_in_several_requests(connect_any: Connect) -> None:
    channel, ranks = connect_any(), range(1_100)
    for rank in ranks[:-1]:
        channel.report("row", rank, {"rank": rank})
    assert not channel.has_reports("row", ranks)
    channel.report("row", ranks[-1], {"rank": ranks[-1]})
    assert channel.has_reports("row", ranks)
    assert channel.reports("row", ranks) == {rank: {"rank": rank} for rank in ranks}


def test_a_counter_adds_and_reads(connect_any: Connect) -> None:
    channel = connect_any()
    assert [channel.add("host/x", 1), channel.add("host/x", 1), channel.add("host/x", 0)] == [1, 2, 2]


def test_a_later_record_replaces_an_earlier_one(connect_any: Connect) -> None:
    channel = connect_any()
    channel.set("a", {"x": 1})
    channel.set("a", {"x": 2})
    assert (channel.get("a"), channel.compare_and_set("a", {"x": 3})) == ({"x": 2}, {"x": 2})


def test_a_counter_is_no_record(connect_any: Connect) -> None:
    """A counter is a key that exists, but reading it as a record is refused."""
    channel = connect_any()
    channel.add("host/x", 1)
    assert channel.has("host/x")
    with pytest.raises(ChannelError):
        channel.get("host/x")


def test_a_record_too_long_is_set_nowhere(connect_any: Connect) -> None:
    """A record over the limit raises in `set` and in `compare_and_set`, and leaves the store as it was."""
    channel = connect_any()
    for write in (channel.set, channel.compare_and_set):
        with pytest.raises(ChannelError):
            write("a", {"x": "y" * RECORD_BYTES})
    assert not channel.has("a")


def test_a_part_of_a_channel_has_keys_of_its_own(connect: Connect) -> None:
    """The guards of a process share a connection, and the log; all other keys belong to one guard."""
    channel = connect()
    first, second = channel.at("0/"), channel.at("1/")
    first.set("a", {"x": 1})
    assert (first.has("a"), second.has("a"), channel.has("a"), channel.has("0/a")) == (True, False, False, True)
    assert first.whole is channel
    assert channel.whole is channel
    assert first.at("b/").whole is channel


def test_keys_have_the_prefix_of_the_rendezvous(store: Any, connect: Connect) -> None:
    connect().compare_and_set("a", {"x": 1})
    assert soon(lambda: store.check(["countoff/test/a"]))
    assert not Channel("127.0.0.1", store.port, "countoff/other/").has("a")


def test_every_way_of_reading_refuses_garbage(store: Any, connect: Connect) -> None:
    channel = connect()
    store.set("countoff/test/a", "x" * 5000)
    for read in (
        channel.get,
        channel.wait,
        lambda key: channel.get_many([key]),
        lambda key: channel.compare_and_set(key, {}),
    ):
        with pytest.raises(ChannelError):
            read("a")


def test_a_record_ends_a_wait_for_it(connect: Connect) -> None:
    writer, waiter = connect(), Waiter(connect(), "log/0")
    writer.set("log/0", {"rank": 1})
    assert waiter.joined() == {"rank": 1}


def test_shutting_a_connection_ends_a_blocked_wait(connect: Connect) -> None:
    """`shut` ends a wait on its own connection with an error, and leaves other connections open."""
    other, channel = connect(), connect()
    waiter = Waiter(channel, "log/0")
    waiter.thread.join(0.05)  # long enough to be inside
    channel.shut()
    assert isinstance(waiter.joined(), Exception)
    other.set("a", {"x": 1})
    assert other.get("a") == {"x": 1}


def test_shutting_twice_and_releasing_is_no_error(connect: Connect) -> None:
    channel = connect()
    channel.shut()
    channel.shut()
    channel.release()


def test_a_released_channel_raises(connect: Connect) -> None:
    channel = connect()
    channel.release()
    with pytest.raises(AttributeError):
        channel.has("a")


def test_shut_leaves_files_open(connect: Connect, tmp_path: Path) -> None:
    """A file whose descriptor appeared while the channel connected is not shut."""
    channel = connect()
    with open(tmp_path / "log", "w+b") as file:
        cast(Any, channel).sockets.add(file.fileno())
        channel.shut()
        assert file.write(b"still open")


def test_a_store_that_is_not_there_holds_up_no_connection_to_another_one(connect: Connect) -> None:
    """Each channel shuts its own connection only, whatever other threads connect to meanwhile."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port, prompt, late = place.getsockname()[1], list[Channel](), list[Channel]()
        waiting = threading.Thread(target=lambda: late.append(Channel("127.0.0.1", port, "a/")), daemon=True)
        waiting.start()
        waiting.join(0.1)  # long enough to be refused
        threading.Thread(target=lambda: prompt.append(connect()), daemon=True).start()
        assert soon(lambda: bool(prompt))
        place.listen()
        descriptor = place.detach()
    store: Any = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor, use_libuv=False
    )
    waiting.join(15)
    late[0].shut()
    prompt[0].set("a", {"x": 1})
    assert prompt[0].get("a") == {"x": 1}
    assert store.port == port


@pytest.mark.skipif(
    torch.__version__ < "2.5", reason="the store of torch 2.4 closes no connection before its process ends"
)
def test_a_connection_is_over_once_the_store_has_closed_it(capfd: pytest.CaptureFixture[str]) -> None:
    """That is asked of the kernel: torch prints nothing."""
    store: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    channel = Channel("127.0.0.1", store.port, "countoff/test/")
    assert not channel.is_over()
    del store
    assert soon(channel.is_over)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("family", ["pipe", "unix socket"])
def test_only_sockets_to_the_store_are_shut(family: str) -> None:
    """A pipe or a socket to elsewhere stays usable, and no descriptor is left open."""
    ends = os.pipe() if family == "pipe" else tuple(end.detach() for end in socket.socketpair())
    before = set(os.listdir("/dev/fd"))
    for end in ends:
        with pytest.raises(OSError, match="is no"), to_port(end, 1234):
            pass
    assert set(os.listdir("/dev/fd")) <= before  # the store of an earlier test may close some of its own
    os.write(ends[1], b"still open")
    assert os.read(ends[0], 10) == b"still open"
    for end in ends:
        os.close(end)


def test_a_closed_port_is_told_from_an_open_one(store: Any) -> None:
    """The port of a store is open, and a port on which no process listens is closed."""
    assert probe("127.0.0.1", store.port) == "open"
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert probe("127.0.0.1", closed.getsockname()[1]) == "closed"

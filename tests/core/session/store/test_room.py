"""Who hosts a store, and whether that process may open enough."""

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from countoff.core.session.store import room


@pytest.fixture(params=["127.0.0.1", "::"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    """A port on which this process listens, as a store does by IPv4 or by both."""
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.create_server((request.param, 0), family=family, dualstack_ipv6=":" in request.param) as server:
        yield server.getsockname()[1]


def test_a_store_of_this_process_is_found(port: int) -> None:
    assert room.host_of(port) == os.getpid()


def test_a_store_of_the_process_above_is_found(port: int) -> None:
    """As torchrun's, which starts the ranks."""
    ask = f"from countoff.core.session.store import room; print(room.host_of({port}))"
    found = subprocess.run([sys.executable, "-c", ask], stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    assert int(found.stdout) == os.getpid()


def test_whose_store_it_is_may_be_unknown(port: int) -> None:
    """It may be on another host, or of a process that did not start this one; a connection to it is no store."""
    far, near = socket.create_connection(("127.0.0.1", port)), socket.socket()
    near.bind(("127.0.0.1", 0))  # nobody listens
    for unknown in (far.getsockname()[1], near.getsockname()[1]):
        assert room.host_of(unknown) is None
    far.close()
    near.close()


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (2 * 100 + 128, ""),
        (2 * 100 + 127, "may open {limit} files, and 100 ranks need {needed}: raise its limit (`ulimit -n {needed}`"),
    ],
)
def test_there_is_room_for_all_ranks_and_some_files(more: int, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = len(os.listdir(f"/proc/{os.getpid()}/fd")) - 1  # that of the listing
    found = SimpleNamespace(**vars(resource))
    found.prlimit = lambda pid, what: (taken + 1 + more, 1 << 20)
    monkeypatch.setattr(room, "resource", found)
    words = reason.format(limit=taken + 1 + more, needed=taken + 1 + 328)
    assert words in (why := room.lack_of_room(os.getpid(), 100))
    assert bool(why) is bool(reason)


def test_a_limit_that_nobody_knows_is_none() -> None:
    """The process may be that of another user, on another host, or gone."""
    assert room.lack_of_room(None, 1 << 30) == ""
    assert room.lack_of_room(1 << 30, 1 << 30) == ""

"""The directory of hosts on a store in memory: which host a rank is on, and which ranks a host has."""

from collections.abc import Mapping

import pytest

from countoff.core.session.liveness import hosts
from tests.fake_store import FakeStore


def directory(monkeypatch: pytest.MonkeyPatch, ranks: Mapping[int, tuple[str, str]]) -> FakeStore:
    """A store in which ranks have registered, each with the id and the name of its host."""
    store = FakeStore()
    for rank, (host, name) in ranks.items():
        monkeypatch.setattr(hosts.socket, "gethostname", lambda name=name: name)
        hosts.register(store, rank, host)
    return store


def test_ranks_are_found_by_their_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message gets the names of its ranks' hosts, however late and in whichever order they came."""
    places = {3: ("x", "node-1"), 0: ("w", "node-0"), 2: ("x", "node-1"), 1: ("w", "node-0")}
    store = directory(monkeypatch, places)
    assert hosts.names(store, (3, 0)) == {3: "node-1", 0: "node-0"}
    assert hosts.names(store, (3, 9)) == {3: "node-1"}  # rank 9 has not begun
    assert hosts.names(store, ()) == {}
    assert hosts.ranks_on(store, 3, range(4)) == [2, 3]
    assert hosts.ranks_on(store, 0, range(4)) == [0, 1]


def test_one_host_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    store = directory(monkeypatch, {0: ("w", "node-0"), 1: ("w", "node-0")})
    assert not hosts.several(store)
    assert hosts.names(store, (0, 1)) == {}


def test_hosts_of_one_name_get_their_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers may all be called localhost."""
    store = directory(monkeypatch, {0: ("w", "localhost"), 1: ("x", "localhost")})
    assert hosts.names(store, (0, 1)) == {0: "localhost (192.0.2.1)", 1: "localhost (192.0.2.1)"}
    assert hosts.names(store, (1,)) == {1: "localhost"}

"""The rendezvous on a real store: where ranks meet, by which address, and what an earlier attempt has left there."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from countoff.core.session.store import rendezvous as module
from countoff.core.session.store.channel import Channel, ChannelError, decode, encode
from countoff.core.session.store.rendezvous import (
    Question,
    StoreAddress,
    choose_place,
    default_store,
    find_place,
    keep_publishing,
    publish,
)


@pytest.fixture
def store() -> Any:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def client(store: Any, host: str) -> Any:
    """A client of a store, by a name or an address of its host."""
    return PrefixStore("default_pg", TCPStore(host, store.port, is_master=False, wait_for_workers=False))


def meet(store: Any, number: int = 0, place: StoreAddress | None = None) -> tuple[StoreAddress, StoreAddress]:
    """Where the ranks meet, as rank 0 and rank 1 know it, if rank 1 asks first."""
    question = Question(store, number)
    place = place or choose_place(store)
    publish(store, number, place)
    found = question.answer()
    assert found is not None
    return place, found


def test_a_tcp_store_is_used_as_it_is(store: Any) -> None:
    """If the job's store is a TCPStore, also below prefixes, all ranks use it and rank 0 hosts none."""
    first, second = meet(PrefixStore("default_pg", PrefixStore("attempt_0", store)))
    assert first == second
    assert (first.host, first.port) == (store.host, store.port)
    assert first.hosted is None


@pytest.mark.parametrize("kind", ["tcp", "hash"])
def test_all_ranks_learn_why_they_do_not_meet(kind: str, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 knows whether there is room for all of them, and opens no store without it."""
    asked: list[tuple[int | None, int]] = []
    monkeypatch.setattr(module, "lack_of_room", lambda *about: asked.append(about) or "there is no room")
    place = choose_place(store if kind == "tcp" else HashStore(), 4)
    assert asked == [(os.getpid(), 4)]
    assert [each.refused for each in meet(store, place=place)] == ["there is no room"] * 2
    assert place.hosted is None


def test_each_rank_reaches_the_store_by_its_own_address(store: Any) -> None:
    """The name that the store's host has on rank 0 may mean another host elsewhere, as `localhost` does."""
    first, others = client(store, "localhost"), client(store, "127.0.0.1")
    place = choose_place(first)
    question = Question(others, 0)
    publish(first, 0, place)
    found = question.answer()
    assert found is not None
    assert (place.host, found.host) == ("localhost", "127.0.0.1")
    assert (place.port, place.nonce) == (found.port, found.nonce)


def test_every_place_has_its_own_keys(store: Any) -> None:
    """A restarted job on the same store must not read what the job before has written."""
    assert len({meet(store, number)[0].nonce for number in (0, 1, 1)}) == 3


def test_a_guard_meets_where_rank_0_has_others_open(store: Any) -> None:
    """The guards of a process share their threads, so rank 0 sends the ranks to the place that it uses already."""
    first, _ = meet(store)
    assert meet(store, 1, first) == (first, first)


@pytest.mark.parametrize("kind", ["tcp", "file", "hash"])
def test_a_place_of_an_earlier_attempt_is_refused(kind: str, store: Any, tmp_path: Path) -> None:
    """A store may outlive an attempt; a rank of the next one waits for the rank 0 of its own attempt."""
    shared = {"tcp": store, "file": FileStore(str(tmp_path / "store"), 2), "hash": HashStore()}[kind]
    stale, _ = meet(shared)
    questions = [Question(shared, 0), Question(shared, 0)]
    assert [question.answer() for question in questions] == [None, None]
    with pytest.raises(TimeoutError):
        find_place(shared, 0, 2, deadline=time.monotonic())
    place = choose_place(shared)
    publish(shared, 0, place)
    assert [question.answer() for question in questions] == [place, place]
    assert place.nonce != stale.nonce


def test_a_rank_that_asks_late_is_answered(store: Any) -> None:
    """Rank 0 answers for as long as a rank may be missing, and not longer."""
    place, all_met = choose_place(store), threading.Event()
    publish(store, 0, place)
    rank_0 = threading.Thread(target=keep_publishing, args=(store, 0, place, 2, all_met.wait), daemon=True)
    rank_0.start()
    own = client(store, "127.0.0.1").underlying_store  # a client serialises its calls
    for _ in range(3):
        assert find_place(own, 0, 2, deadline=time.monotonic() + 20) == place
    all_met.set()
    rank_0.join(20)
    assert not rank_0.is_alive()


def test_ranks_leave_one_counter_behind(store: Any) -> None:
    """However many ranks ask, and however often, the store keeps the count and the last place of each guard."""
    before = store.num_keys()
    for number in (0, 0, 1):
        for _ in range(20):
            meet(store, number)
    assert store.num_keys() == before + 3


@pytest.mark.parametrize("kind", ["file", "hash"])
def test_rank_0_hosts_a_store_if_there_is_no_tcp_store(kind: str, tmp_path: Path) -> None:
    """If the job's store is no TCPStore, rank 0 hosts one, and both ranks can read and write there."""
    other = FileStore(str(tmp_path / "store"), 2) if kind == "file" else HashStore()
    first, second = meet(other)
    assert first == second
    assert (first.hosted is None, second.hosted is None) == (False, True)
    Channel(first.host, first.port, "countoff/").compare_and_set("a", {"x": 1})
    assert Channel(second.host, second.port, "countoff/").get("a") == {"x": 1}


def test_a_place_of_an_older_version_is_accepted() -> None:
    """Its rank 0 counts nobody, and does not say whether it hosts the store."""
    store: Any = HashStore()
    store.set("countoff/0", encode({"host": "node-0", "port": 29500, "nonce": "0123456789ab"}))
    place = find_place(store, 0, 2, deadline=time.monotonic())
    assert place == StoreAddress("node-0", 29500, "0123456789ab")


def test_an_older_version_finds_the_address_that_it_reads() -> None:
    """Rank 0 publishes the store's address, which a rank of this version has itself."""
    store: Any = HashStore()
    publish(store, 0, StoreAddress("node-0", 29500, "0123456789ab"))
    record = decode(store.get("countoff/0"))
    assert (record["host"], record["port"], record["nonce"]) == ("node-0", 29500, "0123456789ab")


class Incomplete(Store):
    """A store of a class in Python that can do what a process group needs, and not what the rendezvous needs."""

    def add(self, key: str, value: int) -> int:
        del key
        return value


@pytest.mark.parametrize("meets", [choose_place, lambda store: Question(store, 0)], ids=["rank 0", "another rank"])
def test_a_store_that_lacks_a_method_is_refused_at_once(meets: Any) -> None:
    """Every rank says which method it is, and none waits for an answer that cannot come."""
    kept = Incomplete()
    with pytest.raises(RuntimeError, match=r"^the job's store is of a Python class that has no check\(\), or "):
        meets(PrefixStore("default_pg", kept))


def test_a_store_to_which_nothing_refers_is_refused_at_once() -> None:
    """Torch keeps the C++ part of such a store alone, which has none of its methods."""
    with pytest.raises(RuntimeError, match=r"has no add\(\), or the program keeps no reference to it"):
        choose_place(PrefixStore("default_pg", Incomplete()))


def test_without_rank_0_a_rank_gives_up_at_its_deadline() -> None:
    with pytest.raises(TimeoutError, match="rank 0 has not counted off"):
        find_place(HashStore(), 0, 2, deadline=time.monotonic())


def test_a_closing_rank_does_not_wait_for_rank_0() -> None:
    """A rank whose guard is closing gives up the rendezvous at once."""
    with pytest.raises(TimeoutError):
        find_place(HashStore(), 0, 2, deadline=float("inf"), given_up=lambda: True)


@pytest.mark.parametrize("value", ["not ours", "[]", '{"nonce": "0123456789ab", "asked": -1}', '{"asked": 1}'])
def test_garbage_at_the_rendezvous_is_refused(value: str) -> None:
    other: Any = HashStore()
    other.set("countoff/0", value)
    with pytest.raises((ChannelError, ValueError, KeyError)):
        find_place(other, 0, 2, deadline=time.monotonic() + 5)


def test_without_a_process_group_there_is_no_store() -> None:
    assert default_store() is None

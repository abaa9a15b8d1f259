"""The threads of a process: what they report when its guards close early, and when they have a voice."""

import errno
import os
import threading
from typing import Any

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from countoff.core import Settings
from countoff.core.state import State
from countoff.core.store.rendezvous import Place
from countoff.core.threads import host_voice
from countoff.core.threads import process_threads as module
from countoff.core.threads.link import Link
from countoff.core.threads.member import Member
from countoff.core.threads.process_threads import ProcessThreads
from tests.fake_store import FakeStore

PLACE = Place("127.0.0.1", 1, "0123456789ab")


class _Store(FakeStore):
    def at(self, prefix: str) -> FakeStore:
        return self

    def release(self) -> None:
        pass


@pytest.mark.parametrize("closing", [True, False])
def test_a_guard_that_closes_while_it_connects_is_silent(
    closing: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A short healthy job prints nothing; a listener that cannot connect while its guard is open says so."""
    threads, member = ProcessThreads(PLACE, Link(0, range(2)), None, Settings()), Member(State(0, 2, Settings(), {}), 0)

    def connect(*_: object) -> Any:
        if threading.current_thread().name == "countoff speaker":
            return _Store()
        if closing:
            member.participation.closing.set()
            threads.closing.set()
        raise TimeoutError("no connection")

    monkeypatch.setattr(module, "Channel", connect)
    threads.add(member)
    threads.listener.join(30)
    assert bool(member.failure) is not closing
    assert threads.remove(member)
    threads.close()
    assert ("LateRank" in capsys.readouterr().err) is not closing


def test_the_listener_connects_while_the_speaker_introduces_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, member = ProcessThreads(PLACE, Link(1, range(2)), None, Settings()), Member(State(1, 2, Settings(), {}), 0)
    listened: list[bool] = []

    class Waits(_Store):
        def add(self, key: str, amount: int) -> int:
            listened.append(threads.listening.wait(10))
            return super().add(key, amount)

    monkeypatch.setattr(module, "Channel", lambda *_: Waits())
    monkeypatch.setattr(Waits, "wait", lambda *_: threads.closing.wait(), raising=False)
    introduced = threading.Event()
    member.speaker.hand(lambda _: introduced.set())
    threads.add(member)
    assert introduced.wait(60)
    threads.remove(member)
    threads.close()
    assert set(listened) == {True}


@pytest.mark.parametrize("lost", [False, True])
def test_a_rank_that_has_lost_its_voice_has_no_other_one(lost: bool) -> None:
    """A guard that it opens later meets ranks that look for its reports where it speaks for itself."""
    store: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    link, place = Link(1, range(2)), Place("127.0.0.1", store.port, "0123456789ab", voice_ranks=2)
    if lost:
        link.voice_lost.set()
    threads, member = ProcessThreads(place, link, None, Settings()), Member(State(1, 2, Settings(), {}), 0)
    introduced = threading.Event()
    member.speaker.hand(lambda _: introduced.set())
    threads.add(member)
    assert introduced.wait(60)
    has_one = store.check([f"{place.prefix}voice/{link.heartbeats.host}/0"])
    threads.remove(member)
    threads.close()
    assert has_one is link.voiced is not lost


def test_a_voice_that_cannot_reach_itself_speaks_for_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process may open nothing more: the rank has a connection of its own, and tells so."""
    store: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    link, place = Link(1, range(2)), Place("127.0.0.1", store.port, "0123456789ab", voice_ranks=2)

    def refuse(*_: object) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(host_voice.socket, "create_connection", refuse)
    monkeypatch.setattr(module, "knock", lambda *_: "open")
    threads, member = ProcessThreads(place, link, None, Settings()), Member(State(1, 2, Settings(), {}), 0)
    introduced = threading.Event()
    member.speaker.hand(lambda _: introduced.set())
    threads.add(member)
    assert introduced.wait(60)
    assert store.get(f"{place.prefix}fallen/1") == b'{"rank":1}'
    assert store.check([f"{place.prefix}rank/1"])
    assert not member.failure
    threads.remove(member)
    threads.close()


def test_a_rank_that_found_no_voice_looks_for_none_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have been told, and would not look for its reports where a voice writes them."""
    store: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    link, place = Link(1, range(2)), Place("127.0.0.1", store.port, "0123456789ab", voice_ranks=2)
    monkeypatch.setattr(module, "find_voice", lambda *_, **__: (None, None))
    threads, member = ProcessThreads(place, link, None, Settings()), Member(State(1, 2, Settings(), {}), 0)
    threads.add(member)
    assert threads.connected.wait(60)
    threads.remove(member)
    threads.close()
    assert link.voice_lost.is_set()


def test_a_rank_that_has_lost_its_voice_tries_no_store_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would try for half a minute, and print a trace of its C++ code for each try."""
    monkeypatch.setattr(module, "Channel", lambda *_: pytest.fail("it connects"))
    threads = ProcessThreads(PLACE, Link(1, range(2)), None, Settings())
    with pytest.raises(RuntimeError, match=r"^the job's store has ended the connection$"):
        threads.connect_again()


def test_a_rank_looks_at_no_other_one_before_it_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks wait for its report. It has introduced itself by then, and has sent a heartbeat."""
    threads, member = ProcessThreads(PLACE, Link(1, range(2)), None, Settings()), Member(State(1, 2, Settings(), {}), 0)
    store, looked = _Store(), list[tuple[str, ...]]()
    has = store.has
    monkeypatch.setattr(store, "has", lambda *keys: looked.append(keys) or has(*keys))
    monkeypatch.setattr(store, "wait", lambda _: threads.closing.wait())
    monkeypatch.setattr(module, "Channel", lambda *_: store)
    reported = threading.Event()
    looked_before: list[tuple[str, ...]] = []
    member.speaker.hand(lambda _: (looked_before.extend(looked), reported.set()))
    threads.add(member)
    assert reported.wait(30)
    assert looked_before == []
    assert store.get("rank/1")
    assert store.get("heartbeat/1")
    threads.remove(member)
    threads.close()


def test_a_lifeline_is_withdrawn_before_the_speaker_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next threads at the same place may have none, and its host's other ranks would rely on it."""
    store, threads = _Store(), ProcessThreads(PLACE, Link(1, range(2)), None, Settings())
    member = Member(State(1, 2, Settings(), {}), 0)
    monkeypatch.setattr(module, "Channel", lambda *_: store)
    monkeypatch.setattr(store, "wait", lambda _: threads.closing.wait(), raising=False)
    threads.lifelines.tell(store, stands=True)
    threads.add(member)
    assert threads.connected.wait(30)
    assert store.get("lifeline/1")["stands"]
    assert threads.remove(member)
    threads.close()
    threads.speaker.join(30)
    assert not store.get("lifeline/1")["stands"]


def test_a_broken_lifeline_does_not_end_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on to look after the guards, and the lifelines are closed: heartbeats decide then."""
    threads, member = ProcessThreads(PLACE, Link(0, range(2)), None, Settings()), Member(State(0, 2, Settings(), {}), 0)
    looks, failed = threading.Semaphore(0), threading.Event()

    def fail() -> None:
        failed.set()
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(threads.lifelines, "poll", fail)
    monkeypatch.setattr(member.watchdog, "look", lambda _: failed.is_set() and looks.release())
    monkeypatch.setattr(module, "Channel", lambda *_: _Store())
    monkeypatch.setattr(_Store, "wait", lambda *_: threads.closing.wait())
    threads.add(member)
    assert looks.acquire(timeout=30)
    assert threads.lifelines.closed
    assert threads.remove(member)
    threads.close()


def test_lifelines_whose_descriptors_are_closed_can_be_closed() -> None:
    """A user's code that closes all descriptors must not break the end of a fit."""
    threads = ProcessThreads(PLACE, Link(0, range(2)), None, Settings())
    threads.lifelines.open(FakeStore())
    for end in threads.lifelines.ends:
        os.close(end.fileno())
    threads.lifelines.close()

"""The threads of a process: what they report, in which order, and how they end."""

import errno
import os
import threading
from typing import Any

import pytest

from countoff.core import Settings
from countoff.core.session.state import State
from countoff.core.session.store.rendezvous import StoreAddress
from countoff.core.session.threads import process_threads as module
from countoff.core.session.threads.process_threads import ProcessThreads
from countoff.core.session.threads.registration import Registration
from countoff.core.session.threads.session import Session
from tests.fake_store import FakeStore

PLACE = StoreAddress("127.0.0.1", 1, "0123456789ab")


class _Store(FakeStore):
    def at(self, prefix: str) -> FakeStore:
        return self

    def release(self) -> None:
        pass


@pytest.mark.parametrize("closing", [True, False])
def test_a_guard_that_closes_while_it_connects_is_silent(
    closing: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A short healthy job prints nothing; a reader that cannot connect while its guard is open says so."""
    threads, registration = (
        ProcessThreads(PLACE, Session(0, range(2)), None, Settings()),
        Registration(State(0, 2, Settings(), {})),
    )

    def connect(*_: object) -> Any:
        if threading.current_thread().name == "countoff writer":
            return _Store()
        if closing:
            registration.status.closing.set()
            threads.closing.set()
        raise TimeoutError("no connection")

    monkeypatch.setattr(module, "Channel", connect)
    threads.add(registration)
    threads.reader_thread.join(30)
    assert bool(registration.failure) is not closing
    assert threads.remove(registration)
    threads.close()
    assert ("LateRank" in capsys.readouterr().err) is not closing


def test_the_reader_connects_while_the_writer_registers_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, registration = (
        ProcessThreads(PLACE, Session(1, range(2)), None, Settings()),
        Registration(State(1, 2, Settings(), {})),
    )
    waited: list[bool] = []

    class Waits(_Store):
        def add(self, key: str, amount: int) -> int:
            waited.append(threads.reader_connected.wait(10))
            return super().add(key, amount)

    monkeypatch.setattr(module, "Channel", lambda *_: Waits())
    monkeypatch.setattr(Waits, "wait", lambda *_: threads.closing.wait(), raising=False)
    registered = threading.Event()
    registration.writer.submit(lambda _: registered.set())
    threads.add(registration)
    assert registered.wait(60)
    threads.remove(registration)
    threads.close()
    assert set(waited) == {True}


def test_a_rank_looks_at_no_other_one_before_it_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks wait for its report. It has registered by then, and has sent a heartbeat."""
    threads, registration = (
        ProcessThreads(PLACE, Session(1, range(2)), None, Settings()),
        Registration(State(1, 2, Settings(), {})),
    )
    store, looked = _Store(), list[tuple[str, ...]]()
    has = store.has
    monkeypatch.setattr(store, "has", lambda *keys: looked.append(keys) or has(*keys))
    monkeypatch.setattr(store, "wait", lambda _: threads.closing.wait())
    monkeypatch.setattr(module, "Channel", lambda *_: store)
    reported = threading.Event()
    looked_before: list[tuple[str, ...]] = []
    registration.writer.submit(lambda _: (looked_before.extend(looked), reported.set()))
    threads.add(registration)
    assert reported.wait(30)
    assert looked_before == []
    assert store.get("rank/1")
    assert store.get("heartbeat/1")
    threads.remove(registration)
    threads.close()


def test_lifelines_are_looked_after_though_heartbeats_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that is gone is to be found as soon in a large job. Whose lifeline it is depends on the host's ranks."""
    store, session = _Store(), Session(1, range(2), seconds=60.0)
    threads = ProcessThreads(PLACE, session, None, Settings())
    registration, tended, knew = Registration(State(1, 2, Settings(), {})), threading.Semaphore(0), list[set[int]]()
    monkeypatch.setattr(module, "TEND_SECONDS", 0.05)
    monkeypatch.setattr(module, "Channel", lambda *_: store)
    monkeypatch.setattr(store, "wait", lambda _: threads.closing.wait(), raising=False)
    monkeypatch.setattr(
        threads.lifelines, "tend", lambda _: (knew.append({*session.heartbeats.neighbours}), tended.release())
    )
    threads.add(registration)
    for _ in range(3):
        assert tended.acquire(timeout=30)
    assert threads.remove(registration)
    threads.close()
    assert knew[0] == {1}
    assert store.get("heartbeat/1") == {"heartbeat": 1, "read": 0, "every": 60.0}


def test_a_lifeline_is_withdrawn_before_the_writer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next threads at the same place may have none, and its host's other ranks would rely on it."""
    store, threads = _Store(), ProcessThreads(PLACE, Session(1, range(2)), None, Settings())
    registration = Registration(State(1, 2, Settings(), {}))
    monkeypatch.setattr(module, "Channel", lambda *_: store)
    monkeypatch.setattr(store, "wait", lambda _: threads.closing.wait(), raising=False)
    threads.lifelines.tell(store, stands=True)
    threads.add(registration)
    assert threads.connected.wait(30)
    assert store.get("lifeline/1")["stands"]
    assert threads.remove(registration)
    threads.close()
    threads.writer_thread.join(30)
    assert not store.get("lifeline/1")["stands"]


def test_a_broken_lifeline_does_not_end_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on to look after the guards, and the lifelines are closed: heartbeats decide then."""
    threads, registration = (
        ProcessThreads(PLACE, Session(0, range(2)), None, Settings()),
        Registration(State(0, 2, Settings(), {})),
    )
    looks, failed = threading.Semaphore(0), threading.Event()

    def fail() -> None:
        failed.set()
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(threads.lifelines, "poll", fail)
    monkeypatch.setattr(registration.watchdog, "look", lambda _: failed.is_set() and looks.release())
    monkeypatch.setattr(module, "Channel", lambda *_: _Store())
    monkeypatch.setattr(_Store, "wait", lambda *_: threads.closing.wait())
    threads.add(registration)
    assert looks.acquire(timeout=30)
    assert threads.lifelines.closed
    assert threads.remove(registration)
    threads.close()


def test_lifelines_whose_descriptors_are_closed_can_be_closed() -> None:
    """A user's code that closes all descriptors must not break the end of a fit."""
    threads = ProcessThreads(PLACE, Session(0, range(2)), None, Settings())
    threads.lifelines.open(FakeStore())
    for end in threads.lifelines.ends:
        os.close(end.fileno())
    threads.lifelines.close()

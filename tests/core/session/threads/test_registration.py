"""A registration without a store of its own: a verdict that comes while it closes, and what a lost store means."""

import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from countoff.core import Settings, Verdict
from countoff.core.protocol.records import verdict_entry
from countoff.core.session.liveness.lifelines import Hub, Loss
from countoff.core.session.state import State
from countoff.core.session.store.channel import Channel
from countoff.core.session.store.rendezvous import StoreAddress
from countoff.core.session.threads import process_threads
from countoff.core.session.threads import registration as module
from countoff.core.session.threads.process_threads import ProcessThreads
from countoff.core.session.threads.registration import Registration
from tests.fake_store import FakeStore

LOST = Verdict("LostRank", "rank 0 is gone.", (0,), gone=True)


class _VerdictAtGoodbye(FakeStore):
    """A store in which another rank's verdict stands as soon as this rank says goodbye."""

    def delete(self, key: str) -> None:
        super().delete(key)
        if key == "joined/1":
            self.compare_and_set("log/0", {**verdict_entry("end", LOST), "guard": 0})

    def at(self, prefix: str) -> FakeStore:
        return self

    def release(self) -> None:
        pass


def test_a_verdict_that_comes_with_the_goodbye_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program then ends with exit code 87: without the verdict nobody could tell why."""
    registration, store = Registration(State(1, 2, Settings(), {})), _VerdictAtGoodbye()

    def channel(*arguments: Any) -> Channel:
        if threading.current_thread().name == "countoff writer":
            return store
        while not arguments[3]():  # the writer, not the reader, is then the one that receives the verdict
            time.sleep(0.002)
        raise TimeoutError("no connection")

    monkeypatch.setattr(process_threads, "Channel", channel)
    monkeypatch.setattr(module, "default_store", lambda: store)
    monkeypatch.setattr(module, "find_place", lambda *_, **__: StoreAddress("127.0.0.1", 1, "0123456789ab"))
    registration.start()
    told = threading.Event()
    registration.writer.submit(lambda _: told.set())
    assert told.wait(30)
    registration.close()
    assert registration.state.end is not None
    assert capsys.readouterr().err.count("LostRank: rank 0 is gone.") == 1


class _SlowStore(FakeStore):
    """A store that is slow to write an entry; a client whose socket is shut in the meantime has not written it."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self._shut = threading.Event(), threading.Event()

    def compare_and_set(self, key: str, record: Any) -> dict[str, Any]:
        if record["type"] == "ends":
            if self._shut.wait(1.0):
                raise RuntimeError("Broken pipe")
            self.written.set()
        return super().compare_and_set(key, record)

    def shut(self) -> None:
        self._shut.set()

    def at(self, prefix: str) -> FakeStore:
        return self

    def release(self) -> None:
        pass


@pytest.mark.parametrize("policy", ["raise", "stop"])
def test_what_other_ranks_may_wait_for_is_written_before_a_guard_is_closed(
    policy: Literal["raise", "stop"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where ranks are kept even, one that left its loop alone would else leave the others waiting for ever."""
    monkeypatch.setattr(module, "DRAIN_SECONDS", 0.01)
    registration, store = Registration(State(0, 2, Settings(uneven_train=policy), {})), _SlowStore()

    def channel(*arguments: Any) -> Channel:
        if threading.current_thread().name == "countoff writer":
            return store
        raise TimeoutError("no connection")

    monkeypatch.setattr(process_threads, "Channel", channel)
    connected = ProcessThreads(
        StoreAddress("127.0.0.1", 1, "0123456789ab"), registration.writer.session, None, Settings()
    )
    connected.reader_thread = threading.Thread(target=int)  # what other ranks write is of no matter here
    connected.add(registration)
    assert connected.connected.wait(30)
    registration.writer.submit(registration.writer.append({"type": "ends", "opened": 1, "at": 3}))
    registration.leave(connected)
    assert store.written.is_set() is (policy == "stop")


ELSEWHERE = Hub("another host", 1, b"", b"", (), True, (0, 1))


@pytest.mark.parametrize(
    ("found", "hub", "seconds_ago", "sentence"),
    [
        ("silent", ELSEWHERE, None, "host node-0 with ranks 0, 1 does not answer."),
        ("silent", replace(ELSEWHERE, ranks=()), None, "the host of the job's store (192.0.2.1) does not answer."),
        (
            "silent",
            replace(ELSEWHERE, has_store=False),
            None,
            "the host of the job's store (192.0.2.1) does not answer.",
        ),
        ("silent", None, None, "the host of the job's store (192.0.2.1) does not answer."),
        ("closed", ELSEWHERE, None, "rank 0 on node-0 or whoever hosts the job's store is gone."),
        ("closed", ELSEWHERE, 0.0, "rank 0 on node-0 is gone."),
        ("closed", ELSEWHERE, 100.0, "rank 0 on node-0 or whoever hosts the job's store is gone."),
    ],
)
def test_a_lost_store_is_explained(
    found: str, hub: Hub | None, seconds_ago: float | None, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its host if that does not answer, by what the lifelines have seen just now, or as far as anybody can tell."""
    monkeypatch.setattr(module, "BETTER_CAUSE_SECONDS", 0.05)
    monkeypatch.setattr(module, "probe", lambda *_: found)
    registration = Registration(State(2, 4, Settings(), {}, complete=True))
    session = registration.writer.session
    session.store_address, session.heartbeats.hosts = ("192.0.2.1", 1), {0: "node-0", 2: "node-1"}
    connected = ProcessThreads(StoreAddress("127.0.0.1", 1, "0123456789ab"), session, None, Settings())
    connected.writer_channel = FakeStore()
    connected.lifelines.hub = hub
    if seconds_ago is not None:
        connected.lifelines.losses.append(Loss((0,), at=time.monotonic() - seconds_ago))
    registration.threads = connected
    registration.lose(RuntimeError("Connection timed out"))
    assert registration.state.end is not None
    assert registration.state.end.sentence == sentence


def test_a_store_that_is_not_quite_gone_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel closes the connections of a killed process one after the other."""
    answers = ["open", "closed"]
    monkeypatch.setattr(module, "BETTER_CAUSE_SECONDS", 0.05)
    monkeypatch.setattr(module, "probe", lambda *_: answers.pop(0))
    registration = Registration(State(1, 2, Settings(), {}, complete=True))
    place = StoreAddress("127.0.0.1", 1, "0123456789ab")
    registration.threads = connected = ProcessThreads(place, registration.writer.session, None, Settings())
    connected.writer_channel = FakeStore()
    registration.lose(RuntimeError("failed to recv, got 0 bytes"))
    assert registration.state.end is not None
    assert registration.state.end.sentence == "rank 0 or whoever hosts the job's store is gone."


def test_training_begins_once_the_reader_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that is slow for the second connection holds it up for no longer than a sync point may."""
    waited: list[float | None] = []
    now = 100.0

    class Answered(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            nonlocal now
            now += 0.04
            return True

        def is_set(self) -> bool:
            return True

    class ReaderConnected(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout)
            return False

    registration = Registration(State(1, 2, Settings(), {}))
    registration.threads = ProcessThreads(
        StoreAddress("127.0.0.1", 1, "0123456789ab"), registration.writer.session, None, Settings()
    )
    registration.threads.reader_connected = ReaderConnected()
    monkeypatch.setattr("countoff.core.session.threads.registration.time", SimpleNamespace(monotonic=lambda: now))
    registration.wait_for_roll_call(Answered())
    assert waited == [pytest.approx(0.05)]
    assert registration.failure == ""


def test_a_rank_without_an_answer_goes_on_by_itself() -> None:
    registration = Registration(State(1, 2, Settings(deadline_seconds=0.01), {}))
    registration.wait_for_roll_call(threading.Event())
    assert registration.failure == "the job's store does not answer"

"""The monitor on a store in memory: what it does with a verdict that comes while it closes."""

import threading
import time
from typing import Any

import pytest

from countoff.core import Settings, Verdict
from countoff.core.protocol.records import verdict_entry
from countoff.core.protocol.state import State
from countoff.core.runtime import connection
from countoff.core.runtime import monitor as module
from countoff.core.runtime.channel import Channel
from countoff.core.runtime.monitor import Monitor
from countoff.core.runtime.rendezvous import Place
from tests.fake_store import FakeStore

LOST = Verdict("LostRank", "rank 0 is gone.", (0,), gone=True)


class _VerdictAtGoodbye(FakeStore):
    """A store in which another rank's verdict stands as soon as this rank says goodbye."""

    def delete(self, key: str) -> None:
        super().delete(key)
        if key == "joined/1":
            self.claim("log/0", {**verdict_entry("end", LOST), "guard": 0})

    def at(self, prefix: str) -> FakeStore:
        return self

    def release(self) -> None:
        pass


def test_a_verdict_that_comes_with_the_goodbye_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program then ends with exit code 87: without the verdict nobody could tell why."""
    monitor, store = Monitor(State(1, 2, Settings(), {}), 0), _VerdictAtGoodbye()

    def channel(*arguments: Any) -> Channel:
        if threading.current_thread().name == "countoff speaker":
            return store
        while not arguments[3]():  # the speaker, not the listener, is then the one that receives the verdict
            time.sleep(0.002)
        raise TimeoutError("no connection")

    monkeypatch.setattr(connection, "Channel", channel)
    monkeypatch.setattr(module, "default_store", lambda: store)
    monkeypatch.setattr(module, "find_place", lambda *_, **__: Place("127.0.0.1", 1, "0123456789ab"))
    monitor.start()
    told = threading.Event()
    monitor.speaker.hand(lambda _: told.set())
    assert told.wait(30)
    monitor.close()
    assert monitor.state.end is not None
    assert capsys.readouterr().err.count("LostRank: rank 0 is gone.") == 1

"""The monitor on a store in memory: what it does with a verdict that comes while it closes."""

from collections.abc import Mapping
from typing import Any

import pytest

from countoff.core import Settings, Verdict
from countoff.core.protocol.records import verdict_entry
from countoff.core.protocol.state import State
from countoff.core.runtime import listener
from countoff.core.runtime.channel import Channel
from countoff.core.runtime.monitor import Monitor
from tests.fake_store import FakeStore

LOST = Verdict("LostRank", "rank 0 is gone.", (0,), gone=True)


class _VerdictAtGoodbye(FakeStore):
    """A store in which another rank's verdict stands as soon as this rank says goodbye."""

    def set(self, key: str, record: Mapping[str, Any]) -> None:
        super().set(key, record)
        if key == "bye/1":
            self.claim("log/0", verdict_entry("end", LOST))

    def release(self) -> None:
        pass


def test_a_verdict_that_comes_with_the_goodbye_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program then ends with exit code 87: without the verdict nobody could tell why."""
    monitor = Monitor(State(1, 2, Settings(), {}), 0)
    session, store = monitor.session, _VerdictAtGoodbye()

    def connect() -> Channel:
        session.address = "127.0.0.1", 1, ""
        session.met.set()
        return store

    def connect_late(*_: object) -> Channel:  # the speaker, not the listener, is then the one that receives it
        session.closing.wait()
        raise TimeoutError("no connection")

    monkeypatch.setattr(monitor.speaker, "_connect", connect)
    monkeypatch.setattr(listener, "Channel", connect_late)
    monitor.start()
    assert session.met.wait(10)
    monitor.close()
    assert monitor.state.end is not None
    assert capsys.readouterr().err.count("LostRank: rank 0 is gone.") == 1

"""The listener without a store: what it reports when its guard closes early."""

import pytest

from countoff.core import Settings
from countoff.core.protocol.state import State
from countoff.core.runtime import listener as module
from countoff.core.runtime.listener import Listener
from countoff.core.runtime.session import Session


@pytest.mark.parametrize("closing", [True, False])
def test_a_guard_that_closes_while_it_connects_is_silent(
    closing: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A short healthy job prints nothing; a listener that cannot connect while its guard is open says so."""
    session = Session(State(0, 2, Settings(), {}), address=("127.0.0.1", 1, ""))
    session.met.set()

    def connect(*_: object) -> None:
        if closing:
            session.closing.set()
        raise TimeoutError("no connection")

    monkeypatch.setattr(module, "Channel", connect)
    Listener(session, concluded=lambda: None, lost=lambda error: None)._run()
    assert bool(session.failure) is not closing
    assert ("LateRank" in capsys.readouterr().err) is not closing

"""The speaker without its thread: what it does with the log when its turn comes."""

from typing import Literal

import pytest

from countoff.core import Settings, Verdict
from countoff.core.protocol.records import verdict_entry
from countoff.core.protocol.state import State
from countoff.core.runtime.speaker import Speaker
from tests.fake_store import FakeStore
from tests.outbox import printed

WARNING = Verdict("WrongLength", "there are 4.")


def test_a_warning_in_the_log_is_read_before_the_job_ends() -> None:
    """A short job may end before the listener has received the warning; catching up receives it all the same."""
    store, state = FakeStore(), State(0, 2, Settings(), {})
    speaker = Speaker(state, connect=lambda: store, lost=lambda error: None)
    store.set("log/0", {"type": "goodbye", "rank": 1})
    store.set("log/1", verdict_entry("notice", WARNING))
    speaker.catch_up(store)
    assert state.log.read == 2
    assert [warning.kind for warning in printed(state)] == ["WrongLength"]


def test_the_thread_ends_after_what_its_jobs_hand_over() -> None:
    """A job that hands over another one, as a report does, must not lose it to the end of the thread."""
    store, state = FakeStore(), State(1, 2, Settings(), {})
    speaker = Speaker(state, connect=lambda: store, lost=lambda error: None)
    speaker.hand(lambda _: speaker.hand(lambda channel: channel.set("span/1/1", {"closed": 0})))
    speaker.hand(None)
    for _ in range(20):
        if not speaker._turn(store):
            break
    assert store.has("span/1/1")


@pytest.mark.parametrize(("policy", "goes_on"), [("raise", False), ("warn", True)])
def test_the_thread_ends_once_a_verdict_is_printed(policy: Literal["raise", "warn"], goes_on: bool) -> None:
    """After a verdict the process ends, and nothing is left to say; with a warning it goes on."""
    store, state = FakeStore(), State(1, 2, Settings(on_divergence=policy), {})
    speaker = Speaker(state, connect=lambda: store, lost=lambda error: None)
    state.adopt(WARNING)
    speaker.hand(lambda channel: channel.set("row/1", {"rank": 1}))
    assert speaker._turn(store)  # it is not printed yet
    state.printed.set()
    speaker.hand(lambda channel: channel.set("told/1", {"told": True}))
    assert speaker._turn(store) is goes_on
    assert store.has("told/1")

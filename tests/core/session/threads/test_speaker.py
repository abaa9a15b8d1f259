"""The speaker without its thread: what it does with the log when its turn comes."""

from typing import Literal

import pytest

from countoff.core import Settings, Verdict
from countoff.core.protocol.records import verdict_entry
from countoff.core.session.state import State
from countoff.core.session.threads import speaker as module
from countoff.core.session.threads.speaker import Speaker
from tests.fake_store import FakeStore
from tests.outbox import printed

WARNING = Verdict("WrongLength", "there are 4.")


def test_a_warning_in_the_log_is_read_before_the_job_ends() -> None:
    """A short job may end before the listener has received the warning; catching up receives it all the same."""
    store, state = FakeStore(), State(0, 2, Settings(), {})
    speaker = Speaker(state)
    store.set("log/0", {"type": "goodbye", "rank": 1, "guard": 0})
    store.set("log/1", {**verdict_entry("notice", WARNING), "guard": 0})
    speaker.catch_up(store)
    assert speaker.link.read == 2
    assert [warning.kind for warning in printed(state)] == ["WrongLength"]


def test_the_end_comes_after_what_the_jobs_hand_over() -> None:
    """A job that hands over another one, as a report does, must not lose it to the end of the guard."""
    store, state = FakeStore(), State(1, 2, Settings(), {})
    speaker = Speaker(state)
    speaker.hand(lambda _: speaker.hand(lambda channel: channel.set("span/1/1", {"closed": 0})))
    speaker.hand(None)
    while not speaker.drained.is_set():
        assert not state.outbox.empty()
        speaker.turn(store)
    assert store.has("span/1/1")


@pytest.mark.parametrize(("policy", "goes_on"), [("raise", False), ("warn", True)])
def test_it_is_done_once_a_verdict_is_printed(policy: Literal["raise", "warn"], goes_on: bool) -> None:
    """After a verdict the process ends, and nothing is left to say; with a warning it goes on."""
    store, state = FakeStore(), State(1, 2, Settings(on_divergence=policy), {})
    speaker = Speaker(state)
    state.adopt(WARNING)
    speaker.hand(lambda channel: channel.set("row/1", {"rank": 1}))
    speaker.turn(store)
    assert not speaker.is_done  # it is not printed yet
    state.printed.set()
    speaker.hand(lambda channel: channel.set("told/1", {"told": True}))
    assert not speaker.is_done
    speaker.turn(store)
    assert speaker.is_done is not goes_on
    assert store.has("told/1")


@pytest.mark.parametrize(("rank", "writes"), [(0, True), (1, False)])
def test_a_goodbye_of_another_rank_is_enough_for_all_but_rank_0(rank: int, writes: bool) -> None:
    """It ends the listeners' waits. With rank 0 the store may go, so the others must know that rank 0 leaves."""
    store, state = FakeStore(), State(rank, 3, Settings(), {})
    speaker = Speaker(state)
    store.set(f"joined/{rank}", {"joined": True})
    store.set("log/0", {"type": "goodbye", "rank": 2, "guard": 0})
    told = speaker.say_goodbye()
    while not state.outbox.empty():
        speaker.turn(store)
    assert told.is_set()
    assert not store.has(f"joined/{rank}")
    assert store.has("log/1") is writes


class Looked:
    """Is never done; counts how often it was looked at."""

    def __init__(self) -> None:
        self.times = 0

    def poll(self, channel: object) -> bool:
        self.times += 1
        return self.times == 4


@pytest.mark.parametrize(("world_size", "seconds"), [(2, 0.001), (8, 0.0016), (64, 0.005), (4096, 0.005)])
def test_few_ranks_look_often_at_what_training_waits_for(world_size: int, seconds: float) -> None:
    """Many would load the store; and what is gathered in the background has time."""
    state = State(1, world_size, Settings(), {})
    speaker = Speaker(state)
    speaker.poll(Looked(), awaited=True)
    speaker.turn(FakeStore())
    assert speaker.seconds_until_look == pytest.approx(seconds)
    speaker.poll(Looked())
    speaker.turn(FakeStore())
    assert speaker.seconds_until_look == pytest.approx(0.005)


def test_ranks_of_many_parts_look_as_seldom_as_all_of_the_job() -> None:
    """They share one store, and do not know how many they are: the last part has the highest ranks."""
    speaker = Speaker(State(4088, 8, Settings(), {}, ranks=tuple(range(4088, 4096))))
    speaker.poll(Looked(), awaited=True)
    speaker.turn(FakeStore())
    assert speaker.seconds_until_look == pytest.approx(0.005)


def test_a_long_wait_keeps_no_store_busy() -> None:
    speaker, store, looked = Speaker(State(1, 2, Settings(), {})), FakeStore(), Looked()
    looked.times = 10
    speaker.poll(looked, awaited=True)
    speaker.turn(store)
    for _ in range(1000):
        speaker.look(store)
    assert speaker.seconds_until_look == pytest.approx(0.32)


def test_what_nobody_waits_for_has_a_pace_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not looked at more often because something else is, and nothing else is because of it."""
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    store, state = FakeStore(), State(1, 2, Settings(), {})
    speaker, often, slow = Speaker(state), Looked(), Looked()
    often.times = 10
    speaker.poll(often)
    speaker.turn(store)
    for _ in range(40):
        speaker.look(store)
    assert speaker.seconds_until_look == pytest.approx(0.02)
    speaker.poll_every(slow, 0.05)
    speaker.turn(store)
    assert speaker.seconds_until_look == 0
    speaker.look(store)
    assert speaker.seconds_until_look == pytest.approx(0.02)
    for _ in range(11):
        now += 0.01
        speaker.look(store)
    assert slow.times == 3
    now += 0.05
    speaker.look(store)
    now += 0.05
    speaker.look(store)
    assert slow.times == 4, "it is done"

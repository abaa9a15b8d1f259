"""The writer without its thread: what it does with the log when its turn comes."""

from typing import Literal

import pytest

from countoff.core import Settings, Verdict
from countoff.core.protocol.records import verdict_entry
from countoff.core.session.state import State
from countoff.core.session.threads import writer as module
from countoff.core.session.threads.writer import Writer
from tests.fake_store import FakeStore
from tests.outbox import printed

WARNING = Verdict("WrongLength", "there are 4.")


def test_a_warning_in_the_log_is_read_before_the_job_ends() -> None:
    """A short job may end before the reader has received the warning; catching up receives it all the same."""
    store, state = FakeStore(), State(0, 2, Settings(), {})
    writer = Writer(state)
    store.set("log/0", {"type": "goodbye", "rank": 1, "guard": 0})
    store.set("log/1", {**verdict_entry("notice", WARNING), "guard": 0})
    writer.catch_up(store)
    assert writer.session.read == 2
    assert [warning.kind for warning in printed(state)] == ["WrongLength"]


def test_the_end_comes_after_what_the_jobs_hand_over() -> None:
    """A job that hands over another one, as a report does, must not lose it to the end of the guard."""
    store, state = FakeStore(), State(1, 2, Settings(), {})
    writer = Writer(state)
    writer.submit(lambda _: writer.submit(lambda channel: channel.set("span/1/1", {"closed": 0})))
    writer.submit(None)
    while not writer.drained.is_set():
        assert not state.outbox.empty()
        writer.turn(store)
    assert store.has("span/1/1")


@pytest.mark.parametrize(("policy", "goes_on"), [("raise", False), ("warn", True)])
def test_it_is_done_once_a_verdict_is_printed(policy: Literal["raise", "warn"], goes_on: bool) -> None:
    """After a verdict the process ends, and nothing is left to say; with a warning it goes on."""
    store, state = FakeStore(), State(1, 2, Settings(on_divergence=policy), {})
    writer = Writer(state)
    state.adopt(WARNING)
    writer.submit(lambda channel: channel.set("row/1", {"rank": 1}))
    writer.turn(store)
    assert not writer.is_done  # it is not printed yet
    state.printed.set()
    writer.submit(lambda channel: channel.set("told/1", {"told": True}))
    assert not writer.is_done
    writer.turn(store)
    assert writer.is_done is not goes_on
    assert store.has("told/1")


@pytest.mark.parametrize(("rank", "writes"), [(0, True), (1, False)])
def test_a_goodbye_of_another_rank_is_enough_for_all_but_rank_0(rank: int, writes: bool) -> None:
    """It ends the readers' waits. With rank 0 the store may go, so the others must know that rank 0 leaves."""
    store, state = FakeStore(), State(rank, 3, Settings(), {})
    writer = Writer(state)
    store.set(f"joined/{rank}", {"joined": True})
    store.set("log/0", {"type": "goodbye", "rank": 2, "guard": 0})
    told = writer.say_goodbye()
    while not state.outbox.empty():
        writer.turn(store)
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
    writer = Writer(state)
    writer.poll(Looked(), awaited=True)
    writer.turn(FakeStore())
    assert writer.seconds_until_look == pytest.approx(seconds)
    writer.poll(Looked())
    writer.turn(FakeStore())
    assert writer.seconds_until_look == pytest.approx(0.005)


def test_ranks_of_many_parts_look_as_seldom_as_all_of_the_job() -> None:
    """They share one store, and do not know how many they are: the last part has the highest ranks."""
    writer = Writer(State(4088, 8, Settings(), {}, ranks=tuple(range(4088, 4096))))
    writer.poll(Looked(), awaited=True)
    writer.turn(FakeStore())
    assert writer.seconds_until_look == pytest.approx(0.005)


def test_a_long_wait_keeps_no_store_busy() -> None:
    writer, store, looked = Writer(State(1, 2, Settings(), {})), FakeStore(), Looked()
    looked.times = 10
    writer.poll(looked, awaited=True)
    writer.turn(store)
    for _ in range(1000):
        writer.look(store)
    assert writer.seconds_until_look == pytest.approx(0.32)


def test_what_nobody_waits_for_has_a_pace_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not looked at more often because something else is, and nothing else is because of it."""
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    store, state = FakeStore(), State(1, 2, Settings(), {})
    writer, often, slow = Writer(state), Looked(), Looked()
    often.times = 10
    writer.poll(often)
    writer.turn(store)
    for _ in range(40):
        writer.look(store)
    assert writer.seconds_until_look == pytest.approx(0.02)
    writer.poll_every(slow, 0.05)
    writer.turn(store)
    assert writer.seconds_until_look == 0
    writer.look(store)
    assert writer.seconds_until_look == pytest.approx(0.02)
    for _ in range(11):
        now += 0.01
        writer.look(store)
    assert slow.times == 3
    now += 0.05
    writer.look(store)
    now += 0.05
    writer.look(store)
    assert slow.times == 4, "it is done"

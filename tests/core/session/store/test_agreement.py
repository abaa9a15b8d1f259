"""Agreement on one entry of the log: who is counted, when it is reached, and what stays in the store."""

import threading
import time

import pytest

from countoff.core import FitPlan, Settings, Verdict
from countoff.core.session.state import State
from countoff.core.session.store.agreement import Agreement
from countoff.core.session.threads.writer import Writer
from tests.fake_store import FakeStore
from tests.simulator import Epoch, Job, Program, play

PROOF = Verdict("UnevenBatches", "they differ.", (1, 0))
KEY = "passed/1"


def states(world_size: int) -> list[State]:
    return [State(rank, world_size, Settings(), {}) for rank in range(world_size)]


def test_it_is_reached_once_the_last_rank_is_counted() -> None:
    """Whoever waits learns it from the key, which the last rank has deleted."""
    store = FakeStore()
    first, second, third = (Agreement(state, KEY) for state in states(3))
    for each in (first, second):
        each.count(store)
        each.look(store)
        assert not each.reached
    third.count(store)
    first.look(store)
    assert first.reached
    assert third.reached
    assert store.values == {}


@pytest.mark.parametrize("why", ["it has proved a divergence", "a verdict stands", "its count is another one"])
def test_a_rank_that_does_not_agree_is_not_counted(why: str) -> None:
    """The others then wait for its objection as long as they can."""
    store, (own, other) = FakeStore(), states(2)
    if why.startswith("it has"):
        own.propose(PROOF)
    elif why.startswith("a verdict"):
        own.adopt(PROOF)
    agrees = why.startswith(("it has", "a verdict"))
    waiting = Agreement(other, KEY)
    waiting.count(store)
    Agreement(own, KEY, lambda: agrees).count(store)
    waiting.look(store)
    assert not waiting.reached


def test_a_rank_that_objects_does_not_reach_it() -> None:
    """A rank that was not counted itself finds no key either; that means nothing."""
    store, (own, _) = FakeStore(), states(2)
    own.propose(PROOF)
    agreement = Agreement(own, KEY)
    agreement.count(store)
    agreement.look(store)
    assert not agreement.reached


def test_agreement_ends_the_wait_for_an_objection() -> None:
    """A rank goes on as soon as all ranks agree, not after the whole time that it may wait."""
    store, (own, other) = FakeStore(), states(2)
    writer = Writer(own)
    agreement, late = Agreement(own, KEY), Agreement(other, KEY)
    agreement.count(store)
    arguments = store, agreement, time.monotonic() + 3600
    waiting = threading.Thread(target=writer.wait_for_objection, args=arguments, daemon=True)
    waiting.start()
    late.count(store)
    waiting.join(30)
    assert agreement.reached
    assert not waiting.is_alive()


@pytest.mark.parametrize("what", ["a verdict", "a verdict to write"])
def test_the_wait_ends_for_what_comes_first(what: str) -> None:
    """A verdict, also one that this rank has to write itself, must not wait for ranks that may never agree."""
    store, (own, _) = FakeStore(), states(2)
    writer = Writer(own)
    agreement = Agreement(own, KEY)
    agreement.count(store)
    arguments = store, agreement, time.monotonic() + 3600
    waiting = threading.Thread(target=writer.wait_for_objection, args=arguments, daemon=True)
    waiting.start()
    own.adopt(PROOF) if what == "a verdict" else own.propose(PROOF)
    waiting.join(30)
    assert not agreement.reached
    assert not waiting.is_alive()


def test_other_work_does_not_shorten_the_wait() -> None:
    """A report that is queued can wait; the next collective of a rank that goes on too early cannot be taken back."""
    store, (own, _) = FakeStore(), states(2)
    writer = Writer(own)
    agreement = Agreement(own, KEY)
    agreement.count(store)
    writer.submit(lambda channel: None)
    arguments = store, agreement, time.monotonic() + 3600
    waiting = threading.Thread(target=writer.wait_for_objection, args=arguments, daemon=True)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    own.adopt(PROOF)
    waiting.join(30)
    assert not waiting.is_alive()


def test_nothing_of_it_stays_in_the_store() -> None:
    """A healthy job of many epochs leaves no key behind for each of them."""
    epochs = tuple(Epoch(4, frozenset({2, 4}), {0: (3,)}) for _ in range(3))
    ranks = play(Job(tuple(Program(epochs, FitPlan(batch_size=8), ahead=ahead) for ahead in (1, 1, 1))), 7)
    assert all(rank.over and rank.state.end is None for rank in ranks)
    assert [key for key in ranks[0].store.values if key.startswith(("passed/", "announced/"))] == []

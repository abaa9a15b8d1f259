"""The end of a question: for which ranks its own waits, and for which no more."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from countoff.core import Settings
from countoff.core.session.state import State
from countoff.core.session.threads.questions import Questions
from tests.fake_store import FakeStore, FakeWriter

KEYS = ["weights/2/1.3/a", "weights/2/1.3/b"]


class Closing:
    """The first of two ranks, which closes its guard on a thread. It has made two comparisons that another one owes."""

    def __init__(self) -> None:
        self.store = FakeStore()
        for key in KEYS:
            self.store.set(key, {})
        self.state = State(0, 2, Settings(), {})
        self.writer = FakeWriter(self.state, self.store)
        self.writer.session.connected = True
        self.began = time.monotonic()
        self.thread = threading.Thread(target=Questions(self.state, self.writer).settle, args=("WeightsDiffer", KEYS))
        self.thread.start()
        assert self.waits()

    def waits(self) -> bool:
        """Whether it still waits after a moment."""
        self.thread.join(0.1)
        self.writer.poll_once()
        self.thread.join(0.1)
        return self.thread.is_alive()

    def neighbour(self, state: str) -> None:
        """The process of the other rank is there from now on, or is not any more."""
        process: Any = SimpleNamespace(state=lambda: state)
        self.writer.session.heartbeats.neighbours[1] = process


def test_it_waits_until_all_ranks_have_made_the_comparisons() -> None:
    closing = Closing()
    closing.store.delete(KEYS[1])
    closing.neighbour("alive")
    assert closing.waits()
    closing.store.delete(KEYS[0])
    assert not closing.waits()


def _fails(closing: Closing) -> None:
    closing.state.receive({"type": "goodbye", "rank": 1})


def _dies(closing: Closing) -> None:
    closing.neighbour("gone")


def _loses_its_store(closing: Closing) -> None:
    closing.writer.session.connected = False


@pytest.mark.parametrize("end", [_fails, _dies, _loses_its_store])
def test_it_waits_for_no_rank_that_makes_none_any_more(end: Callable[[Closing], None]) -> None:
    closing = Closing()
    end(closing)
    assert not closing.waits()


def test_it_waits_for_five_seconds_at_most() -> None:
    closing = Closing()
    closing.thread.join(10)
    assert 4 < time.monotonic() - closing.began < 6

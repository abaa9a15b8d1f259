"""The watchdog on a store in memory: what it does about a lifeline that has broken, and about a neighbour's end."""

import os

import pytest

from countoff.core import Settings
from countoff.core.protocol.state import State
from countoff.core.runtime import watchdog as module
from countoff.core.runtime.heartbeats import begin_fit
from countoff.core.runtime.lifelines import Loss
from countoff.core.runtime.processes import Process
from countoff.core.runtime.session import Session
from countoff.core.runtime.speaker import Job as SpeakerJob
from countoff.core.runtime.watchdog import Watchdog
from tests.fake_store import FakeSpeaker, FakeStore

GONE, SILENT = Loss((2,)), Loss((2, 3), "node-1", 15.0)


class _Speaker(FakeSpeaker):
    """A speaker whose store may have stopped to answer: its jobs are never done then.

    Attributes:
        answered: Whether the store answers.
    """

    answered = True

    def hand(self, job: SpeakerJob | None) -> None:
        if self.answered:
            super().hand(job)


class Rank:
    """Rank 0 of four, of which two are on another host and take part in the fit."""

    def __init__(self) -> None:
        self.state = State(0, 4, Settings(), {}, complete=True)
        self.store = FakeStore()
        self.speaker = _Speaker(self.state, self.store)
        self.watchdog = Watchdog(Session(self.state), self.speaker)
        for rank in (2, 3):
            begin_fit(self.store, rank)


@pytest.fixture
def rank() -> Rank:
    return Rank()


def test_a_broken_lifeline_becomes_the_verdict(rank: Rank) -> None:
    rank.watchdog.report(GONE)
    assert rank.state.proposed is not None
    assert rank.state.proposed.sentence == "rank 2 is gone."


def test_a_silent_host_becomes_the_verdict(rank: Rank) -> None:
    """It does so as long as one of its ranks takes part in the fit."""
    rank.store.delete("joined/2")
    rank.watchdog.report(SILENT)
    assert rank.state.proposed is not None
    assert rank.state.proposed.sentence == "host node-1 with ranks 2, 3 does not answer."


@pytest.mark.parametrize("why", ["it has left", "the fit has ended", "this rank is closing", "it compares no more"])
def test_an_orderly_end_is_no_loss(rank: Rank, why: str) -> None:
    if why == "it has left":
        rank.store.delete("joined/2")
    elif why == "the fit has ended":
        rank.state.finished = True
    elif why == "this rank is closing":
        rank.watchdog._session.closing.set()
    else:
        rank.watchdog._session.failure = "the store broke"
    rank.watchdog.report(GONE)
    assert rank.state.proposed is None
    assert rank.state.end is None


@pytest.mark.parametrize("loss", [GONE, SILENT])
def test_without_the_store_a_rank_ends_by_itself(
    rank: Rank, loss: Loss, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_ANSWER_SECONDS", 0.05)
    rank.speaker.answered = False
    rank.watchdog.report(loss)
    assert rank.state.end is not None
    assert rank.state.end.ranks == loss.ranks
    assert "LostRank" in capsys.readouterr().err


def test_the_stores_own_host_is_not_asked(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that is gone cannot say whether its ranks take part."""
    monkeypatch.setattr(module, "_ANSWER_SECONDS", 1000.0)
    rank.speaker.answered = False
    rank.watchdog.report(Loss((0, 1), "node-0", 15.0, has_store=True))
    assert rank.state.end is not None
    assert rank.state.end.ranks == (0, 1)


def test_a_neighbour_that_was_only_the_first_to_know_is_not_blamed(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a partition, the ranks of a host end one after the other. The store's host is the cause for all of them."""
    monkeypatch.setattr(module, "_ANSWER_SECONDS", 0.05)
    answers = ["silent", "silent", "closed"]
    monkeypatch.setattr(module, "knock", lambda *_: answers.pop(0))
    rank.speaker.answered = False
    rank.speaker.line.heartbeats.neighbours[1] = Process(1, os.getpid(), 1)
    for _ in range(2):
        rank.watchdog.look(0.1)
        assert rank.state.end is None
    rank.watchdog.look(0.1)  # the store's host answers, so nothing else explains that neighbour's end
    assert rank.state.end is not None
    assert rank.state.end.sentence.startswith("rank 1 is gone (pid ")

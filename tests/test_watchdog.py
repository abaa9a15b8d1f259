"""The watchdog on a store in memory: what it does about a lifeline that has broken, about a neighbour's end,
and after a verdict."""

import contextlib
import os
import threading
from types import SimpleNamespace

import pytest

from countoff.core import Settings
from countoff.core.protocol.state import State
from countoff.core.runtime import watchdog as module
from countoff.core.runtime.heartbeats import begin_fit
from countoff.core.runtime.lifelines import Loss
from countoff.core.runtime.processes import Process
from countoff.core.runtime.session import Session
from countoff.core.runtime.speaker import Job as SpeakerJob
from countoff.core.runtime.stacks import Place
from countoff.core.runtime.watchdog import Watchdog
from countoff.core.verdict import Verdict
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


class Ending:
    """Rank 0 of four after a verdict that it has printed, by a clock of the test's own.

    Attributes:
        now: The time, in seconds.
        place: Where the main thread is.
        completed: How many of 99 collectives of NCCL are completed.
        completes: How many more of them are completed in each second.
        aborts: The abort of each time that the communicators were aborted.
        exits: How many times the process would have ended.
        cuts: When the connections of collectives were cut, by that clock.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, nccl: bool = True) -> None:
        self.now, self.completed, self.completes, self.exits = 1000.0, 90.0, 0.0, 0
        self._left = 0.0
        self.place = Place("code", (), (1, 1))
        self.aborts: list[SimpleNamespace] = []
        self.cuts: list[float] = []
        self.rank = Rank()
        self.rank.state.end = Verdict("UnevenBatches", "they differ.", (1,))
        self.rank.state.printed.set()
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(module.time, "sleep", self._pass)
        monkeypatch.setattr(module.stacks, "main_thread", lambda: self.place)
        monkeypatch.setattr(module.collectives, "unfinished", self._unfinished if nccl else frozenset)
        monkeypatch.setattr(module.nccl, "abort_communicators", self._abort if nccl else lambda: None)
        monkeypatch.setattr(module.gloo_interrupt, "cut_collectives", lambda: self.cuts.append(self.now))
        monkeypatch.setattr(module.shutdown, "exit_now", self._exit)

    def _unfinished(self) -> frozenset[tuple[str, int, int]]:
        return frozenset({("0", int(self.completed), 99)} if self.completed < 99 else ())

    def _abort(self) -> SimpleNamespace:
        self._left = 2.0
        self.aborts.append(SimpleNamespace(under_way=True))
        return self.aborts[-1]

    def _exit(self) -> None:
        self.exits += 1

    def _pass(self, seconds: float) -> None:
        """Time passes. An abort that has begun takes two seconds."""
        self.now += seconds
        self.completed += seconds * self.completes
        self._left -= seconds
        if self.aborts and self._left < 0:
            self.aborts[-1].under_way = False

    def look_for(self, seconds: float) -> None:
        """The watchdog looks for so long."""
        for _ in range(round(seconds / module.LOOK_SECONDS)):
            self._pass(module.LOOK_SECONDS)
            self.rank.watchdog.look(0.1)

    def move(self) -> None:
        frame, at = self.place.token
        self.place = Place("code", (), (frame, at + 1))


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> Ending:
    return Ending(monkeypatch)


def test_a_main_thread_that_waits_for_nccl_is_brought_back(ending: Ending, capsys: pytest.CaptureFixture[str]) -> None:
    """After `grace_seconds` the communicators are aborted. The process is not ended before that is done, nor after."""
    ending.look_for(2.5)
    assert not ending.aborts
    ending.look_for(2.5)
    assert len(ending.aborts) == 1
    assert "[rank 0] countoff: this rank has not ended 3 s after the verdict" in capsys.readouterr().err
    ending.move()
    ending.look_for(0.2)
    ending.rank.state.answered.set()  # it has come to a hook, and raises
    ending.look_for(60)
    assert (len(ending.aborts), ending.exits) == (1, 0)


def test_a_main_thread_that_does_not_come_back_is_ended(ending: Ending) -> None:
    """About a second after the abort is done, or given up. It begins after 3 s here, and takes 2 s."""
    ending.look_for(5.8)
    assert (len(ending.aborts), ending.exits) == (1, 0)
    ending.look_for(0.8)
    assert ending.exits > 0


@pytest.mark.parametrize(("completes", "aborts"), [(0, 1), (0.5, 0), (99, 0)])
def test_a_last_checkpoint_that_waits_for_nccl_is_brought_back(ending: Ending, completes: float, aborts: int) -> None:
    """Unless NCCL completes collectives, or has completed all: a rank that has raised may take long."""
    ending.rank.state.answered.set()
    ending.completes = completes
    ending.look_for(20)
    assert (len(ending.aborts), ending.exits) == (aborts, 0)


def test_nothing_is_aborted_before_the_verdict_is_printed(ending: Ending) -> None:
    ending.rank.state.printed.clear()
    ending.rank.state.answered.set()
    ending.look_for(3.5)
    assert not ending.aborts


def test_a_process_that_has_survived_its_verdict_is_left_alone(ending: Ending) -> None:
    """A minute later it does something else, in which it may wait for NCCL."""
    ending.rank.state.answered.set()
    for _ in range(62):
        ending.move()
        ending.look_for(1)
    ending.look_for(20)
    ending.rank.watchdog.free_nccl()
    assert not ending.aborts


@pytest.mark.parametrize(("completes", "aborts"), [(0, 1), (1, 0), (99, 0)])
def test_what_never_ends_is_aborted_when_the_guard_is_closed(ending: Ending, completes: float, aborts: int) -> None:
    """Who destroys the process group after that would wait for it. What NCCL completes in time may go on."""
    ending.look_for(0.1)
    ending.completes = completes
    ending.rank.watchdog.free_nccl()
    assert len(ending.aborts) == aborts
    assert ending.now < 1032


@pytest.mark.parametrize("why", ["there is no verdict", "it was only a warning", "there is no group of NCCL"])
def test_what_no_verdict_ends_is_not_touched(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    ending = Ending(monkeypatch, nccl=why != "there is no group of NCCL")
    if why == "there is no verdict":
        ending.rank.state.end = None
    elif why == "it was only a warning":
        ending.rank.state.settings = Settings(on_divergence="warn")
    ending.rank.watchdog.free_nccl()
    assert not ending.aborts
    assert ending.now == 1000


def test_two_threads_abort_once(ending: Ending, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog and the thread that closes the guard come to it at the same time."""
    together = threading.Barrier(2, timeout=30)

    def abort() -> SimpleNamespace:
        began.append(threading.get_ident())
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(0.2)  # the other one would come here as well
        return SimpleNamespace(under_way=False)

    began: list[int] = []
    monkeypatch.setattr(module.nccl, "abort_communicators", abort)
    threads = [threading.Thread(target=ending.rank.watchdog._abort_nccl) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(began) == 1


def test_connections_are_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a group whose thread was busy are not found at first. Once the main thread moves, nothing is cut."""
    ending = Ending(monkeypatch, nccl=False)
    ending.rank.state.settings = Settings(grace_seconds=0.5)
    ending.look_for(1.0)
    assert len(ending.cuts) > 2
    ending.move()
    ending.look_for(0.3)
    found = len(ending.cuts)
    ending.rank.state.answered.set()
    ending.look_for(5)
    assert (len(ending.cuts), ending.exits) == (found, 0)


def test_without_nccl_a_blocked_process_is_ended_a_second_later(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = Ending(monkeypatch, nccl=False)
    ending.look_for(3.9)
    assert ending.exits == 0
    ending.look_for(0.5)
    assert ending.exits > 0

"""The watchdog on a store in memory: what it does about a lifeline that has broken, about a neighbour's end,
and after a verdict."""

import contextlib
import os
import threading
from types import SimpleNamespace
from typing import cast

import pytest

from countoff.core import Settings, constants
from countoff.core.checks import KINDS
from countoff.core.ending import shutdown
from countoff.core.protocol.counters import SpanCounters
from countoff.core.protocol.observer import Observer
from countoff.core.protocol.records import Absence, SyncPoint, absence_entry, return_entry
from countoff.core.session.liveness.heartbeats import announce_signal, begin_fit
from countoff.core.session.liveness.lifelines import Loss
from countoff.core.session.liveness.processes import Process
from countoff.core.session.liveness.stacks import Place
from countoff.core.session.state import State
from countoff.core.session.threads import watchdog as module
from countoff.core.session.threads.guard_status import GuardStatus
from countoff.core.session.threads.watchdog import Watchdog
from countoff.core.session.threads.writer import Job as WriterJob
from countoff.core.verdict import Verdict
from tests.fake_store import FakeStore, FakeWriter

GONE, SILENT = Loss((2,)), Loss((2, 3), "node-1", 15.0)


class _Writer(FakeWriter):
    """A writer whose store may have stopped to answer: its jobs are never done then.

    Attributes:
        answered: Whether the store answers.
    """

    answered = True

    def submit(self, job: WriterJob | None) -> None:
        if self.answered:
            super().submit(job)


class _WritingWriter(_Writer):
    """A writer that also writes what its jobs put into the outbox."""

    def submit(self, job: WriterJob | None) -> None:
        super().submit(job)
        while not self.state.outbox.empty():
            self.turn(self.store)


class Rank:
    """Rank 0 of four, of which two are on another host and take part in the fit."""

    def __init__(self) -> None:
        self.state = State(0, 4, Settings(), {}, complete=True)
        self.store = FakeStore()
        self.writer = _Writer(self.state, self.store)
        self.watchdog = Watchdog(GuardStatus(self.state), self.writer)
        for rank in (2, 3):
            begin_fit(self.store, rank)


@pytest.fixture
def rank() -> Rank:
    return Rank()


def test_a_broken_lifeline_becomes_the_verdict(rank: Rank) -> None:
    """It does so once this rank needs the one at its other end. The ranks without a lifeline are told of it."""
    rank.watchdog.report(GONE)
    rank.watchdog.look(0.1)
    assert rank.state.proposed is None
    assert [entry for entry in rank.store.values if entry.startswith("log/")] == ["log/0"]
    rank.state.collective_failed = True
    rank.watchdog.look(0.1)
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
        rank.watchdog.status.closing.set()
    else:
        rank.watchdog.status.failure = "the store broke"
    rank.watchdog.report(GONE)
    assert rank.state.proposed is None
    assert rank.state.end is None


@pytest.mark.parametrize("loss", [GONE, SILENT])
def test_without_the_store_a_rank_ends_by_itself(
    rank: Rank, loss: Loss, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.05)
    rank.writer.answered = False
    rank.state.collective_failed = True
    rank.watchdog.report(loss)
    rank.watchdog.look(0.1)
    assert rank.state.end is not None
    assert rank.state.end.ranks == loss.ranks
    assert "LostRank" in capsys.readouterr().err


def test_the_stores_own_host_is_not_asked(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that is gone cannot say whether its ranks take part."""
    monkeypatch.setattr(module, "ANSWER_SECONDS", 1000.0)
    rank.writer.answered = False
    rank.watchdog.report(Loss((0, 1), "node-0", 15.0, has_store=True))
    assert rank.state.end is not None
    assert rank.state.end.ranks == (0, 1)


def test_a_neighbour_that_was_only_the_first_to_know_is_not_blamed(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a partition, the ranks of a host end one after the other. The store's host is the cause for all of them."""
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.05)
    answers = ["silent", "silent", "closed"]
    monkeypatch.setattr(module, "probe", lambda *_: answers.pop(0))
    rank.writer.answered = False
    rank.writer.session.heartbeats.neighbours[1] = Process(1, os.getpid(), 1)
    rank.state.collective_failed = True
    for _ in range(2):
        rank.watchdog.look(0.1)
        assert rank.state.end is None
    rank.watchdog.look(0.1)  # the store's host answers, so nothing else explains that neighbour's end
    assert rank.state.end is not None
    assert rank.state.end.sentence.startswith("rank 1 is gone (pid ")


def test_a_crash_after_other_steps_names_the_steps(rank: Rank) -> None:
    """gloo ends a rank whose collectives do not fit: the message tells what the ranks did before it tells of memory."""
    state, span = rank.state, SpanCounters("train epoch 0")
    state.reach(state.sync_point("fit_start", "the fit", "", span))
    state.reach(state.sync_point("train_start", span.name, "", span, span), span)
    span.started, state.steps = 5, 3
    ended = SyncPoint("train_end", span.name, 5, "exhausted", 2, rank=1)
    state.receive({"type": "sync_point", "index": 2, "sync_point": ended.to_json()})
    begin_fit(rank.store, 1)
    rank.writer.session.heartbeats.neighbours[1] = Process(1, os.getpid(), 1)
    state.collective_failed = True
    rank.watchdog.look(0.1)
    verdict = state.proposed
    assert verdict is not None
    assert "Before that it ran out of data after 5 batches of train epoch 0" in verdict.why
    assert "It had applied 2 optimizer steps there, and rank 0 3 before." in verdict.why
    assert verdict.remedy.startswith("look at what only some ranks do before that place: an optimizer step")


def test_a_lost_rank_is_explained_by_no_warning_of_a_schedule(rank: Rank) -> None:
    """A warning that ranks differ may tell why one of them was lost; that a schedule is too long does not."""
    rank.state.notices += [
        KINDS["WrongHorizon"].found("the learning rate reaches 0 at step 29 of 57."),
        KINDS["WeightsDiffer"].found("after 4 optimizer steps, rank 1 holds other weights.", [1]),
    ]
    rank.writer.session.heartbeats.neighbours[1] = Process(1, os.getpid(), 1)
    begin_fit(rank.store, 1)
    rank.state.collective_failed = True
    rank.watchdog.look(0.1)
    assert rank.state.proposed is not None
    assert rank.state.proposed.why == (
        "It was killed, or it crashed. A warning came before that: after 4 optimizer steps, rank 1 holds other weights."
    )


class Standing:
    """Rank 0 of four, whose main thread is where a test says, by a clock of the test's own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.place, self.rank, self.samples = 1000.0, Place("code", (), ("1",)), Rank(), 0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(module.stacks, "thread", lambda _: self._sample())

    def _sample(self) -> Place:
        self.samples += 1
        return self.place

    def look(self, seconds: float) -> Verdict | None:
        """Looks every tenth of a second; returns the verdict that this rank has proposed."""
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            self.rank.watchdog.look(0.1)
        return self.rank.state.proposed


@pytest.fixture
def standing(monkeypatch: pytest.MonkeyPatch) -> Standing:
    return Standing(monkeypatch)


def test_a_rank_that_is_gone_is_lost_once_this_rank_waits(standing: Standing) -> None:
    """A rank that is busy with its own code hears nothing, and is seldom looked at; one that waits is told at once."""
    begin_fit(standing.rank.store, 1)
    standing.rank.writer.session.heartbeats.neighbours[1] = Process(1, os.getpid(), 1)
    assert standing.look(60) is None
    assert 100 <= standing.samples <= 130
    standing.place = Place("collective", (), ("2",))
    assert standing.look(0.1) is None
    found = standing.look(0.7)
    assert found is not None
    assert found.sentence.startswith("rank 1 is gone (pid ")


def test_a_rank_that_is_gone_before_all_have_begun_is_lost(standing: Standing) -> None:
    standing.rank.state.complete = False
    begin_fit(standing.rank.store, 1)
    standing.rank.writer.session.heartbeats.neighbours[1] = Process(1, os.getpid(), 1)
    assert standing.look(60) is not None


def test_a_rank_that_has_raised_is_lost_once_this_rank_is_batches_ahead(standing: Standing) -> None:
    state = standing.rank.state
    state.receive(absence_entry(Absence(1, "raised ValueError: torn", begun=3)))
    state.reach(SyncPoint("train_start", "train epoch 0"), opens=(span := SpanCounters("train epoch 0")))
    span.started = 6
    assert state.begun == 6
    assert standing.look(16) is not None


def test_a_rank_that_has_left_in_order_is_not_looked_at_again(
    standing: Standing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes part no more, so this rank's main thread is not sampled for its sake."""
    standing.rank.writer.session.heartbeats.neighbours[1] = Process(1, os.getpid(), 1)
    standing.look(0.1)
    monkeypatch.setattr(module.stacks, "thread", lambda _: pytest.fail("it was sampled"))
    assert standing.look(1) is None


def test_a_stopped_rank_is_lost_after_the_patience_of_one_that_waits(
    standing: Standing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop that ends before that is no loss, however long this rank had waited before it."""
    begin_fit(standing.rank.store, 1)
    state = "stopped"
    monkeypatch.setattr(Process, "state", lambda _: state)
    standing.place = Place("collective", (), ("2",))
    standing.look(20)
    standing.rank.writer.session.heartbeats.neighbours[1] = Process(1, os.getpid(), 1)
    assert standing.look(14.8) is None
    state = "alive"
    assert standing.look(0.1) is None
    state = "stopped"
    assert standing.look(14.8) is None
    found = standing.look(0.5)
    assert found is not None
    assert found.sentence.startswith("rank 1 is stopped (pid ")


@pytest.mark.parametrize(("nccl", "seconds"), [(True, 3), (False, 180)])
def test_a_thread_that_does_not_move_inside_of_a_span_waits(
    standing: Standing, monkeypatch: pytest.MonkeyPatch, nccl: bool, seconds: int
) -> None:
    """A wait for NCCL, or for the store, looks like code of the user's own."""
    monkeypatch.setattr(module.nccl, "is_used", lambda: nccl)
    begin_fit(standing.rank.store, 1)
    standing.rank.writer.session.heartbeats.neighbours[1] = Process(1, os.getpid(), 1)
    standing.rank.state.spans.append(SpanCounters("train epoch 0"))
    assert standing.look(seconds) is None
    assert standing.look(1) is not None


def test_an_exception_that_may_be_caught_ends_a_rank_that_waits(standing: Standing) -> None:
    """It does so after `lost_seconds`, unless the loop of that rank goes on before."""
    state = standing.rank.state
    state.receive(absence_entry(Absence(1, "raised ValueError: torn", begun=3)))
    standing.place = Place("collective", (), ("2",))
    assert standing.look(14.9) is None
    state.receive(return_entry(1))
    assert standing.look(20) is None
    state.receive(absence_entry(Absence(1, "raised ValueError: torn", begun=3)))
    standing.place = Place("code", (), ("3",))
    assert standing.look(20) is None
    standing.place = Place("collective", (), ("4",))
    found = standing.look(15.7)
    assert found is not None
    assert found.sentence == "rank 1 raised ValueError: torn."


class Told(Rank):
    """Rank 0 of four that has been sent a SIGTERM; ranks 1 to 3 are on its host, and take part."""

    def __init__(self) -> None:
        super().__init__()
        self.writer = _WritingWriter(self.state, self.store)
        self.watchdog = Watchdog(GuardStatus(self.state), self.writer)
        begin_fit(self.store, 1)
        self.signals: list[str] = []
        self.state.observer = cast("Observer", SimpleNamespace(ended_by=self.signals.append, concluded=self.conclude))
        for rank, pid in {1: 2**22 + 1, 2: os.getpid(), 3: 2**22 + 3}.items():
            process = Process(rank, pid, 1) if pid != os.getpid() else Process.own(rank)
            self.writer.session.heartbeats.neighbours[rank] = process

    def conclude(self, *_: object, **__: object) -> None:
        pass

    def explain_sigterm(self) -> None:
        def conclude() -> None:
            assert self.state.end is not None
            shutdown.print_verdict(self.state, self.state.end)
            self.state.printed.set()

        self.watchdog.explain_sigterm(conclude)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.05)
    return Told()


def test_who_is_ended_by_a_signal_says_first_who_is_gone(told: Told, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 3 is gone too, but has told that it was ended by the signal."""
    announce_signal(told.store, 3)
    told.explain_sigterm()
    assert "LostRank: rank 1 is gone (pid " in capsys.readouterr().err
    assert told.signals == ["SIGTERM"]
    assert told.store.has("signal/0")


def test_a_neighbour_that_this_rank_has_not_met_yet_is_looked_for(told: Told) -> None:
    """The ranks learn of one another by heartbeats, once a second."""
    heartbeats = told.writer.session.heartbeats
    record = heartbeats.neighbours[1]
    heartbeats.neighbours.clear()
    told.store.add(f"host/{heartbeats.host}", 1)
    told.store.set(f"host/{heartbeats.host}/1", {"rank": 1, "pid": record.pid, "began": 1})
    told.explain_sigterm()
    assert told.state.end is not None
    assert told.state.end.ranks == (1,)


@pytest.mark.parametrize("why", ["all are ended", "it has left", "the fit has ended", "it compares no more"])
def test_who_is_ended_with_all_others_says_nothing(told: Told, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (1, 3):
        if why == "all are ended":
            announce_signal(told.store, rank)
        elif why == "it has left":
            told.store.delete(f"joined/{rank}")
    if why == "the fit has ended":
        told.state.finished = True
    elif why == "it compares no more":
        told.watchdog.status.failure = "the store broke"
    told.explain_sigterm()
    assert capsys.readouterr().err == ""
    assert told.signals == ["SIGTERM"]


def test_without_the_store_who_is_ended_decides_alone(told: Told, capsys: pytest.CaptureFixture[str]) -> None:
    told.writer.answered = False
    told.explain_sigterm()
    assert "LostRank: rank 1 is gone (pid " in capsys.readouterr().err


def test_a_verdict_that_is_there_is_printed_before_the_end(told: Told, capsys: pytest.CaptureFixture[str]) -> None:
    told.state.adopt(Verdict("UnevenBatches", "rank 2 ran out of data.", (2,)))
    told.explain_sigterm()
    assert "UnevenBatches: rank 2 ran out of data." in capsys.readouterr().err


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
        skips: When torch's clean-up was skipped, by that clock.
        samples: How many times the main thread was looked at.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, nccl: bool = True) -> None:
        self.now, self.completed, self.completes, self.exits = 1000.0, 90.0, 0.0, 0
        self._left = 0.0
        self.place = Place("code", ())
        self.aborts: list[SimpleNamespace] = []
        self.cuts: list[float] = []
        self.skips: list[float] = []
        self.samples = 0
        self.rank = Rank()
        self.rank.state.end = Verdict("UnevenBatches", "they differ.", (1,))
        self.rank.state.printed.set()
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(module.time, "sleep", self._pass)
        monkeypatch.setattr(module.stacks, "thread", lambda _: self._sample())
        monkeypatch.setattr(module.collectives, "unfinished", self._unfinished if nccl else frozenset)
        monkeypatch.setattr(module.nccl, "abort_communicators", self._abort if nccl else lambda: None)
        monkeypatch.setattr(module.nccl, "skip_torch_cleanup", lambda: self.skips.append(self.now))
        monkeypatch.setattr(module.gloo, "cut_collectives", lambda: self.cuts.append(self.now))
        monkeypatch.setattr(module.shutdown, "exit_now", self._exit)

    def _unfinished(self) -> frozenset[tuple[str, int, int]]:
        return frozenset({("0", int(self.completed), 99)} if self.completed < 99 else ())

    def _abort(self) -> SimpleNamespace:
        self._left = 2.0
        self.aborts.append(SimpleNamespace(under_way=True))
        return self.aborts[-1]

    def _sample(self) -> Place:
        self.samples += 1
        return self.place

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
        self.place = Place("code", (), token=f"{self.place.token} one line on")


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> Ending:
    return Ending(monkeypatch)


def test_a_main_thread_that_waits_for_nccl_is_brought_back(ending: Ending, capsys: pytest.CaptureFixture[str]) -> None:
    """After 3 s the communicators are aborted. The process is not ended before that is done, nor after."""
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
    assert not ending.skips


@pytest.mark.parametrize(("completes", "aborts"), [(0, 1), (1, 0), (99, 0)])
def test_what_never_ends_is_aborted_when_the_guard_is_closed(ending: Ending, completes: float, aborts: int) -> None:
    """Who destroys the process group after that would wait for it. What NCCL completes in time may go on."""
    ending.look_for(0.1)
    ending.completes = completes
    ending.rank.watchdog.free_nccl()
    assert len(ending.aborts) == aborts
    assert len(ending.skips) == 1
    assert ending.now < 1032


def test_an_abort_that_has_begun_is_waited_for_when_the_guard_is_closed(ending: Ending) -> None:
    """Also where NCCL has nothing left to complete: CUDA must not end before it."""
    ending.look_for(0.1)
    ending.rank.watchdog.abort_nccl()
    ending.completed = 99
    ending.rank.watchdog.free_nccl()
    assert [abort.under_way for abort in ending.aborts] == [False]


@pytest.mark.parametrize("why", ["there is no verdict", "it was only a warning", "there is no group of NCCL"])
def test_what_no_verdict_ends_is_not_touched(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    ending = Ending(monkeypatch, nccl=why != "there is no group of NCCL")
    if why == "there is no verdict":
        ending.rank.state.end = None
    elif why == "it was only a warning":
        ending.rank.state.settings = Settings(on_divergence="warn")
    ending.rank.watchdog.free_nccl()
    assert not ending.aborts
    assert bool(ending.skips) == (why == "there is no group of NCCL")  # which it finds by itself
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
    threads = [threading.Thread(target=ending.rank.watchdog.abort_nccl) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(began) == 1


def test_connections_are_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a group whose thread was busy are not found at first. Once the main thread moves, nothing is cut."""
    ending = Ending(monkeypatch, nccl=False)
    monkeypatch.setattr(constants, "GRACE_SECONDS", 0.5)
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


def test_a_main_thread_is_looked_at_no_more_than_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look costs it a little time, and a checkpoint that is written after a verdict may take long."""
    ending = Ending(monkeypatch, nccl=False)
    ending.look_for(2.5)
    assert ending.samples == 0
    ending.rank.state.answered.set()
    ending.look_for(30)
    assert 50 < ending.samples < 120
    assert ending.exits == 0


@pytest.mark.parametrize("moves", [True, False])
def test_a_rank_that_waits_in_a_collective_after_its_verdict_is_ended(
    monkeypatch: pytest.MonkeyPatch, *, moves: bool
) -> None:
    """Unless it moves: a checkpoint of many parts may need many collectives."""
    ending = Ending(monkeypatch, nccl=False)
    ending.rank.state.answered.set()
    ending.look_for(1)
    ending.place = Place("collective", (), token="all_reduce")
    for _ in range(6):
        ending.look_for(1)
        if moves:
            ending.place = Place("collective", (), token=f"{ending.place.token} again")
    assert (ending.exits == 0) is moves


@pytest.mark.parametrize(("kind", "state", "exits"), [("Stalled", "code", True), ("Stalled", "collective", False)])
def test_a_loop_that_stalls_the_job_is_ended_though_it_moves(
    monkeypatch: pytest.MonkeyPatch, kind: str, state: str, *, exits: bool
) -> None:
    """It waits for a file, say, that never comes. A rank that comes out of its collective may save a checkpoint."""
    ending = Ending(monkeypatch, nccl=False)
    ending.rank.state.end = Verdict(kind, "no rank has made progress.", (1,))
    ending.place = Place(state, ())
    ending.look_for(3.2)
    for _ in range(30):
        ending.move()
        ending.look_for(0.2)
    assert (ending.exits > 0) is exits

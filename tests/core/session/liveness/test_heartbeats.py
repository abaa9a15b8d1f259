"""Heartbeats on a store in memory, by a clock of the test's own: who is called lost, and what is removed."""

from collections.abc import Sequence

import pytest

from countoff.core import Settings
from countoff.core.session.liveness import heartbeats as module
from countoff.core.session.liveness import hosts
from countoff.core.session.liveness.heartbeats import Heartbeats, begin_fit, say_goodbye, seconds_between
from countoff.core.session.state import State
from tests.fake_store import FakeStore


class Job:
    """Rank 0's heartbeats, and one guard of it; rank 1 is on another host.

    Attributes:
        now: The time, in seconds.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.store, self.state = FakeStore(), State(0, 2, Settings(stall_seconds=30.0), {})
        self.own, self.other = Heartbeats(0, range(2)), Heartbeats(1, range(2))
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        begin_fit(self.store, 1)

    def look_for(self, seconds: int) -> None:
        """Rank 0 sends its heartbeats for so long, and judges who is silent."""
        for _ in range(seconds):
            self.now += 1
            self.own.send(self.store, 0)
            self.own.report_silence(self.store, self.state)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch)


def test_a_rank_without_heartbeats_is_lost(job: Job) -> None:
    job.other.send(job.store, 0)
    job.look_for(30)
    assert job.state.proposed is None
    job.look_for(2)
    assert job.state.proposed is not None
    assert job.state.proposed.sentence == "rank 1 has not been heard for 30 s."


def test_a_rank_on_a_host_that_answers_is_not_lost(job: Job) -> None:
    """A rank that holds the interpreter sends no heartbeat, however long it does."""
    job.other.send(job.store, 0)
    for _ in range(60):
        job.now += 1
        job.own.send(job.store, 0)
        job.own.report_silence(job.store, job.state, lambda _, rank: rank == 1)
    assert job.state.proposed is None


def test_a_rank_that_is_heard_rarely_by_its_own_settings_is_not_lost(job: Job) -> None:
    """In a large job, how rare heartbeats are depends on settings that need not be the same on all ranks."""
    rare = Heartbeats(1, range(2), seconds=20.0)
    for _ in range(5):
        rare.send(job.store, 0)
        job.look_for(40)
    assert job.state.proposed is None
    job.look_for(22)
    assert job.state.proposed is not None
    assert job.state.proposed.sentence == "rank 1 has not been heard for 60 s."


@pytest.mark.parametrize("died_at", [0, 29])
@pytest.mark.parametrize("phase", [1, 15, 29])
def test_rare_heartbeats_find_a_lost_rank_at_most_two_of_them_later(job: Job, phase: int, died_at: int) -> None:
    """As with 100,000 ranks: 30 s between two, which each rank counts from a moment of its own."""
    job.state.settings, began = Settings(), job.now
    job.own = Heartbeats(0, range(2), seconds=seconds_between(100_000, job.state.settings))
    rare = Heartbeats(1, range(2), seconds=30.0)
    silent_since = 0.0
    while job.state.proposed is None and job.now - began < 2000:
        if (job.now - began) % 30 == 0 and job.now - began <= 600 + died_at:
            rare.write(job.store, 0)
            silent_since = job.now
        if (job.now - began) % 30 == phase:
            job.own.send(job.store, 0)
            job.own.report_silence(job.store, job.state)
        job.now += 1
    assert 180 <= job.now - silent_since <= 180 + 2 * 30


@pytest.mark.parametrize("phase", [0, 1, 15, 29])
@pytest.mark.parametrize("pause", [29, 61, 89, 119, 200, 3600])
def test_a_pause_of_a_large_job_is_no_silence(job: Job, pause: int, phase: int) -> None:
    """Where a job was paused, the first rank may go on before the others have sent another heartbeat."""
    job.state.settings = Settings()
    job.own, rare = Heartbeats(0, range(2), seconds=30.0), Heartbeats(1, range(2), seconds=30.0)
    next_beat, next_look, beats = job.now, job.now + phase, 0
    while beats < 30:
        if job.now >= next_look:
            next_look = job.now + 30
            job.own.send(job.store, 0)
            job.own.report_silence(job.store, job.state)
        if job.now >= next_beat:
            next_beat, beats = job.now + 30, beats + 1
            rare.write(job.store, 0)
        job.now += 1
        if beats == 10 and job.now == next_beat:
            job.now += pause
    assert job.state.proposed is None


def test_the_longer_patience_counts(job: Job) -> None:
    """Without a lifeline, a rank is lost after `stall_seconds`, or after `lost_seconds` if that is more."""
    job.state.settings = Settings(stall_seconds=5.0, lost_seconds=40.0)
    job.other.send(job.store, 0)
    job.look_for(40)
    assert job.state.proposed is None
    job.look_for(2)
    assert job.state.proposed is not None


def test_a_rank_that_has_said_goodbye_is_not_lost(job: Job) -> None:
    job.other.send(job.store, 0)
    say_goodbye(job.store, 1)
    job.look_for(60)
    assert job.state.proposed is None


def test_a_rank_that_joins_after_a_pause_is_not_lost(job: Job) -> None:
    """It has ended all its handles, and sends no heartbeat until it begins the next one."""
    job.other.send(job.store, 0)
    say_goodbye(job.store, 1)
    job.look_for(60)
    job.other.send(job.store, 0)  # as its threads start again: before it joins
    begin_fit(job.store, 1)
    job.own.report_silence(job.store, job.state)  # rank 0 is between its look and its judgement
    assert job.state.proposed is None
    job.look_for(40)
    assert job.state.proposed is not None


def test_a_pause_of_this_rank_is_no_silence_of_others(job: Job) -> None:
    job.other.send(job.store, 0)
    job.look_for(2)
    job.now += 3600
    job.look_for(2)
    assert job.state.proposed is None


def test_rank_0_removes_what_all_ranks_have_read(job: Job) -> None:
    """The log must not grow with the length of the job; an entry stays for a rank that is on its way to it."""
    for index in range(100):
        job.store.set(f"log/{index}", {"type": "x"})
    job.other.send(job.store, 90)
    job.own.send(job.store, 100)
    job.own.prune(job.store)
    left = sorted(int(key[4:]) for key in job.store.values if key.startswith("log/"))
    assert left == list(range(90, 100))


def test_rank_0_removes_no_entry_while_there_is_something_else_to_do(job: Job) -> None:
    """Each one is a request to the store, and another rank may wait for what this rank has to write."""
    for index in range(4):
        job.store.set(f"log/{index}", {"type": "x"})
    idle = iter([True, True, False, True, True])
    job.own.all_have_read(3)
    job.own.prune(job.store, lambda: next(idle))
    assert [key for key in job.store.values if key.startswith("log/")] == ["log/2", "log/3"]
    job.own.prune(job.store, lambda: next(idle))
    assert [key for key in job.store.values if key.startswith("log/")] == ["log/3"]


def on_hosts(monkeypatch: pytest.MonkeyPatch, names: Sequence[str]) -> tuple[FakeStore, list[Heartbeats]]:
    """A store and the heartbeats of ranks, each on a host of its own with one of these names."""
    store, ranks = FakeStore(), [Heartbeats(rank, range(len(names))) for rank in range(len(names))]
    for rank, name in zip(ranks, names, strict=True):
        monkeypatch.setattr(hosts, "own_name", lambda name=name: name)
        rank.host = f"id of rank {ranks.index(rank)}"
        rank.register(store)
    return store, ranks  # what looks next is on the last of these hosts


def test_a_rank_knows_the_names_of_its_own_host_and_of_the_first_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    store, ranks = on_hosts(monkeypatch, ["node-0", "node-1"])
    ranks[1].find_neighbours(store, complete=True)
    assert ranks[1].hosts == {0: "node-0", 1: "node-1"}


def test_two_hosts_of_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    store, ranks = on_hosts(monkeypatch, ["localhost", "localhost"])
    ranks[1].find_neighbours(store, complete=True)
    assert ranks[1].hosts == {0: "localhost (192.0.2.1)", 1: "localhost (192.0.2.1)"}


def test_ranks_of_the_first_ranks_host_know_its_name_only_where_there_are_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, ranks = on_hosts(monkeypatch, ["node-0", "node-1"])
    monkeypatch.setattr(hosts, "own_name", lambda: "node-0")
    alone = on_hosts(monkeypatch, ["node-0"])
    for known_to, of, expected in ((ranks[0], store, {0: "node-0"}), (alone[1][0], alone[0], {})):
        known_to.find_neighbours(of, complete=True)
        assert known_to.hosts == expected

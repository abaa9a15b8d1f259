"""How far a host's clock is ahead of rank 0's, on a store in memory and by clocks of the test's own."""

from collections.abc import Mapping

import pytest

from countoff.core.session.liveness import heartbeats as module
from countoff.core.session.liveness.heartbeats import Heartbeats
from countoff.core.trace.clocks import ClockComparison
from tests.fake_store import FakeStore

AHEAD = 3.0
EPOCH = 1_000_000.0


class Slow(FakeStore):
    """A store whose calls take a while, by the clock of the test."""

    def __init__(self, job: "Job") -> None:
        super().__init__()
        self._job = job

    def set(self, key: str, record: Mapping[str, object]) -> None:
        for _ in range(4 if self._job.latency else 0):  # the other rank looks before the store has the heartbeat
            self._job.now += self._job.latency
            self._job.look()
        super().set(key, record)

    def has(self, *keys: str) -> bool:
        self._job.now += self._job.latency
        return super().has(*keys)

    def get(self, key: str) -> dict[str, object]:
        self._job.now += self._job.latency / 2
        found = super().get(key)
        self._job.now += self._job.latency / 2
        return found


class Job:
    """Rank 0, which sends a heartbeat every second, and a rank on a host whose clock is ahead.

    Attributes:
        now: The true time.
        latency: Seconds that a call to the store takes.
        measured: What the other rank has found: seconds ahead, and the error.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.latency = 0.0, 0.0
        self.store, self.rank_0 = Slow(self), Heartbeats(0, range(2))
        self.measured: list[tuple[float, float]] = []
        self.done = True
        monkeypatch.setattr(module.time, "time", lambda: EPOCH + self.now)
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)
        self.comparison = ClockComparison(
            lambda ahead, error: self.measured.append((ahead, error)), clock=lambda: EPOCH + self.now + AHEAD
        )
        self.beat()
        self.done = False

    def look(self) -> None:
        self.done = self.done or self.comparison.poll(self.store)

    def beat(self) -> None:
        self.rank_0.sent += 1
        self.rank_0.send_time(self.store, 0)

    def run(self, seconds: float, every: float) -> bool:
        """Lets time pass, with a look every so many seconds; whether the comparison is done."""
        until, next_beat = self.now + seconds, self.now + 1.0
        while self.now < until:
            if self.now >= next_beat:
                self.beat()
                next_beat += 1.0
            self.look()
            if self.done:
                return True
            self.now += every
        return False


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch)


@pytest.mark.parametrize("every", [0.001, 0.02, 0.3])
@pytest.mark.parametrize("latency", [0.0, 0.001, 0.04])
def test_the_error_holds(every: float, latency: float, job: Job) -> None:
    job.latency = latency
    assert job.run(10, every)
    ((ahead, error),) = job.measured
    assert abs(ahead - AHEAD) <= error + 1e-9
    assert error <= every + 10 * latency + 1e-6


def test_heartbeats_that_were_missed_are_not_compared(job: Job) -> None:
    """A look that comes late does not know when each of them came."""
    assert not job.run(0.5, 0.01)
    for _ in range(3):
        job.now += 1
        job.beat()
    assert not job.comparison.poll(job.store)
    assert job.run(5, 0.01)
    ((ahead, error),) = job.measured
    assert abs(ahead - AHEAD) <= error < 0.02


def test_heartbeats_that_stop_are_not_waited_for(job: Job) -> None:
    while not job.done and job.now < 60:
        job.look()
        job.now += 0.05
    assert job.done
    assert job.now < 15
    assert job.measured == []


def test_rare_heartbeats_are_waited_for(job: Job) -> None:
    """Those of a large job come up to 30 s apart, and are looked for as much less often."""
    job.comparison = ClockComparison(
        lambda ahead, error: job.measured.append((ahead, error)), every=20.0, clock=lambda: EPOCH + job.now + AHEAD
    )
    while not job.done and job.now < 100:
        if job.now % 20 == 0:
            job.beat()
        job.look()
        job.now += 1
    ((ahead, error),) = job.measured
    assert abs(ahead - AHEAD) <= error <= 0.5


def test_a_rank_0_that_tells_no_time_is_not_compared_with(job: Job) -> None:
    """An older version writes only a number."""
    job.store.set("heartbeat/0", {"heartbeat": 7, "read": 0})
    assert job.comparison.poll(job.store)
    assert job.measured == []


def test_a_time_that_is_no_number_is_not_believed(job: Job) -> None:
    for number in (7, 8, 9):
        job.store.set("heartbeat/0", {"heartbeat": number, "time": 1e999, "took": 0.0})
        done = job.comparison.poll(job.store)
    assert done
    assert job.measured == []

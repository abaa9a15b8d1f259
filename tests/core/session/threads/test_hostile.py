"""A store that holds garbage, sends garbage or drops connections: training continues, and one line says why.

Two real guards with all of their threads run in one process, on a real TCPStore.
"""

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from countoff.core import FitPlan, Guard, Settings, constants
from countoff.core.protocol.records import SyncPoint
from countoff.core.session.liveness.processes import host_id
from countoff.report.reader import read
from tests.relay import Relay

pytestmark = pytest.mark.alone

NUMBER = 0
SYNC_POINT = SyncPoint("train_start", "train epoch 0", rank=1, time=1.0).to_json()


def soon(holds: Callable[[], bool], seconds: float = 30.0) -> bool:
    patience = time.monotonic() + seconds
    while not holds() and time.monotonic() < patience:
        time.sleep(0.002)
    return holds()


@dataclass
class Pair:
    """Two guards of one job, each called by its own thread."""

    store: Any
    port: int
    guards: list[Guard]
    errors: list[BaseException] = field(default_factory=list[BaseException])

    def both(self, work: Callable[[Guard], object]) -> None:
        """Runs `work` on both ranks at the same time; fails if a rank hangs."""

        def run(guard: Guard) -> None:
            try:
                work(guard)
            except BaseException as error:
                self.errors.append(error)

        threads = [threading.Thread(target=run, args=(guard,), daemon=True) for guard in self.guards]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(90)
            assert not thread.is_alive(), "a rank hangs"

    def start(self) -> None:
        self.both(lambda guard: guard.fit_start(FitPlan(batch_size=4)))

    def prefix(self) -> str:
        """The prefix of all keys of these guards."""
        return f"{self.base()}{NUMBER}/"

    def base(self) -> str:
        """The prefix of the keys that all guards of a process share."""
        where = json.loads(self.store.get(f"countoff/{NUMBER}"))
        return f"countoff/{where['nonce']}/"

    def train(self) -> None:
        """Runs the rest of a healthy job on both ranks."""

        def work(guard: Guard) -> None:
            for epoch in range(2):
                guard.train_start(epoch)
                for _ in range(5):
                    guard.batch()
                    guard.step()
                guard.train_end("exhausted")
                guard.eval_start("validation")
                guard.batch(last=True)
                guard.eval_end("exhausted")
            guard.fit_end()
            guard.close()

        self.both(work)

    def assert_unharmed(self) -> None:
        assert self.errors == []
        assert [guard.verdict for guard in self.guards] == [None, None]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Pair]]:
    """Makes two guards on a store of their own, which they reach directly or through a relay."""
    made: list[Pair] = []

    def make(behind: Callable[[int], int] = int) -> Pair:
        store: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = behind(store.port)
        monkeypatch.setattr("countoff.core.guard._numbers", {(): itertools.repeat(0)})  # both ranks are in this process
        monkeypatch.setattr("countoff.core.session.threads.registration.take_back", lambda *place: None)  # for `base`
        monkeypatch.setattr("countoff.core.session.threads.registration.default_store", lambda: client(port))
        monkeypatch.setattr(constants, "TICK_BATCHES", 2)
        guards = [Guard(Settings(deadline_seconds=10.0), rank=rank, world_size=2) for rank in range(2)]
        made.append(Pair(store, store.port, guards))
        return made[-1]

    yield make
    for each in made:
        each.both(lambda guard: guard.close())


def client(port: int) -> Any:
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def test_the_trace_has_the_length_of_each_ranks_own_loader(pair: Callable[..., Pair], tmp_path: Path) -> None:
    """Where ranks are made even, the plans that are compared have none."""
    job = pair()
    settings = Settings(uneven_train="stop", trace_dir=str(tmp_path), deadline_seconds=10.0)
    job.guards[:] = [Guard(settings, rank=rank, world_size=2) for rank in range(2)]
    job.both(lambda guard: guard.fit_start(FitPlan(batches_per_epoch=4 + job.guards.index(guard))))
    job.both(lambda guard: guard.fit_end())
    job.both(lambda guard: guard.close())
    assert not job.errors
    (run,) = read([str(tmp_path)]).runs
    assert {rank: fit.plan.get("batches_per_epoch") for rank, fit in run.fits.items()} == {0: 4, 1: 5}


BROKEN: dict[str, str | bytes] = {
    "no JSON": "GET / HTTP/1.1\r\n",
    "no text": b"\xff\xfe\x00\x80",
    "truncated": '{"type": "sync_point", "index": 1, "sync',
    "nested too deeply": "[" * 1000,
    "nested objects": '{"a":' * 200,
    "no object": "[1, 2]",
    "64 KiB": '{"type": "' + "x" * (1 << 16) + '"}',
    "a pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94\x8c\x06getpid\x94\x93\x94)R\x94.",
}


def sync_point(**changes: Any) -> dict[str, Any]:
    return {"type": "sync_point", "index": 1, "sync_point": {**SYNC_POINT, **changes}}


WRONG: dict[str, Any] = {
    "no type": {},
    "no guard": {"guard": None},
    "a guard that is none": {**sync_point(), "guard": -1},
    "no sync point": {"type": "sync_point", "index": 1},
    "a sync point that is text": {"type": "sync_point", "index": 1, "sync_point": "train_start"},
    "a negative number": {**sync_point(), "index": -1},
    "an absurd number": {**sync_point(), "index": 2**70},
    "a number that is none": {**sync_point(), "index": float("nan")},
    "an absurd count": sync_point(at=2**70),
    "a negative count": sync_point(at=-4),
    "an infinite count": sync_point(at=float("inf")),
    "a count that is text": sync_point(at="4"),
    "another version's kind": sync_point(kind="epoch_pause"),
    "another version's way to end": sync_point(reason=["exited"]),
    "counts that are none": sync_point(counts=7),
    "a rank out of range": sync_point(rank=64),
    "a negative rank": sync_point(rank=-1),
    "no time": sync_point(time=None),
    "an announcement of nothing": {"type": "announcement"},
    "an absurd announcement": {"type": "announcement", "opened": 2**70, "sync_point": SYNC_POINT},
    "an empty verdict": {"type": "end", "verdict": {}},
    "a verdict that is a list": {"type": "end", "verdict": [1]},
    "a verdict on nobody": {"type": "end", "verdict": {"kind": "LostRank", "ranks": [-1]}},
    "an empty notice": {"type": "notice"},
}


@pytest.mark.parametrize("what", [*BROKEN, *WRONG])
def test_garbage_in_the_log_ends_only_the_comparison(
    what: str, pair: Callable[..., Pair], capsys: pytest.CaptureFixture[str]
) -> None:
    """After garbage in the log each rank trains on without comparing, and prints one line about it."""
    job = pair()
    job.start()
    assert soon(lambda: all(guard.registration.writer.session.read == 1 for guard in job.guards))  # pyright: ignore[reportOptionalMemberAccess]
    registrations: list[Any] = [guard.registration for guard in job.guards]
    value = BROKEN[what] if what in BROKEN else json.dumps({"guard": NUMBER, **WRONG[what]})
    client(job.port).set(job.base() + "log/1", value)
    assert soon(lambda: all(registration.failure for registration in registrations))
    job.train()
    job.assert_unharmed()
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert sorted(line[:8] for line in lines) == ["[rank 0]", "[rank 1]"]
    for line in lines:
        assert "(this rank trains on without comparing)" in line
        assert line.isprintable()
        assert len(line) < 600


@pytest.mark.parametrize("entry", [{"type": "x"}, {"type": 7}, {"type": None}, {"type": "goodbye", "rank": "none"}])
def test_an_entry_of_an_unknown_kind_is_skipped(
    entry: dict[str, Any], pair: Callable[..., Pair], capsys: pytest.CaptureFixture[str]
) -> None:
    job = pair()
    job.start()
    client(job.port).set(job.base() + "log/1", json.dumps({**entry, "guard": NUMBER}))
    job.train()
    job.assert_unharmed()
    assert capsys.readouterr().err == ""
    assert not any(guard.registration is None for guard in job.guards)


@pytest.mark.parametrize(
    "value", ["junk", "[]", "{}", '{"heartbeat": [], "read": "x"}', '{"rank": 1}', "x" * (9 << 20)]
)
@pytest.mark.parametrize("key", ["span/1/1", "tick/1/2", "heartbeat/0", "heartbeat/1", f"host/{host_id()}/2"])
def test_garbage_under_any_other_key_harms_nothing(
    key: str, value: str, pair: Callable[..., Pair], capsys: pytest.CaptureFixture[str]
) -> None:
    job = pair()
    job.start()
    with contextlib.suppress(RuntimeError):  # newer stores refuse what would break their clients
        shared = key.partition("/")[0] in ("heartbeat", "host")
        client(job.port).set((job.base() if shared else job.prefix()) + key, value)
    job.train()
    job.assert_unharmed()
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(lines) <= 2
    assert all("(this rank trains on without comparing)" in line for line in lines)


@pytest.mark.parametrize(
    "where",
    [
        "junk",
        "[]",
        "{}",
        '{"host": "127.0.0.1", "port": 1e99, "nonce": "x"}',
        '{"host": "127.0.0.1", "port": -1, "nonce": "x"}',
        '{"host": "127.0.0.1", "port": "here", "nonce": []}',
    ],
)
def test_garbage_at_the_rendezvous_is_reported_in_one_line(
    where: str, pair: Callable[..., Pair], capsys: pytest.CaptureFixture[str]
) -> None:
    job = pair()
    job.store.set(f"countoff/{NUMBER}", where)
    del job.guards[0]  # rank 0 would overwrite it
    job.start()
    job.train()
    assert job.errors == []
    assert job.guards[0].verdict is None
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line]
    assert "(this rank trains on without comparing)" in line


@pytest.mark.parametrize("at", [3, *(pytest.param(at, marks=pytest.mark.nightly) for at in (5, 8, 12, 17)), 24])
@pytest.mark.parametrize("bad", ["drop", "garbage"])
def test_a_failing_store_harms_nothing(
    bad: Literal["drop", "garbage"], at: int, pair: Callable[..., Pair], capsys: pytest.CaptureFixture[str]
) -> None:
    """A store that drops a connection or sends garbage ends no training and causes no `LostRank`."""
    relays: list[Relay] = []

    def behind(port: int) -> int:
        relays.append(Relay(port, bad, at))
        return relays[0].port

    job = pair(behind)
    job.start()
    job.train()
    relays[0].close()
    job.assert_unharmed()
    assert "countoff: LostRank" not in capsys.readouterr().err


def test_a_counter_that_is_no_number_harms_nothing(pair: Callable[..., Pair]) -> None:
    job = pair()
    job.start()
    client(job.port).set(job.base() + f"host/{host_id()}", "many")
    job.train()
    job.assert_unharmed()


def test_a_closed_guard_releases_the_jobs_store(pair: Callable[..., Pair]) -> None:
    job = pair()
    job.start()
    registrations: list[Any] = [guard.registration for guard in job.guards]
    assert all(isinstance(registration.threads.store, TCPStore) for registration in registrations)
    job.train()
    assert [registration.threads.store for registration in registrations] == [None, None]

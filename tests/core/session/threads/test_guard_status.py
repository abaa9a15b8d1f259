"""Whether a guard takes part: a rank stops comparing once, or ends without the store."""

import threading
from dataclasses import replace

import pytest

from countoff.core import Settings, Verdict
from countoff.core.session.state import State
from countoff.core.session.threads.guard_status import GuardStatus, first_line
from countoff.core.session.threads.writer import Writer
from tests.fake_store import FakeStore

LOST = Verdict("LostRank", "rank 0 is gone.", (0,))


@pytest.fixture
def status() -> GuardStatus:
    return GuardStatus(State(1, 2, Settings(), {}))


def test_a_rank_stops_comparing_once(status: GuardStatus, capsys: pytest.CaptureFixture[str]) -> None:
    """The first reason is kept and printed in one line; a later one changes nothing."""
    status.stop_comparing("the store is gone")
    status.stop_comparing("the store is gone again")
    assert status.failure == "the store is gone"
    line = "[rank 1] countoff: LateRank: the store is gone (this rank trains on without comparing)"
    assert capsys.readouterr().err.split("\n") == ["", line, ""]


@pytest.mark.parametrize("rank", [0, 1])
def test_where_no_rank_compares_the_first_one_says_so(rank: int, capsys: pytest.CaptureFixture[str]) -> None:
    status = GuardStatus(State(rank, 2, Settings(), {}))
    status.stop_comparing("there is no room", everywhere=True)
    assert status.failure == "there is no room"
    line = "[rank 0] countoff: LateRank: there is no room (nothing is compared; training goes on)"
    assert capsys.readouterr().err.split("\n") == (["", line, ""] if rank == 0 else [""])


def test_a_rank_that_stopped_comparing_writes_nothing(status: GuardStatus) -> None:
    """What it still finds must not end the job of ranks that compare."""
    store = FakeStore()
    writer = Writer(status.state)
    status.stop_comparing("the store is gone")
    status.state.propose(LOST)
    writer.carry_out(status.state.outbox.get_nowait(), store)
    assert store.values == {}


def test_many_threads_stop_comparing_once(status: GuardStatus, capsys: pytest.CaptureFixture[str]) -> None:
    """If several threads find the store lost at the same time, one line is printed."""
    barrier = threading.Barrier(4)

    def stop() -> None:
        barrier.wait(10)
        status.stop_comparing("the store is gone")

    threads = [threading.Thread(target=stop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert capsys.readouterr().err.count("countoff:") == 1


def test_without_the_store_a_verdict_names_the_hosts_of_its_ranks_alone() -> None:
    """A scheduler must not leave out the hosts of ranks that are well."""
    hosts = {0: "node-0", 2: "node-1", 3: "node-1"}
    status = GuardStatus(State(3, 4, Settings(), {}), hosts=lambda: hosts)
    status.conclude_alone(replace(LOST, gone=True))
    assert status.state.end is not None
    told = status.state.end.to_dict()
    assert (told["sentence"], told["hosts"]) == ("rank 0 on node-0 is gone.", {"0": "node-0"})
    assert told["leave_out"] == ["node-0"]


def test_without_the_store_a_rank_prints_its_verdict(status: GuardStatus, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that has lost the store ends the fit with the verdict that it is given, and its remedy."""
    status.conclude_alone(LOST)
    assert status.state.end is not None
    assert replace(status.state.end, remedy="") == LOST
    assert status.state.end.remedy.startswith("read that rank's own output first")
    assert status.state.printed.is_set()
    assert capsys.readouterr().err.count("LostRank: rank 0 is gone.") == 1


def test_without_the_store_an_own_proof_is_the_cause(status: GuardStatus) -> None:
    """What this rank has proved itself is the better cause."""
    proof = Verdict("UnevenBatches", "they differ.", (1, 0))
    status.state.propose(proof)
    status.conclude_alone(LOST)
    assert status.state.end == proof


@pytest.mark.parametrize(
    "text",
    [
        "failed to recv, got 0 bytes",
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
        "recvVector failed: Connection reset by peer",
        "Broken pipe",
    ],
)
def test_a_store_that_is_gone_has_one_name(text: str) -> None:
    """torch says it in other words where it was writing, and in its newest version."""
    assert first_line(RuntimeError(text)) == "the job's store has ended the connection"


def test_first_line_of_an_error_is_short() -> None:
    """The first line has at most 120 characters; an error without a text is named by its type."""
    assert first_line(RuntimeError("one\ntwo")) == "one"
    assert first_line(RuntimeError()) == "RuntimeError"
    assert len(first_line(RuntimeError("x" * 500))) == 120


def test_a_rank_that_keeps_even_does_not_train_on_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Without the store nobody knows which batches may be started, so the fit ends here."""
    status = GuardStatus(State(1, 2, Settings(uneven_train="stop"), {}))
    status.stop_comparing("the store is gone")
    assert status.state.end is not None
    assert status.state.end.kind == "LostRank"
    assert "rank 1 has lost contact with the other ranks: the store is gone." in capsys.readouterr().err
    assert status.failure == ""

"""A rank is killed by SIGKILL, and a launcher ends the others by SIGTERM: they say first whom they have lost."""

import json
import signal
import threading
from pathlib import Path

import pytest

from countoff.report import facts
from countoff.report.reader import read
from countoff.torch import Countoff
from integration_tests import devices, loops
from integration_tests.composer_jobs import needs_composer
from integration_tests.digits import own_rank, share_loader
from integration_tests.harness import RankResult, Watch, tell
from integration_tests.killed_table import kill_one
from integration_tests.output import printed_lines

RANKS = 4


def train() -> None:
    """A plain loop in which all ranks but rank 1 wait in a collective for it, when the signals come.

    Lightning and Composer have a handler of their own for the signal.
    """
    devices.join()
    model, optimizer = loops.model_and_optimizer()
    loader = share_loader(5000)
    countoff = Countoff(optimizer=optimizer)
    for number, batch in enumerate(countoff.train(loader)):
        loops.train_on(model, optimizer, batch)
        if number == 3:
            tell("training")
            if own_rank() == 1:
                threading.Event().wait()


def run_and_signal(
    run_ranks, directory: Path, signals: dict[int, signal.Signals]
) -> tuple[list[RankResult], list[list[str]]]:
    """Trains on four ranks, sends each of them a signal, and returns how they ended and what they printed.

    No signal waits for another one, but a SIGTERM comes once the ranks that get SIGKILL have ended: a launcher ends the
    others because it has seen that.
    """
    killed = [rank for rank, number in signals.items() if number == signal.SIGKILL]

    def send(watch: Watch) -> None:
        for rank in range(RANKS):
            watch.wait_for(rank, "training")
        for rank in killed:
            watch.kill(rank)
        for rank in killed:
            watch.wait_for_end(rank)
        for rank in signals.keys() - killed:
            watch.kill(rank, signals[rank])

    env = {"COUNTOFF_VERDICT_FILE": str(directory / "verdict.json"), "COUNTOFF_TRACE_DIR": str(directory / "trace")}
    results = run_ranks(train, RANKS, expect=None, env=env, while_running=send, deadline_seconds=120)
    assert [result.exit_code for result in results] == [-signals[rank] for rank in range(RANKS)], results
    return results, [printed_lines(result) for result in results]


def test_who_is_ended_by_sigterm_says_who_was_killed(run_ranks, tmp_path):
    """It comes as soon as the rank is dead, while main threads wait in a collective, and ends them as it would have."""
    signals = {1: signal.SIGKILL, 0: signal.SIGTERM, 2: signal.SIGTERM, 3: signal.SIGTERM}
    results, printed = run_and_signal(run_ranks, tmp_path, signals)
    whole = [rank for rank, lines in enumerate(printed) if any("lost: rank 1 of 4 ranks" in line for line in lines)]
    assert len(whole) >= 1, results
    for rank in (0, 2, 3):
        assert printed[rank][0].startswith("countoff: LostRank: rank 1 is gone (pid "), results
        assert "countoff LostRank: rank 1 is gone" in results[rank].error_file, results
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert (verdict["kind"], verdict["ranks"], verdict["restart"]) == ("LostRank", [1], "may_help")
    assert (tmp_path / "trace" / "incident.json").exists()
    run = read([str(tmp_path / "trace")]).runs[0]
    assert {rank: fit.ending and fit.ending.how for rank, fit in run.fits.items()} == {
        0: "verdict",
        1: None,
        2: "verdict",
        3: "verdict",
    }


def test_ranks_that_are_all_ended_by_sigterm_say_nothing(run_ranks, tmp_path):
    """A scheduler takes the machines back. Their traces tell it."""
    _, printed = run_and_signal(run_ranks, tmp_path, dict.fromkeys(range(RANKS), signal.SIGTERM))
    assert printed == [[]] * RANKS
    assert not (tmp_path / "verdict.json").exists()
    assert "ranks 0–3 were ended by SIGTERM" in facts.headline(read([str(tmp_path / "trace")]))


def test_ranks_that_are_all_killed_leave_it_to_their_traces(run_ranks, tmp_path):
    """As the kernel does where their container has no memory left."""
    _, printed = run_and_signal(run_ranks, tmp_path, dict.fromkeys(range(RANKS), signal.SIGKILL))
    assert printed == [[]] * RANKS
    said = facts.headline(read([str(tmp_path / "trace")]))
    assert "4 ranks have no end: killed, or still running; all ranks wrote their last lines within " in said


@pytest.mark.torchrun
@pytest.mark.parametrize(
    ("adapter", "moment"),
    [("torch", "batch"), pytest.param("composer", "start", marks=[needs_composer, pytest.mark.nightly])],
)
def test_under_torchrun_the_killed_rank_is_named(tmp_path, adapter, moment):
    """Composer has a handler of its own for SIGTERM, by which its ranks leave with `sys.exit`."""
    outcome = kill_one(adapter, moment, 2 if moment == "batch" else 3, tmp_path)
    assert not outcome.wrong, outcome
    assert moment == "start" or outcome.whole == 1, outcome

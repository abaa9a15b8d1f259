import atexit
import fcntl
import json
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch.distributed as dist

from countoff.core import FitPlan, Guard, Settings
from integration_tests import harness
from integration_tests.harness import ABSENT, RanksFailed, RanksTimedOut, Watch, tell
from integration_tests.torchrun import TorchrunTimedOut


def leave_each_in_its_own_way(directory):
    rank = int(os.environ["RANK"])
    atexit.register((Path(directory) / f"atexit{rank}").touch)
    print("before the end of", rank)
    if rank == 1:
        raise ValueError("the uncaught one")
    if rank == 2:
        sys.exit(3)
    if rank == 3:
        sys.exit("a reason")
    if rank == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def hang_in_sleep():
    threading.Thread(target=hang_in_a_thread, daemon=True).start()
    time.sleep(3600)


def hang_in_a_thread():
    threading.Event().wait()


def hang_stopped():
    threading.Thread(target=hang_in_a_thread, daemon=True).start()
    os.kill(os.getpid(), signal.SIGSTOP)
    hang_in_a_thread()


def rank_1_does_not_come():
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        dist.barrier()
    else:
        hang_in_a_thread()


def rank_1_begins_no_fit():
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        Guard(Settings(), rank=0, world_size=2).fit_start(FitPlan())
    hang_in_a_thread()


def write_error_file():
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"rank": os.environ["RANK"]}))


def tell_and_wait_to_be_killed():
    tell("here")
    hang_in_a_thread()


def rank_0_raises():
    if os.environ["RANK"] == "0":
        raise ValueError
    hang_in_a_thread()


def a_thread_that_outlives_main():
    def finish():
        threading.main_thread().join()
        print("the thread ended last")

    threading.Thread(target=finish).start()


@pytest.mark.parametrize("finalise", [pytest.param(True, marks=pytest.mark.nightly), False])
def test_each_way_to_exit_has_its_code_output_and_atexit(run_ranks, tmp_path, finalise):
    """A return, an exception, sys.exit and a signal end a rank as they end a script."""
    codes = [0, 1, 3, 1, -signal.SIGKILL]
    results = run_ranks(leave_each_in_its_own_way, 5, str(tmp_path), expect=codes, finalise=finalise)
    assert [result.value for result in results] == [0, ABSENT, ABSENT, ABSENT, ABSENT]
    assert all(f"before the end of {rank}\n" in results[rank].output for rank in range(5))
    assert "Traceback" in results[1].output
    assert "ValueError: the uncaught one" in results[1].output
    assert "a reason" in results[3].output
    assert sorted(path.name for path in tmp_path.glob("atexit*")) == ["atexit0", "atexit1", "atexit2", "atexit3"]


def test_an_unexpected_exit_code_fails_with_every_output(run_ranks, tmp_path):
    """An unexpected exit code fails the run, with the output of all ranks."""
    with pytest.raises(RanksFailed, match=r"exit codes \[0, 1\], expected \[0, 0\][^$]*the uncaught one"):
        run_ranks(leave_each_in_its_own_way, 2, str(tmp_path))


@pytest.mark.parametrize("finalise", [pytest.param(True, marks=pytest.mark.nightly), False])
def test_threads_are_joined_before_the_end(run_ranks, finalise):
    """A rank waits for its threads before it exits."""
    (result,) = run_ranks(a_thread_that_outlives_main, 1, finalise=finalise)
    assert "the thread ended last" in result.output


@pytest.mark.parametrize("function", [pytest.param(hang_in_sleep, marks=pytest.mark.nightly), hang_stopped])
def test_a_hang_ends_with_the_stacks_of_every_thread(run_ranks, function):
    """At the deadline every thread of every rank prints its stack, also of a stopped rank."""
    with pytest.raises(RanksTimedOut, match="ranks 0, 1") as failure:
        run_ranks(function, 2, deadline_seconds=1.5)
    for result in failure.value.results:
        assert f"in {function.__name__}" in result.output
        assert "in hang_in_a_thread" in result.output


@pytest.mark.nightly
def test_a_rank_blocked_in_a_collective_shows_its_stack(run_ranks):
    """The stacks show the collective in which a rank is blocked."""
    with pytest.raises(RanksTimedOut) as failure:
        run_ranks(rank_1_does_not_come, 2, deadline_seconds=3)
    assert "in barrier" in failure.value.results[0].output
    assert "in hang_in_a_thread" in failure.value.results[1].output


def test_a_hang_shows_what_countoff_has_told_the_others(run_ranks):
    """Stacks do not tell which rank's report is missing, the store does."""
    with pytest.raises(RanksTimedOut) as failure:
        run_ranks(rank_1_begins_no_fit, 2, deadline_seconds=5)
    assert str(failure.value).endswith(
        "countoff: fit 0 has joined/0, plan/0 in the store, and not plan, joined/1, plan/1; its log ends at 0."
    )


def what_a_rank_begins_with():
    write_error_file()
    return "lightning.pytorch" in sys.modules, threading.active_count(), Path.cwd().name, os.environ.get("COUNTOFF")


def test_each_rank_begins_with_what_is_its_own(run_ranks, monkeypatch):
    """The frameworks imported, one thread, the directory of its run, an environment and an error file of its own.

    COUNTOFF variables of pytest's do not reach it.
    """
    monkeypatch.setenv("COUNTOFF", "0")
    results = run_ranks(what_a_rank_begins_with, 2, env=lambda rank: {"COUNTOFF": "1"} if rank == 0 else {})
    assert [result.value[:2] for result in results] == [(True, 1)] * 2
    assert len({result.value[2] for result in results}) == 1
    assert [result.value[3] for result in results] == ["1", None]
    assert [json.loads(result.error_file) for result in results] == [{"rank": "0"}, {"rank": "1"}]


def test_a_rank_can_be_killed_once_it_has_told_where_it_is(run_ranks):
    """A test can wait until a rank has come somewhere, and kill it there."""

    def kill_both(watch: Watch):
        for rank in (1, 0):
            watch.wait_for(rank, "here")
            watch.kill(rank)
            assert watch.wait_for_end(rank) == -signal.SIGKILL

    run_ranks(tell_and_wait_to_be_killed, 2, expect=-signal.SIGKILL, while_running=kill_both)


def test_waiting_for_a_rank_that_has_ended_fails_at_once(run_ranks):
    """Waiting for a message of a rank that has ended fails without a delay."""
    with pytest.raises(RanksFailed, match="rank 1 has not told 'here'"):
        run_ranks(write_error_file, 2, while_running=lambda watch: watch.wait_for(1, "here"))


def test_a_failure_ends_the_peers_only_on_request(run_ranks):
    """A failed rank's peers go on, unless the test asks for their end."""
    with pytest.raises(RanksTimedOut, match="ranks 1"):
        run_ranks(rank_0_raises, 2, deadline_seconds=3)
    run_ranks(rank_0_raises, 2, kill_peers_after=0.2, expect=[1, -signal.SIGTERM])


@pytest.mark.torchrun
def test_torchrun_reports_its_exit_code_and_every_output(run_torchrun):
    """A run under torchrun gives its exit code and the output of all ranks."""
    script = """
import os, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
print("I am", rank, flush=True)
Path(f"said-{rank}").touch()
while rank == 1 and not Path("said-0").exists():  # torchrun ends rank 0 as soon as rank 1 has failed
    time.sleep(0.01)
sys.exit(rank)
"""
    run = run_torchrun(script, 2)
    assert run.exit_code == 1
    assert "I am 0" in run.output
    assert "I am 1" in run.output


@pytest.mark.torchrun
@pytest.mark.nightly
def test_torchrun_past_its_deadline_shows_stacks_and_ends(run_torchrun, tmp_path):
    """At the deadline torchrun's workers print their stacks, and no process remains."""
    script = "import os, time; open(f'pid{os.getpid()}', 'w').close()\ndef hang(): time.sleep(3600)\nhang()"
    with pytest.raises(TorchrunTimedOut, match="in hang"):
        run_torchrun(script, 2, deadline_seconds=20)
    pids = [int(path.name[3:]) for path in tmp_path.glob("pid*")]
    assert len(pids) == 2
    assert all(has_ended(pid) for pid in pids)


def has_ended(pid):
    """Whether it has, or does within 5 s; unlike /proc this is true of one that nobody has reaped."""
    try:
        return bool(wait([os.pidfd_open(pid)], 5))
    except ProcessLookupError:
        return True


def test_jobs_with_streaming_take_turns(one_streaming_job):
    """Also those of another test session: none of them gets the lock while this test has it."""
    with harness.STREAMING_TURN.open("w") as turn, pytest.raises(BlockingIOError):
        fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)

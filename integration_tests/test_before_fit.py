"""Ranks that wait for one another outside a fit, in programs under torchrun and in ranks of the harness."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from countoff._run import process_group
from countoff.core.session.store.rendezvous import default_store, tcp_store
from countoff.core.waiting import until
from countoff.torch import Countoff, before_fit
from integration_tests.digits import own_rank
from integration_tests.harness import NAME_LOOKUPS, Watch, python_path, tell

STALL_SECONDS = {"COUNTOFF_STALL_SECONDS": "1"}
DATA = """\
import time
from pathlib import Path


def load(patience):
    Path("loading").touch()
    deadline = time.monotonic() + patience
    while "explain Stalled" not in Path("stderr").read_text() and time.monotonic() < deadline: time.sleep(0.02)


def come_a_second_later():
    while not Path("loading").exists(): time.sleep(0.02)
    time.sleep(1)
"""
LOOP = """\
import sys
import torch
import torch.distributed as dist
import data

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(3):
    if number == 1:
        data.load(float(sys.argv[1])) if dist.get_rank() == 2 else data.come_a_second_later()
    model(torch.ones(4)).sum().backward()
    optimizer.step()
print(f"rank {dist.get_rank()} goes on\\n", end="", flush=True)
dist.destroy_process_group()
"""
TRAIN = """\
import sys
import torch.distributed as dist
import data

dist.init_process_group("gloo")
if dist.get_rank() == 2:
    data.load(float(sys.argv[1]))
else:
    data.come_a_second_later()
dist.barrier()
print(f"rank {dist.get_rank()} goes on\\n", end="", flush=True)
dist.destroy_process_group()
"""


def launch(directory: Path, *command: str, program: str = TRAIN) -> tuple[int, list[str], str]:
    """Runs a program on four ranks; returns its exit code, what it has printed, and what is on stderr."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("COUNTOFF")}
    fixed = {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "COUNTOFF_STALL_SECONDS": "2", **NAME_LOOKUPS}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    (directory / "data.py").write_text(DATA)
    (directory / "train.py").write_text(program)
    with (directory / "stderr").open("w") as errors:
        done = subprocess.run(
            [*torchrun, *command],
            cwd=directory,
            env={**inherited, **fixed},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            timeout=180,
        )
    return done.returncode, sorted(done.stdout.splitlines()), (directory / "stderr").read_text()


@pytest.mark.nightly
def test_a_rank_that_loads_alone_is_named_and_the_program_goes_on(tmp_path):
    """The program is as it is; it ends as without countoff, and has printed the same."""
    code, printed, errors = launch(tmp_path, "-m", "countoff.run", "train.py", "120")
    assert code == 0, errors
    (said,) = [line for line in errors.splitlines() if "countoff: Stalled: " in line]
    place, waiting = "rank 2, at data.py:8 in load, for ", " wait in torch.distributed.barrier at train.py:10."
    assert said.startswith(f"[rank 0] countoff: Stalled: {place}"), errors
    assert said.endswith(f" s; ranks 0, 1, 3{waiting}"), errors
    assert 2 <= int(said.removeprefix(said.partition(place)[0] + place).partition(" s")[0]) < 60
    without = launch(tmp_path, "train.py", "0")
    assert (without[0], without[1]) == (code, printed)
    assert "countoff" not in without[2]


@pytest.mark.nightly
def test_a_stall_in_a_loop_of_plain_pytorch_names_the_rank_for_which_the_others_wait(tmp_path):
    """Nothing is counted there, and the program goes on."""
    code, _, errors = launch(tmp_path, "-m", "countoff.run", "train.py", "120", program=LOOP)
    assert code == 0, errors
    (said,) = [line for line in errors.splitlines() if "countoff: Stalled: " in line]
    assert said.startswith("[rank 0] countoff: Stalled: rank 2, at data.py:8 in load, for "), errors
    # DDP waits in its forward pass where the step before is still under way.
    assert re.search(r" s; ranks 0, 1, 3 wait in (the backward pass|DistributedDataParallel) at train\.py:12\.$", said)
    assert errors.count("countoff: the ranks' batches were not compared: ") == 1


def wait_for_a_stopped_rank() -> None:
    join(asks=False)
    for number in range(100):
        if number == 20:
            tell("meets")
        time.sleep(0.1)
        dist.barrier()


def test_a_rank_that_gives_no_sign_of_life_is_named(run_ranks):
    """Its process is stopped; one that was killed gives none either, where the launcher leaves the others alone."""

    def stop_until_the_report(watch: Watch) -> None:
        watch.wait_for(1, "meets")
        watch.let_run(1.5)
        watch.kill(1, signal.SIGSTOP)
        patience = time.monotonic() + 60
        while "explain Stalled" not in watch.results()[0].output and time.monotonic() < patience:
            watch.let_run(0.1)
        watch.kill(1, signal.SIGCONT)

    zero, one = run_ranks(wait_for_a_stopped_rank, 2, env=STALL_SECONDS, while_running=stop_until_the_report)
    assert "countoff: Stalled: rank 1 has given no sign of life for " in zero.output, zero
    assert " s; rank 0 waits in torch.distributed.barrier at test_before_fit.py:" in zero.output, zero
    assert "Stalled" not in one.output


def watchers() -> int:
    """The threads of this process that look for a stall before the fit."""
    return [thread.name for thread in threading.enumerate()].count("countoff before the fit")


def told(key: str = "") -> bool:
    """Whether the job's store has a key of the watching: the one under which this rank tells where it is."""
    store = default_store()
    server: Any = None if store is None else tcp_store(store)
    assert server is not None
    return server.check([f"countoff/before_fit/{key or own_rank()}"])


def join(asks: bool) -> None:
    """Makes the process group below countoff run's hook, and asks for the watching too, twice."""
    process_group.hook(dist.distributed_c10d)
    dist.distributed_c10d.init_process_group("gloo")
    for _ in range(2 * asks):
        before_fit()


def prepare_for_long() -> None:
    """All ranks are busy for three times as long as a stall, each in a line of its own."""
    join(asks=True)
    begun = time.monotonic()
    while time.monotonic() - begun < 3:
        time.sleep(0.5 if own_rank() else 3)
    dist.barrier()


def meet_regularly() -> None:
    """Nothing is trained: rank 0 has work, for which the others wait in the same line again and again."""
    join(asks=False)
    for _ in range(25):
        if own_rank() == 0:
            time.sleep(0.2)
        dist.barrier()


@pytest.mark.parametrize("job", [prepare_for_long, meet_regularly])
def test_ranks_that_are_busy_or_meet_hear_nothing(job, run_ranks):
    for result in run_ranks(job, 3, env=STALL_SECONDS):
        assert "Stalled" not in result.output, result


def load_for_two_seconds() -> None:
    """So long as rank 1 runs, whatever the time of day."""
    join(asks=False)
    tell("begun")
    for _ in range(40 * own_rank()):
        time.sleep(0.05)
    dist.barrier()


@pytest.mark.nightly
def test_a_job_that_was_stopped_has_not_stood_still(run_ranks):
    def stop_for_a_while(watch: Watch) -> None:
        for rank in range(2):
            watch.wait_for(rank, "begun")
        watch.let_run(0.5)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for rank in range(2):
                watch.kill(rank, number)
            watch.let_run(6.0)

    for result in run_ranks(
        load_for_two_seconds, 2, env={"COUNTOFF_STALL_SECONDS": "4"}, while_running=stop_for_a_while
    ):
        assert "Stalled" not in result.output, result


def begin_soon() -> tuple[int, int, bool]:
    join(asks=True)
    before = watchers()
    with Countoff() as countoff:
        countoff.start()
        until(lambda: not watchers(), time.monotonic() + 30)
        return before, watchers(), told("waits")


def test_a_fit_ends_the_watching_and_nothing_was_told(run_ranks):
    """One thread for each rank, however it was asked for; with the default patience it has not connected by then."""
    for result in run_ranks(begin_soon, 2, finalise=True):
        assert result.value == (1, 0, False), result
        assert "countoff" not in result.output, result


def wait_until_told(ending: str) -> Any:
    """Ends after this rank has told where it is: by a fit, by the end of the process group, or of the process."""
    join(asks=False)
    assert until(told, time.monotonic() + 60)
    dist.barrier()
    if ending == "process":
        return watchers()
    if ending == "fit":
        Countoff().start()
        return until(lambda: not told(), time.monotonic() + 30) and until(lambda: not watchers(), time.monotonic() + 30)
    dist.destroy_process_group()
    return until(lambda: not watchers(), time.monotonic() + 30)


@pytest.mark.parametrize("ending", ["fit", "group", "process"])
def test_the_watching_ends_with_what_it_watches(ending, run_ranks):
    """It leaves no thread, no record of a rank that is in its fit, and no warning of torch's."""
    for result in run_ranks(wait_until_told, 2, ending, env=STALL_SECONDS, finalise=True):
        assert result.value, result
        assert "Stalled" not in result.output, result
        assert "c10d" not in result.output, result


def outlive_the_store() -> bool:
    """Rank 0 hosts the store, and ends first, without a word to the process group."""
    join(asks=False)
    assert until(told, time.monotonic() + 60)
    dist.barrier()
    return own_rank() == 0 or until(lambda: not watchers(), time.monotonic() + 30)


def test_a_store_that_is_gone_ends_the_watching(run_ranks):
    """Torch may print a warning, if it goes in the middle of a call."""
    for result in run_ranks(outlive_the_store, 2, env=STALL_SECONDS, hosted_by="rank0"):
        assert result.value, result


def be_alone() -> int:
    before_fit()
    dist.init_process_group("gloo")
    before_fit()
    dist.barrier()
    return watchers()


def test_a_rank_without_others_is_not_watched(run_ranks):
    (result,) = run_ranks(be_alone, 1, env=STALL_SECONDS)
    assert (result.value, result.output) == (0, ""), result


def wait_for_each_other() -> None:
    """Each rank waits for a message of the other; the test ends them."""
    join(asks=False)
    message = torch.zeros(1)
    if own_rank() == 0:
        dist.recv(message, src=1)
    dist.recv(message, src=0)


def test_ranks_that_wait_for_one_another_are_named(run_ranks):
    def end_after_the_report(watch: Watch) -> None:
        patience = time.monotonic() + 60
        while "explain Stalled" not in watch.results()[0].output and time.monotonic() < patience:
            watch.let_run(0.1)
        for rank in range(2):
            watch.kill(rank)

    zero, one = run_ranks(wait_for_each_other, 2, env=STALL_SECONDS, expect=None, while_running=end_after_the_report)
    assert "Stalled: rank 0 waits in torch.distributed.recv at test_before_fit.py:" in zero.output, zero
    assert "; rank 1 waits in torch.distributed.recv at test_before_fit.py:" in zero.output
    assert "Stalled" not in one.output

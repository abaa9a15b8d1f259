"""A job whose store's process may open too few files for the connections of all ranks."""

import contextlib
import os
import resource
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from countoff.core import FitPlan, Guard, Settings
from integration_tests import devices, loops
from integration_tests.digits import own_rank
from integration_tests.output import verdict_lines

SAID = " files, and 2 ranks need "
NOT_COMPARED = " (nothing is compared; training goes on)"


@pytest.fixture(autouse=True)
def _own_limits() -> Iterator[None]:
    """Gives this process its limits back, also where rank 0 has failed."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@contextlib.contextmanager
def few_files(pid: int) -> Iterator[None]:
    """Lets a process open 64 files more."""
    limit, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{pid}/fd")) + 64, most))
    yield
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, most))


def train(host: int) -> tuple[list[dict[str, Any]], float]:
    """The outcomes of a loop without countoff and with it, and how long the second one took.

    Args:
        host: The process that hosts the store; 0: that of rank 0.
    """
    devices.join()
    with few_files(host or os.getpid()) if own_rank() == 0 else contextlib.nullcontext():
        dist.barrier()
        without, began = loops.healthy(False), time.monotonic()
        return [without, loops.healthy(True)], time.monotonic() - began


@pytest.mark.parametrize("hosted_by", ["agent", "rank0"])
def test_a_job_that_cannot_be_compared_says_so_once_and_trains_to_the_same_bits(run_ranks, hosted_by):
    """The process above the ranks hosts the store, as torchrun does, or the process of rank 0."""
    results = run_ranks(train, 2, os.getpid() if hosted_by == "agent" else 0, hosted_by=hosted_by)
    (line,), nothing = map(verdict_lines, results)
    assert line.startswith("countoff: LateRank: the process that hosts the job's store (pid "), line
    assert SAID in line, line
    assert line.endswith(NOT_COMPARED), line
    assert nothing == []
    for result in results:
        (without, compared), seconds = result.value
        assert without["weights"] == compared["weights"]
        assert seconds < 30, "a rank has waited for the others"


def ask_late() -> tuple[list[str], bool]:
    """Rank 1 asks where to meet once rank 0 trains on without it; the threads left, and whether it compares."""
    devices.join()
    store = dist.distributed_c10d._get_default_store()
    with few_files(os.getpid()) if own_rank() == 0 else contextlib.nullcontext():
        dist.barrier()
        if own_rank() == 1:
            store.wait(["trains"])
        guard = Guard(Settings(), rank=own_rank(), world_size=2)
        guard.fit_start(FitPlan())
        if own_rank() == 0:
            store.set("trains", "yes")
        dist.barrier()
        guard.close()
    for thread in threading.enumerate():
        if thread.name == "countoff rendezvous":
            thread.join(10)
    return [each.name for each in threading.enumerate() if each.name.startswith("countoff")], guard.state.comparing


def test_a_rank_that_asks_late_hears_that_nothing_is_compared(run_ranks):
    """Rank 0 trains on and its guard is closed by then: a rank without an answer would wait for `deadline_seconds`."""
    results = run_ranks(ask_late, 2, hosted_by="rank0")
    assert [result.value for result in results] == [([], False)] * 2
    assert verdict_lines(results[1]) == []


def test_ranks_that_must_take_as_many_batches_end_with_the_reason(run_ranks):
    """They cannot agree on their batches: to train on could hang. A rank that asks late finds rank 0 gone."""
    env = {"COUNTOFF_UNEVEN_TRAIN": "stop", "COUNTOFF_DEADLINE_SECONDS": "5"}
    first, second = (verdict_lines(result) for result in run_ranks(train, 2, os.getpid(), env=env, expect=None))
    assert any("LostRank: rank 0 has lost contact" in line and SAID in line for line in first), first
    assert any("LostRank: rank 1 has lost contact" in line for line in second), second

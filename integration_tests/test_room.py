"""A job whose store's process may open too few files for the connections of all ranks."""

import contextlib
import os
import resource
import time
from collections.abc import Iterator
from typing import Any

import pytest

from integration_tests import devices, loops
from integration_tests.jobs import own_rank, verdict_lines

SAID = " files, and 2 ranks need "
NOT_COMPARED = " (nothing is compared; training goes on)"


@contextlib.contextmanager
def few_files() -> Iterator[None]:
    """Lets this process open 64 files more."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 64, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))


def train(hosts_store: bool) -> tuple[list[dict[str, Any]], float]:
    """The outcomes of a loop without countoff and with it, and how long the second one took."""
    devices.join()
    with few_files() if hosts_store and own_rank() == 0 else contextlib.nullcontext():
        without, began = loops.healthy(False), time.monotonic()
        return [without, loops.healthy(True)], time.monotonic() - began


@pytest.mark.parametrize("hosted_by", ["agent", "rank0"])
def test_a_job_that_cannot_be_compared_says_so_once_and_trains_to_the_same_bits(run_ranks, hosted_by):
    """The process above the ranks hosts the store, as torchrun does, or the process of rank 0."""
    with few_files() if hosted_by == "agent" else contextlib.nullcontext():
        results = run_ranks(train, 2, hosted_by == "rank0", hosted_by=hosted_by)
    (line,), nothing = map(verdict_lines, results)
    assert line.startswith("countoff: LateRank: the process that hosts the job's store (pid "), line
    assert SAID in line, line
    assert line.endswith(NOT_COMPARED), line
    assert nothing == []
    for result in results:
        (without, compared), seconds = result.value
        assert without["weights"] == compared["weights"]
        assert seconds < 30, "a rank has waited for the others"


def test_ranks_that_must_take_as_many_batches_end_with_the_reason(run_ranks):
    """They cannot agree on their batches: to train on could hang."""
    with few_files():
        results = run_ranks(loops.healthy_without_and_with, 2, env={"COUNTOFF_UNEVEN_TRAIN": "stop"}, expect=None)
    for result in results:
        assert any("LostRank: " in line and SAID in line for line in verdict_lines(result)), result

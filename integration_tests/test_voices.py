"""Hosts whose ranks have one voice: jobs are as healthy, and faults are named as soon and by all, as without it."""

import contextlib
import os
import signal
import threading
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch.distributed as dist

from countoff.torch import attach
from integration_tests import devices, even_loops, loops
from integration_tests.faults.cases import CASES
from integration_tests.faults.matrix import run_cell
from integration_tests.harness import RankResult, tell
from integration_tests.hosts import HostsWatch
from integration_tests.jobs import assert_named, own_rank, share_loader, verdict_lines
from integration_tests.test_faults import assert_survivors_name, end_of
from integration_tests.test_hosts import SOON, train_slowly
from integration_tests.test_torch_even import CASES as EVEN
from integration_tests.test_torch_even import assert_even

VOICES = {"COUNTOFF_VOICE_RANKS": "2"}
"""Each host has a voice, however few ranks meet."""
nightly = pytest.mark.nightly
places = pytest.mark.parametrize(
    ("hosts", "per_host"), [(2, 2), pytest.param(2, 4, marks=nightly), pytest.param(4, 2, marks=nightly)]
)


def has_voice(*, other: bool = False) -> bool:
    """Whether this process is the voice of its host; with `other`, whether another one is."""
    return ("countoff voice" in {thread.name for thread in threading.enumerate()}) is not other


def train_and_tell(batches: int) -> tuple[int, bool]:
    """A slow loop; returns the number of batches, and whether this rank has been the voice of its host."""
    voice: list[bool] = []

    def look(number: int) -> None:
        time.sleep(0.01)
        if number == 12:
            voice.append(has_voice())

    return train_slowly(batches, 1, look), voice[0]


def end_at(at: int, sent: signal.Signals, host: int, per_host: int, other: bool, number: int) -> None:
    """Sends a signal to this process at a sample, if it is the voice of that host, or another rank of it."""
    time.sleep(0.01)
    of_host = int(os.environ["RANK"]) // per_host == host
    if number == at and of_host and has_voice(other=other) and (not other or os.environ["LOCAL_RANK"] in ("0", "1")):
        tell("culprit")
        os.kill(os.getpid(), sent)


@places
def test_each_host_has_one_voice_and_a_healthy_job_says_nothing(run_hosts, hosts, per_host):
    results = run_hosts(train_and_tell, 40, hosts=hosts, per_host=per_host, env=VOICES)
    voices = [result.value[1] for result in results]
    assert [sum(voices[first : first + per_host]) for first in range(0, hosts * per_host, per_host)] == [1] * hosts
    for result in results:
        assert result.value[0] == 40
        assert verdict_lines(result) == []
    for result in run_hosts(loops.healthy_without_and_with, hosts=hosts, per_host=per_host, env=VOICES):
        assert verdict_lines(result) == [], result
        assert len({outcome["weights"] for outcome in result.value}) == 1


@places
def test_a_short_rank_is_named_on_every_host(run_hosts, hosts, per_host):
    last = hosts * per_host - 1
    batches = [5] * last + [4]
    results = run_hosts(loops.uneven, batches, hosts=hosts, per_host=per_host, env=VOICES, expect=None)
    assert_named(results, "UnevenBatches", [last], f"rank {last} on {results[last].host} ran out of data after 4 batch")


def test_a_rank_that_is_alone_on_its_host_reads_those_that_have_a_voice_and_they_read_it(run_hosts):
    """It has no voice, and its records are in another place than theirs."""
    where = {"hosts": 2, "per_host": 2, "ranks": 3, "env": VOICES}
    results = run_hosts(loops.healthy_without_and_with, **where)
    assert [verdict_lines(result) for result in results] == [[]] * 3
    for short in (0, 2):
        batches = [4 if rank == short else 5 for rank in range(3)]
        results = run_hosts(loops.uneven, batches, **where, expect=None)
        words = f"rank {short} on {results[short].host} ran out of data after 4 batch"
        assert_named(results, "UnevenBatches", [short], words)


def culprits(results: list[RankResult]) -> list[int]:
    """The ranks that have sent themselves the signal that kills."""
    return [result.rank for result in results if result.exit_code == -signal.SIGKILL]


@pytest.mark.alone
@pytest.mark.parametrize("host", [0, 1])
@pytest.mark.parametrize("other", [False, True], ids=["voice", "another rank"])
def test_a_killed_rank_is_named_at_once_on_every_host(run_hosts, host, other):
    """The other ranks of the host speak for themselves once their voice is gone."""
    before = partial(end_at, 60, signal.SIGKILL, host, 2, other)
    results = run_hosts(
        train_slowly, 500, 1, before, hosts=2, per_host=2, env={**VOICES, **SOON}, expect=None, deadline_seconds=40
    )
    [culprit] = culprits(results)
    assert culprit // 2 == host
    assert_survivors_name(end_of(results, culprit), f"rank {culprit} on node-{host} is gone")


@pytest.mark.alone
@pytest.mark.parametrize("host", [pytest.param(0, marks=nightly), 1])
def test_a_stopped_voice_is_named_on_every_host(run_hosts, host):
    def wait(watch: HostsWatch) -> None:
        ranks = range(2 * host, 2 * host + 2)
        others = [rank for rank in range(4) if rank not in ranks]
        for rank in others:
            watch.wait_for_end(rank, timeout=40)
        for rank in ranks:  # one of them is stopped, the others have ended
            with contextlib.suppress(ProcessLookupError):
                watch.kill(rank)

    before = partial(end_at, 60, signal.SIGSTOP, host, 2, False)
    results = run_hosts(
        train_slowly,
        500,
        1,
        before,
        hosts=2,
        per_host=2,
        env={**VOICES, **SOON},
        expect=None,
        while_running=wait,
        deadline_seconds=60,
    )
    survivors = [result for result in results if result.rank // 2 != host]
    assert_survivors_name(survivors, f" on node-{host} is stopped")


@pytest.mark.ranks(4, nightly=(8,))
def test_uneven_ranks_take_as_many_batches_with_the_same_bits(run_ranks, ranks):
    cases = EVEN[ranks]
    assert_even(run_ranks(even_loops.with_twins, ranks, cases, env=VOICES), cases)


@pytest.mark.parametrize("policy", ["stop", "repeat"])
def test_uneven_ranks_of_two_hosts_take_as_many_batches(run_hosts, policy):
    cases = [case for case in EVEN[4] if case.policy == policy]
    assert_even(run_hosts(even_loops.with_twins, cases, hosts=2, per_host=2, env=VOICES), cases)


def pause_the_voice(number: int) -> None:
    """At one sample, has another rank of the host stop the process of the voice for a second."""
    time.sleep(0.005)
    if number == 10 and has_voice():
        Path("voice").write_text(f"{own_rank()} {os.getpid()}")
    if number == 100:
        rank, pid = map(int, Path("voice").read_text().split())
        if own_rank() == int(rank == 0):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(1.0)
            os.kill(pid, signal.SIGCONT)


def train_around_a_pause(batches: list[int]) -> list[tuple[int, bool]]:
    """Two fits; in the first one the voice stands still for a while.

    Returns:
        Of each fit, the number of batches, and whether this rank has had a voice.
    """
    os.environ["COUNTOFF_VOICE_RANKS"] = "2" if own_rank() == 0 else "0"
    devices.join()
    fits: list[tuple[int, bool]] = []
    for before in (pause_the_voice, None):
        model, optimizer = loops.model_and_optimizer()
        loader = share_loader(batches[own_rank()], before=before)
        trained = 0
        with attach(train=loader, optimizer=optimizer, uneven_train="stop") as handle:
            for batch in loader:
                loops.train_on(model, optimizer, batch)
                trained += 1
            assert handle.guard.member is not None
            fits.append((trained, handle.guard.member.speaker.link.voiced))
    return fits


@pytest.mark.alone
def test_a_voice_that_stands_still_holds_up_nobody(run_ranks):
    """Its ranks go on without it, and begin the next fit with voices again. That there are any is rank 0's choice."""
    results = run_ranks(train_around_a_pause, 4, [40, 38, 40, 41], deadline_seconds=60)
    assert [result.value for result in results] == [[(38, True)] * 2] * 4
    heads = [line for result in results for line in verdict_lines(result) if line.startswith("countoff: ")]
    assert len(heads) == 2  # one for each fit
    assert all(head.startswith("countoff: Truncated: train epoch 0 stopped") for head in heads)


def begin_after_the_first_of_the_host(batches: int) -> int:
    """An uneven fit, which the first rank of each host begins before the others, as where it reads the data first."""
    devices.join()
    model, optimizer = loops.model_and_optimizer()
    loader = share_loader(batches + own_rank() % 3)
    dist.barrier()
    if os.environ["LOCAL_RANK"] != "0":
        time.sleep(0.5)
    trained = 0
    with attach(train=loader, optimizer=optimizer, uneven_train="stop"):
        for batch in loader:
            loops.train_on(model, optimizer, batch)
            trained += 1
    return trained


@nightly
def test_ranks_that_begin_after_the_first_of_their_host_are_met(run_hosts):
    """More than 16 ranks: rank 0 looks up so many voices one by one."""
    results = run_hosts(begin_after_the_first_of_the_host, 10, hosts=4, per_host=8, env=VOICES, deadline_seconds=120)
    assert [result.value for result in results] == [10] * 32
    assert [line for result in results for line in verdict_lines(result) if "LateRank" in line] == []


@pytest.mark.parametrize(
    ("name", "adapter", "world_size"),
    [
        ("F1", "torch", 4),
        ("F4", "torch", 2),
        ("F5", "torch", 4),
        ("F8", "lightning", 2),
        ("F14", "composer", 2),
        ("F17", "torch", 4),
        ("F11", "accelerate", 2),
    ],
)
def test_a_fault_is_named_and_leaves_nothing_behind(tmp_path, monkeypatch, name, adapter, world_size):
    """`COUNTOFF_VOICE_RANKS=2 python -m integration_tests.faults` runs all of them."""
    if find_spec(adapter) is None:
        pytest.skip(f"{adapter} is not installed here")
    monkeypatch.setenv("COUNTOFF_VOICE_RANKS", "2")
    row = run_cell(CASES[name], adapter, world_size, tmp_path)
    assert not row.wrong, f"{'; '.join(row.wrong)}\n{row.output}"

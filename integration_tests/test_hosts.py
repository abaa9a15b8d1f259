"""Several hosts, as namespaces of this machine: what is found there, and what is no fault there."""

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from countoff.core.messages import names_of
from countoff.core.session.liveness import lifelines
from countoff.torch import Countoff
from integration_tests import loops
from integration_tests.constants import environment
from integration_tests.digits import own_rank, share_loader
from integration_tests.harness import RankResult, RanksTimedOut, tell
from integration_tests.hosts import HostsWatch
from integration_tests.lightning_jobs import Job, fit
from integration_tests.output import assert_named, verdict_lines, whole_message
from integration_tests.test_faults import assert_survivors_name, end_of, long_job, pace
from integration_tests.torchrun import family


def train_slowly(batches: int, epochs: int, before: Callable[[int], None] = pace) -> int:
    """A plain loop, of which the test can wait for the third batch; returns the number of batches."""
    dist.init_process_group("gloo")
    model, optimizer = loops.model_and_optimizer()
    loader = share_loader(batches, before=before)
    countoff = Countoff(optimizer=optimizer)
    trained = 0
    for _ in range(epochs):
        for batch in countoff.train(loader):
            loops.train_on(model, optimizer, batch)
            trained += 1
    return trained


_watched: list[bool] = []


def pace_until_watched(number: int) -> None:
    """Trains slowly, and tells the test once the lifelines stand and the ranks know each other's hosts."""
    pace(number)
    if not _watched and any(map(_is_watched, lifelines._all)):  # Lightning fetches batches before there are any
        _watched.append(True)
        tell("watched")


def _is_watched(own: lifelines.Lifelines) -> bool:
    rank, per_host = own_rank(), int(os.environ["LOCAL_WORLD_SIZE"])
    if rank == 0:
        return len(own.known_hosts) == 4 // per_host - 1
    stands = 0 in own.sockets or not own._is_hosts_first()
    return rank < per_host or (stands and own.hub is not None and bool(own.hub.ranks))


def wait_until_watched(watch: HostsWatch) -> None:
    for rank in range(4):
        watch.wait_for(rank, "watched")


SOON = {"COUNTOFF_LOST_SECONDS": "3", **environment(GRACE_SECONDS=1)}
"""So that tests are short."""
JOBS: dict[str, tuple[Any, ...]] = {
    "plain": (train_slowly, 500, 1, pace_until_watched),
    "lightning": (fit, Job(train=[500] * 4, before=pace_until_watched)),
}
nightly = pytest.mark.nightly


def wait_in_a_loader() -> int:
    """A plain loop in which the loader of rank 3 waits until rank 0 has reported the stall."""

    def hold(sample: int) -> None:
        deadline = time.monotonic() + 20
        while own_rank() == 3 and sample and "Stalled" not in Path("rank0.log").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    dist.init_process_group("gloo")
    model, optimizer = loops.model_and_optimizer()
    loader = share_loader(3, before=hold)
    countoff = Countoff(optimizer=optimizer, stall_seconds=1.0)
    return sum(loops.train_on(model, optimizer, batch) is None for batch in countoff.train(loader))


def fit_without_and_with() -> list[dict[str, Any]]:
    """The outcomes of the same fit without countoff and with it, in one process."""
    return [fit(Job(even=80, val=[2] * 4, options=options)) for options in (None, {})]


def see_the_host() -> dict[str, Any]:
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    return {
        "host": socket.gethostname(),
        "sum": total.item(),
        "local_rank": os.environ["LOCAL_RANK"],
        "sees": os.path.exists(f"/proc/{os.getpid()}/stat"),
        "processes": sum(name.isdigit() for name in os.listdir("/proc")),
        "namespaces": [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "uts", "pid", "mnt")],
    }


def wait_to_be_ended() -> None:
    dist.init_process_group("gloo")
    tell("here")
    time.sleep(3600)


def networks() -> set[str]:
    """The network namespaces that a thread of pytest, or of a process that it has started, is in."""
    found = set()
    for process in family(os.getpid()):
        for thread in Path(f"/proc/{process}/task").glob("*"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                found.add(os.readlink(thread / "ns/net"))
    return found


def links() -> list[str]:
    return sorted(os.listdir("/sys/class/net"))


@pytest.mark.parametrize("hosted_by", ["agent", pytest.param("rank0", marks=nightly)])
def test_ranks_of_two_hosts_meet_and_see_their_own_host_alone(run_hosts, hosted_by):
    """Each host has its own name, network and processes, and the ranks of both form one group."""
    results = run_hosts(see_the_host, hosts=2, per_host=2, hosted_by=hosted_by)
    values = [result.value for result in results]
    assert [value["host"] for value in values] == [result.host for result in results]
    assert [result.host for result in results] == ["node-0", "node-0", "node-1", "node-1"]
    assert [value["local_rank"] for value in values] == ["0", "1", "0", "1"]
    assert all(value["sum"] == 4 and value["sees"] and value["processes"] < 20 for value in values)
    assert values[0]["namespaces"] == values[1]["namespaces"]
    ours = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "uts", "pid", "mnt")]
    for first, second in (
        (values[0]["namespaces"], values[2]["namespaces"]),
        (values[0]["namespaces"], ours),
        (values[2]["namespaces"], ours),
    ):
        assert not set(first) & set(second)


@pytest.mark.nightly
def test_nothing_stays_behind_whatever_happens(run_hosts):
    """After a deadline, an exception, a Ctrl-C and a loss of power, no process, thread, link or namespace is left."""
    before, before_links = networks(), links()
    made: list[int] = []

    def stop_with(error: type[BaseException], watch: HostsWatch) -> None:
        watch.wait_for(1, "here")
        made.append(len(networks() - before))
        raise error

    with pytest.raises(RanksTimedOut, match="ranks 0, 1") as failure:
        run_hosts(wait_to_be_ended, hosts=2, per_host=1, deadline_seconds=10)
    assert all("in wait_to_be_ended" in result.output for result in failure.value.results)
    for error in (ZeroDivisionError, KeyboardInterrupt):
        stop = partial(stop_with, error)
        with pytest.raises(error):
            run_hosts(wait_to_be_ended, hosts=2, per_host=1, while_running=stop, delay_seconds=0.01)

    def power_off(watch: HostsWatch) -> None:
        for rank, host in ((1, 1), (0, 0)):
            watch.wait_for(rank, "here")
            watch.power_off(host)
            assert watch.wait_for_end(rank) == -signal.SIGKILL

    run_hosts(
        wait_to_be_ended,
        hosts=2,
        per_host=1,
        while_running=power_off,
        expect=-signal.SIGKILL,
        delay_seconds=0.01,
    )
    assert made == [3, 3]  # those of a switch and two hosts
    assert networks() == before
    assert links() == before_links


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 2), pytest.param(4, 1, marks=nightly)], ids=["2x2", "4x1"])
def test_a_short_rank_is_named_on_every_host(run_hosts, hosts, per_host):
    """Every rank of every host names the rank that runs out of data first, in plain PyTorch and in Lightning."""
    batches = [5, 5, 5, 4]
    for function, argument in ((loops.uneven, batches), (fit, Job(train=batches))):
        results = run_hosts(function, argument, hosts=hosts, per_host=per_host, expect=None, deadline_seconds=40)
        host = results[3].host
        words = f"rank 3 on {host} ran out of data after 4 batches of train epoch 0"
        assert_named(results, "UnevenBatches", [3], words)
        assert any(line.split()[:2] == ["3", host] for line in whole_message(results).splitlines())


def test_a_stall_report_names_the_host_of_the_rank_that_waits(run_hosts):
    """The report has the host in its sentence and a column for it, and the job goes on."""
    results = run_hosts(wait_in_a_loader, hosts=2, per_host=2)
    head, _, columns, first, *rest = verdict_lines(results[0])
    assert head == "countoff: Stalled: no rank has made progress for 1 s; rank 3 on node-1 is in its loader."
    assert columns.split()[:3] == ["rank", "host", "where"]
    assert first.split()[:2] == ["3", "node-1"]
    assert [line.split()[1] for line in rest[:3]] == ["node-0", "node-0", "node-1"]
    assert not any(verdict_lines(result) for result in results[1:])


@pytest.mark.alone
@pytest.mark.parametrize("framework", ["plain", pytest.param("lightning", marks=nightly)])
def test_a_killed_rank_is_named_at_once_on_every_host(run_hosts, framework):
    """A neighbour sees a killed rank's process end, and all survivors name it, those of the other host as well."""
    ended: list[float] = []

    def kill(watch: HostsWatch) -> None:
        watch.wait_for(3, "training")
        began = time.monotonic()
        watch.kill(3)
        for rank in range(3):
            watch.wait_for_end(rank)
        ended.append(time.monotonic() - began)

    function, *arguments = (train_slowly, 500, 1) if framework == "plain" else (fit, long_job(4))
    results = run_hosts(function, *arguments, hosts=2, per_host=2, expect=None, while_running=kill, deadline_seconds=40)
    assert results[3].exit_code == -signal.SIGKILL
    assert_survivors_name(end_of(results, 3), "rank 3 on node-1 is gone")
    assert ended[0] < 10, ended


@pytest.mark.nightly
@pytest.mark.parametrize("seconds", [8, pytest.param(13, marks=nightly)])
def test_a_partition_that_heals_is_no_fault(run_hosts, seconds):
    """After some seconds in which neither host reaches the other, the job ends well and without a word."""

    def cut(watch: HostsWatch) -> None:
        watch.wait_for(2, "training")
        watch.link_down(1)
        watch.let_run(seconds)
        watch.link_up(1)

    results = run_hosts(train_slowly, 60, 1, hosts=2, per_host=2, while_running=cut)
    for result in results:
        assert result.value == 60
        assert result.seconds > seconds
        assert verdict_lines(result) == [], result


def of_localhost(rank: int) -> dict[str, str]:
    """The environment of a rank where host 0, which has two ranks, knows the store as its own."""
    return {"MASTER_ADDR": "localhost"} if rank < 2 else {}


@pytest.mark.parametrize("hosted_by", ["agent", pytest.param("rank0", marks=nightly)])
def test_hosts_may_know_the_store_by_different_names(run_hosts, hosted_by):
    """With MASTER_ADDR=localhost on the store's host and its name on the other one, ranks are compared as ever."""
    where = {"hosts": 2, "per_host": 2, "hosted_by": hosted_by, "env": of_localhost, "deadline_seconds": 40}
    for result in run_hosts(train_slowly, 3, 1, **where):
        assert result.value == 3
        assert verdict_lines(result) == [], result
    results = run_hosts(loops.uneven, [5, 5, 5, 4], expect=None, **where)
    assert_named(results, "UnevenBatches", [3], "rank 3 on node-1 ran out of data after 4 batches of train epoch 0")


def assert_host_lost(results: list[RankResult], host: str, ranks: str) -> None:
    """All of these ranks have ended with the loss of a host, and have named no other rank."""
    for result in results:
        text = "\n".join(verdict_lines(result))
        assert text.count("countoff: LostRank: ") == 1, result
        assert f"countoff: LostRank: host {host} with {ranks} does not answer." in text, result
        assert f"lost: {ranks} of 4 ranks" in text or "lost: " not in text, result
        assert result.exit_code not in (0, None), result
        assert f"host {host} with {ranks} does not answer" in result.error_file, result


@pytest.mark.alone
@pytest.mark.parametrize(
    ("framework", "hosts", "per_host", "lost", "hosted_by"),
    [
        ("plain", 2, 2, 1, "agent"),
        ("lightning", 2, 2, 0, "rank0"),
        pytest.param("lightning", 2, 2, 1, "rank0", marks=nightly),
        pytest.param("plain", 2, 2, 0, "agent", marks=nightly),
        pytest.param("plain", 4, 1, 1, "agent", marks=nightly),
        pytest.param("plain", 4, 1, 0, "rank0", marks=nightly),
    ],
)
def test_a_host_without_power_is_named(run_hosts, framework, hosts, per_host, lost, hosted_by):
    """Every survivor names the host and all of its ranks, though it may be the store's."""
    dead = range(lost * per_host, (lost + 1) * per_host)

    def cut(watch: HostsWatch) -> None:
        wait_until_watched(watch)
        watch.power_off(lost)
        survivors = [rank for rank in range(4) if rank not in dead]
        for rank in survivors:
            watch.wait_for_end(rank, timeout=20)

    results = run_hosts(
        *JOBS[framework],
        hosts=hosts,
        per_host=per_host,
        hosted_by=hosted_by,
        env=SOON,
        expect=None,
        while_running=cut,
        deadline_seconds=80,
    )
    survivors = [result for result in results if result.rank not in dead]
    assert_host_lost(survivors, f"node-{lost}", names_of(list(dead)))


@pytest.mark.alone
@pytest.mark.parametrize("framework", ["plain", pytest.param("lightning", marks=nightly)])
def test_in_a_partition_each_side_names_the_other(run_hosts, framework):
    """In a partition that lasts, each side ends with the other's host, and no rank blames one of its own host."""

    def cut(watch: HostsWatch) -> None:
        wait_until_watched(watch)
        watch.link_down(1)
        for rank in range(4):
            watch.wait_for_end(rank, timeout=20)
        watch.link_up(1)

    results = run_hosts(
        *JOBS[framework], hosts=2, per_host=2, env=SOON, expect=None, while_running=cut, deadline_seconds=80
    )
    assert_host_lost(results[:2], "node-1", "ranks 2, 3")
    assert_host_lost(results[2:], "node-0", "ranks 0, 1")


@pytest.mark.alone
@pytest.mark.parametrize("framework", ["plain", pytest.param("lightning", marks=nightly)])
def test_a_killed_rank_without_neighbours_is_named(run_hosts, framework):
    """With one rank per host, no neighbour sees a killed rank's process end, and all survivors name it."""

    def kill(watch: HostsWatch) -> None:
        wait_until_watched(watch)
        watch.kill(3)
        for rank in range(3):
            watch.wait_for_end(rank)

    results = run_hosts(*JOBS[framework], hosts=4, per_host=1, expect=None, while_running=kill, deadline_seconds=40)
    assert_survivors_name(end_of(results, 3), "rank 3 on node-3 is gone")


@pytest.mark.alone
@pytest.mark.parametrize(("hosts", "per_host"), [(2, 2), pytest.param(4, 1, marks=nightly)], ids=["2x2", "4x1"])
def test_a_killed_rank_0_is_named_though_it_hosts_the_store(run_hosts, hosts, per_host):
    """Every survivor names it, and none takes its own lost connection for the cause."""

    def kill(watch: HostsWatch) -> None:
        wait_until_watched(watch)
        watch.kill(0)

    results = run_hosts(
        *JOBS["plain"],
        hosts=hosts,
        per_host=per_host,
        hosted_by="rank0",
        expect=None,
        while_running=kill,
        deadline_seconds=60,
    )
    assert_survivors_name(end_of(results, 0), "countoff: LostRank: rank 0 on node-0 ")


@pytest.mark.alone
@pytest.mark.nightly
@pytest.mark.parametrize("stopped", [1, 0])
def test_a_host_whose_ranks_are_all_stopped_is_not_lost(run_hosts, stopped):
    """A stopped process sends no heartbeat, but its kernel answers: the job goes on where it has stopped."""
    ranks = range(2 * stopped, 2 * stopped + 2)

    def stop(watch: HostsWatch) -> None:
        wait_until_watched(watch)
        for rank in ranks:
            watch.kill(rank, signal.SIGSTOP)
        watch.let_run(8)
        for rank in ranks:
            watch.kill(rank, signal.SIGCONT)

    env = {**SOON, "COUNTOFF_STALL_SECONDS": "4"}  # that is how patient heartbeats alone would be
    results = run_hosts(train_slowly, 200, 1, pace_until_watched, hosts=2, per_host=2, env=env, while_running=stop)
    for result in results:
        assert result.value == 200
        assert "LostRank" not in result.output, result


@pytest.mark.parametrize("delay_seconds", [pytest.param(None, marks=nightly), 0.03])
def test_a_healthy_job_on_two_hosts_prints_nothing(run_hosts, delay_seconds):
    """A healthy job prints nothing on any host and trains to the same bits, also where the store answers late."""
    plain = run_hosts(loops.healthy_without_and_with, hosts=2, per_host=2, delay_seconds=delay_seconds)
    lightning = run_hosts(fit_without_and_with, hosts=2, per_host=2, delay_seconds=delay_seconds)
    for results in (plain, lightning):
        for result in results:
            assert verdict_lines(result) == [], result
        assert len({outcome["weights"] for result in results for outcome in result.value}) == 1


@pytest.mark.torchrun
@pytest.mark.nightly
def test_under_torchrun_both_hosts_show_the_verdict(run_torchrun_on_hosts):
    """The torchrun of each host fails with the verdict, which is on its console and is its root cause."""
    script = "from integration_tests.loops import uneven\nuneven([5, 5, 5, 4])"
    # The torchruns decide which of the hosts has rank 3.
    verdict = r"countoff: UnevenBatches: rank 3 on node-[01] ran out of data after 4 batches of train epoch 0"
    for run in run_torchrun_on_hosts(script, hosts=2, per_host=2):
        console, _, cause = run.output.partition("Root Cause")
        assert run.exit_code == 1, run.output
        assert re.search(verdict, console), run.output
        assert re.search(verdict, cause), run.output

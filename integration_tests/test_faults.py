"""Ranks that fail, die, freeze, or lose the store: every survivor ends with a verdict that names the culprit."""

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from countoff.core import FitPlan, Guard, Settings
from countoff.core.session.store.channel import Channel
from countoff.core.session.threads.process_threads import ProcessThreads
from countoff.torch import Countoff
from integration_tests.digits import own_rank, share_loader
from integration_tests.harness import RankResult, Watch, tell
from integration_tests.lightning_jobs import Job, fit
from integration_tests.output import assert_named, verdict_lines
from tests.relay import slow_store


def fail_at(rank: int, sample: int, number: int) -> None:
    if own_rank() == rank and number == sample:
        raise ValueError("shard 3 is torn")


def pace(number: int) -> None:
    """Trains slowly, and tells the test when training has begun."""
    time.sleep(0.01)
    if number == 12:
        tell("training")


def long_job(ranks: int, **more: Any) -> Job:
    return Job(train=[500] * ranks, before=pace, **more)


def end_of(results: list[RankResult], culprit: int) -> list[RankResult]:
    return [result for result in results if result.rank != culprit]


HOSTED_BY = [pytest.param("agent", marks=pytest.mark.nightly), "rank0"]
"""With the agent's store, the fault matrix and test_schedulers.py have the same faults at each merge."""


@pytest.mark.ranks(2, nightly=(4,))
@pytest.mark.parametrize("hosted_by", HOSTED_BY)
def test_a_rank_that_raises_in_its_loader_is_named(run_ranks, ranks, hosted_by):
    """Every rank names the rank that raised, with its error, whoever hosts the store."""
    culprit = ranks - 1 if hosted_by == "agent" else 0
    job = Job(train=[5] * ranks, before=partial(fail_at, culprit, 9))
    results = run_ranks(fit, ranks, job, expect=None, hosted_by=hosted_by, deadline_seconds=40, finalise=True)
    assert_named(results, "LostRank", [culprit], f"rank {culprit} raised ValueError: shard 3 is torn")


@pytest.mark.ranks(2, nightly=(4,))
@pytest.mark.parametrize("hosted_by", HOSTED_BY)
def test_a_killed_rank_is_named_by_every_survivor(run_ranks, ranks, hosted_by):
    """The survivors name a killed rank, though it may have hosted the store."""
    culprit = ranks - 1 if hosted_by == "agent" else 0

    def kill(watch: Watch) -> None:
        watch.wait_for(culprit, "training")
        watch.kill(culprit)

    results = run_ranks(
        fit,
        ranks,
        long_job(ranks),
        expect=None,
        hosted_by=hosted_by,
        while_running=kill,
        deadline_seconds=40,
        finalise=True,
    )
    assert results[culprit].exit_code == -signal.SIGKILL
    assert_survivors_name(end_of(results, culprit), f"rank {culprit} is gone")


@pytest.mark.ranks(2, nightly=(4,))
@pytest.mark.parametrize("hosted_by", HOSTED_BY)
def test_a_stopped_rank_is_named_by_every_survivor(run_ranks, ranks, hosted_by):
    """The survivors name a stopped rank, though it may host the store."""
    culprit = ranks - 1 if hosted_by == "agent" else 0

    def stop(watch: Watch) -> None:
        watch.wait_for(culprit, "training")
        watch.kill(culprit, signal.SIGSTOP)
        for rank in range(ranks):
            if rank != culprit:
                watch.wait_for_end(rank, timeout=30)
        watch.kill(culprit)

    results = run_ranks(
        fit,
        ranks,
        long_job(ranks, options={"lost_seconds": 2.0}),
        expect=None,
        hosted_by=hosted_by,
        while_running=stop,
        deadline_seconds=60,
        finalise=True,
    )
    assert_survivors_name(end_of(results, culprit), f"rank {culprit} is stopped")


def assert_survivors_name(survivors: list[RankResult], words: str) -> None:
    for result in survivors:
        text = "\n".join(verdict_lines(result))
        assert "countoff: LostRank: " in text, result
        assert words in text, result
        assert result.exit_code not in (0, None), result
        assert "countoff LostRank: " in result.error_file, result


@pytest.mark.alone
def test_training_does_not_wait_for_a_slow_store(run_ranks):
    """Training takes no longer where the store answers seconds late."""
    with slow_store() as store:

        def delay(watch: Watch) -> None:
            watch.wait_for(0, "training")
            store.delay_seconds = 3.0

        env = {"MASTER_PORT": str(store.port)}
        job = Job(train=[8, 8], before=pace, trainer={"max_epochs": 12})
        results = run_ranks(timed_fit, 2, job, env=env, while_running=delay, deadline_seconds=60)
    for result in results:
        # 24 sync points and as many gatherings were passed; had one in ten waited for its answer, this would not hold.
        assert result.value["seconds"] < 12 * 8 * 4 * 0.01 + 8, result
        assert verdict_lines(result) == []


def timed_fit(job: Job) -> dict[str, Any]:
    began = time.monotonic()
    return {**fit(job), "seconds": time.monotonic() - began}


@pytest.mark.nightly
def test_a_slow_store_makes_the_verdict_late_not_wrong(run_ranks):
    """With a slow store the verdict comes later and names the same rank."""
    with slow_store() as store:

        def delay(watch: Watch) -> None:
            watch.wait_for(0, "training")
            store.delay_seconds = 0.5

        env = {"MASTER_PORT": str(store.port)}
        job = Job(train=[40, 39], before=pace, trainer={"max_epochs": 12})
        results = run_ranks(fit, 2, job, expect=None, env=env, while_running=delay)
    for result in results:
        text = "\n".join(verdict_lines(result))
        assert "countoff: UnevenBatches: " in text, result
        assert "rank 1 ran out of data after 39 batches of train epoch 0" in text, result
        assert "40" in text, result
        assert result.exit_code not in (0, None), result


@pytest.mark.alone
def test_a_guard_on_one_rank_alone_reports_it_and_trains_on(run_ranks):
    """COUNTOFF=1 turns it on in an unchanged program. The rank reports the missing one, and trains to the end."""

    def only_on_rank_0(rank: int) -> dict[str, str]:
        return {"COUNTOFF": "1", "COUNTOFF_DEADLINE_SECONDS": "2"} if rank == 0 else {}

    results = run_ranks(fit, 2, Job(train=[5, 5], options=None), env=only_on_rank_0, deadline_seconds=40)
    assert any("rank 1 has not counted off: is countoff on there?" in line for line in verdict_lines(results[0])), (
        results[0]
    )
    assert verdict_lines(results[1]) == []


@pytest.mark.alone
def test_a_guard_on_every_rank_but_the_first_reports_it(run_ranks):
    """Rank 0 without countoff is reported by the others."""

    def not_on_rank_0(rank: int) -> dict[str, str]:
        return {"COUNTOFF": "1", "COUNTOFF_DEADLINE_SECONDS": "2"} if rank else {}

    results = run_ranks(fit, 2, Job(train=[5, 5], options=None), env=not_on_rank_0, deadline_seconds=40)
    assert any("rank 0 has not counted off: is countoff on there?" in line for line in verdict_lines(results[1])), (
        results[1]
    )


def test_a_flag_in_the_environment_turns_it_off(run_ranks):
    """COUNTOFF=0 turns the callback off: no thread of countoff runs."""
    results = run_ranks(count_threads, 2, Job(even=40), env={"COUNTOFF": "0"})
    assert [result.value for result in results] == [[], []]


def count_threads(job: Job) -> list[str]:
    import threading

    fit(job)
    return [thread.name for thread in threading.enumerate() if "countoff" in thread.name]


def test_a_bad_value_in_the_environment_is_one_clear_line(run_ranks):
    """A bad value in the environment ends the program with the name of the variable in the last line."""
    env = {"COUNTOFF_ON_DIVERGENCE": "explode"}
    results = run_ranks(fit, 2, Job(even=40), env=env, expect=1, deadline_seconds=40)
    for result in results:
        assert "COUNTOFF_ON_DIVERGENCE" in result.output.splitlines()[-1], result


def test_warn_mode_prints_once_and_ends_nothing(run_ranks):
    """`on_divergence='warn'` prints the verdict once and lets the program go on."""
    results = run_ranks(epochs_by_hand, 2, expect=0, deadline_seconds=40)
    lines = [line for result in results for line in verdict_lines(result)]
    assert sum("countoff: UnevenBatches: " in line for line in lines) == 1, results[0].output + results[1].output
    assert verdict_lines(results[1]) == []
    assert [result.value for result in results] == [8, 10]


def epochs_by_hand() -> int:
    """Two epochs in which nothing is synchronised, so that only the counts differ."""
    dist.init_process_group("gloo")
    rank = own_rank()
    guard = Guard(Settings(on_divergence="warn"), rank=rank, world_size=2)
    guard.fit_start(FitPlan())
    batches = 0
    for epoch in range(2):
        guard.train_start(epoch)
        for _ in range(4 if rank == 0 else 5):
            guard.batch()
            batches += 1
        guard.train_end("exhausted")
    guard.fit_end()
    guard.close()
    dist.barrier()
    return batches


def test_a_closed_guard_leaves_no_thread_and_no_descriptor(run_ranks):
    """But for its two connections, which the next fit uses, and which end with the process group."""
    for result in run_ranks(leftovers, 2):
        assert result.value == (0, 2, 0)


def test_a_guard_closed_while_it_connects_leaves_no_thread_and_no_descriptor(run_ranks):
    """A fit may be shorter than a look-up of a name, which torch's client makes while it connects."""
    for result in run_ranks(leftovers_of_a_slow_connection, 2):
        assert result.value == (0, 2, 0)


def leftovers_of_a_slow_connection() -> tuple[int, int, int]:
    connect = ProcessThreads._connect

    def late(self: ProcessThreads) -> Channel:
        channel = connect(self)
        if threading.current_thread() is self.reader_thread:
            self.closing.wait()
            time.sleep(0.5)  # a name server that is slow
        return channel

    ProcessThreads._connect = late
    try:
        return leftovers()
    finally:
        ProcessThreads._connect = connect


def leftovers() -> tuple[int, int, int]:
    """The threads and descriptors that three fits have left, and the descriptors without the process group."""
    dist.init_process_group("gloo")
    dist.barrier()  # so that gloo has made its connections, and closed what it needed for that
    threads, descriptors = threading.active_count(), set(os.listdir("/dev/fd"))
    for _ in range(3):
        guard = Guard(Settings(), rank=own_rank(), world_size=2)
        guard.fit_start(FitPlan())
        guard.fit_end()
        guard.close()
        guard.close()
        del guard
    threads, kept = threading.active_count() - threads, len(set(os.listdir("/dev/fd")) - descriptors)
    dist.barrier()  # the other rank has counted too, before the group ends
    dist.destroy_process_group()
    return threads, kept, len(set(os.listdir("/dev/fd")) - descriptors)


def wait_in_different_collectives() -> None:
    """After two batches, rank 0 sums once more, and rank 1 waits for a broadcast from it in another group."""
    dist.init_process_group("gloo")
    pair = dist.new_group([0, 1])
    loader = share_loader(4)
    countoff = Countoff(stall_seconds=1.0)
    total = torch.zeros(3)
    for number, _ in enumerate(countoff.train(loader), 1):
        dist.all_reduce(total)
        if number == 2:
            break
    threading.Thread(target=_tell_of_the_stall, daemon=True).start()
    if own_rank() == 0:
        dist.all_reduce(total)
    else:
        dist.broadcast(total, src=0, group=pair)


def _tell_of_the_stall() -> None:
    while "Collectives issued" not in Path("rank0.log").read_text():
        time.sleep(0.05)
    tell("stalled")


def test_a_stall_shows_the_last_collectives(run_ranks):
    """Torch's flight recorder has them: in newer versions those of gloo, in older ones those of NCCL alone."""

    def end(watch):
        watch.wait_for(0, "stalled")
        for rank in (0, 1):
            watch.kill(rank)

    recorder = {"TORCH_FR_BUFFER_SIZE": "100"}
    results = run_ranks(
        wait_in_different_collectives, 2, env=recorder, expect=None, while_running=end, deadline_seconds=40
    )
    report = "\n".join(verdict_lines(results[0]))
    if hasattr(_distributed_c10d, "_dump_fr_trace_json"):
        sums, broadcast = "(the last: all_reduce of [3])", "(the last: broadcast of [3])"
        assert f"in process group 0: 3 {sums} by rank 0, 2 {sums} by rank 1." in report, report
        assert f"in process group 1: 0 by rank 0, 1 {broadcast} by rank 1." in report, report
    else:
        assert "in process group 0: 3 by rank 0, 2 by rank 1." in report, report
        assert "in process group 1: 0 by rank 0, 1 by rank 1." in report, report

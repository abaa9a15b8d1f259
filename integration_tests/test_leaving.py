"""Ranks that come late, pause or exit: healthy ones get no verdict, and those that hide a failure are named."""

import contextlib
import multiprocessing
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from countoff._adapter.counted_loop import active_loops
from countoff.core import DivergenceError, FitPlan, Guard, Settings
from countoff.core.session.store.channel import Channel
from countoff.core.verdict import PlanMismatch
from countoff.torch import Countoff
from integration_tests.digits import BATCH_SIZE, own_rank, share_loader
from integration_tests.loops import even_loader, model_and_optimizer, train_on
from integration_tests.objects import threads
from integration_tests.output import assert_named, verdict_lines


def test_a_destroyed_process_group_is_no_lost_store(run_ranks):
    """A rank that works on after `destroy_process_group()` gets no verdict."""
    results = run_ranks(destroys_the_group_and_works_on, 2, hosted_by="rank0", finalise=True)
    assert [result.value for result in results] == [None, None], results
    assert not any(verdict_lines(result) for result in results), results


def destroys_the_group_and_works_on() -> str | None:
    dist.init_process_group("gloo")
    loader = even_loader(40)
    countoff = Countoff()
    for _ in countoff.train(loader):
        dist.barrier()
    dist.destroy_process_group()
    threading.Event().wait(1.5)  # rank 0 saves the model: three times as long as a lost store is looked into
    verdict = countoff.guard.verdict
    return None if verdict is None else verdict.headline


def test_an_exit_of_all_ranks_is_no_verdict(run_ranks):
    """An exit of all ranks inside an epoch is no verdict, and neither is the failure of a forked child."""
    for result in run_ranks(forks_and_exits, 2, finalise=True):
        assert result.exit_code == 0, result
        assert not verdict_lines(result), result
        assert not result.error_file, result


def forks_and_exits() -> None:
    dist.init_process_group("gloo")
    loader = even_loader(40)
    with Countoff() as countoff:
        for _ in countoff.train(loader):
            child = os.fork()
            if not child:
                countoff.guard.failed(ValueError("of a child that is not this rank"))
                os._exit(0)
            os.waitpid(child, 0)
            dist.barrier()
            sys.exit(0)


def test_a_second_countoff_takes_over_from_the_first(run_ranks):
    """Its first train pass ends the fit of the first one, which counts nothing from then on."""
    results = run_ranks(begins_twice, 2)
    assert [result.value for result in results] == [(5, 5, 1, [])] * 2
    assert not any(verdict_lines(result) for result in results), results


def begins_twice() -> tuple[int, int, int, list[str]]:
    dist.init_process_group("gloo")
    loader = even_loader(40)
    first, second = Countoff(), Countoff()
    for countoff in (first, second):
        for _ in countoff.train(loader):
            dist.barrier()
    active = len(active_loops())
    first.close()
    second.close()
    return first.guard.train_batches, second.guard.train_batches, active, threads()


def test_one_rank_that_exits_in_the_middle_is_named(run_ranks):
    """A rank that exits alone is named by a rank that no collective would end."""
    results = run_ranks(exits_alone, 2, expect=None, finalise=True)
    assert "rank 1 stopped after 3 batches of train epoch 0" in results[0].output, results
    assert results[0].exit_code != 0


@pytest.mark.parametrize(
    "way", ["return", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("exit", "catch"))]
)
def test_one_rank_that_is_gone_before_its_collective_is_named(run_ranks, way):
    """A rank that leaves its loop before a collective is named, by whatever way it left."""
    results = run_ranks(goes_alone, 2, way, expect=None, finalise=True)
    assert "rank 1 stopped after 3 batches of train epoch 0 and ended its fit there" in results[0].output, results
    assert "countoff LostRank: rank 1 stopped" in results[0].error_file, results


def goes_alone(way: str) -> None:
    dist.init_process_group("gloo")
    model, optimizer = model_and_optimizer()
    loader = even_loader(40)
    countoff = Countoff()
    with contextlib.suppress(KeyboardInterrupt):
        for number, batch in enumerate(countoff.train(loader), start=1):
            if own_rank() == 1 and number == 3:
                if way == "exit":
                    sys.exit(0)
                if way == "catch":
                    raise KeyboardInterrupt
                break
            train_on(model, optimizer, batch)
    countoff.close()


def exits_alone() -> None:
    dist.init_process_group("gloo")
    loader = even_loader()
    with Countoff() as countoff:
        for number, _ in enumerate(countoff.train(loader), start=1):
            if own_rank() == 1 and number == 3:
                sys.exit(0)
            if number > 3:  # without rank 1 no collective would ever end: only its sync point shows it
                countoff.guard.state.ended.wait(10)


def test_a_rank_that_leaves_a_hand_written_loop_unseen_is_named(run_ranks):
    """The rank whose program exits past its guard is named, and not the one that only lost its peer."""
    results = run_ranks(leaves_unseen, 2, expect=None, finalise=True)
    said = "\n".join(verdict_lines(results[0]))
    assert "countoff: LostRank: rank 1 left the job before its fit had ended; rank 0 raised " in said, results
    assert "lost: rank 1 of 2 ranks" in said, results
    assert not verdict_lines(results[1]), results


def leaves_unseen() -> None:
    dist.init_process_group("gloo")
    guard = Guard(Settings(), rank=own_rank(), world_size=2)
    guard.fit_start(FitPlan())
    guard.train_start(0)
    try:
        for number in range(5):
            guard.batch()
            if own_rank() == 1 and number == 2:
                sys.exit(0)
            dist.barrier()
    except Exception as error:
        guard.failed(error)
        raise


def test_ranks_that_all_leave_write_two_goodbyes_at_most(run_ranks):
    """The log has a goodbye of the first one and of rank 0, and every rank ends its threads without a word."""
    for result in run_ranks(leave_together, 5, finalise=True):
        goodbyes, left = result.value
        assert len(goodbyes) <= 2, result
        assert 0 in goodbyes, result
        assert left == [], result
        assert result.output == "", result


def leave_together() -> tuple[list[int], list[str]]:
    """The ranks whose goodbyes are in the log, and the threads that are left."""
    dist.init_process_group("gloo")
    guard = Guard(Settings(), rank=own_rank(), world_size=5)
    guard.fit_start(FitPlan())
    guard.train_start(0)
    registration: Any = guard.registration
    place = registration.threads.place
    dist.barrier()
    guard.close()
    left = threads()
    dist.barrier()
    log = Channel(place.host, place.port, place.prefix)
    entries = [log.get(key) for key in (f"log/{index}" for index in range(32)) if log.has(key)]
    return [entry["rank"] for entry in entries if entry["type"] == "goodbye"], left


def test_a_rank_that_goes_on_after_another_has_left_is_compared(run_ranks):
    """Nobody waits for entries of the log any more, and each one is read all the same."""
    values = [result.value for result in run_ranks(goes_on_after_another, 3)]
    assert values == ["rank 0 ran out of data", None, "rank 0 ran out of data"], values


def goes_on_after_another() -> str | None:
    dist.init_process_group("gloo")
    guard = Guard(Settings(on_divergence="warn"), rank=own_rank(), world_size=3)
    guard.fit_start(FitPlan())
    guard.train_start(0)
    dist.barrier()
    store: Any = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportAttributeAccessIssue]
    if own_rank() == 1:
        guard.close()
        store.set("closed", "yes")
    else:
        store.wait(["closed"])
        while guard.state.left is None:
            time.sleep(0.01)
        for _ in range(4 + own_rank()):
            guard.batch()
        guard.train_end("exhausted")
        guard.state.ended.wait(20)
        guard.close()
    dist.barrier()
    return None if guard.verdict is None else guard.verdict.sentence.partition(" after")[0]


def test_a_rank_that_is_gone_is_the_cause_and_not_one_that_has_left(run_ranks):
    """A launcher stops rank 0 because rank 1 was killed. Rank 2, whose collective fails then, names rank 1."""
    results = run_ranks(is_killed_as_another_leaves, 3, expect=None, deadline_seconds=60)
    assert "LostRank: rank 1 is gone (pid " in "\n".join(verdict_lines(results[2])), results


def is_killed_as_another_leaves() -> None:
    dist.init_process_group("gloo")
    store: Any = dist.distributed_c10d._get_default_store()
    loader = even_loader()
    with contextlib.ExitStack() as stack, Countoff() as countoff:
        for _ in countoff.train(loader):
            if own_rank() == 0:
                active_loops()[-1].abandon()
                store.set("left", "yes")
                store.wait(["over"])
                return
            store.wait(["left"])
            while countoff.guard.state.left is None:
                time.sleep(0.01)
            if own_rank() == 1:
                os._exit(9)
            stack.callback(store.set, "over", "yes")  # rank 0's process is there until rank 2 has reported
            dist.barrier()


@pytest.mark.parametrize("way", ["exception", "plan"])
def test_a_process_with_several_fits_prints_one_message(run_ranks, way):
    """An exception before the first pass, or a verdict of one of several fits, is one message on each rank."""
    results = run_ranks(begins_several, 2, way, expect=None, finalise=True)
    for result in results:
        (line,) = [line for line in verdict_lines(result) if line.startswith("countoff: ")]
        if way == "plan":
            assert line.startswith("countoff: PlanMismatch: before the first batch, batch_size is "), results
        else:
            words = r"countoff: LostRank: rank 1 raised ValueError: no such file at test_leaving\.py:\d+ "
            assert re.fullmatch(words + r"\(before its first batch\)\.", line), results
        assert "countoff " in result.error_file, results


def in_groups(count: int, **told: Any) -> list[Countoff]:
    """As many fits at a time, each in a process group of its own, of all ranks: the same ranks have one only."""
    fits = [Countoff(group=dist.new_group(), **told) for _ in range(count)]
    for fit in fits:
        fit.start()
    return fits


def begins_several(way: str) -> None:
    dist.init_process_group("gloo")
    fits = in_groups(3)
    if way == "plan":
        in_groups(1, batch_size=3 + own_rank())
    if own_rank() == 1:
        raise ValueError("no such file")
    with contextlib.suppress(RuntimeError):  # the collective that loses its peer
        dist.barrier()
    for _ in fits:
        dist.barrier()


def test_the_guards_of_a_process_share_their_threads(run_ranks):
    """There are three threads for any number of guards of the same ranks, and none once the last one has ended."""
    three = ["countoff reader", "countoff watchdog", "countoff writer"]
    results = run_ranks(has_many_guards, 2)
    assert [result.value for result in results] == [(three, [5] * 7, three, [])] * 2, results
    assert not any(verdict_lines(result) for result in results), results


def has_many_guards() -> tuple[Any, ...]:
    dist.init_process_group("gloo")
    guards = [Guard(Settings(), rank=own_rank(), world_size=2) for _ in range(7)]
    for guard in guards:
        guard.fit_start(FitPlan())
    found: list[Any] = [sorted(threads())]
    for guard in guards:
        guard.train_start(0)
        for _ in range(5):
            guard.batch()
            dist.barrier()
        guard.train_end("exhausted")
    found.append([guard.train_batches for guard in guards])
    kept = guards.pop(own_rank())  # the last one that is open is not the same on all ranks
    for guard in guards:
        guard.fit_end()
        guard.close()
    found.append(sorted(threads()))
    dist.barrier()
    kept.fit_end()
    kept.close()
    return (*found, threads())


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_that_end_a_fit_at_different_times_compare_the_next_one(run_ranks, first):
    """A rank that has ended all of its fits meets the others again, in silence, and is compared as before."""
    results = run_ranks(begins_again, 2, first, expect=None)
    for result in results:
        assert result.output.count("trained, in silence") == 1, results
        (line,) = [line for line in verdict_lines(result) if line.startswith("countoff: ")]
        assert line.startswith("countoff: UnevenBatches: rank 1 ran out of data after 2 batches"), results


def begins_again(first: int) -> None:
    dist.init_process_group("gloo")
    early = Countoff()
    early.start()
    if own_rank() == first:
        early.close()
    with Countoff() as countoff:
        for _ in countoff.train(even_loader(40)):
            dist.barrier()
    print(f"trained, in silence: {countoff.guard.notices}")
    with Countoff() as countoff:
        for _ in countoff.train(share_loader(3 - own_rank())):
            dist.barrier()
        if own_rank() == 1:
            dist.barrier()  # rank 0 is in its last batch, and rank 1 beyond it
        while countoff.guard.verdict is None:  # a rank that has ended its fit may be gone before the verdict arrives
            time.sleep(0.01)


def test_a_fit_that_has_ended_leaves_no_thread(run_ranks):
    """A closed fit, or one whose loop an exception has left, keeps no thread; a verdict keeps the watchdog."""
    results = run_ranks(ends_in_every_way, 2)
    assert [result.value for result in results] == [([], [], {"countoff watchdog"}, [])] * 2


def ends_in_every_way() -> tuple[Any, ...]:
    dist.init_process_group("gloo")
    with Countoff() as countoff:
        countoff.start()
    found: list[Any] = [threads()]
    with contextlib.suppress(ArithmeticError, DivergenceError), Countoff() as countoff:
        countoff.start()
        dist.barrier()  # else a rank that is still in start() raises the verdict there
        raise ArithmeticError("out of luck")
    deadline = time.monotonic() + 20
    while threads() and time.monotonic() < deadline:  # the exception is over, and the watchdog is about to see that
        time.sleep(0.02)
    found.append(threads())
    with contextlib.suppress(PlanMismatch):
        Countoff(batch_size=3 + own_rank()).start()
    for thread in threading.enumerate():
        if thread.name in ("countoff reader", "countoff writer"):
            thread.join(5)
    found.append(set(threads()))
    with Countoff() as countoff:
        countoff.start()  # a guard that begins closes those that a process has survived
    found.append(threads())
    return tuple(found)


@pytest.mark.parametrize("inside", [True, False], ids=["in the next epoch", "between spans"])
def test_a_pause_is_not_blamed_on_an_earlier_evaluation(run_ranks, inside):
    """A pause of all ranks is no verdict after an uneven evaluation that was only warned of."""
    results = run_ranks(pauses_after_an_uneven_evaluation, 2, inside)
    assert [result.value for result in results] == [None, None], results
    assert "UnevenBatches" in results[0].output


def pauses_after_an_uneven_evaluation(inside: bool) -> str | None:
    dist.init_process_group("gloo")
    guard = Guard(Settings(stall_seconds=0.5), rank=own_rank(), world_size=2)
    guard.fit_start(FitPlan())
    guard.eval_start("validation")
    for _ in range(3 - own_rank()):
        guard.batch()
    guard.eval_end("exhausted")
    if inside:
        guard.train_start(0)
        guard.batch()
    dist.barrier()
    threading.Event().wait(3.0)  # every rank writes its shard of a checkpoint, for six times stall_seconds
    dist.barrier()
    if inside:
        guard.train_end("exhausted")
    guard.fit_end()
    guard.close()
    return None if guard.verdict is None else guard.verdict.headline


def test_a_rank_that_comes_after_the_deadline_is_compared(run_ranks):
    """A rank that joins after the deadline is reported as missing first, then compared."""
    results = run_ranks(comes_late, 3, expect=None)
    for result in results:
        assert "countoff: UnevenBatches: " in result.output, result
        assert "out of step: rank 2 of 3 ranks" in "\n".join(verdict_lines(result)), result
        assert result.exit_code != 0, result
    assert not any("this rank trains on without comparing" in result.output for result in results), results
    assert "rank 2 has not counted off" in results[0].output


def comes_late() -> None:
    dist.init_process_group("gloo")
    store: Any = dist.distributed_c10d._get_default_store()
    if own_rank() == 0:
        threading.Event().wait(1.5)  # rank 1's deadline ends before that of rank 0, which waits for rank 2
    if own_rank() == 2:
        store.wait(["gone on without rank 2"])
    guard = Guard(Settings(deadline_seconds=6.0), rank=own_rank(), world_size=3)
    guard.fit_start(FitPlan())
    if own_rank() == 0:
        store.set("gone on without rank 2", "1")
    guard.train_start(0)
    dist.barrier()
    for _ in range(4):
        guard.batch()
    if own_rank() == 2:
        store.wait(["ended 0", "ended 1"])  # so that all are known to have got so far
        guard.batch()
    guard.train_end("exhausted")
    store.set(f"ended {own_rank()}", "1")
    guard.state.ended.wait(20)  # instead of the next collective, which would have no partner
    guard.fit_end()
    guard.close()


def test_a_multiprocessing_child_that_raises_is_named(run_ranks):
    """A rank that is a child of multiprocessing is named with its error, and its traceback is printed."""
    (result,) = run_ranks(starts_ranks_of_its_own, 1, finalise=True)
    assert result.value == [1, 1], result
    assert "ValueError: of the user's own" in result.output.partition("Traceback")[2], result
    assert "countoff: LostRank: rank 1 raised ValueError: of the user's own" in result.output, result


def starts_ranks_of_its_own() -> list[int | None]:
    context = multiprocessing.get_context("fork")
    path = os.path.abspath("meeting")
    children = [context.Process(target=child_rank, args=(rank, path)) for rank in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    return [child.exitcode for child in children]


def child_rank(rank: int, path: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    model, optimizer = model_and_optimizer()
    loader = even_loader()
    countoff = Countoff()
    for number, batch in enumerate(countoff.train(loader)):
        if rank == 1 and number == 3:
            raise ValueError("of the user's own")
        train_on(model, optimizer, batch)


def test_a_program_that_ends_as_the_verdict_comes_prints_it(run_ranks):
    """A rank that has run its last line when it learns of the verdict prints that before it exits."""
    results = run_ranks(ends_as_the_verdict_comes, 2, [5, 4], expect=None)
    assert_named(results, "UnevenBatches", [1], "rank 1 ran out of data after 4 batches")
    assert results[1].exit_code == 87


def ends_as_the_verdict_comes(batches: list[int]) -> None:
    dist.init_process_group("gloo")
    model, optimizer = model_and_optimizer()
    deadline, left = time.monotonic() + 20, Path("rank 1 has left its loop")

    def hold(sample: int) -> None:
        while own_rank() == 0 and sample == 4 * BATCH_SIZE and not left.exists() and time.monotonic() < deadline:
            time.sleep(0.001)

    loader = share_loader(batches[own_rank()], before=hold)
    countoff = Countoff(optimizer=optimizer)
    for batch in countoff.train(loader):
        train_on(model, optimizer, batch)
    left.touch()
    while countoff.guard.verdict is None and time.monotonic() < deadline:
        time.sleep(0.001)

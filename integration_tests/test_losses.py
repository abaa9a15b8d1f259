"""When a rank is lost: only where another one needs it. Ranks that leave alike, seconds apart, hear nothing."""

import contextlib
import os
import signal
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader

import countoff.accelerate
from countoff.torch import Countoff
from integration_tests.digits import own_rank, weights
from integration_tests.harness import RankResult, Watch, tell
from integration_tests.loops import even_loader, model_and_optimizer, train_on
from integration_tests.output import verdict_lines

_OUT_OF_MEMORY = "CUDA out of memory."


def assert_silent(results: list[RankResult]) -> None:
    for result in results:
        assert not verdict_lines(result), results
        assert not result.error_file, results


def first_lines(result: RankResult) -> list[str]:
    return [line for line in verdict_lines(result) if line.startswith("countoff: ")]


@pytest.mark.ranks(2, nightly=(4,))
def test_an_exception_that_every_rank_catches_is_no_word(run_ranks, ranks):
    """Ranks run out of memory, the last one later than anybody would wait for it, and begin again with less."""
    results = run_ranks(all_retry, ranks, deadline_seconds=120)
    assert_silent(results)
    for result in results:
        off, plain, accelerated = result.value
        assert plain == off, result
        assert accelerated == results[0].value[2], result


def all_retry() -> list[Any]:
    dist.init_process_group("gloo")
    return [retried("off"), retried("plain"), retried("accelerated")]


def retried(kind: str) -> tuple[str, str]:
    """The weights and the random state after a training of which every rank has caught two exceptions."""
    torch.manual_seed(own_rank())
    for size in (4, 2, 1):
        model, optimizer = model_and_optimizer()
        loader = even_loader(40)
        if kind == "accelerated":
            accelerator = Accelerator(cpu=True)
            loader = accelerator.prepare(DataLoader(loader.dataset, batch_size=4))
            made: Any = countoff.accelerate.Countoff(accelerator, lost_seconds=0.4)
        else:
            made = Countoff(enabled=kind != "off", lost_seconds=0.4)
        try:
            with made as fit:
                for number, batch in enumerate(fit.train(loader)):
                    if size > 1 and number == 1:
                        time.sleep(1.5 * (own_rank() == dist.get_world_size() - 1))
                        raise RuntimeError(_OUT_OF_MEMORY)
                    train_on(model, optimizer, batch)
        except RuntimeError as error:
            if _OUT_OF_MEMORY not in str(error):
                raise
        else:
            return weights(model), str(hash(torch.get_rng_state().numpy().tobytes()))
    raise AssertionError("it has always run out of memory")


@pytest.mark.parametrize("destroys", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_rank_that_alone_catches_its_exception_is_named(run_ranks, destroys):
    """The others stand in the collective of that batch, or their collective fails."""
    results = run_ranks(one_retries, 3, destroys, expect=None, finalise=True)
    for result in (results[0], results[2]):
        (line,) = first_lines(result)
        assert line.startswith(f"countoff: LostRank: rank 1 raised RuntimeError: {_OUT_OF_MEMORY} at test_losses.py:")
        assert "(in batch 3 of train epoch 0)." in line, results
        assert result.exit_code not in (0, None), results


def one_retries(destroys: bool) -> None:
    dist.init_process_group("gloo")
    store: Any = dist.distributed_c10d._get_default_store()
    model, optimizer = model_and_optimizer()
    loader = even_loader()
    with contextlib.ExitStack() as stack:
        if own_rank() != 1:
            stack.callback(store.add, "over", 1)
        try:
            with Countoff(lost_seconds=0.5) as fit:
                for number, batch in enumerate(fit.train(loader), start=1):
                    if own_rank() == 1 and number == 3:
                        raise RuntimeError(_OUT_OF_MEMORY)
                    train_on(model, optimizer, batch)
        except RuntimeError:
            if own_rank() != 1:
                raise
        if destroys:
            dist.destroy_process_group()
        while store.add("over", 0) < 2:  # it is busy with its second try
            time.sleep(0.05)


def test_a_caught_exception_leaves_no_thread(run_ranks):
    """A fit that an exception has left ends once the exception is over, though no other fit begins."""
    results = run_ranks(catches_and_goes_on, 2)
    assert [result.value for result in results] == [[], []]
    assert_silent(results)


def catches_and_goes_on() -> list[str]:
    dist.init_process_group("gloo")
    hook = sys.excepthook
    try:
        with Countoff() as fit:
            fit.start()
            raise ArithmeticError
    except ArithmeticError:
        pass
    deadline = time.monotonic() + 20
    while countoff_threads() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sys.excepthook == hook
    return countoff_threads()


def countoff_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("countoff")]


@pytest.mark.parametrize(
    ("place", "hosted_by"),
    [pytest.param("after", "agent", marks=pytest.mark.nightly), ("after", "rank0"), ("amid", "agent")],
)
def test_ranks_that_exit_alike_without_a_word_are_not_lost(run_ranks, place, hosted_by):
    """The other rank still writes its results."""
    results = run_ranks(exits_hard, 2, place, hosted_by=hosted_by)
    assert_silent(results)
    assert ["writes" in result.output for result in results] == [False, True]
    assert all("exits" in result.output for result in results)


def exits_hard(place: str) -> None:
    dist.init_process_group("gloo")
    model, optimizer = model_and_optimizer()
    loader = even_loader()
    fit = Countoff()
    for number, batch in enumerate(fit.train(loader), start=1):
        train_on(model, optimizer, batch)
        if place == "amid" and number == 3:
            break
    dist.barrier()
    if own_rank() == 1:
        wait_until_gone(fit, 0)
        time.sleep(1.5)
        print("writes")
    print("exits", flush=True)
    os._exit(0)


def wait_until_gone(fit: Any, rank: int) -> None:
    process = fit.guard.registration.writer.session.heartbeats.neighbours[rank]
    while process.state() != "gone":
        time.sleep(0.01)


def test_a_common_exit_code_is_no_failure(run_ranks):
    """A job that is preempted: each rank leaves with the code that tells the scheduler to start it again."""
    assert_silent(run_ranks(exit_75, 2, None, expect=75, finalise=True))


def test_a_rank_that_exits_alone_is_the_first_of_the_table(run_ranks):
    results = run_ranks(exit_75, 2, 1, expect=None, finalise=True)
    lines = verdict_lines(results[0])
    assert lines[0].startswith("countoff: LostRank: rank 1 raised SystemExit: 75 at test_losses.py:"), results
    assert "lost: rank 1 of 2 ranks" in lines[1], results
    assert [line.split()[0] for line in lines[3:5]] == ["1", "0"], results
    assert results[1].exit_code == 75


def exit_75(alone: int | None) -> None:
    dist.init_process_group("gloo")
    model, optimizer = model_and_optimizer()
    loader = even_loader()
    with Countoff() as fit:
        for number, batch in enumerate(fit.train(loader), start=1):
            if number == 3 and alone in (None, own_rank()):
                time.sleep(own_rank())
                sys.exit(75)
            train_on(model, optimizer, batch)


def test_a_failure_after_the_epoch_says_so(run_ranks):
    results = run_ranks(fails_after_the_epoch, 2, expect=None, finalise=True)
    for result in results:
        assert "rank 1 raised ValueError: disk full at test_losses.py:" in result.output, results
        assert "(after train epoch 0)." in result.output, results


def fails_after_the_epoch() -> None:
    dist.init_process_group("gloo")
    loader = even_loader()
    with Countoff() as fit:
        for _ in fit.train(loader):
            dist.barrier()
        if own_rank() == 1:
            raise ValueError("disk full")
        dist.barrier()


def test_a_stop_that_ends_is_no_loss(run_ranks):
    """A rank is stopped for longer than it takes to see that, and goes on. The other one waits in a collective."""

    def stop(watch: Watch) -> None:
        watch.wait_for(1, "training")
        watch.kill(1, signal.SIGSTOP)
        time.sleep(3.5)
        watch.kill(1, signal.SIGCONT)

    assert_silent(run_ranks(trains_for_a_while, 2, while_running=stop))


def trains_for_a_while() -> None:
    dist.init_process_group("gloo")
    model, optimizer = model_and_optimizer()
    loader = even_loader(800)
    with Countoff() as fit:
        for number, batch in enumerate(fit.train(loader), start=1):
            train_on(model, optimizer, batch)
            time.sleep(0.01)
            if number == 3:
                tell("training")


@pytest.mark.parametrize("way", ["ends", "disconnects"])
def test_a_victim_is_not_accused(run_ranks, way):
    """Its collective has failed. The other rank has ended its fit, or nothing tells what it has done."""
    results = run_ranks(loses_its_peer, 2, way, expect=None, finalise=True)
    line = first_lines(results[0])[0]
    if way == "ends":
        assert line.startswith("countoff: LostRank: rank 1 has ended its fit, and rank 0 has not: rank 0 raised "), (
            results
        )
    else:
        assert line.startswith("countoff: LostRank: rank 0 is a victim: it raised RuntimeError: "), results
        assert "lost: " not in "\n".join(verdict_lines(results[0])), results


def loses_its_peer(way: str) -> None:
    dist.init_process_group("gloo")
    loader = even_loader(40)
    fit = Countoff()
    for _ in fit.train(loader):
        dist.barrier()
    if own_rank() == 0:
        for _ in even_loader(40):  # and nobody counts that
            dist.barrier()
        return
    if way == "ends":
        dist.barrier()
        fit.close()
        dist.destroy_process_group()
    else:
        dist.destroy_process_group()
        wait_until_gone(fit, 0)
        os._exit(1)

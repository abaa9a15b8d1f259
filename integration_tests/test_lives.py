"""A guest's life in a process: several fits, long waits, signals, no threads, and an end."""

import gc
import os
import signal
import sys
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]  # no stubs
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks as step_hooks  # pyright: ignore[reportPrivateUsage]

from countoff.core import DivergenceError
from countoff.core.session.store import channel
from countoff.torch import Countoff
from integration_tests.constants import put
from integration_tests.digits import own_rank
from integration_tests.fits import fits_one_after_the_other
from integration_tests.harness import tell
from integration_tests.in_turn import in_turn
from integration_tests.loops import even_loader, model_and_optimizer, train_on
from integration_tests.objects import threads
from integration_tests.output import verdict_lines


def said(results: list[Any]) -> list[str]:
    return [line for result in results for line in verdict_lines(result)]


def folds() -> tuple[list[bool], int, list[str]]:
    """Three fits one after the other; nobody closes one."""
    dist.init_process_group("gloo")
    models: list[weakref.ref[Any]] = []
    before = len(step_hooks)
    countoff = Countoff()
    for fold in range(3):
        model, optimizer = model_and_optimizer()
        models.append(weakref.ref(model))
        countoff = Countoff(model=model, optimizer=optimizer, stall_seconds=2)
        for batch in countoff.train(even_loader()):
            train_on(model, optimizer, batch)
            time.sleep(0.3 if fold == 2 else 0)
        del model, optimizer
        gc.collect()
    countoff.close()
    return [each() is not None for each in models], len(step_hooks) - before, threads()


def test_folds_leave_nothing_of_one_another(run_ranks):
    """Each fit ends the one before it: no stall is reported of that, and its model is let go."""
    results = run_ranks(folds, 2)
    assert [result.value for result in results] == [([False] * 3, 0, [])] * 2
    assert said(results) == []


def outlasts_the_longest_wait(options: dict[str, Any]) -> int:
    channel._LONGEST = timedelta(seconds=1)  # pyright: ignore[reportPrivateUsage]
    dist.init_process_group("gloo")
    model, optimizer = model_and_optimizer()
    with Countoff(model=model, optimizer=optimizer, **options) as countoff:
        for batch in countoff.train(even_loader()):
            train_on(model, optimizer, batch)
            time.sleep(0.4)
    return countoff.guard.train_batches


def test_a_wait_that_is_over_begins_again(run_ranks):
    """An epoch without a sync point may last longer than the longest wait for one."""
    policies = {"as it is": {}, "stop": {"uneven_train": "stop"}}
    jobs = {name: (outlasts_the_longest_wait, options) for name, options in policies.items()}
    results = run_ranks(in_turn, 2, jobs)
    assert [result.value for result in results] == [dict.fromkeys(jobs, 10)] * 2
    assert said(results) == []


def starts_no_thread(spare: int) -> list[str]:
    dist.init_process_group("gloo")
    loader, start, left = even_loader(40), threading._start_new_thread, [spare]  # pyright: ignore

    def limited(*arguments: Any, **options: Any) -> Any:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        return start(*arguments, **options)

    if own_rank() == 1:
        threading._start_new_thread = limited  # pyright: ignore
    try:
        with Countoff(deadline_seconds=2) as countoff:
            for _ in countoff.train(loader):
                dist.barrier()
    finally:
        threading._start_new_thread = start  # pyright: ignore
    return threads()


def test_where_no_thread_may_start_nothing_is_compared(run_ranks):
    """A rank whose limit of processes is reached says so in one line, and trains."""
    for spare in (0, 2):
        results = run_ranks(starts_no_thread, 2, spare)
        assert [result.value for result in results] == [[], []]
        own = [line for line in verdict_lines(results[1]) if line.startswith("countoff")]
        assert own == ["countoff: LateRank: can't start new thread (this rank trains on without comparing)"]


def catches_the_verdict() -> str:
    """Rank 1 saves for longer than a verdict waits; rank 0 waits for it in a barrier."""
    dist.init_process_group("gloo")
    put(GRACE_SECONDS=0.5)
    countoff, caught = Countoff(), ""
    try:
        for _ in countoff.train(range(400 if own_rank() else 4)):
            time.sleep(0.05)
        while True:  # the shorter rank goes on to its next epoch
            for _ in countoff.train(range(4)):
                time.sleep(0.05)
    except DivergenceError as error:
        caught = type(error).__name__
    time.sleep(1.5)
    group = dist.new_group([0, 1])
    if own_rank() == 1:
        time.sleep(3)
    dist.barrier(group)
    return caught


def test_a_verdict_that_was_caught_is_enforced_no_more(run_ranks):
    results = run_ranks(catches_the_verdict, 2, expect=None)
    assert [result.exit_code for result in results] == [0, 0], results
    assert [result.value for result in results] == ["UnevenBatches"] * 2


def is_interrupted() -> None:
    dist.init_process_group("gloo")
    for number, _ in enumerate(Countoff().train(even_loader())):
        dist.barrier()
        if number == 3:
            time.sleep(0.3 * own_rank())  # the key reaches all ranks, and each handles it in its own time
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)


def test_an_operators_stop_accuses_nobody(run_ranks):
    results = run_ranks(is_interrupted, 2, expect=None)
    assert said(results) == []
    assert all("KeyboardInterrupt" in result.output for result in results), results


def trains_on_another_thread() -> str:
    """Another thread trains, and saves for longer than a verdict waits, while the first one only waits for it."""
    dist.init_process_group("gloo")
    put(GRACE_SECONDS=0.5)
    found: list[str] = []

    def train() -> None:
        try:
            for _ in Countoff().train(range(4 + own_rank())):
                time.sleep(0.02)
            time.sleep(1)
        except DivergenceError as error:
            time.sleep(3)  # it saves its checkpoint
            found.append(type(error).__name__)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    return found[0] if found else ""


def test_the_thread_that_trains_is_looked_at(run_ranks):
    results = run_ranks(trains_on_another_thread, 2, expect=None)
    assert results[1].value == "UnevenBatches", results


def evaluates_on_one_rank() -> int:
    dist.init_process_group("gloo")
    model, optimizer = model_and_optimizer()
    loader: Any = even_loader()
    with Countoff(model=model, optimizer=optimizer) as countoff:
        for epoch in range(3):
            loader.sampler.set_epoch(epoch)
            for batch in countoff.train(loader):
                train_on(model, optimizer, batch)
            if own_rank() == 0:
                for images, _ in countoff.eval(even_loader(40)):
                    model.module(images)
            dist.barrier()
    return countoff.guard.steps


def test_who_evaluates_is_no_proof_of_harm(run_ranks):
    """One rank evaluates while the others wait: one warning, which says how to say so, and the job goes on."""
    results = run_ranks(evaluates_on_one_rank, 2)
    assert [result.value for result in results] == [30, 30]
    lines = [line for line in said(results) if line.startswith("countoff: ")]
    assert lines == ["countoff: UnevenBatches: rank 0 began validation; rank 1 began train epoch 1."] or lines == [
        "countoff: UnevenBatches: rank 1 began train epoch 1; rank 0 began validation."
    ]
    assert "Countoff(..., uneven_eval='off')" in "\n".join(said(results))


def has_own_rates(kind: str) -> int:
    """Two ranks, two models, as the stages of a pipeline have them; or one, with its groups in another order."""
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    model: Any = torch.nn.Sequential(torch.nn.Linear(64, 10), torch.nn.Linear(10, 10))
    rates = (0.1, 0.2) if own_rank() == 0 else (0.3, 0.2)
    order = (0, 1)
    if kind == "order":
        model, rates, order = DistributedDataParallel(model), (0.1, 0.2), (0, 1) if own_rank() == 0 else (1, 0)
    inner = model.module if kind == "order" else model
    groups = [{"params": [*inner[number].parameters()], "lr": rates[number]} for number in order]
    optimizer = torch.optim.SGD(groups)
    with Countoff(model=model, optimizer=optimizer) as countoff:
        for batch in countoff.train(even_loader()):
            train_on(model, optimizer, batch)
    return countoff.guard.steps


def test_rates_that_rightly_differ_are_silent(run_ranks):
    results = run_ranks(in_turn, 2, {kind: (has_own_rates, kind) for kind in ("stages", "order")})
    assert [result.value for result in results] == [{"stages": 10, "order": 10}] * 2
    assert said(results) == []


def compares_often() -> int:
    """Counts the keys of the job's store behind an epoch with many comparisons, before that ends."""
    put(TICK_BATCHES=1, KEPT_TICKS=8)
    dist.init_process_group("gloo")
    store: Any = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportAttributeAccessIssue]
    found = 0
    with Countoff() as countoff:
        for number, _ in enumerate(countoff.train(range(400))):
            dist.barrier()
            if number == 399:
                time.sleep(1)
                found = store.num_keys()
                dist.barrier()
    return found


def test_the_keys_of_a_long_epoch_do_not_add_up(run_ranks):
    results = run_ranks(compares_often, 2)
    assert all(result.value < 120 for result in results), [result.value for result in results]


def leaves_with_its_store(seconds: float, closes: bool) -> None:
    """Rank 0 hosts the store, and is gone before rank 1 ends."""
    dist.init_process_group("gloo")
    countoff = Countoff()
    for _ in countoff.train(even_loader(40)):
        dist.barrier()
    if closes:
        countoff.close()  # its connections are kept
    if own_rank() == 1:
        time.sleep(seconds)
    tell("ends")


def test_a_healthy_end_is_silent(run_ranks):
    for seconds, closes in ((0.3, False), (1.2, False), (0.3, True)):
        results = run_ranks(leaves_with_its_store, 2, seconds, closes, hosted_by="rank0", finalise=True)
        assert not any("TCPStore" in result.output or "frame #" in result.output for result in results), results
        assert said(results) == []


def replaces_a_process() -> str:
    """Ranks 0 and 1 have had a fit; then process 2 takes the place of process 1 in a new process group.

    Process 2 is short. Process 0 is in its last batch when that is told, and long enough to hear it.
    """
    process, found = own_rank(), ""
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    for name, pair in (("before", (0, 1)), ("after", (0, 2))):
        if process not in pair:
            continue
        store = PrefixStore(name, TCPStore(*where, is_master=False, wait_for_workers=False))
        dist.init_process_group("gloo", store=store, rank=pair.index(process), world_size=2)
        try:
            with Countoff(deadline_seconds=10) as countoff:
                for number in countoff.train(range(4 - (process == 2))):
                    if name == "after":
                        time.sleep(2 if number == 3 else 0.1)
        except DivergenceError as error:
            found = error.verdict.kind
        dist.destroy_process_group()
    return found


def test_a_process_that_takes_the_place_of_another_one_meets_the_others(run_ranks):
    """Fits are counted in the store in which ranks meet, not in each process."""
    results = run_ranks(replaces_a_process, 3, expect=None)
    assert [result.value for result in results] == ["UnevenBatches", "", "UnevenBatches"], results


def test_fits_leave_nothing_that_adds_up(run_ranks):
    """No thread, descriptor, hook or key of the store is left by a fit that the one before it has not left too."""
    for result in run_ranks(fits_one_after_the_other, 2, 12):
        held = {look.held for look in result.value[3:]}
        assert len(held) == 1, result.value
        assert held.pop().threads == 1


def counts_connections() -> list[int]:
    """How many connections to the store this rank has made after each fit. In the third one, rank 1 ends too early."""
    dist.init_process_group("gloo")
    connect, made, found = channel._connect, list[Any](), list[int]()  # pyright: ignore[reportPrivateUsage]

    def counted(*how: Any) -> Any:
        made.append(how)
        return connect(*how)

    channel._connect = counted  # pyright: ignore[reportPrivateUsage]
    for fit in range(4):
        try:
            with Countoff() as countoff:
                for _ in countoff.train(range(4 - (fit == 2) * own_rank())):
                    pass
        except DivergenceError:
            assert fit == 2
        found.append(len(made))
        dist.barrier()
    return found


def test_a_fit_uses_the_connections_of_the_one_before_it(run_ranks):
    """Unless a verdict has ended that one."""
    results = run_ranks(counts_connections, 2, expect=None)
    assert [result.value for result in results] == [[2, 2, 2, 4]] * 2, results


def diverges_at_its_end(how: str) -> str:
    """Rank 1 leaves out its last step, which is seen only where the fit ends."""
    dist.init_process_group("gloo")
    model, optimizer = model_and_optimizer()
    countoff = Countoff(model=model, optimizer=optimizer)
    batches = countoff.train(iter(lambda: next(iter(even_loader())), None))
    for number in range(5):
        model(next(batches)[0]).sum().backward()
        if number < 4 or own_rank() == 0:
            optimizer.step()
    if how == "the program ends":
        return "trained"
    try:
        next(Countoff().train(range(1)))
    except DivergenceError as error:
        return error.verdict.kind
    return "not raised"


def test_what_is_found_at_the_end_of_a_fit_ends_the_program(run_ranks):
    """Its exit code tells where nothing of the program's runs any more, and the next fit raises it."""
    for how, value, code in (("the program ends", "trained", 87), ("another fit begins", "StepMismatch", 0)):
        results = run_ranks(diverges_at_its_end, 2, how, expect=code, finalise=True)
        assert [result.value for result in results] == [value] * 2
        assert any("StepMismatch" in line for line in verdict_lines(results[0]))


def replaces_its_program() -> int:
    """After its last batch, rank 1 becomes another program; rank 0 needs nobody any more."""
    dist.init_process_group("gloo")
    model, optimizer = model_and_optimizer()
    countoff = Countoff(model=model, optimizer=optimizer, lost_seconds=1)
    for batch in countoff.train(even_loader()):
        train_on(model, optimizer, batch)
    if own_rank() == 1:
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(1)"])
    time.sleep(4)
    return countoff.guard.train_batches


def test_a_rank_may_become_another_program_after_training(run_ranks):
    """Nobody waits for it, so nobody is ended, as where it leaves by os._exit."""
    first, second = run_ranks(replaces_its_program, 2, expect=0)
    assert (first.value, said([first, second])) == (10, [])

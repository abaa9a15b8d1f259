"""The guard of a single process: it counts batches and steps, and starts nothing."""

import functools
import importlib
import subprocess
import sys
import threading

import pytest

import countoff.core
from countoff.core import FitPlan, Guard, Settings, Verdict, constants
from countoff.core.protocol.counters import UnusedBatches, hash_step
from countoff.core.protocol.records import SyncPoint
from countoff.core.session.state import NEVER

EPOCH = "train epoch 0"


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Guard:
    monkeypatch.setattr(constants, "TICK_BATCHES", 2)
    guard = Guard(Settings(), rank=0, world_size=1)
    guard.fit_start(FitPlan(batches_per_epoch=4))
    return guard


def train(guard: Guard, batches: int, *, epoch: int = 0, step_every: int = 1) -> None:
    guard.train_start(epoch)
    for batch in range(1, batches + 1):
        guard.batch(batch + 1, last=batch == batches)
        if batch % step_every == 0:
            guard.step()
    guard.train_end("exhausted")


def hash_of(*batches: int) -> int:
    """The hash of steps applied after these batches."""
    return functools.reduce(hash_step, batches, 0)


def sync_points_of(guard: Guard) -> list[SyncPoint]:
    """All sync points of a guard; in a single process, none is ever compared, so all are pending."""
    return list(guard.state.log.pending.values())


def test_a_single_process_starts_no_thread_and_imports_no_torch() -> None:
    script = """
import sys, threading
from countoff.core import FitPlan, Guard, Settings
guard = Guard(Settings(), rank=0, world_size=1)
guard.fit_start(FitPlan())
guard.train_start(0)
guard.batch(last=True)
guard.step()
guard.train_end("exhausted")
guard.fit_end()
guard.close()
print(threading.active_count(), "torch" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert (run.stdout.split(), run.stderr) == (["1", "False"], "")


def test_importing_the_monitor_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(countoff, "core", countoff.core)  # put back, as are the modules, after a second import
    for name in [name for name in sys.modules if name.startswith("countoff.core")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail(f"{thread.name} was started"))
    assert importlib.import_module("countoff.core.session.threads.registration") is not countoff.core


def test_a_plan_that_is_a_dict_is_refused() -> None:
    """An adapter written for a plan of another form gets one clear line, on any number of ranks."""
    guard = Guard(Settings(), rank=0, world_size=1)
    with pytest.raises(TypeError, match="expected a FitPlan, got a dict"):
        guard.fit_start({"batch_size": 8})  # pyright: ignore[reportArgumentType]


def test_making_a_guard_for_many_ranks_starts_no_thread() -> None:
    before = threading.active_count()
    Guard(Settings(), rank=0, world_size=8).close()
    assert threading.active_count() == before


def test_a_single_process_never_gets_a_verdict(guard: Guard) -> None:
    """Whatever a single process does, it gets no verdict, no warning and no metric."""
    train(guard, 5)
    guard.eval_start("validation")
    guard.batch(3, last=True)
    guard.batch(2)
    guard.eval_end("stopped")
    train(guard, 4, epoch=1)
    guard.failed(ValueError("torn shard"))
    guard.fit_end()
    assert guard.verdict is None
    assert (guard.notices, guard.metrics) == ((), {})


def test_closing_twice_is_no_error(guard: Guard) -> None:
    """A second `close` does nothing, and the guard still counts after it."""
    guard.close()
    guard.close()
    train(guard, 2)


def test_a_warning_of_a_single_process_is_printed(guard: Guard, capsys: pytest.CaptureFixture[str]) -> None:
    guard.warn(Verdict("WrongLength", "there are 4 batches."))
    assert capsys.readouterr().err == "\n[rank 0] countoff: WrongLength: there are 4 batches.\n"


def test_batches_and_steps_are_counted(guard: Guard) -> None:
    train(guard, 5, step_every=2)
    assert (guard.batches, guard.steps) == (5, 2)
    train(guard, 3, epoch=1, step_every=3)
    assert (guard.batches, guard.steps) == (3, 3)


def test_several_optimizers_in_one_batch_are_one_step(guard: Guard) -> None:
    """Several optimizers that step after one batch count as one step."""
    guard.train_start(0)
    for _ in range(2):
        guard.batch()
        guard.step()
        guard.step()
    assert (guard.steps, guard.state.step_hash) == (2, hash_of(1, 2))


def test_steps_of_two_epochs_are_two_steps(guard: Guard) -> None:
    """Steps after the same batch of two epochs are two steps."""
    for epoch in range(2):
        train(guard, 1, epoch=epoch)
    assert guard.steps == 2


def test_a_step_in_an_evaluation_counts_for_training(guard: Guard) -> None:
    """A step inside an evaluation belongs to the train batch before the evaluation."""
    guard.train_start(0)
    guard.batch()
    guard.eval_start("validation")
    guard.batch()
    guard.batch()
    guard.step()
    assert guard.state.step_hash == hash_of(1)


def test_a_step_outside_of_train_spans_does_not_count(guard: Guard) -> None:
    guard.step()
    guard.eval_start("validation")
    guard.batch()
    guard.step()
    assert guard.steps == 0


def test_a_resumed_epoch_continues_at_its_position(guard: Guard) -> None:
    guard.train_start(3, position=7)
    assert guard.batches == 7
    guard.batch()
    assert (guard.open_span, guard.batches) == ("train epoch 3", 8)


def test_batches_fetched_ahead_are_not_started(guard: Guard) -> None:
    guard.train_start(0)
    guard.batch(2)
    assert (guard.batches, guard.span.fetched) == (1, 2)
    guard.batch()
    guard.batch()
    assert (guard.batches, guard.span.fetched) == (3, 3)


def test_batches_count_in_the_innermost_span(guard: Guard) -> None:
    """Batches count in the innermost open span; once it closes, the outer span continues with its own count."""
    guard.train_start(0)
    guard.batch()
    guard.eval_start("validation")
    assert (guard.open_span, guard.batches) == ("validation", 0)
    guard.batch()
    guard.eval_end("exhausted")
    guard.batch()
    assert (guard.open_span, guard.batches) == (EPOCH, 2)
    guard.train_end("exhausted")
    assert guard.open_span is None


def test_requests_count_in_train_epochs_only(guard: Guard) -> None:
    """A requested batch counts in a train epoch, and not in an evaluation."""
    guard.train_start(0)
    guard.batch()
    guard.batch_requested()
    guard.eval_start("validation")
    guard.batch_requested()
    assert [span.requested for span in guard.state.spans] == [2, 0]


def test_loaders_of_one_evaluation_are_counted_apart(guard: Guard) -> None:
    guard.eval_start("validation")
    span = guard.span
    for loader, batches in enumerate((2, 0, 3)):
        guard.eval_loader(loader)
        for _ in range(batches):
            guard.batch()
            guard.eval_loader(loader)
    guard.eval_end("exhausted")
    assert (span.started, span.counts) == (5, [2, 0, 3])
    assert sync_points_of(guard)[-1].counts == (2, 0, 3)


def test_a_skipped_loader_has_zero_batches(guard: Guard) -> None:
    guard.eval_start("validation")
    span = guard.span
    guard.batch()
    guard.eval_loader(2)
    guard.batch()
    guard.eval_end("exhausted")
    assert span.counts == [1, 0, 1]


def test_waiting_time_adds_up_in_the_span(guard: Guard) -> None:
    guard.train_start(0)
    guard.waited(0.25)
    guard.waited(0.5)
    assert guard.span.loader_seconds == 0.75


def test_a_single_process_never_takes_the_slow_path(guard: Guard) -> None:
    train(guard, 9)
    assert guard.state.next_check_at == NEVER


def test_sync_points_carry_the_counts_of_their_span(guard: Guard) -> None:
    """Each sync point carries the batches, the reason and the steps of the span in which it stands."""
    guard.train_start(0)
    guard.batch()
    guard.step()
    guard.eval_start("validation", train_exhausted=True)
    guard.batch()
    guard.eval_end("stopped")
    guard.train_end("exhausted")
    sync_points = [
        (sync_point.kind, sync_point.at, sync_point.reason, sync_point.steps)
        for sync_point in sync_points_of(guard)[2:]
    ]
    assert sync_points == [
        ("eval_start", 1, "exhausted", 1),
        ("eval_end", 1, "stopped", 1),
        ("train_end", 1, "exhausted", 1),
    ]


def test_uncompared_spans_add_no_counts_and_no_steps(guard: Guard) -> None:
    """Sync points of spans that are not compared carry no counts, and their steps are not counted."""
    guard.compare_spans(False)
    train(guard, 4)
    guard.eval_start("validation")
    guard.batch()
    guard.eval_end("exhausted")
    guard.compare_spans(True)
    train(guard, 2, epoch=1)
    sync_points = [(sync_point.kind, sync_point.at, sync_point.steps) for sync_point in sync_points_of(guard)[1:]]
    assert sync_points == [("train_start", 0, 0), ("train_end", 0, 0), ("train_start", 0, 0), ("train_end", 2, 2)]


def test_evaluations_that_are_not_compared_have_no_sync_points() -> None:
    """Not every rank need evaluate."""
    guard = Guard(Settings(uneven_eval="off"), rank=0, world_size=1)
    guard.train_start(0)
    guard.eval_start("validation")
    guard.batch()
    guard.eval_end("exhausted")
    guard.train_end("exhausted")
    assert [sync_point.kind for sync_point in sync_points_of(guard)] == ["train_start", "train_end"]


def test_unused_batches_belong_to_the_innermost_span() -> None:
    guard = Guard(Settings(), rank=0, world_size=1)
    guard.fit_start(FitPlan(batches_per_epoch=4))
    guard.train_start(0)
    train = guard.span
    guard.eval_start("validation")
    evaluation = guard.span
    guard.report_unused(UnusedBatches(2, 8))
    guard.eval_end("stopped")
    guard.train_end("exhausted")
    assert (train.unused, evaluation.unused) == (None, (2, 8, True))
    assert guard.notices == ()


def test_a_single_process_agrees_with_no_rank() -> None:
    """In a single process, `agreed` is empty."""
    guard = Guard(Settings(), rank=0, world_size=1)
    guard.fit_start(FitPlan(batches_per_epoch=4))
    assert guard.agreed == frozenset()


def test_a_failure_says_where_this_rank_was(guard: Guard) -> None:
    """Before the first span, before the first batch of a span, in a batch, and after the span."""
    found = [guard.where()]
    guard.train_start(0)
    found.append(guard.where())
    guard.batch()
    found.append(guard.where())
    guard.train_end("stopped")
    found.append(guard.where())
    inside = "in batch 1 of train epoch 0"
    assert found == ["before its first batch", "before the first batch of train epoch 0", inside, inside]

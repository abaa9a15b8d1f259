"""Micro-batches: what is counted at each step, what of it goes into a record, and what a verdict says."""

import dataclasses
import json
import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from countoff.core.checks import Checks, judge
from countoff.core.checks.check import FitStart
from countoff.core.checks.micro_batches import compare_micro_batches
from countoff.core.protocol.counters import SpanCounters, TickPlace
from countoff.core.protocol.log import LogView
from countoff.core.protocol.micro_batches import MicroBatchLog
from countoff.core.protocol.records import RECORD_BYTES, FitPlan, MicroCounts, SyncPoint, sync_entry, verdict_entry
from countoff.core.protocol.resume_record import ScheduleState
from countoff.core.protocol.rule import compare_sync_points
from countoff.core.session.state import State
from countoff.core.session.store.channel import encode
from countoff.core.settings import Settings

EPOCH = "train epoch 0"


def run(log: MicroBatchLog, span: SpanCounters, *counts: int) -> None:
    """Steps after every batch, each with so many micro-batches."""
    for count in counts:
        span.started += 1
        span.micro_batches += count
        log.step(span)


def opened(*counts: int) -> tuple[MicroBatchLog, SpanCounters]:
    log, span = MicroBatchLog(), SpanCounters(EPOCH)
    log.begin(span)
    run(log, span, *counts)
    return log, span


def checks_of(rates: Sequence[float]) -> tuple[Checks, State]:
    """The checks of rank 1, which trains with these learning rates, and its state."""
    state = State(1, 2, Settings(), {})
    state.evidence.steps(threading.get_ident())
    in_force = {"learning_rates_in_force": lambda: rates, "schedule": ScheduleState, "hash_weights": None}
    checks = Checks.of(state, **in_force)
    checks.learning_rates.fit_started(FitStart(FitPlan(), {}, holders=(0, 1)), None)
    return checks, state


def test_steps_are_kept_since_the_last_comparison() -> None:
    """What is taken has the steps since it was taken before, and the hash of all of them."""
    log, span = opened(4, 4)
    first = log.take()
    assert (first.since, first.counts, first.batches, first.span) == (0, (4, 4), ((1, 1), (2, 2)), EPOCH)
    run(log, span, 5)
    second = log.take()
    assert (second.since, second.counts, second.batches) == (2, (5,), ((3, 3),))
    assert second.hash == opened(4, 4, 5)[0].take().hash != first.hash
    assert log.take().counts == ()


def test_a_step_has_all_batches_since_the_step_before() -> None:
    log, span = opened()
    span.started, span.micro_batches = 3, 12
    log.step(span)
    assert log.take().batches == ((1, 3),)
    resumed = SpanCounters("train epoch 1", started=6)
    log.begin(resumed)
    run(log, resumed, 4)
    assert log.take() == MicroCounts(log.take().hash, 1, (4,))


def test_other_optimizers_of_the_same_batch_add_to_its_step() -> None:
    log, span = opened(1)
    span.micro_batches += 2
    log.step_again(span)
    run(log, span, 1)
    assert log.take().counts == (3, 1)
    span.micro_batches += 1
    log.step_again(span)  # the step has been compared already: what came after it belongs to the next one
    run(log, span, 1)
    assert log.take().counts == (2,)


def test_passes_before_an_epoch_belong_to_no_step() -> None:
    log, span = opened(4)
    span.micro_batches += 3
    later = SpanCounters("train epoch 1")
    log.begin(later)
    run(log, later, 4)
    assert log.take().counts == (4, 4)


def test_a_rank_that_counts_none_is_compared_with_none() -> None:
    """An adapter that does not count micro-batches writes nothing of them, and differs from nobody."""
    none, some = opened(0, 0)[0].take(), opened(4, 0)[0].take()
    assert none.to_json() == {}
    assert not none.differ(some)
    assert some.differ(opened(4, 1)[0].take())


def test_a_verdict_names_the_first_batch_that_differs_and_both_counts() -> None:
    theirs, mine = opened(4, 4, 4, 5)[0].take(), opened(4, 4, 3, 4)[0].take()
    told = MicroCounts.from_json(json.loads(json.dumps(theirs.to_json())))
    found = compare_micro_batches(mine, "at batch 4", 4)(told.to_json(), (0, 1))
    assert found is not None
    assert found.sentence == "in batch 3 of train epoch 0, rank 0 ran 4 micro-batches, rank 1 3."
    logged = SyncPoint("train_end", EPOCH, 4, "exhausted", 4, 9, rank=0, micro=told)
    divergence = compare_sync_points(logged, dataclasses.replace(logged, rank=1, micro=mine))
    assert divergence is not None
    verdict = judge(divergence, 1)
    assert (verdict.kind, verdict.sentence, verdict.ranks) == ("StepMismatch", found.sentence, (0, 1))
    assert "averages gradients of different amounts" in verdict.why


def passes(*counts: int) -> MicroBatchLog:
    """Steps of a sharded model after every batch, each with so many forward passes."""
    log, span = MicroBatchLog(sharded=True), SpanCounters(EPOCH)
    log.begin(span)
    for count in counts:
        span.started += 1
        span.passes += count
        span.micro_batches += 1
        log.step(span)
    return log


def test_forward_passes_of_a_sharded_model_are_compared_in_place_of_micro_batches() -> None:
    theirs, mine = passes(4, 4, 5).take(), passes(4, 4, 3).take()
    told = json.loads(json.dumps(theirs.to_json()))
    found = compare_micro_batches(mine, "at batch 3", 3)(told, (0, 1))
    assert found is not None
    assert found.sentence == "in batch 3 of train epoch 0, rank 0 ran 5 forward passes of the sharded model, rank 1 3."
    assert (found.subject, found.harmful) == ("forward passes", False)
    assert "it is a collective" in found.why
    later = dataclasses.replace(mine, since=9)
    found = compare_micro_batches(later, "at batch 3", 3)(told, (0, 1))
    assert found is not None
    assert found.sentence.endswith("but of different numbers of forward passes of the sharded model.")


def test_forward_passes_are_not_compared_with_micro_batches() -> None:
    """Ranks of different versions, or of which one has not run the sharded model yet."""
    assert not passes(4).take().differ(opened(3)[0].take())
    assert not MicroCounts.from_json(opened(3)[0].take().to_json()).differ(passes(4).take())


def test_other_learning_rates_are_found_beside_other_micro_batches() -> None:
    """The hash of micro-batches differs for good once it has differed, and must hide no verdict."""
    theirs = {"rank": 0, "steps": 1, "step_hash": 5, **opened(4)[0].take().to_json()}
    for rates, expected in (([0.1], ("LearningRateMismatch", "")), ([0.2], ("StepMismatch", "micro-batches"))):
        checks, state = checks_of([0.2])
        state.steps, state.step_hash = 1, 5
        state.micro_batches, span = opened(5)
        place = TickPlace(span.opened, span.started, span.name)
        makes = [make for check in checks if (make := check.tick(span)) is not None]
        parts = [part for make in makes if (part := make(place)) is not None]
        found = [each for part in parts if (each := part.compare({**theirs, "rates": rates}, (0, 1))) is not None]
        assert (found[0].kind, found[0].subject) == expected


def test_other_micro_batches_leave_a_rank_on_its_side() -> None:
    """A rank that agrees with a disputed sync point in batches and steps has agreed with it."""
    logged = SyncPoint("train_end", EPOCH, 4, "exhausted", 4, 9, rank=0, micro=opened(4)[0].take())
    for steps, side in ((4, True), (3, False)):
        log = LogView()
        log.receive_sync_point(0, logged, ())
        log.reach(dataclasses.replace(logged, rank=1, steps=steps, micro=opened(5)[0].take()))
        assert log.side(1, 0, False, ()) is side


@pytest.mark.parametrize("theirs", [MicroCounts(7, 0, ()), MicroCounts(7, 1, (5, 4)), MicroCounts(7, 0, (4, 4))])
def test_a_verdict_without_the_batch_is_still_true(theirs: MicroCounts) -> None:
    """Where the records do not hold the step that differs, the sentence says what is known."""
    compare = compare_micro_batches(opened(4, 4)[0].take(), "after 2 batches of train epoch 0", 2)
    found = compare(theirs.to_json(), (1, 0))
    assert found is not None
    assert found.sentence == (
        "after 2 batches of train epoch 0, ranks 0 and 1 had applied 2 optimizer steps, but of different numbers of "
        "micro-batches."
    )


def test_the_counts_of_any_steps_fit_into_a_record() -> None:
    """Whatever ranks run, a tick and a sync point fit into their records; the last steps are left out first."""
    taken = passes(*(random.Random(step).randrange(10**9) for step in range(1000))).take()
    assert len(taken.counts) == 512
    rates = [-1.2345678901234567e-300] * 8
    tick = {"rank": 99_999, "steps": 10**9, "step_hash": 2**48 - 1, "rates": rates, **taken.to_json()}
    name = "会" * 9
    sync_point = SyncPoint(
        "eval_start", name, 10**9, "exhausted", 10**9, 2**48 - 1, (), 99_999, 1700000000.123456, taken
    )
    for record in (tick, sync_entry(10**9, sync_point)):
        assert len(encode(record)) <= RECORD_BYTES
    told = MicroCounts.from_json(json.loads(json.dumps(taken.to_json())))
    assert 0 < len(told.counts) < 512
    assert told.counts == taken.counts[: len(told.counts)]
    other = MicroCounts(1, 0, (10**9,), ((10**9, 10**9 + 1),), name, sharded=True)
    verdict = compare_micro_batches(other, f"at batch {10**9} of {name}", 10**9)(tick, (99_999, 99_998))
    assert verdict is not None
    encode(verdict_entry("end", verdict))


@pytest.mark.parametrize(
    "micro",
    [
        5,
        {},
        {"hash": 1, "since": 0},
        {"hash": 1, "since": 0, "counts": [4]},
        {"hash": 1, "since": -1, "counts": "4"},
        {"hash": "1", "since": 0, "counts": "4"},
        *(
            {"hash": 1, "since": 0, "counts": text}
            for text in ("4,", ",4", "4*", "x", "-4", "4*513", "٤", "4\n", "4,,4", "4*500,5*500")
        ),
    ],
)
def test_what_is_no_count_is_refused(micro: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        MicroCounts.from_json({"micro": micro})

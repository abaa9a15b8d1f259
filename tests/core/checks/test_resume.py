"""Resumes: which proofs a record in a checkpoint gives, and which ones it does not."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy
import pytest

from countoff.core import FitPlan, Guard, Settings
from countoff.core.checks.data import Sampling
from countoff.core.checks.resume import (
    Observed,
    Restored,
    judge_resumed_data,
    judge_resumed_order,
    judge_resumed_position,
    judge_resumed_rates,
    judge_resumed_seed,
    judge_resumed_steps,
)
from countoff.core.protocol.resume_record import Place, ScheduleState
from tests.situations import RESUME_RECORD

RECORD = replace(RESUME_RECORD, schedule=ScheduleState((0.08,), (0.1,), (9,)))
PLAN = FitPlan(batch_size=8, dp_degree=2)
EXACT = Restored(exact=True)


def effect(verdict: Any) -> str | None:
    """What a verdict says is repeated or skipped."""
    return None if verdict is None else verdict.sentence.partition(": ")[2]


@pytest.mark.parametrize(
    ("epoch", "skipped", "restored", "expected"),
    [
        (1, 3, EXACT, None),
        (1, 3, Restored(), None),
        (1, 0, EXACT, "3 batches are trained on again."),
        (1, 0, Restored(), None),  # the loader may have been restored itself
        (1, 2, Restored(), "1 batch is trained on again."),
        (1, 5, Restored(), "2 batches are skipped."),
        (2, 0, EXACT, "3 batches of train epoch 1 are skipped."),
        (3, 0, EXACT, "train epoch 2 is skipped."),
        (4, 0, EXACT, "train epochs 2 to 3 are skipped."),
        (0, 0, EXACT, "train epochs 0 to 1 are trained on again."),
    ],
)
def test_a_position_is_compared_with_the_records(epoch: int, skipped: int, restored: Restored, expected: str | None):
    assert effect(judge_resumed_position(RECORD, PLAN, epoch, skipped, restored)) == expected


def test_the_next_epoch_follows_a_checkpoint_at_an_epochs_end():
    """It does after one that was written at the last batch, and after one whose epoch's length nobody knows."""
    assert judge_resumed_position(replace(RECORD, left=0), PLAN, 2, 0, EXACT) is None
    assert judge_resumed_position(replace(RECORD, left=None), PLAN, 2, 0, EXACT) is None
    assert judge_resumed_position(replace(RECORD, epoch=2, batches=0), PLAN, 2, 0, EXACT) is None
    found = judge_resumed_position(replace(RECORD, epoch=2, batches=0), PLAN, 3, 0, EXACT)
    assert effect(found) == "train epoch 2 is skipped."


def test_a_checkpoint_may_be_written_before_its_batch_is_trained_on():
    """The loop may do the batch of the checkpoint again, or go on behind it."""
    before = replace(RECORD, stepped=2)
    assert [effect(judge_resumed_position(before, PLAN, 1, skipped, Restored())) for skipped in (1, 2, 3, 4)] == [
        "1 batch is trained on again.",
        None,
        None,
        "1 batch is skipped.",
    ]
    assert judge_resumed_data(before, Observed(("5e", "a1"), True, 3), 1) is None
    assert judge_resumed_data(before, Observed(("c4", "d5"), True, 1), 1) is None
    assert effect(judge_resumed_data(before, Observed(("5e", "a1"), True, 1), 1)) == "2 batches are trained on again."


def test_another_number_of_ranks_is_counted_in_samples():
    four = replace(PLAN, dp_degree=4)
    found = judge_resumed_position(RECORD, four, 1, 3, Restored())
    assert found is not None
    assert found.sentence == (
        "train epoch 1 goes on after 96 samples (3 batches of 8 on 4 data ranks), and the checkpoint was written after "
        "48 samples (3 batches of 8 on 2 data ranks): 48 samples are skipped."
    )
    assert judge_resumed_position(RECORD, replace(four, batch_size=4), 1, 3, Restored()) is None
    assert judge_resumed_position(RECORD, four, 1, 3, Restored(samples=48)) is None
    assert effect(judge_resumed_position(RECORD, four, 1, 3, Restored(samples=40))) == "8 samples are trained on again."
    assert judge_resumed_position(RECORD, replace(four, batch_size=None), 1, 3, Restored()) is None
    assert judge_resumed_position(replace(RECORD, batch_size=None), PLAN, 1, 5, Restored()) is None


@pytest.mark.parametrize(
    ("prints", "batches", "accumulation", "expected"),
    [
        (("5e", "a1"), 1, 1, "3 batches are trained on again."),
        (("5e", "a1"), 3, 1, "1 batch is trained on again."),
        (("5e", "a1"), 4, 1, None),  # the loop has skipped three
        (("5e", "a1"), 2, 2, "3 batches are trained on again."),
        (("5e", "a1"), 4, 2, None),
        (("5e", "77"), 1, 1, None),
        (("d5", "e6"), 1, 1, None),
        (("c4", "d5"), 1, 1, "1 batch is trained on again."),
        (("b3", "c4"), 1, 1, "2 batches are trained on again."),
        (("c4", "d5"), 2, 1, None),
    ],
)
def test_batches_that_are_trained_on_again_are_counted(
    prints: tuple[str, ...], batches: int, accumulation: int, expected: str | None
):
    assert effect(judge_resumed_data(RECORD, Observed(prints, True, batches), accumulation)) == expected


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (None, False),
        ((1, 1, 96, 0), False),
        ((2, 2, 96, 0), False),
        ((2, 1, 96, 0), False),
        ((0, 2, 96, 0), True),
        ((3, 1, 96, 0), True),
        ((0, 2, 40, 0), False),
        ((0, 2, 96, 2), False),  # a seed of its own
    ],
)
def test_a_samplers_epoch_goes_on(order: tuple[int, int, int, int] | None, expected: bool):
    assert (judge_resumed_order(RECORD, order) is not None) is expected
    assert judge_resumed_order(replace(RECORD, order=(0, 1, 96, 0)), order) is None  # the run has numbers of its own
    assert judge_resumed_order(replace(RECORD, order=None), order) is None


@pytest.mark.parametrize(
    ("order", "passed", "expected"),
    [
        ((1, 1, 96, 5), 48, True),
        ((1, 1, 96, 5), 47, False),  # it may have begun again
        ((1, 1, 96, 5), 49, False),
        ((1, 1, 96, 0), 48, False),
        ((2, 1, 96, 5), 48, False),
        ((1, 1, 95, 5), 48, False),  # of other data
        (None, 48, False),
    ],
)
def test_a_sampler_keeps_its_seed_in_the_middle_of_an_epoch(
    order: tuple[int, int, int, int] | None, passed: int, expected: bool
):
    found = judge_resumed_seed(RECORD, order, passed)
    assert (found is not None) is expected
    if found is not None:
        assert found.sentence == (
            "train epoch 1 goes on after 48 samples in another order than it had before the checkpoint: the sampler "
            "shuffles by seed 5, and did by 0."
        )
    assert judge_resumed_seed(replace(RECORD, left=0), order, passed) is None
    assert judge_resumed_seed(replace(RECORD, batch_size=None), order, passed) is None


def test_a_loop_that_begins_with_epoch_0_again_is_named_first() -> None:
    begun, stuck = judge_resumed_order(RECORD, (0, 3, 96, 0)), judge_resumed_order(RECORD, (1, 3, 96, 0))
    assert begun is not None
    assert stuck is not None
    assert begun.why.startswith("The run has begun with epoch 0 again, or ")
    assert "epoch 0" not in stuck.why


def after(first: float, second: float, calls: int = 9, base: float = 0.1) -> list[ScheduleState]:
    return [ScheduleState((first,), (base,), (calls,)), ScheduleState((second,), (base,), (calls + 1,))]


def without_calls(states: list[ScheduleState]) -> list[ScheduleState]:
    return [state._replace(calls=()) for state in states]


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (after(0.08, 0.079), None),
        (after(0.079, 0.078, calls=10), None),  # the checkpoint was written between a step and its schedule's
        (after(0.01, 0.04, calls=0), "rate"),
        (after(0.08, 0.04, calls=0), "rate"),
        (after(0.05, 0.049, calls=18), "rate"),
        (after(0.05, 0.05), "changed rate"),
        (after(0.2, 0.19, calls=0, base=0.2), "changed rate"),
        (after(0.08, 0.079, calls=0, base=0.2), None),
        (without_calls(after(0.08, 0.04)), "rate"),
        (without_calls(after(0.01, 0.04)), "rate"),
        (without_calls(after(0.079, 0.078)), None),
        ([ScheduleState(), ScheduleState()], None),
    ],
)
def test_learning_rates_go_on(states: list[ScheduleState], expected: str | None):
    found = judge_resumed_rates(RECORD, states)
    assert (None if found is None else found.subject) == expected


def test_a_constant_rate_says_nothing_of_its_schedule():
    constant = replace(RECORD, start_rates=((0.08,), (0.08,)))
    assert judge_resumed_rates(constant, after(0.08, 0.08, calls=0)) is None
    assert judge_resumed_rates(constant, without_calls(after(0.08, 0.08))) is None


def test_a_rate_without_a_schedule_may_change():
    bare = replace(RECORD, schedule=ScheduleState((0.08,)))
    found = judge_resumed_rates(bare, [ScheduleState((0.05,)), ScheduleState((0.05,))])
    assert found is not None
    assert found.subject == "changed rate"


def test_restored_steps_are_compared():
    assert judge_resumed_steps(RECORD, Restored()) is None
    assert judge_resumed_steps(RECORD, Restored(steps=9)) is None
    assert judge_resumed_steps(RECORD, Restored(steps=0)) is not None


class Loop:
    """A loop of one rank, with random batches, the same in each epoch."""

    def __init__(self, record: Any = None, rates: list[float] | None = None, **options: Any) -> None:
        self.rates = iter(rates or [0.1] * 1000)
        self.rate = next(self.rates)
        self.guard = Guard(Settings(**options), rank=0, world_size=1, learning_rates=lambda: [self.rate])
        self.guard.fit_start(FitPlan(batch_size=1, dp_degree=1))
        if record is not None:
            self.guard.resumes.restore(record)

    def epoch(self, epoch: int, first: int = 0, batches: int = 6, skip: int = 0) -> Any:
        """Reads an epoch from one of its batches on, and trains on all but the first `skip`; yields after each."""
        self.guard.train_start(epoch)
        for number in range(first, batches):
            batch = [random.Random(number).randbytes(128)]
            self.guard.batch()
            if self.guard.data.fingerprints_due:
                self.guard.data.read(batch)
            if number - first >= skip:
                self.guard.step()
                self.rate = next(self.rates)
            yield batch
        self.guard.train_end("exhausted")


def record_after(batches: int, left: int | None = None) -> dict[str, Any]:
    loop = Loop()
    for number, batch in enumerate(loop.epoch(0), 1):
        if number == batches:
            return loop.guard.resumes.record(batch, left=left)
    raise AssertionError


@pytest.mark.parametrize("left", [None, 3])
@pytest.mark.parametrize(
    ("first", "skip", "said"),
    [(0, 3, ""), (3, 0, ""), (0, 0, "3 batches are"), (2, 0, "1 batch is"), (0, 2, "1 batch is")],
)
def test_a_loop_that_resumes(capsys: pytest.CaptureFixture[str], left: int | None, first: int, skip: int, said: str):
    loop = Loop(record_after(3, left))
    for _ in loop.epoch(0, first, skip=skip):
        pass
    for _ in loop.epoch(1):
        pass
    text = capsys.readouterr().err
    assert ("countoff: ResumeMismatch: " in text) is bool(said)
    assert (f"{said} trained on again" in text) is bool(said)


def test_where_the_length_is_not_known_the_next_epoch_is_no_repetition(capsys: pytest.CaptureFixture[str]):
    """A checkpoint at what happens to be the last batch is followed by an epoch with the same data."""
    loop = Loop(record_after(6, None))
    for _ in loop.epoch(0):
        pass
    assert capsys.readouterr().err == ""


def test_a_second_checkpoint_counts_from_the_epochs_first_batch():
    """The loader of the resumed run was restored itself: its first batch is the epoch's fourth."""
    loop = Loop(record_after(3, 3))
    batches = loop.epoch(0, 3)
    next(batches)
    assert loop.guard.resumes.record()["batches"] is None  # one batch proves nothing
    next(batches)
    assert loop.guard.resumes.record()["batches"] == 5
    assert not loop.guard.resumes.begins_epoch
    assert list(loop.epoch(1))
    assert loop.guard.resumes.begins_epoch


def test_steps_and_first_rates_are_those_of_the_whole_run():
    rates = [0.01, 0.04, 0.1, 0.09, 0.08, 0.07, 0.06]
    loop = Loop(rates=rates)
    assert list(loop.epoch(0))
    first = loop.guard.resumes.record()
    assert (first["epoch"], first["batches"], first["steps"]) == (1, 0, 6)
    assert first["start_rates"] == [[0.01], [0.04]]
    later = Loop(first, rates=[0.06, 0.05, 0.04, 0.03, 0.02, 0.01, 0.0])
    assert list(later.epoch(1))
    second = later.guard.resumes.record()
    assert (second["epoch"], second["steps"], second["start_rates"]) == (2, 12, [[0.01], [0.04]])


def test_without_fingerprints_positions_are_still_compared(capsys: pytest.CaptureFixture[str]):
    loop = Loop(record_after(3, 3), compare_data=False)
    assert list(loop.epoch(0))
    assert capsys.readouterr().err == ""
    loop = Loop(record_after(3, 3), compare_data=False)
    assert list(loop.epoch(2))
    assert "train epoch 1 is skipped" in capsys.readouterr().err


def test_a_run_that_has_trained_may_go_back_to_a_checkpoint(capsys: pytest.CaptureFixture[str]):
    """It goes on counting from there, and nothing is compared."""
    loop = Loop()
    loop.guard.resumes.restore(record_after(3, 3), compare=False)
    assert list(loop.epoch(4))
    assert capsys.readouterr().err == ""
    assert loop.guard.resumes.record()["steps"] == 9


def test_an_epoch_of_numpy_is_a_number_of_json():
    """A loop may set its sampler's epoch from an array."""
    loop = Loop()
    loop.guard.train_start(0)
    loop.guard.data.read([b"batch"], Sampling(shuffled=(numpy.int64(3), 96, 7)))  # pyright: ignore[reportArgumentType]
    assert json.loads(json.dumps(loop.guard.resumes.record()))["order"] == [3, 0, 96, 7]


def test_a_checkpoint_that_is_written_before_the_resumed_run_trains_has_the_same_record():
    record = record_after(3, 3)
    assert Loop(record).guard.resumes.record() == record


def test_a_second_resume_that_begins_where_the_first_one_did_is_found():
    """The state that was saved behind the first resume is that of the checkpoint from which it came."""
    record = replace(RECORD, batches=8, stepped=8, since=("b2", "b3"), since_batches=5)
    found = judge_resumed_data(record, Observed(("b2", "b3"), True, 1), 1)
    assert found is not None
    assert found.sentence == (
        "train epoch 1 goes on with the same batches as after the resume before this one: 5 batches are trained on "
        "again."
    )
    assert judge_resumed_data(record, Observed(("c8", "c9"), True, 1), 1) is None


class Issued:
    """What the sampler has issued in one pass: these batches, each with a digest of its own."""

    skipped = 0

    def __init__(self, batches: Sequence[int]) -> None:
        self.first = str(batches[0])

    def goes_on(self, place: Place, position: int, *, again: bool = False) -> bool | None:
        return None


@pytest.mark.parametrize(
    ("rest", "following", "first", "epoch", "position", "said"),
    [
        ((3, 4, 5), (3, 4, 5), "0", 1, 3, True),
        ((3, 4, 5), (0, 1, 2, 3, 4, 5), "0", 1, 3, False),
        ((3, 4, 5), (3, 4, 5, 6), "0", 1, 3, False),  # it has more than the rest
        ((3, 4, 5), (3, 5, 4), "0", 1, 3, False),  # another order, which begins alike
        ((3, 4, 5), (3, 4, 5), "0", 0, 3, False),  # another pass over the rest of one epoch
        ((3, 4, 5), (3, 4, 5), "", 1, 3, False),  # nobody knows how the epoch began
        ((0, 1, 2), (0, 1, 2), "0", 1, 3, False),  # the epoch began again, as its data tells
        ((3, 4, 5), (3, 4, 5), "0", 1, 2, False),  # the position is wrong, as a warning has said
    ],
)
def test_a_sampler_that_keeps_the_place_of_the_checkpoint_is_named_in_the_next_epoch(
    capsys: pytest.CaptureFixture[str],
    rest: Sequence[int],
    following: Sequence[int],
    first: str,
    epoch: int,
    position: int,
    said: bool,
) -> None:
    record = {**record_after(3), "prints": [], "issued": Place(6, 3, "", {}, first).to_json()}
    loop = Loop(record)
    for number, skipped, issued in ((0, position, rest), (epoch, 0, following)):
        loop.guard.train_start(number, skipped)
        loop.guard.once.reads = Issued(issued)  # pyright: ignore[reportAttributeAccessIssue]
        loop.guard.resumes.look_at_order()
        for batch in issued:
            loop.guard.batch()
            loop.guard.data.read([random.Random(batch).randbytes(128)])
            loop.guard.step()
        loop.guard.train_end("exhausted")
    assert ("has skipped its first" in capsys.readouterr().err) is said


@pytest.mark.parametrize(("dp_rank", "is_own"), [(0, True), (1, False)])
def test_the_first_batches_of_an_epoch_are_known_from_a_record_of_this_rank_alone(dp_rank: int, is_own: bool) -> None:
    """A loop may load the record of one rank on all of them."""
    loop = Loop({**record_after(3), "dp_rank": dp_rank, "order": [0, 0, 96, 7]})
    loop.guard.train_start(0, 3)
    assert (loop.guard.data.begun_as is not None) is is_own

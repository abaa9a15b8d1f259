"""The totals of a job whose ranks take the same number of batches, whatever each rank's loader has."""

from typing import Any

import pytest

from countoff.core import LoaderFacts
from countoff.core.arithmetic.facts import LoaderPass
from countoff.core.arithmetic.totals import Totals
from countoff.core.checks.framework import judge_length

PER_EPOCH = ("batches_per_epoch", "steps_per_epoch", "total_steps", "samples_per_epoch", "samples_repeated")


def totals_of(**facts: Any) -> Totals:
    """Two ranks, two epochs; on this rank 28 samples in batches of 4."""
    known: dict[str, Any] = {"reported_batches": 7, "batch_size": 4, "drop_last": False, "samples_per_rank": 28}
    known |= {"reported_is_cap": False, "max_epochs": 2, "partial_step": "dropped", "dataset_size": 28}
    return Totals(LoaderFacts(**(known | facts)), dp_degree=2)


def per_epoch(totals: Totals) -> list[int | None]:
    return [totals.plan.metrics().get(f"countoff/{name}") for name in PER_EPOCH]


def test_numbers_of_one_ranks_loader_are_not_those_of_the_job() -> None:
    """No number that depends on the length is told before the common length is known; then it is that of the epoch."""
    totals = totals_of(gradient_accumulation_steps=2)
    assert per_epoch(totals) == [7, 3, 6, 56, None]
    totals.take_common(None)
    assert per_epoch(totals) == [None] * 5
    assert totals.plan.metrics()["countoff/global_batch_size"] == 16
    assert totals.progress(1) is None
    totals.take_common(5)
    assert per_epoch(totals) == [5, 2, 4, None, None]
    assert totals.progress(1) == 0.2
    totals.take_common(0)
    assert per_epoch(totals) == [None] * 5


def test_a_limit_is_in_the_common_length() -> None:
    """Neither a limit nor the length that is reported here cuts the common one."""
    totals = totals_of(limit_batches=0.5, reported_is_cap=True, partial_step="at_reported_end")
    assert per_epoch(totals)[0] == 3
    totals.take_common(4)
    assert per_epoch(totals)[:3] == [4, 4, 8]
    assert totals.plan.metrics()["countoff/reported_batches_per_epoch"] == 3


@pytest.mark.parametrize(
    "divided",
    [{"sampling": "distributed"}, {"one_pass": LoaderPass(batches=7, fewest_batches=7, most_batches=7, samples=56)}],
    ids=["DistributedSampler", "Accelerate"],
)
def test_a_dataset_that_is_divided_keeps_its_totals(divided: dict[str, Any]) -> None:
    """What divides one dataset among the ranks makes them even by itself, until an epoch or a proof shows otherwise."""
    totals = totals_of(**divided)
    own = per_epoch(totals)
    assert own[:2] == [7, 7]
    for batches in (None, 7):
        totals.take_common(batches)
        assert per_epoch(totals) == own
    totals.take_common(5)
    assert per_epoch(totals) == [5, 5, 10, None, None]
    totals.take_common(7)
    assert per_epoch(totals) == own
    unequal = totals_of(**divided)
    unequal.take_common(7, proven=True)
    assert per_epoch(unequal) == [7, 7, 14, None, None]


def test_a_common_length_says_nothing_about_this_ranks_loader() -> None:
    """No `WrongLength` follows from the length of an epoch that another rank has ended, and nothing is set to it."""
    totals = totals_of(samples_per_rank=None, dataset_size=None, reported_batches=14)
    totals.take_common(7)
    assert totals.plan.batches_per_epoch == 7
    assert judge_length(totals.own, counted_by="") is None
    assert totals.shorter_than_reported is None
    wrong = totals_of(reported_batches=14)
    wrong.take_common(5)
    assert judge_length(wrong.own, counted_by="") is not None
    assert wrong.shorter_than_reported == 7


def test_epochs_that_differ_tell_no_length() -> None:
    """An epoch shows the length of the next ones only as long as all have been alike."""
    totals = totals_of(samples_per_rank=None, dataset_size=None, reported_batches=None)
    found: list[int | None] = []
    for batches in (7, 7, 6, 7):
        totals.observe(batches)
        found.append(totals.plan.batches_per_epoch)
    assert found == [7, 7, None, None]

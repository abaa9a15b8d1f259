"""A loop that a person writes: what its fit begins with."""

from fractions import Fraction
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from countoff._adapter.counted_loop import CountedLoop
from countoff._adapter.fit import Fit, OwnRank
from countoff._adapter.schedule_watch import Schedule
from countoff._torch.messages import MESSAGES
from countoff.core import FitPlan, Guard, LoaderFacts, Settings
from countoff.core.arithmetic.totals import Totals


def test_ranks_compare_schedules_that_fit_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule that has been compared with the run is let go of; the roll call still has what it will do."""
    planned: list[Any] = []
    monkeypatch.setattr(Guard, "fit_start", lambda guard, plan, versions, schedules, **more: planned.extend(schedules))
    facts = LoaderFacts(reported_batches=4, batch_size=2, drop_last=False, samples_per_rank=8, max_epochs=3)
    totals = Totals(facts, dp_degree=1)
    fit = Fit(Settings(), MESSAGES, OwnRank(0, 1, 0, 1), totals)
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    scheduler = CosineAnnealingLR(optimizer, 12)
    fit.watch_schedules([Schedule.of(scheduler, pace=Fraction(1))], steps=12)
    loop = CountedLoop(fit)
    loop.begin(FitPlan(), {})
    loop.abandon()
    assert [each.name for each in planned] == ["CosineAnnealingLR"]


@pytest.mark.parametrize(("agreed", "known"), [((), True), (("batches_per_epoch",), True), (("batch_size",), False)])
def test_totals_of_samples_are_those_of_ranks_with_equal_lengths(
    monkeypatch: pytest.MonkeyPatch, agreed: tuple[str, ...], known: bool
) -> None:
    """Where the roll call has found other lengths, nothing is said of the samples of all ranks."""
    facts = LoaderFacts(reported_batches=4, batch_size=2, drop_last=False, samples_per_rank=8)
    fit = Fit(Settings(), MESSAGES, OwnRank(0, 2, 0, 2), Totals(facts, dp_degree=2))
    monkeypatch.setattr(Guard, "agreed", frozenset(agreed))
    assert ("countoff/samples_per_epoch" in fit.metrics) == known
    assert fit.metrics["countoff/batches_per_epoch"] == 4


@pytest.mark.parametrize(("uneven", "whose"), [("raise", "this rank"), ("stop", "each rank")])
def test_an_observed_length_is_that_of_the_rank_that_has_seen_it(uneven: Any, whose: str) -> None:
    """Ranks may differ on purpose, inside of `uncounted`, or with a warning; made even, they do not."""
    facts = LoaderFacts(reported_batches=None, batch_size=2, drop_last=False, samples_per_rank=None)
    totals = Totals(facts, dp_degree=2)
    fit = Fit(Settings(uneven_train=uneven), MESSAGES, OwnRank(0, 2, 0, 2), totals)
    totals.observe(8)
    assert fit.in_words().startswith(f"An epoch has 8 batches on {whose} and ")

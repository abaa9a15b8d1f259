"""Learning-rate horizons: the step at which a schedule ends, and the warning if the run does not end there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from countoff.core.arithmetic.horizon import Horizon, planned_epochs, run_out, wrong_horizon


def ticked(horizon, steps):
    """The step after which the schedule has had all its ticks, found by counting them."""
    ticks = 0
    for step in range(1, steps + 1):
        ticks += horizon.ticks_per_step
        if ticks >= horizon.ticks:
            return step
    raise AssertionError("it has not ended")


@given(st.integers(1, 500), st.integers(1, 9))
def test_a_schedule_ends_when_its_ticks_are_used(ticks, ticks_per_step):
    horizon = Horizon("OneCycleLR", ticks=ticks, ticks_per_step=ticks_per_step)
    assert horizon.end_step == ticked(horizon, ticks)


@given(st.integers(1, 200), st.integers(1, 8), st.integers(1, 9))
def test_a_schedule_multiplied_by_its_ticks_per_step_fits(steps_per_epoch, epochs, ticks_per_step):
    steps = steps_per_epoch * epochs
    horizon = Horizon("OneCycleLR", ticks=steps * ticks_per_step, ticks_per_step=ticks_per_step)
    assert horizon.end_step == steps
    assert horizon.rho(steps) == 1
    assert wrong_horizon(horizon, total_steps=steps, slack_steps=0) is None
    assert planned_epochs(horizon, steps_per_epoch=steps_per_epoch) is None


@pytest.mark.parametrize(
    ("ticks_per_step", "pace", "end", "warmup", "share"), [(2, "twice", 50, 10, "1/2"), (4, "4 times", 25, 5, "1/4")]
)
def test_a_schedule_made_in_steps_ends_early(ticks_per_step, pace, end, warmup, share):
    """With several ticks per step, a schedule made in steps ends at a fraction of the run."""
    horizon = Horizon("LambdaLR", ticks=100, ticks_per_step=ticks_per_step, warmup_ticks=20)
    verdict = wrong_horizon(horizon, total_steps=100, slack_steps=3, why="Two processes tick it.")
    assert verdict is not None
    assert (verdict.kind, verdict.why) == ("WrongHorizon", "Two processes tick it.")
    assert verdict.sentence == (
        f"LambdaLR was made for 100 ticks and ticks {pace} per optimizer step: it ends at step {end} of 100 ({share} "
        f"of the run); its warm-up of 20 ticks ends at step {warmup}."
    )
    assert verdict.remedy == (
        f"make LambdaLR for {100 * ticks_per_step} ticks: 100 steps of the run × {ticks_per_step} ticks per step. A "
        f"warm-up that is to last 20 steps needs {20 * ticks_per_step} ticks."
    )


def test_the_remedy_has_all_epochs_in_its_number():
    """A schedule made for one epoch's steps, of three epochs on two processes, gets the number that it must have."""
    verdict = wrong_horizon(Horizon("OneCycleLR", ticks=40, ticks_per_step=2), total_steps=120, slack_steps=3)
    assert verdict is not None
    assert verdict.remedy == "make OneCycleLR for 240 ticks: 120 steps of the run × 2 ticks per step."


def test_a_schedule_longer_than_the_run_is_a_warning():
    verdict = wrong_horizon(Horizon("CosineAnnealingLR", ticks=300), total_steps=100, slack_steps=3)
    assert verdict is not None
    assert verdict.sentence == (
        "CosineAnnealingLR was made for 300 ticks and ticks once per optimizer step: it would end at step 300, and the "
        "run ends at step 100."
    )
    assert verdict.remedy == "make CosineAnnealingLR for 100 ticks."


def test_an_end_at_no_simple_fraction_is_in_percent():
    verdict = wrong_horizon(Horizon("LinearLR", ticks=70), total_steps=100, slack_steps=3)
    assert verdict is not None
    assert "ends at step 70 of 100 (70% of the run)" in verdict.sentence


@pytest.mark.parametrize(("ticks", "wrong"), [(97, False), (96, True), (103, False), (104, True)])
def test_a_difference_that_rounding_explains_is_no_warning(ticks, wrong):
    verdict = wrong_horizon(Horizon("LinearLR", ticks=ticks), total_steps=100, slack_steps=3)
    assert (verdict is not None) == wrong


def test_planned_epochs_are_none_if_ambiguous():
    """A schedule that fits in ticks as well as in steps gives no planned epochs."""
    two_epochs_of_ticks = Horizon("OneCycleLR", ticks=400, ticks_per_step=2)
    assert planned_epochs(two_epochs_of_ticks, steps_per_epoch=100) is None
    assert planned_epochs(Horizon("OneCycleLR", ticks=301, ticks_per_step=2), steps_per_epoch=100) is None
    assert planned_epochs(Horizon("OneCycleLR", ticks=300, ticks_per_step=1), steps_per_epoch=100) is None
    assert planned_epochs(Horizon("OneCycleLR", ticks=300, ticks_per_step=4), steps_per_epoch=100) == 3


def test_a_schedule_runs_out_with_its_last_tick():
    horizon = Horizon("OneCycleLR", ticks=30, ticks_per_step=2)
    assert run_out(horizon, ticks=29, span="train epoch 1") is None
    assert run_out(horizon, ticks=30, span="train epoch 1") is not None


@pytest.mark.parametrize("numbers", [{"ticks": 0}, {"ticks": 1.5}, {"ticks": 3, "ticks_per_step": 0}])
def test_numbers_outside_their_domain_are_refused(numbers):
    with pytest.raises(ValueError, match="must be an integer of at least 1"):
        Horizon("LinearLR", **numbers)

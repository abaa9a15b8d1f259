"""Learning-rate horizons: the step at which a schedule ends, and the warning if the run does not end there."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from countoff.core.arithmetic.schedules import Ending
from countoff.core.checks.horizon import Horizon, RunLength, run_out, wrong_horizon


def zero(call, **more):
    return Ending("zero", call, 0.0, 0.1, **more)


def lowest(call, rate=0.02, **more):
    return Ending("minimum", call, rate, 0.1, **more)


@given(st.integers(1, 500), st.integers(1, 9))
def test_a_schedule_ends_when_its_calls_are_used(calls, pace):
    horizon = Horizon("LinearLR", zero(calls), Fraction(pace))
    assert horizon.end_step == next(step for step in range(1, calls + 1) if step * pace >= calls)


@given(st.integers(1, 200), st.integers(1, 8), st.integers(1, 9))
def test_a_schedule_multiplied_by_its_calls_per_step_fits(steps_per_epoch, epochs, pace):
    steps = steps_per_epoch * epochs
    run = RunLength(steps, steps_per_epoch=steps_per_epoch, epochs=epochs, processes=pace)
    horizon = Horizon("OneCycleLR", zero(steps * pace), Fraction(pace))
    assert horizon.end_step == steps
    assert wrong_horizon(horizon, run) is None


@given(st.integers(1, 500), st.integers(0, 500), st.integers(0, 500), st.integers(1, 4))
def test_a_resumed_schedule_ends_where_it_would_have_ended(calls, steps, calls_before, pace):
    """What is left of a schedule is taken in steps from the present one."""
    horizon = Horizon("LinearLR", zero(calls), Fraction(pace), before=(steps, calls_before))
    assert horizon.end_step == max(0, steps + math.ceil((calls - calls_before) / pace))


@pytest.mark.parametrize(("pace", "often", "end", "warmup"), [(2, "twice", 50, 10), (4, "4 times", 25, 5)])
def test_a_schedule_made_in_steps_ends_early(pace, often, end, warmup):
    """With several calls per step, a schedule made in steps ends at a fraction of the run."""
    horizon = Horizon("LambdaLR", zero(100, warmup=20), Fraction(pace), "once per process")
    verdict = wrong_horizon(horizon, RunLength(100, processes=pace), why="Each process steps it.")
    assert verdict is not None
    assert (verdict.kind, verdict.why) == (
        "WrongHorizon",
        "100 is the number of optimizer steps of the run. Each process steps it.",
    )
    assert verdict.sentence == (
        f"the learning rate reaches 0 at step {end} of 100: LambdaLR was made for 100 steps, and is stepped {often} "
        f"per optimizer step (once per process); its warm-up of 20 steps ends at step {warmup}."
    )
    assert verdict.remedy == (
        f"make LambdaLR for {100 * pace} steps: 100 optimizer steps × {pace}. A warm-up that is to last 20 steps of "
        f"the optimizer needs {20 * pace} steps."
    )


STEPWISE = lowest(80, 1e-4, stepwise=True)
RUN = RunLength(1200, steps_per_epoch=400, epochs=3, gradient_accumulation_steps=4, processes=2)


@pytest.mark.parametrize(
    ("made_for", "cause"),
    [
        (400, "400 is the number of optimizer steps of one epoch."),
        (1600, "1,600 is the number of batches of one epoch."),
        (4800, "4,800 is the number of batches of the run: optimizer steps × 4, the gradient accumulation."),
        (2400, "2,400 is the number of optimizer steps that one process alone would need: those of the run × 2."),
        (9600, "9,600 is the number of batches that one process alone would need: optimizer steps × 4 × 2."),
        (3, "3 is the number of epochs of the run."),
        (777, ""),
    ],
)
def test_the_cause_is_the_number_that_the_schedule_was_made_for(made_for, cause):
    verdict = wrong_horizon(Horizon("LambdaLR", zero(made_for)), RUN)
    assert verdict is not None
    assert verdict.why == cause


@pytest.mark.parametrize(
    ("horizon", "run"),
    [
        (Horizon("LambdaLR", lowest(600)), RUN),
        (
            Horizon("MultiStepLR", lowest(80, 1e-4, stepwise=True), Fraction(1, 400)),
            replace(RUN, epochs=90, steps=36000),
        ),
        (Horizon("CosineAnnealingLR", zero(40, rises=True)), RUN),
        (Horizon("LambdaLR", zero(1190)), RUN),
        (Horizon("LambdaLR", zero(1300)), RUN),
        (Horizon("LambdaLR", zero(100_000)), replace(RUN, limited=True)),
        (Horizon("LinearLR", Ending("full", 100, 0.1, 0.1, warmup=100)), RUN),
    ],
    ids=["a rest", "milestones", "cycles", "2 % early", "10 % late", "a trial", "a warm-up"],
)
def test_nothing_is_said_of_what_may_be_meant(horizon, run):
    assert wrong_horizon(horizon, run) is None


@pytest.mark.parametrize(
    ("horizon", "run", "said"),
    [
        (Horizon("LambdaLR", lowest(1200), Fraction(2)), RUN, "reaches its lowest value, 0.02, at step 600 of 1,200: "),
        (
            Horizon("MultiStepLR", STEPWISE),
            replace(RUN, epochs=90, steps=36000),
            "reaches its lowest value, 1e-4, at step 80 of 36,000: ",
        ),
        (
            Horizon("CosineAnnealingLR", zero(3, rises=True)),
            RUN,
            "reaches 0 at step 3 of 1,200 and then rises again: ",
        ),
        (
            Horizon("LambdaLR", zero(4800)),
            replace(RUN, limited=True),
            "would reach its end at step 4,800, and the run ",
        ),
        (Horizon("PolynomialLR", lowest(600, 1e-7)), RUN, "reaches its lowest value, 1e-7, at step 600 of 1,200: "),
    ],
    ids=["per process", "epochs", "cycles of epochs", "a trial", "all but zero"],
)
def test_what_nobody_means_is_said(horizon, run, said):
    verdict = wrong_horizon(horizon, run)
    assert verdict is not None
    assert said in verdict.sentence


def test_the_remedy_has_all_epochs_in_its_number():
    """A schedule made for one epoch's steps, of three epochs on two processes, gets the number that it must have."""
    run = RunLength(120, steps_per_epoch=40, epochs=3, processes=2)
    verdict = wrong_horizon(Horizon("OneCycleLR", zero(40), Fraction(2)), run)
    assert verdict is not None
    assert verdict.remedy == "make OneCycleLR for 240 steps: 120 optimizer steps × 2."


def test_a_schedule_of_steps_that_is_stepped_per_epoch_is_named():
    run = RunLength(1200, steps_per_epoch=400, epochs=3)
    verdict = wrong_horizon(Horizon("CosineAnnealingLR", zero(1200), Fraction(1, 400)), run)
    assert verdict is not None
    assert verdict.sentence == (
        "the learning rate would reach its end at step 480,000, and the run ends at 1,200: CosineAnnealingLR was made "
        "for 1,200 calls of its step(), and is stepped once per epoch."
    )
    assert verdict.remedy == "step CosineAnnealingLR once per optimizer step.\nmake it for 3 calls of its step()."


@pytest.mark.parametrize(("end", "said"), [(979, True), (980, False), (1000, False), (1100, False), (1101, True)])
def test_a_small_difference_is_none(end, said):
    """A schedule may end 2 % of the run before its end, and 10 % after it."""
    assert (wrong_horizon(Horizon("LambdaLR", zero(end)), RunLength(1000)) is not None) is said


@pytest.mark.parametrize(("calls", "said"), [(52, False), (59, False), (60, True), (72, True)])
def test_the_last_steps_of_a_rounded_schedule_are_none(calls, said):
    """A schedule for 10 epochs of 21 batches / 4 has 52 steps, and the run 60: one more in each epoch."""
    run = RunLength(steps_per_epoch=6, gradient_accumulation_steps=4, epoch_batches=(21,))
    assert (run_out(Horizon("LinearLR", zero(52)), run, calls=calls, span="train epoch 9") is not None) is said


def test_an_epoch_after_the_end_is_reported():
    """A schedule at 0 is reported where an epoch begins; one that rests above 0, or wraps, is not."""
    verdict = run_out(
        Horizon("LinearLR", zero(30), Fraction(2)), RunLength(), calls=30, span="train epoch 1", why="Yes."
    )
    assert verdict is not None
    assert verdict.sentence == (
        "train epoch 1 begins with a learning rate of 0, which it has had since step 15: LinearLR was made for 30 "
        "steps, and is stepped twice per optimizer step."
    )
    assert (verdict.why, verdict.remedy) == ("Yes.", "make LinearLR for 2 times the optimizer steps of the whole run.")
    for ending in (lowest(30), zero(30, rises=True), zero(31)):
        assert run_out(Horizon("LinearLR", ending), RunLength(), calls=30, span="train epoch 1") is None


@pytest.mark.parametrize(("call", "said"), [(240, False), (300, True)])
def test_cycles_are_meant_unless_the_run_has_few(call, said):
    """A cosine of an epoch that is stepped on falls and rises: several times, as cycles do, or about once."""
    run = replace(RUN, epochs=5) if call == 240 else replace(RUN, epochs=4)
    run = replace(run, steps_per_epoch=call, steps=1210 if call == 240 else 1200)
    assert (wrong_horizon(Horizon("CosineAnnealingLR", zero(call, rises=True)), run) is not None) is said


def test_a_rate_that_vanishes_after_the_run_is_none():
    """A schedule that falls for ever is made for no number of steps."""
    assert wrong_horizon(Horizon("ExponentialLR", Ending("vanished", 9000)), RUN) is None
    early = wrong_horizon(Horizon("ExponentialLR", Ending("vanished", 900)), RUN)
    assert early is not None
    assert "falls below a millionth of its highest value at step 900 of 1,200: ExponentialLR is" in early.sentence


@pytest.mark.parametrize("given", [{"steps": 0}, {"steps": 1.5}, {"processes": 0}, {"epochs": 0}])
def test_lengths_are_counts(given):
    with pytest.raises(ValueError, match=f"{next(iter(given))} must be"):
        RunLength(**given)


def test_a_run_of_unknown_length_is_not_compared():
    with pytest.raises(ValueError, match="steps must be"):
        wrong_horizon(Horizon("LinearLR", zero(10)), RunLength())

"""The curves of live schedulers: torch's, transformers' and users' own, each made right and made wrong."""

import argparse
import copy
import functools
import inspect
import logging
import math
import random
import types
import warnings
from fractions import Fraction

import numpy
import pytest
import torch
from torch.optim import lr_scheduler

from countoff._adapter.object_copies import NotCopied, copied
from countoff._adapter.schedule_watch import Schedule, ScheduleWatch
from countoff._adapter.scheduler_curves import curve_of
from countoff.core.checks.horizon import RunLength

EPOCHS, PER_EPOCH = 40, 50
STEPS = EPOCHS * PER_EPOCH
RUN = RunLength(STEPS, steps_per_epoch=PER_EPOCH, epochs=EPOCHS, processes=4)
PER_STEP, PER_EPOCH_PACE = Fraction(1), Fraction(1, PER_EPOCH)


@pytest.fixture
def optimizer():
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3))], lr=0.1)


def linear(length, warmup=0):
    def factor(step):
        return min(step / warmup if warmup else 1.0, 1.0) * max(0.0, 1 - step / length)

    return factor


def warmed_up(optimizer, length):
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=100),
        lr_scheduler.CosineAnnealingLR(optimizer, length - 100),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[100])


def chained(optimizer, length):
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=100),
        lr_scheduler.PolynomialLR(optimizer, length, power=2.0),
    ]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


class Own(lr_scheduler.LRScheduler):
    """As users write them: the rate follows from the tick."""

    def __init__(self, optimizer, length):
        self.length = length
        super().__init__(optimizer)

    def get_lr(self):
        return [base * max(0.0, 1 - self.last_epoch / self.length) for base in self.base_lrs]


class Recursive(lr_scheduler.LRScheduler):
    """Its rate follows from the one before."""

    def __init__(self, optimizer, length):
        self.less = 0.1 / length
        super().__init__(optimizer)

    def get_lr(self):
        return [
            max(0.0, group["lr"] - (self.less if self.last_epoch else 0.0)) for group in self.optimizer.param_groups
        ]


class WithItsOwnStep(lr_scheduler.LambdaLR):
    """It is stepped in a way of its own."""

    def step(self, epoch=None):
        super().step()


ZOO = {
    # torch's class: made right, made wrong, ticks per step of each, what the warning says
    "LambdaLR": (
        lambda o: lr_scheduler.LambdaLR(o, linear(STEPS)),
        lambda o: lr_scheduler.LambdaLR(o, linear(PER_EPOCH)),
        PER_STEP,
        "the learning rate reaches 0 at step 50 of 2,000: LambdaLR was made for 50 steps.",
    ),
    "MultiplicativeLR": (
        lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.999),
        lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
        PER_STEP,
        "falls below a millionth of its highest value at step 132 of 2,000: MultiplicativeLR is stepped once per",
    ),
    "StepLR": (
        lambda o: lr_scheduler.StepLR(o, step_size=15 * PER_EPOCH),
        lambda o: lr_scheduler.StepLR(o, step_size=15),
        PER_STEP,
        "falls below a millionth of its highest value at step 105 of 2,000: StepLR is stepped once per optimizer step.",
    ),
    "MultiStepLR": (
        lambda o: lr_scheduler.MultiStepLR(o, [20 * PER_EPOCH, 35 * PER_EPOCH]),
        lambda o: lr_scheduler.MultiStepLR(o, [20, 35]),
        PER_STEP,
        "reaches its lowest value, 0.001, at step 35 of 2,000: MultiStepLR was made for 35 steps.",
    ),
    "ConstantLR": (
        lambda o: lr_scheduler.ConstantLR(o, total_iters=5),
        lambda o: lr_scheduler.ConstantLR(o, total_iters=5 * PER_EPOCH),
        PER_EPOCH_PACE,
        "the warm-up of the learning rate would end at step 12,500, and the run ends at 2,000: that of ConstantLR",
    ),
    "LinearLR": (
        lambda o: lr_scheduler.LinearLR(o, 1.0, 0.01, total_iters=STEPS),
        lambda o: lr_scheduler.LinearLR(o, 1.0, 0.001, total_iters=EPOCHS),
        PER_STEP,
        "reaches its lowest value, 1e-4, at step 40 of 2,000: LinearLR was made for 40 steps.",
    ),
    "ExponentialLR": (
        lambda o: lr_scheduler.ExponentialLR(o, 0.999),
        lambda o: lr_scheduler.ExponentialLR(o, 0.9),
        PER_STEP,
        "falls below a millionth of its highest value at step 132 of 2,000: ExponentialLR is stepped once per",
    ),
    "SequentialLR": (
        lambda o: warmed_up(o, STEPS),
        lambda o: warmed_up(o, 4 * STEPS),
        PER_STEP,
        "would reach its end at step 8,000, and the run ends at 2,000: SequentialLR was made for 8,000 steps.",
    ),
    "CosineAnnealingLR": (
        lambda o: lr_scheduler.CosineAnnealingLR(o, EPOCHS),
        lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
        PER_EPOCH_PACE,
        "would reach its end at step 100,000, and the run ends at 2,000: CosineAnnealingLR was made for 2,000 calls",
    ),
    "ChainedScheduler": (
        lambda o: chained(o, STEPS),
        lambda o: chained(o, 4 * STEPS),
        PER_STEP,
        "would reach its end at step 8,000, and the run ends at 2,000: ChainedScheduler was made for 8,000 steps.",
    ),
    "OneCycleLR": (
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=STEPS),
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=STEPS // 2),
        PER_STEP,
        "OneCycleLR has no learning rate after step 1,000 of 2,000, and raises an error there: OneCycleLR was made for",
    ),
    "PolynomialLR": (
        lambda o: lr_scheduler.PolynomialLR(o, STEPS, power=0.9),
        lambda o: lr_scheduler.PolynomialLR(o, STEPS // 2, power=0.9),
        PER_STEP,
        "reaches 0 at step 1,000 of 2,000: PolynomialLR was made for 1,000 steps.",
    ),
    # users' own
    "Own": (
        lambda o: Own(o, STEPS),
        lambda o: Own(o, STEPS // 4),
        PER_STEP,
        "reaches 0 at step 500 of 2,000: Own was made for 500 steps.",
    ),
    "Recursive": (
        lambda o: Recursive(o, STEPS),
        lambda o: Recursive(o, STEPS // 4),
        PER_STEP,
        "at step 500 of 2,000: Recursive was made for 500 steps.",
    ),
    "WithItsOwnStep": (
        lambda o: WithItsOwnStep(o, linear(STEPS)),
        lambda o: WithItsOwnStep(o, linear(STEPS // 4)),
        PER_STEP,
        "reaches 0 at step 500 of 2,000: WithItsOwnStep was made for 500 steps.",
    ),
}

SILENT = {
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=7, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 10),
    "a constant LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0),
    "a warm-up alone": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=5),
}


def said(scheduler, pace, run=RUN):
    verdict = ScheduleWatch([Schedule.of(scheduler, pace)], lambda _: run).begin(0)
    return None if verdict is None else verdict.sentence


def state_of(scheduler, optimizer):
    """All that a run depends on, as text."""
    parts = [vars(each) for each in (scheduler, *getattr(scheduler, "_schedulers", ()))]
    generators = random.getstate(), numpy.random.get_state(), torch.get_rng_state().tolist()
    return repr((parts, optimizer.state_dict(), generators))


def test_every_scheduler_of_torch_is_here():
    known = {name for name in lr_scheduler.__all__ if inspect.isclass(getattr(lr_scheduler, name))}
    assert known - {"LRScheduler", "_LRScheduler"} <= {*ZOO, *SILENT}


@pytest.mark.parametrize("name", ZOO)
def test_a_scheduler_made_right_is_silent_and_one_made_wrong_is_named(name, optimizer):
    """The wrong one is named with the step, the right one is not; both stay as they were, and so does all else."""
    right, wrong, pace, sentence = ZOO[name]
    for make, expected in ((right, None), (wrong, sentence)):
        scheduler = make(copy.deepcopy(optimizer))
        before = state_of(scheduler, scheduler.optimizer)
        found = said(scheduler, pace)
        assert state_of(scheduler, scheduler.optimizer) == before
        assert found is None if expected is None else expected in str(found)


@pytest.mark.parametrize("name", SILENT)
@pytest.mark.parametrize("pace", [PER_STEP, PER_EPOCH_PACE, Fraction(4)])
def test_a_scheduler_without_an_end_is_silent(name, pace, optimizer):
    assert said(SILENT[name](optimizer), pace) is None


@pytest.mark.parametrize(
    "name", ["LambdaLR", "SequentialLR", "ChainedScheduler", "CosineAnnealingLR", "OneCycleLR", "Own"]
)
def test_the_curve_is_what_training_gets(name, optimizer):
    """The rate after each tick is the one that stepping the real scheduler gives."""
    scheduler = ZOO[name][0](optimizer)
    curve = curve_of(scheduler)
    assert curve is not None
    for tick in range(200):
        assert curve(tick) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6, abs=1e-12)
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # SequentialLR steps with an argument that torch deprecates
            scheduler.step()


@pytest.mark.parametrize(
    ("name", "more", "silent"),
    [
        ("linear", {}, False),
        ("cosine", {}, False),
        ("cosine_with_restarts", {}, False),
        ("polynomial", {}, False),
        ("warmup_stable_decay", {"num_decay_steps": 100}, False),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}, False),
        ("constant", {}, True),
        ("constant_with_warmup", {}, True),
        ("inverse_sqrt", {}, True),
    ],
)
def test_schedules_of_transformers(name, more, silent, optimizer):
    """Each of the names of `get_scheduler`, made for the run; stepped once per step, and once per process."""
    get_scheduler = pytest.importorskip("transformers.optimization").get_scheduler
    scheduler = get_scheduler(
        name, optimizer, num_warmup_steps=20, num_training_steps=STEPS, scheduler_specific_kwargs=more
    )
    assert said(scheduler, PER_STEP) is None
    per_process = said(scheduler, Fraction(4))
    assert per_process is None if silent else "at step 500 of 2,000" in str(per_process)


def counted_calls(calls, step):
    calls.append(step)
    return max(0.0, 1 - step / 500)


LENGTH = argparse.Namespace(steps=500)
CALLS: list[int] = []


def by_a_global(step):
    CALLS.append(step)
    random.random()
    numpy.random.rand()
    print("the learning rate is asked for")
    return max(0.0, 1 - step / LENGTH.steps)


def by_a_nonlocal():
    asked = 0

    def factor(step):
        nonlocal asked
        asked += 1
        return max(0.0, 1 - step / 500)

    return factor, lambda: asked


def test_calling_a_users_function_changes_nothing(optimizer, capsys):
    """Functions that count their calls, draw random numbers and print are looked at, and nothing is left of it."""
    calls: list[int] = []
    by_nonlocal, asked = by_a_nonlocal()
    for function in (functools.partial(counted_calls, calls), by_a_global, by_nonlocal):
        scheduler = lr_scheduler.LambdaLR(copy.deepcopy(optimizer), function)
        before = len(calls), len(CALLS), asked(), state_of(scheduler, scheduler.optimizer)
        capsys.readouterr()
        assert "at step 500 of 2,000" in str(said(scheduler, PER_STEP))
        assert (len(calls), len(CALLS), asked(), state_of(scheduler, scheduler.optimizer)) == before
        assert capsys.readouterr() == ("", "")


class Refusing:
    """A user's object that no copy stands for."""

    def __init__(self, length):
        self.length, self.handle = length, (each for each in ())

    def __call__(self, step):
        return max(0.0, 1 - step / self.length)


class Closing:
    """Its end does something."""

    ended = 0

    def __del__(self):
        Closing.ended += 1

    def __call__(self, step):
        return max(0.0, 1 - step / 500)


class Counting:
    """A call of it counts in its class."""

    calls = 0

    def __call__(self, step):
        type(self).calls += 1
        return max(0.0, 1 - step / 500)


class Printing(lr_scheduler.LRScheduler):
    """It prints what it computes."""

    def get_lr(self):
        print(self.last_epoch)
        return [base * max(0.0, 1 - self.last_epoch / 500) for base in self.base_lrs]


class Logging(lr_scheduler.LambdaLR):
    """A step of it keeps the rate in a list of its module."""

    def step(self, epoch=None):
        super().step()
        CALLS.append(self.last_epoch)


def by_a_file(step):
    with open(LENGTH.file, "a") as file:
        file.write(str(step))
    return max(0.0, 1 - step / 500)


def by_a_log(step):
    logging.warning("step %d", step)
    return max(0.0, 1 - step / 500)


def by_torch(step):
    torch.manual_seed(step)
    return max(0.0, 1 - step / 500)


MORE_THAN_COMPUTE = {
    "a file": lambda o: lr_scheduler.LambdaLR(o, by_a_file),
    "a log": lambda o: lr_scheduler.LambdaLR(o, by_a_log),
    "torch": lambda o: lr_scheduler.LambdaLR(o, by_torch),
    "a class": lambda o: lr_scheduler.LambdaLR(o, Counting()),
    "an end": lambda o: lr_scheduler.LambdaLR(o, Closing()),
    "a print": Printing,
    "a step": lambda o: Logging(o, linear(500)),
}


@pytest.mark.parametrize("name", MORE_THAN_COMPUTE)
def test_what_does_more_than_compute_is_silent_and_not_called(name, optimizer, capsys, caplog, tmp_path, monkeypatch):
    """Code of the user's that writes, prints, logs, counts or ends something is not called a single time."""
    monkeypatch.setattr(LENGTH, "file", tmp_path / "rates", raising=False)
    scheduler = MORE_THAN_COMPUTE[name](optimizer)
    capsys.readouterr()
    caplog.clear()

    def effects():
        written = LENGTH.file.read_text() if LENGTH.file.exists() else ""
        return written, len(CALLS), Counting.calls, Closing.ended, torch.get_rng_state().tolist()

    before = effects()
    assert said(scheduler, PER_STEP) is None
    assert effects() == before
    assert capsys.readouterr() == ("", "")
    assert caplog.records == []


class InAModel(torch.nn.Module):
    """A LightningModule keeps its schedule like this."""

    def factor(self, step):
        return max(0.0, 1 - step / 500)


@pytest.mark.parametrize("function", [Refusing(500), InAModel().factor], ids=["a generator", "a model"])
def test_a_scheduler_that_cannot_be_copied_is_silent(function, optimizer):
    assert said(lr_scheduler.LambdaLR(optimizer, function), PER_STEP) is None


HEALTHY = {
    # what healthy runs of STEPS steps have, and how often it is stepped per step
    "MNIST's example": (lambda o: lr_scheduler.StepLR(o, step_size=1, gamma=0.7), Fraction(1, 143)),
    "a mild exponential": (lambda o: lr_scheduler.ExponentialLR(o, 0.65), Fraction(1, 250)),
    "an exponential function": (lambda o: lr_scheduler.LambdaLR(o, lambda s: math.exp(-s / 300)), PER_STEP),
    "a sigmoid": (lambda o: lr_scheduler.LambdaLR(o, lambda s: 1 / (1 + math.exp((s - 1000) / 200))), PER_STEP),
    "a power of two": (lambda o: lr_scheduler.LambdaLR(o, lambda s: 1 / (2.0 ** (s // 10))), PER_EPOCH_PACE),
    "two cycles": (lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS // 4), PER_STEP),
    "one whole cosine": (lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS // 2), PER_STEP),
    "numpy's power": (
        lambda o: lr_scheduler.LambdaLR(o, lambda s: float((1 - numpy.float64(s) / STEPS) ** 0.9)),
        PER_STEP,
    ),
    "python's power": (lambda o: lr_scheduler.LambdaLR(o, lambda s: (1 - s / STEPS) ** 0.9), PER_STEP),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_silent(name, optimizer):
    """What falls for ever, cycles, or overflows far beyond the run is not warned of, and numpy does not warn either."""
    make, pace = HEALTHY[name]
    assert said(make(optimizer), pace) is None


@pytest.mark.parametrize("gamma", [0.1, 0.2, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("size", [1, 3, 10, 30])
def test_a_step_schedule_is_silent_unless_it_vanishes(gamma, size, optimizer):
    for epochs in (8, 14, 30, 60, 90):
        scheduler = lr_scheduler.StepLR(copy.deepcopy(optimizer), step_size=size, gamma=gamma)
        run = RunLength(100 * epochs, steps_per_epoch=100, epochs=epochs)
        found = said(scheduler, Fraction(1, 100), run)
        if gamma ** (epochs // size) > 1.01e-6:
            assert found is None
        elif gamma ** ((0.9 * epochs - 1) // size) < 0.99e-6:
            assert found is not None


def test_a_root_of_less_than_zero_is_named(optimizer):
    """Python's power makes a complex number of it, which the optimizer refuses."""
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda s: (1 - s / PER_EPOCH) ** 0.9)
    assert "LambdaLR has no learning rate after step 50 of 2,000, and raises an error there" in str(
        said(scheduler, PER_STEP)
    )


class Odd(lr_scheduler.LambdaLR):
    """Nobody can look at it."""

    def __getattribute__(self, name):
        if name == "last_epoch" and vars(self).get("made"):
            raise RuntimeError("not now")
        return super().__getattribute__(name)


@pytest.mark.parametrize("ticks", [0.25, 1.5, "one", None], ids=repr)
def test_nothing_is_raised_into_the_loop(ticks, optimizer):
    """A count that is no whole number, a rate that is none, and a class of any kind end the check in silence."""
    scheduler = lr_scheduler.LambdaLR(optimizer, linear(500))
    watch = watched(scheduler)
    assert watch.epoch_begins("train epoch 0", 0) is None
    scheduler.last_epoch = ticks
    for step in range(1, 20):
        assert watch.stepped(step, step) is None
    assert watch.epoch_begins("train epoch 1", 20) is None
    nan = lr_scheduler.LambdaLR(copy.deepcopy(optimizer), lambda s: math.nan if s > 100 else 1.0)
    assert said(nan, PER_STEP) is None
    odd = Odd(copy.deepcopy(optimizer), linear(500))
    vars(odd)["made"] = True
    assert said(odd, PER_STEP) is None
    assert said(object(), PER_STEP) is None


@pytest.mark.parametrize("size", [1000, 100_000])
def test_what_a_function_holds_is_copied_only_if_it_is_small(size, optimizer):
    """A closure over a large list or over a dataset's tensors is refused before it is copied."""
    numbers, tensors = list(range(size)), [torch.zeros(size // 10) for _ in range(10)]
    for holds in (numbers, tensors):
        factor = functools.partial(lambda holds, s: max(0, 1 - s / 500) * len(holds), holds)
        found = said(lr_scheduler.LambdaLR(copy.deepcopy(optimizer), factor), PER_STEP)
        assert (found is None) is (size > 1000)


def test_many_parameter_groups_are_looked_at_as_one(optimizer):
    """The groups of one function have one curve: of 300, the highest is looked at."""
    for _ in range(300):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.01})
    curve = curve_of(lr_scheduler.LambdaLR(optimizer, linear(500)))
    assert curve is not None
    assert len(curve.copy.optimizer.param_groups) == 1
    assert curve(0) == 0.1


@pytest.mark.parametrize(
    ("ticks", "length"),
    [([0] * 20 + [1] * 30, 1980), ([0, 0, 0, 0, 1] * 10, 400), ([0] * 49 + [1], 40)],
    ids=["after a warm-up by hand", "every fifth step", "in the last step"],
)
def test_a_scheduler_that_begins_late_is_not_taken_for_another_pace(ticks, length, optimizer):
    scheduler = lr_scheduler.LambdaLR(optimizer, linear(length))
    watch = watched(scheduler)
    assert watch.epoch_begins("train epoch 0", 0) is None
    assert stepped(watch, scheduler, ticks) is None
    assert watch.epoch_begins("train epoch 1", PER_EPOCH) is None


def test_a_scheduler_that_is_loaded_after_the_begin_is_silent(optimizer):
    """A loop that resumes without telling it restores its scheduler where it likes."""
    scheduler = lr_scheduler.LambdaLR(optimizer, linear(STEPS))
    watch = watched(scheduler)
    assert watch.begin(0) is None
    assert watch.epoch_begins("train epoch 20", 0) is None
    scheduler.last_epoch = 1000
    assert stepped(watch, scheduler, [1] * 20) is None


def test_a_recursive_scheduler_of_many_steps_is_silent(optimizer):
    """One that must be stepped tick by tick is not followed further than 5,000 ticks."""
    run = RunLength(100_000)
    assert said(Recursive(optimizer, 50_000), PER_STEP, run) is None


def test_a_scheduler_of_ten_million_steps_is_looked_at_in_few_places(optimizer):
    schedule = Schedule.of(lr_scheduler.LambdaLR(optimizer, linear(2_500_000, 1000)), PER_STEP)
    counted = 0

    def curve(tick):
        nonlocal counted
        counted += 1
        return linear(2_500_000, 1000)(tick)

    schedule.curve = lambda: curve
    verdict = ScheduleWatch([schedule], lambda _: RunLength(10_000_000)).begin(0)
    assert verdict is not None
    assert "at step 2,500,000 of 10,000,000" in verdict.sentence
    assert counted < 3000


def test_several_parameter_groups_end_with_the_last(optimizer):
    """A group that is frozen, or decays before the others, does not end the schedule."""
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.2})
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.0})
    functions = [linear(STEPS // 4), linear(STEPS), linear(STEPS)]
    assert said(lr_scheduler.LambdaLR(optimizer, functions), PER_STEP) is None


def watched(scheduler, run=RUN, **options):
    return ScheduleWatch([Schedule.of(scheduler, **options)], lambda _: run)


def stepped(watch, scheduler, ticks_of_steps):
    """Plays optimizer steps, each followed by some steps of the scheduler; returns the first warning and its step."""
    for step, ticks in enumerate(ticks_of_steps, 1):
        scheduler.optimizer.step()
        found = watch.stepped(step, step)
        if found is not None:
            return step, found.sentence
        for _ in range(ticks):
            scheduler.step()
    return None


@pytest.mark.parametrize(
    ("ticks", "length", "reasons", "expected"),
    [
        ([1] * 20, STEPS, {}, None),
        ([1] * 20, STEPS // 4, {}, "at step 500 of 2,000: LambdaLR was made for 500 steps."),
        ([4] * 20, STEPS, {4: "once per process"}, "at step 500 of 2,000: LambdaLR was made for 2,000 steps, and is "),
        ([4] * 20, 4 * STEPS, {4: "once per process"}, None),
        ([1, 1, 2, 1, 1, 1, 1, 1, 1], STEPS // 4, {}, None),
        ([0] * 20, STEPS // 4, {}, None),
    ],
    ids=["right", "short", "per process", "right per process", "irregular", "not within the epoch"],
)
def test_how_often_a_scheduler_is_stepped_is_observed(ticks, length, reasons, expected, optimizer):
    """Eight steps show it; a loop that skips optimizer steps, as a GradScaler does, is not taken for another pace."""
    scheduler = lr_scheduler.LambdaLR(optimizer, linear(length))
    found = stepped(watched(scheduler, reasons=reasons), scheduler, ticks)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        step, sentence = found
        assert step == 8
        assert expected in sentence


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (EPOCHS, None),
        (STEPS, "at step 100,000, and the run ends at 2,000"),
        (EPOCHS // 2, "reaches 0 at step 1,000 of"),
    ],
)
def test_a_scheduler_that_is_stepped_per_epoch_is_observed(length, expected, optimizer):
    """The first epoch shows it."""
    scheduler = lr_scheduler.LambdaLR(optimizer, linear(length))
    watch = watched(scheduler)
    assert watch.epoch_begins("train epoch 0", 0) is None
    assert stepped(watch, scheduler, [0] * PER_EPOCH) is None
    scheduler.step()
    found = watch.epoch_begins("train epoch 1", PER_EPOCH)
    assert found is None if expected is None else expected in str(found and found.sentence)
    assert watch.epoch_begins("train epoch 2", 2 * PER_EPOCH) is None


def test_epochs_that_are_shorter_than_what_is_observed_are_no_end_of_it(optimizer):
    """The first steps are observed across epochs of five steps."""
    scheduler = lr_scheduler.LambdaLR(optimizer, linear(15))
    watch = watched(scheduler, RunLength(60, steps_per_epoch=5, epochs=12))
    found = []
    for step in range(1, 12):
        if step % 5 == 1:
            assert watch.epoch_begins(f"train epoch {step // 5}", step - 1) is None
        optimizer.step()
        found += [(step, verdict.sentence) for verdict in [watch.stepped(step, 1 + (step - 1) % 5)] if verdict]
        scheduler.step()
    assert found == [(6, "the learning rate reaches 0 at step 15 of 60: LambdaLR was made for 15 steps.")]


def test_one_schedule_is_warned_of(optimizer):
    """Of several wrong schedules, the first is named, once."""
    schedules = [Schedule.of(lr_scheduler.LambdaLR(optimizer, linear(length)), PER_STEP) for length in (500, 400)]
    watch = ScheduleWatch(schedules, lambda _: RUN)
    found = watch.begin(0)
    assert found is not None
    assert "at step 500 of 2,000" in found.sentence
    assert watch.end_step == 500
    assert watch.begin(0) is watch.stepped(1, 1) is watch.epoch_begins("train epoch 1", 50) is None


def test_a_resumed_schedule_ends_where_it_began_to(optimizer):
    """A scheduler that goes on in the middle of a run is compared from there on."""
    scheduler = lr_scheduler.LambdaLR(optimizer, linear(STEPS))
    for _ in range(1000):
        optimizer.step()
        scheduler.step()
    watch = watched(scheduler, pace=PER_STEP)
    assert watch.begin(1000) is None
    assert watch.end_step == STEPS


@pytest.mark.parametrize(
    ("length", "expected"), [(STEPS // 4, None), (STEPS, "would reach its end at step 2,000, and the run ends at 500")]
)
def test_batches_per_step_are_observed(length, expected, optimizer):
    """A loop that accumulates without telling it is compared by what it does, with a short step at an epoch's end."""
    scheduler = lr_scheduler.LambdaLR(optimizer, linear(length))

    def run(batches_per_step):
        per_epoch = PER_EPOCH // (batches_per_step or 1)
        return RunLength(
            EPOCHS * per_epoch, steps_per_epoch=per_epoch, gradient_accumulation_steps=batches_per_step or 1
        )

    watch = ScheduleWatch([Schedule.of(scheduler)], run)
    found = None
    for step, batches in enumerate([4, 8, 10, 4, 8, 10, 4, 8, 10, 4], 1):
        optimizer.step()
        found = found or watch.stepped(step, batches)
        scheduler.step()
    assert found is None if expected is None else expected.replace("500", "480") in str(found and found.sentence)


@pytest.mark.parametrize(("length", "silent"), [(STEPS, True), (STEPS + 600, True), (STEPS // 2, False)])
def test_a_scheduler_that_was_stepped_before_may_belong_to_either_run(length, silent, optimizer):
    """Where nothing says how many steps came before, the schedule of the whole run fits, and that of a longer one."""
    scheduler = lr_scheduler.LambdaLR(optimizer, linear(length))
    for _ in range(600):
        optimizer.step()
        scheduler.step()
    assert (watched(scheduler, pace=PER_STEP).begin(0) is None) is silent


def test_copies_are_apart():
    """What a copy holds is its own, also what a function has closed over, and what it calls."""
    inner = {"a": [1, 2], "b": (3, {4})}
    holder = types.SimpleNamespace(inner=inner, again=inner, tensor=torch.ones(2), array=numpy.ones(2))
    holder.self = holder

    def function(key=inner):
        return holder, key, math_of

    math_of = function
    new = copied(holder, {})
    assert new.inner == inner
    assert new.inner is not inner
    assert new.again is new.inner
    assert new.self is new
    assert new.tensor is not holder.tensor
    other, default, again = copied(function, {})()
    assert other is not holder
    assert other.inner == inner
    assert default == inner
    assert default is not inner
    assert again is not function


@pytest.mark.parametrize(
    "value",
    [
        torch.nn.Linear(1, 1),
        torch.zeros(100_000),
        [numpy.zeros(100_000)],
        (each for each in ()),
        [[] for _ in range(10_000)],
    ],
    ids=["a model", "a large tensor", "a large array", "a generator", "many objects"],
)
def test_what_is_large_or_alive_is_not_copied(value):
    with pytest.raises(NotCopied):
        copied(value, {})

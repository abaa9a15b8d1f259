"""The schedules of live schedulers: torch's, transformers' and users' own, each made right and made wrong."""

import copy
import functools
import gc
import inspect
import random
import weakref
from fractions import Fraction

import numpy
import pytest
import torch
from torch.optim import lr_scheduler

from countoff._adapter.declared_schedules import declared_ending
from countoff._adapter.schedule_watch import Schedule, ScheduleWatch
from countoff.core.checks.horizon import RunLength

EPOCHS, PER_EPOCH = 40, 50
STEPS = EPOCHS * PER_EPOCH
RUN = RunLength(STEPS, steps_per_epoch=PER_EPOCH, epochs=EPOCHS, processes=4)
PER_STEP, PER_EPOCH_PACE = Fraction(1), Fraction(1, PER_EPOCH)


@pytest.fixture
def optimizer():
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3))], lr=0.1)


def linear(optimizer, length):
    return lr_scheduler.PolynomialLR(optimizer, length)


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


ZOO = {
    # torch's class: made right, made wrong, calls per step of each, what the warning says
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
}


class OfUser(lr_scheduler.PolynomialLR):
    """It has torch's attributes, and may compute anything."""

    def __getattribute__(self, name):
        if name == "total_iters" and vars(self).get("made"):
            raise RuntimeError("a user's code is called")
        return super().__getattribute__(name)


def of_user(optimizer):
    scheduler = OfUser(optimizer, 500)
    vars(scheduler)["made"] = True
    return scheduler


def never_called(step):
    if step:
        raise RuntimeError("a user's code is called")
    return 1.0


def after_a_plateau(optimizer):
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5), lr_scheduler.LambdaLR(optimizer, never_called)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[5])


SILENT = {
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=7, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 10),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, never_called),
    "a partial of the user's": lambda o: lr_scheduler.LambdaLR(
        o, functools.partial(lambda step, *, num_training_steps: 1.0, num_training_steps=5)
    ),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "a warm-up alone": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=5),
    "a warm-up, and a function": after_a_plateau,
    "a class of the user's": of_user,
    "no scheduler": lambda o: object(),
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
@pytest.mark.parametrize("pace", [PER_STEP, PER_EPOCH_PACE, Fraction(4), None])
def test_a_scheduler_that_declares_no_end_is_silent_and_not_called(name, pace, optimizer):
    scheduler = SILENT[name](optimizer)
    watch = watched(scheduler, pace=pace)
    assert watch.begin(0) is None
    assert [watch.stepped(step, step) for step in range(1, 20)] == [None] * 19
    assert watch.epoch_begins("train epoch 1", PER_EPOCH) is None


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning", "ignore:.*epoch parameter.*:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        warmed_up,
        lambda o, length: lr_scheduler.CosineAnnealingLR(o, length, eta_min=1e-3),
        lambda o, length: lr_scheduler.LinearLR(o, 1.0, 0.01, total_iters=length),
        lambda o, length: lr_scheduler.MultiStepLR(o, [40, length]),
        lambda o, length: lr_scheduler.PolynomialLR(o, length),
    ],
)
def test_the_end_is_where_training_gets_it(make, optimizer):
    """The real scheduler, stepped, has its highest and its lowest rate where its attributes say so."""
    scheduler = make(optimizer, 200)
    ending, rates = declared_ending(scheduler), []
    assert ending is not None
    for _ in range(202):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    assert ending.at == 200
    assert rates[ending.at] == pytest.approx(ending.rate) == pytest.approx(min(rates))
    assert rates[ending.warmup] == pytest.approx(max(rates))


@pytest.mark.parametrize(
    ("name", "more", "silent"),
    [
        ("linear", {}, False),
        ("cosine", {}, False),
        ("cosine", {"num_cycles": 1.25}, True),
        ("cosine_with_restarts", {}, False),
        ("polynomial", {}, False),
        ("warmup_stable_decay", {"num_decay_steps": 100}, False),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}, False),
        ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1}, False),
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


def test_groups_with_other_schedules_are_silent(optimizer):
    """Each group has a function of its own; only if all of them end alike, the scheduler has one end."""
    transformers = pytest.importorskip("transformers.optimization")
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.2})

    def function(length):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        return transformers.get_linear_schedule_with_warmup(optimizer, 0, length).lr_lambdas[0]

    for lengths, silent in (((500, 500), False), ((500, STEPS), True)):
        scheduler = lr_scheduler.LambdaLR(copy.deepcopy(optimizer), [function(length) for length in lengths])
        assert (said(scheduler, PER_STEP) is None) is silent


HEALTHY = {
    # what healthy runs of STEPS steps have, and how often it is stepped per step
    "MNIST's example": (lambda o: lr_scheduler.StepLR(o, step_size=1, gamma=0.7), Fraction(1, 143)),
    "a mild exponential": (lambda o: lr_scheduler.ExponentialLR(o, 0.65), Fraction(1, 250)),
    "two cycles": (lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS // 4), PER_STEP),
    "one whole cosine": (lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS // 2), PER_STEP),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_silent(name, optimizer):
    """What falls for ever, or cycles, is not warned of."""
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


@pytest.mark.parametrize("calls", [0.25, 1.5, "one", None], ids=repr)
def test_a_count_that_is_none_ends_the_check(calls, optimizer):
    scheduler = linear(optimizer, 500)
    watch = watched(scheduler)
    assert watch.epoch_begins("train epoch 0", 0) is None
    scheduler.last_epoch = calls
    assert watch.plans(0) == []
    for step in range(1, 20):
        assert watch.stepped(step, step) is None
    assert watch.epoch_begins("train epoch 1", 20) is None


@pytest.mark.parametrize("value", [0, -5, "60", None, float("nan")])
def test_an_attribute_that_is_no_length_is_silent(value, optimizer):
    """A user may set it to anything."""
    scheduler = linear(optimizer, 500)
    scheduler.total_iters = value
    assert declared_ending(scheduler) is None


@pytest.mark.parametrize(
    ("calls", "length"),
    [([0] * 20 + [1] * 30, 1980), ([0, 0, 0, 0, 1] * 10, 400), ([0] * 49 + [1], 40)],
    ids=["after a warm-up by hand", "every fifth step", "in the last step"],
)
def test_a_scheduler_that_begins_late_is_not_taken_for_another_pace(calls, length, optimizer):
    scheduler = linear(optimizer, length)
    watch = watched(scheduler)
    assert watch.epoch_begins("train epoch 0", 0) is None
    assert stepped(watch, scheduler, calls) is None
    assert watch.epoch_begins("train epoch 1", PER_EPOCH) is None


def test_a_scheduler_that_is_loaded_after_the_begin_is_silent(optimizer):
    """A loop that resumes without telling it restores its scheduler where it likes."""
    scheduler = linear(optimizer, STEPS)
    watch = watched(scheduler)
    assert watch.begin(0) is None
    assert watch.epoch_begins("train epoch 20", 0) is None
    scheduler.last_epoch = 1000
    assert stepped(watch, scheduler, [1] * 20) is None


def test_a_length_that_a_checkpoint_restores_is_that_of_the_check(optimizer):
    scheduler = linear(optimizer, STEPS)
    watch = watched(scheduler, pace=PER_STEP)
    scheduler.load_state_dict({**scheduler.state_dict(), "total_iters": 500})
    found = watch.begin(0)
    assert found is not None
    assert "at step 500 of 2,000" in found.sentence


def watched(scheduler, run=RUN, **options):
    return ScheduleWatch([Schedule.of(scheduler, **options)], lambda _: run)


def stepped(watch, scheduler, calls_of_steps):
    """Plays optimizer steps, each followed by some steps of the scheduler; returns the first warning and its step."""
    for step, calls in enumerate(calls_of_steps, 1):
        scheduler.optimizer.step()
        found = watch.stepped(step, step)
        if found is not None:
            return step, found.sentence
        for _ in range(calls):
            scheduler.step()
    return None


@pytest.mark.parametrize(
    ("calls", "length", "reasons", "expected"),
    [
        ([1] * 20, STEPS, {}, None),
        ([1] * 20, STEPS // 4, {}, "at step 500 of 2,000: PolynomialLR was made for 500 steps."),
        ([4] * 20, STEPS, {4: "once per process"}, "at step 500 of 2,000: PolynomialLR was made for 2,000 steps, and "),
        ([4] * 20, 4 * STEPS, {4: "once per process"}, None),
        ([1, 1, 2, 1, 1, 1, 1, 1, 1], STEPS // 4, {}, None),
        ([0] * 20, STEPS // 4, {}, None),
    ],
    ids=["right", "short", "per process", "right per process", "irregular", "not within the epoch"],
)
def test_how_often_a_scheduler_is_stepped_is_observed(calls, length, reasons, expected, optimizer):
    """Eight steps show it; a loop that skips optimizer steps, as a GradScaler does, is not taken for another pace."""
    scheduler = linear(optimizer, length)
    found = stepped(watched(scheduler, reasons=reasons), scheduler, calls)
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
    scheduler = linear(optimizer, length)
    watch = watched(scheduler)
    assert watch.epoch_begins("train epoch 0", 0) is None
    assert stepped(watch, scheduler, [0] * PER_EPOCH) is None
    scheduler.step()
    found = watch.epoch_begins("train epoch 1", PER_EPOCH)
    assert found is None if expected is None else expected in str(found and found.sentence)
    assert watch.epoch_begins("train epoch 2", 2 * PER_EPOCH) is None


def test_epochs_that_are_shorter_than_what_is_observed_are_no_end_of_it(optimizer):
    """The first steps are observed across epochs of five steps."""
    scheduler = linear(optimizer, 15)
    watch = watched(scheduler, RunLength(60, steps_per_epoch=5, epochs=12))
    found = []
    for step in range(1, 12):
        if step % 5 == 1:
            assert watch.epoch_begins(f"train epoch {step // 5}", step - 1) is None
        optimizer.step()
        found += [(step, verdict.sentence) for verdict in [watch.stepped(step, 1 + (step - 1) % 5)] if verdict]
        scheduler.step()
    assert found == [(6, "the learning rate reaches 0 at step 15 of 60: PolynomialLR was made for 15 steps.")]


def test_one_schedule_is_warned_of(optimizer):
    """Of several wrong schedules, the first is named, once."""
    schedulers = [linear(optimizer, length) for length in (500, 400)]
    watch = ScheduleWatch([Schedule.of(each, PER_STEP) for each in schedulers], lambda _: RUN)
    found = watch.begin(0)
    assert found is not None
    assert "at step 500 of 2,000" in found.sentence
    assert watch.end_step == 500
    assert watch.begin(0) is watch.stepped(1, 1) is watch.epoch_begins("train epoch 1", 50) is None


@pytest.mark.parametrize("pace", [PER_STEP, None])
def test_a_scheduler_that_its_program_has_dropped_is_compared_no_more(pace, optimizer):
    """It is held weakly."""
    scheduler = linear(optimizer, 500)
    gone, watch = weakref.ref(scheduler), watched(scheduler, pace=pace)
    del scheduler
    gc.collect()
    assert gone() is None
    assert watch.plans(0) == []
    assert watch.begin(0) is watch.stepped(1, 1) is watch.epoch_begins("train epoch 1", 50) is None
    assert watch.end_step is None


def test_a_resumed_schedule_ends_where_it_began_to(optimizer):
    """A scheduler that goes on in the middle of a run is compared from there on."""
    scheduler = linear(optimizer, STEPS)
    for _ in range(1000):
        optimizer.step()
        scheduler.step()
    watch = watched(scheduler, pace=PER_STEP)
    assert watch.begin(1000) is None
    assert watch.end_step == STEPS


@pytest.mark.parametrize(
    ("length", "expected"), [(STEPS // 4, None), (STEPS, "would reach its end at step 2,000, and the run ends at 480")]
)
def test_batches_per_step_are_observed(length, expected, optimizer):
    """A loop that accumulates without telling it is compared by what it does, with a short step at an epoch's end."""
    scheduler = linear(optimizer, length)

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
    assert found is None if expected is None else expected in str(found and found.sentence)


@pytest.mark.parametrize(("length", "silent"), [(STEPS, True), (STEPS + 600, True), (STEPS // 2, False)])
def test_a_scheduler_that_was_stepped_before_may_belong_to_either_run(length, silent, optimizer):
    """Where nothing says how many steps came before, the schedule of the whole run fits, and that of a longer one."""
    scheduler = linear(optimizer, length)
    for _ in range(600):
        optimizer.step()
        scheduler.step()
    assert (watched(scheduler, pace=PER_STEP).begin(0) is None) is silent

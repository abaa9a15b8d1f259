"""How long live schedulers were made for, of torch and of transformers."""

import pytest
import torch
from torch.optim import lr_scheduler

from countoff._adapter.scheduler_horizons import horizon_of


@pytest.fixture
def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


def by_closure(optimizer):
    """As diffusers makes them."""
    num_warmup_steps, num_training_steps = 4, 30

    def lr_lambda(step):
        return min(step / num_warmup_steps, 1.0) * (1 - step / num_training_steps)

    return lr_scheduler.LambdaLR(optimizer, lr_lambda)


def warmed_up(optimizer):
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5), lr_scheduler.CosineAnnealingLR(optimizer, 25)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[5])


READ = {
    "one cycle": (lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=30), 30, 0),
    "cosine": (lambda o: lr_scheduler.CosineAnnealingLR(o, 30), 30, 0),
    "polynomial": (lambda o: lr_scheduler.PolynomialLR(o, 30), 30, 0),
    "falling": (lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, total_iters=30), 30, 0),
    "warmed up": (warmed_up, 30, 5),
    "closure": (by_closure, 30, 4),
    "chained": (
        lambda o: lr_scheduler.ChainedScheduler(
            [lr_scheduler.LinearLR(o, 0.1, total_iters=5), lr_scheduler.PolynomialLR(o, 30)]
        ),
        30,
        5,
    ),
}


@pytest.mark.parametrize("name", READ)
def test_the_length_of_a_schedule_is_read(optimizer, name):
    """The ticks and the warm-up of each of torch's schedules are read."""
    make, ticks, warmup_ticks = READ[name]
    horizon = horizon_of(make(optimizer), ticks_per_step=2)
    assert horizon is not None
    assert (horizon.ticks, horizon.warmup_ticks, horizon.ticks_per_step) == (ticks, warmup_ticks, 2)


@pytest.mark.parametrize(
    ("name", "arguments", "ticks"),
    [
        ("linear", {"num_training_steps": 30}, 30),
        ("cosine", {"num_training_steps": 30}, 30),
        ("polynomial", {"num_training_steps": 30}, 30),
        (
            "warmup_stable_decay",
            {"num_training_steps": 30, "scheduler_specific_kwargs": {"num_decay_steps": 6}},
            30,
        ),
    ],
)
def test_the_length_of_transformers_schedules_is_read(optimizer, name, arguments, ticks):
    """The ticks and the warm-up of each of transformers' schedules are read."""
    optimization = pytest.importorskip("transformers.optimization")
    horizon = horizon_of(optimization.get_scheduler(name, optimizer, num_warmup_steps=4, **arguments))
    assert horizon is not None
    assert (horizon.ticks, horizon.warmup_ticks) == (ticks, 4)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.StepLR(o, 10),
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0),
        lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=5),
        lambda o: lr_scheduler.ReduceLROnPlateau(o),
    ],
    ids=["steps", "any function", "warm-up alone", "plateau"],
)
def test_a_schedule_without_an_end_has_none(optimizer, make):
    """A schedule without an end has no horizon."""
    assert horizon_of(make(optimizer)) is None

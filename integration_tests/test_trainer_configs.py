"""What countoff reads out of a Trainer's arguments, against the real transformers: names, defaults, schedules."""

import dataclasses
import itertools
import math
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from transformers.optimization import get_scheduler

from countoff._adapter.declared_schedules import declared_ending
from countoff.plan.readers import transformers as reader

RATE = 1e-3
RUN = 60
# The arguments of each schedule, in all combinations.
SCHEDULES: dict[str, dict[str, list[Any]]] = {
    "linear": {},
    "cosine": {"num_cycles": [None, 0.5, 1.25]},
    "cosine_with_restarts": {"num_cycles": [None, 3]},
    "polynomial": {"power": [None, 2.0], "lr_end": [None, 1e-4]},
    "constant": {},
    "constant_with_warmup": {},
    # transformers 4 does not pass the time scale on.
    "inverse_sqrt": {"timescale": [None, *([25] if int(transformers.__version__.partition(".")[0]) > 4 else [])]},
    "cosine_with_min_lr": {"min_lr": [1e-4, 0.0]},
    "cosine_warmup_with_min_lr": {"min_lr_rate": [0.2], "warmup_lr_rate": [None, 0.05]},
    "warmup_stable_decay": {
        "num_stable_steps": [None, 20],
        "num_decay_steps": [25],
        "warmup_type": [None, "cosine", "1-sqrt"],
        "decay_type": [None, "linear", "1-sqrt"],
        "min_lr_ratio": [None, 0.1],
    },
}
CASES = [
    (name, {key: value for key, value in zip(options, values, strict=True) if value is not None}, warmup)
    for name, options in SCHEDULES.items()
    for values in itertools.product(*options.values())
    for warmup in ({"warmup_steps": 0}, {"warmup_steps": 1}, {"warmup_steps": 13}, {"warmup_ratio": 0.11})
]


def real_scheduler(name: str, options: dict[str, Any], warmup: int) -> Any:
    """transformers' own scheduler."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    return get_scheduler(name, optimizer, warmup, RUN, scheduler_specific_kwargs=dict(options))


def factors_of(scheduler: Any) -> list[float]:
    """The factor of each step, as the scheduler sets it."""
    factors: list[float] = []
    for _ in range(RUN):
        factors.append(scheduler.optimizer.param_groups[0]["lr"] / RATE)
        scheduler.optimizer.step()
        scheduler.step()
    return factors


@pytest.mark.filterwarnings("ignore:Both num_training_steps and num_stable_steps are specified:UserWarning")
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_that_of_transformers(name: str) -> None:
    """A file, and the real scheduler that is made from it, declare one warm-up and one end, and the rates have them."""
    cases = [(options, warmup) for case, options, warmup in CASES if case == name]
    assert len(cases) >= 4
    known = 0
    for options, warmup in cases:
        data = {"lr_scheduler_type": name, "lr_scheduler_kwargs": options, "learning_rate": RATE, **warmup}
        schedule = reader.read({"max_steps": RUN, **data}).schedule
        assert schedule is not None
        steps = math.ceil(warmup["warmup_ratio"] * RUN) if "warmup_ratio" in warmup else int(warmup["warmup_steps"])
        ending, scheduler = schedule.in_run(RUN), real_scheduler(name, options, steps)
        assert name == "constant" or ending.warmup == steps
        live = declared_ending(scheduler)
        if live is not None and live.kind != "full":
            known += 1
            assert (live.at, live.warmup) == (ending.at, ending.warmup), (options, warmup)
        factors = factors_of(scheduler)
        if name != "cosine_warmup_with_min_lr":  # its warm-up is one step ahead
            assert factors[ending.warmup] == pytest.approx(max(factors)), (options, warmup)
        if ending.at < RUN:
            assert factors[ending.at] == pytest.approx(ending.rate, abs=1e-12), (options, warmup)
    assert bool(known) == (name not in ("constant", "constant_with_warmup", "inverse_sqrt"))


def test_every_scheduler_of_transformers_is_known() -> None:
    """Each value of lr_scheduler_type is one that the reader accepts."""
    for kind in transformers.SchedulerType:
        assert reader.read({"lr_scheduler_type": kind.value}).framework == "transformers"


def test_the_defaults_are_those_of_transformers() -> None:
    """What is not written in a file is what TrainingArguments has by default."""
    job = reader.read({})
    defaults = {field.name: field.default for field in dataclasses.fields(transformers.TrainingArguments)}
    assert job.batch_size == defaults["per_device_train_batch_size"]
    assert job.gradient_accumulation_steps == defaults["gradient_accumulation_steps"]
    assert job.epochs == defaults["num_train_epochs"]
    assert job.drop_last == defaults["dataloader_drop_last"]
    assert getattr(defaults["lr_scheduler_type"], "value", defaults["lr_scheduler_type"]) == "linear"
    assert not any(job.origins[name].given for name in ("batch_size", "gradient_accumulation_steps", "epochs"))

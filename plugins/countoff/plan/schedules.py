"""The learning-rate factors of the frameworks' schedules, step by step, so that a schedule can be checked beforehand.

The factor multiplies the configured learning rate. Steps count from 0: step 0 is the first one taken. Each formula is
that of its framework, including its oddities, because a configuration is checked for these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, Protocol

__all__ = [
    "LinguaSchedule",
    "MegatronSchedule",
    "NemoCosine",
    "Schedule",
    "TorchTitanSchedule",
    "TrainerSchedule",
    "WarmupDecay",
    "peak_factor",
]


class Schedule(Protocol):
    """A learning-rate schedule over optimizer steps."""

    @property
    def warmup_steps(self) -> int:
        """Steps until the full learning rate, as configured."""
        ...

    @property
    def horizon_steps(self) -> int:
        """Steps for which the schedule is planned; 0 if that is the run's length, which is not known yet."""
        ...

    def factor(self, step: int) -> float:
        """Returns the factor of a step, counted from 0; NaN if the framework fails there."""
        ...

    def planned_for(self, steps: int) -> Schedule:
        """Returns the schedule that the same configuration gives in a run of this many steps, at least 1."""
        ...


@dataclass(frozen=True)
class TorchTitanSchedule:
    """Warm-up, stable, decay, as TorchTitan's ``LRSchedulersContainer`` builds it.

    TorchTitan cuts a warm-up that is longer than the horizon, and a decay that does not fit after the warm-up, logs a
    warning and goes on. The stable part has one step more, so that the last step is not at the minimum.

    Attributes:
        warmup_steps: Steps of the warm-up, at least 0.
        horizon_steps: ``lr_scheduler.total_steps``, or ``training.steps`` where that is not set; at least 1.
        decay_ratio: The fraction of the horizon in which the rate decays, 0 to 1; None: all steps after the warm-up.
        decay_type: The curve of the decay.
        min_factor: The factor at which the decay ends.
        own_horizon: Whether ``lr_scheduler.total_steps`` is set, so that the horizon does not depend on the run.

    Example:
        >>> schedule = TorchTitanSchedule(warmup_steps=2, horizon_steps=10, decay_ratio=0.8)
        >>> schedule.factor(0), schedule.factor(1), schedule.factor(9)
        (0.5, 1.0, 0.125)
    """

    warmup_steps: int
    horizon_steps: int
    decay_ratio: float | None = None
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    min_factor: float = 0.0
    own_horizon: bool = False

    @property
    def phases(self) -> tuple[int, int, int]:
        """The steps of warm-up, stable and decay, after TorchTitan has cut them."""
        warmup = min(self.warmup_steps, self.horizon_steps)
        left = self.horizon_steps - warmup
        decay = left if self.decay_ratio is None else min(round(self.horizon_steps * self.decay_ratio), left)
        return warmup, left + 1 - decay, decay

    def factor(self, step: int) -> float:
        """Returns the factor of a step, counted from 0; below 0 after the end of a linear or square-root decay."""
        warmup, stable, decay = self.phases
        if step < warmup:
            return (step + 1) / warmup
        if step < warmup + stable:
            return 1.0
        if not decay:
            return math.nan  # TorchTitan stops on an assertion here
        progress = (step + 1 - warmup - stable) / decay
        curve = {
            "linear": 1 - progress,
            "sqrt": 1 - math.sqrt(progress),
            "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        }[self.decay_type]
        return self.min_factor + (1 - self.min_factor) * curve

    def planned_for(self, steps: int) -> TorchTitanSchedule:
        """Returns the schedule that the same configuration gives in a run of this many steps, at least 1."""
        return self if self.own_horizon else replace(self, horizon_steps=steps)


@dataclass(frozen=True)
class LinguaSchedule:
    """The schedules of lingua's ``optim`` section.

    Attributes:
        scheduler: The curve.
        warmup_steps: ``optim.warmup``, at least 0.
        horizon_steps: ``steps``, at least 1: lingua has no other horizon.
        min_factor: ``optim.lr_min_ratio``.
        cycle_length: The fraction of the run that one cycle takes.
        cosine_theta: The exponent of the progress inside the cosine.
        decay_fraction: The fraction of a cycle in which ``wsd`` decays.
        exp_factor: The exponent of ``inv_sqrt``.

    Example:
        >>> schedule = LinguaSchedule("cosine", warmup_steps=2000, horizon_steps=1000)
        >>> schedule.factor(0), schedule.factor(999)
        (0.0, 0.4995)
    """

    scheduler: Literal["constant", "linear", "inv_sqrt", "cosine", "wsd"]
    warmup_steps: int
    horizon_steps: int
    min_factor: float = 0.1
    cycle_length: float = 1.0
    cosine_theta: float = 1.0
    decay_fraction: float = 0.1
    exp_factor: float = 0.5

    def factor(self, step: int) -> float:
        """Returns the factor of a step, counted from 0; with a cosine it is 1.0 again at step == horizon_steps."""
        if self.scheduler == "constant":
            return 1.0
        if step < self.warmup_steps:
            return step / self.warmup_steps
        if self.scheduler == "inv_sqrt":
            return max((self.warmup_steps / step) ** self.exp_factor, self.min_factor) if step else math.nan
        if self.scheduler == "wsd":
            return self._stable_then_decay(step)
        if step > self.horizon_steps:
            return self.min_factor
        if self.horizon_steps == self.warmup_steps:
            return math.nan  # lingua divides by zero here
        progress = (step - self.warmup_steps) / (self.horizon_steps - self.warmup_steps)
        if self.scheduler == "linear":
            return progress * self.min_factor + (1 - progress)
        sign = 1 - 2 * ((step // (self.horizon_steps * self.cycle_length)) % 2)
        wave = sign * math.cos(math.pi * progress**self.cosine_theta / self.cycle_length)
        return self.min_factor + 0.5 * (1 - self.min_factor) * (wave + 1)

    def planned_for(self, steps: int) -> LinguaSchedule:
        """Returns the schedule that the same configuration gives in a run of this many steps, at least 1."""
        return replace(self, horizon_steps=steps)

    def _stable_then_decay(self, step: int) -> float:
        cycle = max(int(self.horizon_steps * self.cycle_length), 1)
        end = cycle * (step // cycle + 1) if step != self.horizon_steps else self.horizon_steps
        decay = int(end * self.decay_fraction)
        if step <= end - decay:
            return 1.0
        progress = (step - (end - decay)) / decay
        return 1 / (progress / self.min_factor + (1 - progress)) if self.min_factor else math.nan


@dataclass(frozen=True)
class WarmupDecay:
    """Linear warm-up, then a decay to a minimum that holds from the horizon on, as in Composer and DeepSpeed.

    Attributes:
        curve: The curve of the decay.
        warmup_steps: Steps of the warm-up, at least 0.
        horizon_steps: Steps at which the decay ends; 0 if that is the run's length, which is not known yet.
        min_factor: The factor at its end.
        warmup_part: The warm-up as a fraction of the run; None if it is configured in steps.
        horizon_part: The horizon as a fraction of the run; None if it is configured in steps.
        warmup_rounding: How the steps of warmup_part are made whole: to the ``nearest``, or ``down`` as in verl.

    Example:
        >>> WarmupDecay("linear", warmup_steps=10, horizon_steps=110).factor(60)
        0.5
    """

    curve: Literal["linear", "cosine", "constant"]
    warmup_steps: int
    horizon_steps: int
    min_factor: float = 0.0
    warmup_part: float | None = None
    horizon_part: float | None = None
    warmup_rounding: Literal["nearest", "down"] = "nearest"

    def planned_for(self, steps: int) -> WarmupDecay:
        """Returns the schedule that the same configuration gives in a run of this many steps, at least 1."""
        warmup = self.warmup_steps
        if self.warmup_part is not None:
            warmup = self.warmup_part * steps
            warmup = int(warmup) if self.warmup_rounding == "down" else round(warmup)
        horizon = self.horizon_steps if self.horizon_part is None else max(round(self.horizon_part * steps), 1)
        return replace(self, warmup_steps=warmup, horizon_steps=horizon)

    def factor(self, step: int) -> float:
        """Returns the factor of a step, counted from 0."""
        if step < self.warmup_steps:
            return step / self.warmup_steps
        if self.curve == "constant":
            return 1.0
        left = self.horizon_steps - self.warmup_steps
        progress = min((step - self.warmup_steps) / left, 1.0) if left > 0 else 1.0
        shape = 1 - progress if self.curve == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.min_factor + (1 - self.min_factor) * shape


@dataclass(frozen=True)
class TrainerSchedule:
    """The schedules of transformers, by ``lr_scheduler_type``, and those that axolotl adds to them.

    Sources: transformers 4.57.6 and 5.23.0, ``optimization.py`` (``get_scheduler`` and the ``_lr_lambda`` functions)
    and ``TrainingArguments.get_warmup_steps``; axolotl 067b021c, ``utils/schedulers.py`` and
    ``core/builders/base.py`` (``_configure_warmup_and_logging``). The Trainer plans a schedule for the steps of the
    run, so only ``warmup_stable_decay`` can end elsewhere.

    Attributes:
        curve: The curve after the warm-up.
        warmup_steps: Steps of the warm-up, at least 0.
        run_steps: Steps of the run; 0 if they are not known yet.
        min_factor: The factor at the end of the decay.
        warmup_part: The warm-up as a fraction of the run; None if it is configured in steps.
        warmup_rounding: Whether the fraction is rounded up, as in transformers, or down, as in axolotl, which also
            makes two steps of one.
        warmup_cap: The largest number of steps that a fraction gives; None if there is none.
        warmup_curve: The curve of the warm-up; ``square`` is axolotl's ``lr_quadratic_warmup``.
        start_factor: The factor of the first step, with ``cosine_warmup_with_min_lr``; None: one step of the warm-up.
        cycles: Waves of the cosine; restarts of ``cosine_with_restarts``.
        power: The power of ``polynomial``.
        timescale: The time scale of ``inverse_sqrt``; None: the warm-up, or 10,000 without one.
        stable_steps: Steps at the full rate of ``warmup_stable_decay``; None if they follow from the others.
        decay_steps: Steps of its decay; None if they follow from the others.
        decay_curve: The curve of its decay.
        thirds: Whether steps that are not configured there are a third for the stable part and the rest for the decay,
            as in LLaMA-Factory; if not, the stable part takes what the others leave.
        decay_part: The fraction of the run after which a cosine stays at its minimum.

    Example:
        >>> schedule = TrainerSchedule("cosine", warmup_steps=0, warmup_part=0.1).planned_for(100)
        >>> schedule.warmup_steps, schedule.factor(5), schedule.factor(10), schedule.factor(100)
        (10, 0.5, 1.0, 0.0)
    """

    curve: Literal[
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "warmup_stable_decay",
        "rex",
    ]
    warmup_steps: int
    run_steps: int = 0
    min_factor: float = 0.0
    warmup_part: float | None = None
    warmup_rounding: Literal["up", "down"] = "up"
    warmup_cap: int | None = None
    warmup_curve: Literal["linear", "cosine", "1-sqrt", "square"] = "linear"
    start_factor: float | None = None
    cycles: float = 0.5
    power: float = 1.0
    timescale: int | None = None
    stable_steps: int | None = None
    decay_steps: int | None = None
    decay_curve: Literal["linear", "cosine", "1-sqrt"] = "cosine"
    thirds: bool = False
    decay_part: float = 1.0

    @property
    def horizon_steps(self) -> int:
        """Steps for which the schedule is planned; 0 if that is the run's length, which is not known yet."""
        if self.curve != "warmup_stable_decay" or not self.run_steps:
            return self.run_steps
        return self.warmup_steps + sum(self.phases)

    @property
    def phases(self) -> tuple[int, int]:
        """The steps of the stable part and of the decay of ``warmup_stable_decay``; below 0 where none is left."""
        left = self.run_steps - self.warmup_steps
        third = left // 3
        decay = (left - third if self.thirds else 0) if self.decay_steps is None else self.decay_steps
        stable = (third if self.thirds else left - decay) if self.stable_steps is None else self.stable_steps
        return stable, decay

    def planned_for(self, steps: int) -> TrainerSchedule:
        """Returns the schedule that the same configuration gives in a run of this many steps, at least 1."""
        return replace(self, run_steps=steps, warmup_steps=self._warmup_in(steps))

    def factor(self, step: int) -> float:
        """Returns the factor of a step, counted from 0."""
        if self.curve == "constant":
            return 1.0
        if self.curve == "rex":
            step += 1  # axolotl's RexLR counts from 1
            if step <= self.warmup_steps:
                return step / self.warmup_steps
        elif step < self.warmup_steps:
            return self._warmup(step)
        return self._after_warmup(step)

    def _warmup_in(self, steps: int) -> int:
        if self.warmup_part is None:
            return self.warmup_steps
        if self.warmup_rounding == "up":
            return math.ceil(self.warmup_part * steps)
        warmup = int(self.warmup_part * steps)
        warmup = warmup if self.warmup_cap is None else min(warmup, self.warmup_cap)
        return 2 if warmup == 1 else warmup

    def _warmup(self, step: int) -> float:
        progress = step / self.warmup_steps
        if self.curve == "cosine_warmup_with_min_lr":
            if self.start_factor is None:
                return (step + 1) / self.warmup_steps
            return self.start_factor + (1 - self.start_factor) * step / max(1, self.warmup_steps - 1)
        shape = {
            "linear": progress,
            "cosine": 0.5 * (1 - math.cos(math.pi * progress)),
            "1-sqrt": 1 - math.sqrt(1 - progress),
            "square": progress**2,
        }[self.warmup_curve]
        return self._above_minimum(shape) if self.curve == "warmup_stable_decay" else shape

    def _after_warmup(self, step: int) -> float:
        done, left = step - self.warmup_steps, max(1, self.run_steps - self.warmup_steps)
        if self.curve == "constant_with_warmup":
            return 1.0
        if self.curve == "inverse_sqrt":
            timescale = self.timescale or self.warmup_steps or 10_000
            return 1 / math.sqrt((done + timescale) / timescale) if done + timescale > 0 else math.nan
        if self.curve == "warmup_stable_decay":
            return self._stable_then_decay(done)
        if self.curve == "rex":
            rest = max(0.0, (left - done) / left)
            return self._above_minimum(rest / (0.1 + 0.9 * rest))
        if self.curve == "linear":
            return max(0.0, 1 - done / left)
        if self.curve == "polynomial":
            return self._above_minimum(max(0.0, 1 - done / left) ** self.power)
        if self.curve == "cosine_with_restarts":
            wave = math.cos(math.pi * (self.cycles * done / left % 1.0))
            return 0.5 * (1 + wave) if done < left else 0.0
        if self.decay_part < 1:
            left = max(1, int(self.run_steps * self.decay_part) - self.warmup_steps)
            done = min(done, left)
        elif self.curve == "cosine_warmup_with_min_lr":
            done += 1
        return max(0.0, self._above_minimum(0.5 * (1 + math.cos(math.pi * 2 * self.cycles * done / left))))

    def _stable_then_decay(self, done: int) -> float:
        stable, decay = self.phases
        if done < stable:
            return 1.0
        if done >= stable + decay:
            return self.min_factor
        progress = (done - stable) / max(1, decay)
        shape = {
            "linear": 1 - progress,
            "cosine": 0.5 * (1 + math.cos(math.pi * 2 * self.cycles * progress)),
            "1-sqrt": 1 - math.sqrt(progress),
        }[self.decay_curve]
        return max(0.0, self._above_minimum(shape))

    def _above_minimum(self, shape: float) -> float:
        return self.min_factor + (1 - self.min_factor) * shape


@dataclass(frozen=True)
class MegatronSchedule:
    """The schedules of Megatron-LM, which count samples where the run is given in samples, else iterations.

    Source: Megatron-LM d98e8a64, ``OptimizerParamScheduler.get_lr`` in
    ``megatron/core/optimizer_param_scheduler.py``, and ``get_optimizer_param_scheduler`` in
    ``megatron/training/training.py``: the rate of a step is that of the samples before it; the decay is by default as
    long as the run, and a fraction is one of the decay.

    Attributes:
        style: The curve after the warm-up.
        warmup: Samples or iterations of the warm-up, at least 0.
        decay: Samples or iterations at which the decay ends, at least 1.
        min_factor: The factor at its end, which holds from there on.
        init_factor: The factor at which the warm-up begins.
        units_per_step: Samples of one step; 1 if iterations are counted.
        own_decay: Whether the decay is configured, so that it does not depend on the run.
        warmup_fraction: The warm-up as a fraction of the decay; None if it is configured as a number.
        wsd_decay: Samples or iterations of the last part of ``WSD``, in which it decays.
        wsd_style: The curve of that part.
        growth: The global batches before the full one, each with its number of steps.

    Example:
        >>> schedule = MegatronSchedule("cosine", warmup=100, decay=1100, min_factor=0.1, units_per_step=10)
        >>> schedule.factor(5), schedule.factor(10), schedule.factor(110), schedule.horizon_steps
        (0.5, 1.0, 0.1, 110)
    """

    style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
    warmup: float
    decay: int
    min_factor: float = 0.0
    init_factor: float = 0.0
    units_per_step: int = 1
    own_decay: bool = True
    warmup_fraction: float | None = None
    wsd_decay: int = 0
    wsd_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    growth: tuple[tuple[int, int], ...] = ()

    @property
    def warmup_steps(self) -> int:
        """Steps until the full learning rate, as configured."""
        return self.steps_until(self.warmup)

    @property
    def horizon_steps(self) -> int:
        """Steps after which the decay has ended."""
        return self.steps_until(self.decay)

    def steps_until(self, units: float) -> int:
        """Returns the steps after which so many samples, or iterations, are done."""
        steps = 0
        for batch, count in self.growth:
            if units <= batch * count:
                return steps + math.ceil(units / batch)
            steps += count
            units -= batch * count
        return steps + math.ceil(units / self.units_per_step)

    def _done(self, step: int) -> int:
        """Returns the samples, or iterations, before a step."""
        done = 0
        for batch, count in self.growth:
            if step <= count:
                return done + step * batch
            done += count * batch
            step -= count
        return done + step * self.units_per_step

    def factor(self, step: int) -> float:
        """Returns the factor of a step, counted from 0."""
        done = self._done(step)
        if self.warmup > 0 and done <= self.warmup:
            return self.init_factor + (1 - self.init_factor) * done / self.warmup
        if self.style == "constant":
            return 1.0
        if done > self.decay:
            return self.min_factor
        if self.style == "inverse-square-root":
            return max(self.min_factor, math.sqrt(max(self.warmup, 1) / max(done, 1)))
        if self.warmup >= self.decay:
            return math.nan  # Megatron-LM stops on an assertion here
        return self.min_factor + (1 - self.min_factor) * self._shape(done)

    def planned_for(self, steps: int) -> MegatronSchedule:
        """Returns the schedule that the same configuration gives in a run of this many steps, at least 1."""
        if self.own_decay or steps in (self.horizon_steps, self.horizon_steps - 1):
            return self  # the last batch of a run in samples is left out if it is not full
        decay = steps * self.units_per_step
        warmup = self.warmup if self.warmup_fraction is None else self.warmup_fraction * decay
        return replace(self, decay=decay, warmup=warmup)

    def _shape(self, done: int) -> float:
        if self.style != "WSD":
            progress = (done - self.warmup) / (self.decay - self.warmup)
            return 1 - progress if self.style == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        start = self.decay - self.wsd_decay
        if done <= start:
            return 1.0
        progress = (done - start) / self.wsd_decay
        return {
            "linear": 1 - progress,
            "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
            "exponential": 2 * 0.5**progress - 1,
            "minus_sqrt": 1 - math.sqrt(progress),
        }[self.wsd_style]


@dataclass(frozen=True)
class NemoCosine:
    """NeMo's ``CosineAnnealing``: a warm-up, a cosine, and, if asked for, a constant end at the minimum.

    Source: NeMo v1.23.0, ``CosineAnnealing`` and ``WarmupAnnealHoldPolicy`` in ``nemo/core/optim/lr_scheduler.py``. The
    warm-up begins above 0, except with ``constant_steps``.

    Attributes:
        warmup_steps: Steps of the warm-up, at least 0.
        horizon_steps: ``max_steps``, of the schedule or of the trainer; the minimum holds after it. 0 if that is the
            run's length, which is not known yet.
        constant_steps: Steps at the minimum before ``horizon_steps``, at least 0.
        min_factor: The factor of the minimum.
        own_horizon: Whether the schedule has its own ``max_steps``.
        warmup_part: The warm-up as a fraction of the horizon; None if it is configured in steps.

    Example:
        >>> schedule = NemoCosine(warmup_steps=9, horizon_steps=109, min_factor=0.1)
        >>> schedule.factor(0), schedule.factor(9), schedule.factor(59), schedule.factor(109)
        (0.1, 1.0, 0.55, 0.1)
    """

    warmup_steps: int
    horizon_steps: int
    constant_steps: int = 0
    min_factor: float = 0.0
    own_horizon: bool = False
    warmup_part: float | None = None

    def factor(self, step: int) -> float:
        """Returns the factor of a step, counted from 0."""
        warmup = self.warmup_steps
        if warmup and step <= warmup:
            return step / warmup if self.constant_steps else (step + 1) / (warmup + 1)
        left = self.horizon_steps - warmup - self.constant_steps
        if step > self.horizon_steps or step > warmup + left:
            return self.min_factor
        if left <= 0:
            return math.nan  # NeMo divides by zero here
        return self.min_factor + (1 - self.min_factor) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / left))

    def planned_for(self, steps: int) -> NemoCosine:
        """Returns the schedule that the same configuration gives in a run of this many steps, at least 1."""
        if self.own_horizon or steps == self.horizon_steps:
            return self
        warmup = self.warmup_steps if self.warmup_part is None else int(self.warmup_part * steps)
        return replace(self, warmup_steps=warmup, horizon_steps=steps)


def peak_factor(schedule: Schedule, *, steps: int) -> float:
    """Returns the largest factor that a run reaches; NaN if the framework fails at every step.

    Every schedule here rises until its warm-up ends and does not rise after it, except after its horizon.

    Args:
        schedule: The schedule.
        steps: Optimizer steps of the run, at least 1.

    Example:
        >>> peak_factor(LinguaSchedule("cosine", warmup_steps=2000, horizon_steps=1000), steps=1000)
        0.4995
    """
    warmup, horizon = schedule.warmup_steps, schedule.horizon_steps
    turning_points = (0, warmup - 1, warmup, warmup + 1, horizon - 1, horizon, 2 * horizon, steps - 1)
    factors = [schedule.factor(step) for step in turning_points if 0 <= step < steps]
    return max((factor for factor in factors if not math.isnan(factor)), default=math.nan)

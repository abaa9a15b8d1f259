"""A learning-rate schedule as a configuration declares it, in the unit in which it is written."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from countoff.core.arithmetic.schedules import Ending, decay

__all__ = ["ConfiguredSchedule"]


@dataclass(frozen=True)
class ConfiguredSchedule:
    """The warm-up and the end of a schedule, as far as they are configured.

    Attributes:
        warmup: Units of the warm-up, at least 0.
        warmup_part: The warm-up as a fraction of the run; None if it is configured as a number.
        rounds_up: Whether the steps of that fraction are rounded up; if not, to the nearest.
        horizon: Units after which the schedule ends, at least 1; None if that is where the run does.
        horizon_part: The horizon as a fraction of the run; None if it is no such fraction.
        lowest: The factor at which it ends; 1 if it does not fall.
        beyond: What the rate does there: it is ``held``, it ``falls`` on below 0, it ``rises`` again, or the framework
            has ``none`` and stops.
        falls_below_zero: Steps after the horizon at which it is negative, where it falls on, at least 1.
        cuts_warmup: Whether a warm-up that is longer than the horizon ends there.
        may_be_held: Whether a run may be meant to go on at the lowest rate.
        divides_by_zero: Whether the framework stops where the warm-up is as long as the run.
        linear_warmup: Whether the rate rises in a straight line from 0.
        per_step: Units of one step: samples, or 1.
        growth: Batches before the full one, each with its number of steps, where units are samples.
        stable: Steps at the full rate of a schedule that has them; None if they follow from the others.
        falling: Steps of its decay; None if they follow from the others.
        phases: How those follow: as ``rest`` of the run, or in ``thirds`` of it; None if it has no such phases.

    Example:
        >>> ending = ConfiguredSchedule(warmup=10).in_run(100)
        >>> ending.at, ending.warmup
        (100, 10)
    """

    warmup: float = 0
    warmup_part: float | None = None
    rounds_up: bool = False
    horizon: int | None = None
    horizon_part: float | None = None
    lowest: float = 0.0
    beyond: Literal["held", "falls", "rises", "none"] = "held"
    falls_below_zero: int = 1
    cuts_warmup: bool = False
    may_be_held: bool = False
    divides_by_zero: bool = False
    linear_warmup: bool = True
    per_step: int = 1
    growth: tuple[tuple[int, int], ...] = ()
    stable: int | None = None
    falling: int | None = None
    phases: Literal["rest", "thirds"] | None = None

    @property
    def own_horizon(self) -> bool:
        """Whether the schedule ends where it says, and not where the run does."""
        written = self.horizon is not None or self.horizon_part is not None or self.phases is not None
        return written and self._falls

    @property
    def _falls(self) -> bool:
        return 0 <= self.lowest < 1

    def in_run(self, steps: int) -> Ending:
        """Returns where the schedule ends and its warm-up does, in steps of a run of so many, at least 1."""
        warmup = self._warmup_in(steps)
        if not self._falls:
            return decay(steps, warmup=warmup)
        if self.phases is not None:
            stable, falling = self.phases_in(steps)
            return decay(max(1, warmup + stable + falling), warmup=warmup, lowest=self.lowest)
        return decay(self._horizon_in(steps), warmup=warmup, lowest=self.lowest)

    def phases_in(self, steps: int) -> tuple[int, int]:
        """Returns the steps at the full rate and those of the decay; below 0 where none is left."""
        left, thirds = steps - self._warmup_in(steps), self.phases == "thirds"
        falling = (left - left // 3 if thirds else 0) if self.falling is None else self.falling
        stable = (left // 3 if thirds else left - falling) if self.stable is None else self.stable
        return stable, falling

    def _warmup_in(self, steps: int) -> int:
        if self.warmup_part is None:
            return self._steps_until(self.warmup)
        warmup = self.warmup_part * steps
        return math.ceil(warmup) if self.rounds_up else round(warmup)

    def _horizon_in(self, steps: int) -> int:
        if self.horizon_part is not None:
            return max(round(self.horizon_part * steps), 1)
        return steps if self.horizon is None else self._steps_until(self.horizon)

    def _steps_until(self, units: float) -> int:
        """Returns the steps after which so many units are done."""
        steps = 0
        for batch, count in self.growth:
            if units <= batch * count:
                return steps + math.ceil(units / batch)
            steps += count
            units -= batch * count
        return steps + math.ceil(units / self.per_step)

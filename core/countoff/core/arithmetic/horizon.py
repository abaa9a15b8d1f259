"""Learning-rate horizons: the length for which a schedule was made, and the step of the run at which it ends.

A schedule counts *ticks*: calls of ``scheduler.step()``. Accelerate ticks a prepared scheduler once per process at
every optimizer step, so on several processes a schedule made in steps ends before the run. Needs no torch.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from countoff.core.arithmetic.batches import check_count
from countoff.core.verdict import Verdict, count_of

__all__ = ["Horizon", "planned_epochs", "run_out", "wrong_horizon"]


@dataclass(frozen=True)
class Horizon:
    """The length of one schedule, and how often it ticks.

    Attributes:
        name: The scheduler's class, for the message.
        ticks: Ticks after which the schedule ends, at least 1.
        ticks_per_step: Ticks per optimizer step, at least 1.
        warmup_ticks: Ticks of its warm-up, at least 0.

    Raises:
        ValueError: If a number is not an integer in its domain.

    Example:
        >>> horizon = Horizon("LambdaLR", ticks=300, ticks_per_step=4, warmup_ticks=20)
        >>> horizon.end_step, horizon.warmup_end_step, horizon.rho(300)
        (75, 5, 4.0)
    """

    name: str
    ticks: int
    ticks_per_step: int = 1
    warmup_ticks: int = 0

    def __post_init__(self) -> None:
        check_count("ticks", self.ticks, minimum=1)
        check_count("ticks_per_step", self.ticks_per_step, minimum=1)
        check_count("warmup_ticks", self.warmup_ticks, minimum=0)

    @property
    def end_step(self) -> int:
        """The optimizer step after which the schedule has ended."""
        return -(-self.ticks // self.ticks_per_step)

    @property
    def warmup_end_step(self) -> int:
        """The optimizer step after which the warm-up has ended."""
        return -(-self.warmup_ticks // self.ticks_per_step)

    def rho(self, steps: int) -> float:
        """Returns ticks of the run over ticks of the schedule: 2 means that it ends half-way, 0.5 that half is unused.

        Args:
            steps: Optimizer steps of the run, at least 0.

        Raises:
            ValueError: If steps is not an integer of at least 0.
        """
        return check_count("steps", steps, minimum=0) * self.ticks_per_step / self.ticks


def planned_epochs(horizon: Horizon, *, steps_per_epoch: int) -> int | None:
    """Returns the epochs for which a schedule was made, if it was made in optimizer steps although it ticks faster.

    That is the case if its ticks are a whole number of epochs counted in steps, but not a whole number of epochs
    counted in ticks. If they are both, either can be meant, and the answer is None.

    Args:
        horizon: The schedule.
        steps_per_epoch: Optimizer steps of one epoch, at least 1.

    Raises:
        ValueError: If steps_per_epoch is not an integer of at least 1.

    Example:
        >>> planned_epochs(Horizon("OneCycleLR", ticks=300, ticks_per_step=2), steps_per_epoch=100)
        3
        >>> planned_epochs(Horizon("OneCycleLR", ticks=600, ticks_per_step=2), steps_per_epoch=100) is None
        True
    """
    epochs, rest = divmod(horizon.ticks, check_count("steps_per_epoch", steps_per_epoch, minimum=1))
    return None if rest or epochs % horizon.ticks_per_step == 0 else epochs


def wrong_horizon(horizon: Horizon, *, total_steps: int, slack_steps: int, why: str = "") -> Verdict | None:
    """Returns a `WrongHorizon` warning if a schedule does not end where the run ends.

    Args:
        horizon: The schedule.
        total_steps: Optimizer steps of the run, at least 1.
        slack_steps: Largest difference in steps that rounding explains, at least 0: a plan may round once per epoch.
        why: Why the schedule ticks this often.

    Raises:
        ValueError: If a number is not an integer in its domain.

    Example:
        >>> verdict = wrong_horizon(Horizon("OneCycleLR", ticks=30, ticks_per_step=2), total_steps=30, slack_steps=3)
        >>> verdict.sentence.partition(": ")[2]
        'it ends at step 15 of 30 (1/2 of the run).'
        >>> verdict.remedy
        'make OneCycleLR for 60 ticks: 30 steps of the run × 2 ticks per step.'
        >>> wrong_horizon(Horizon("OneCycleLR", ticks=60, ticks_per_step=2), total_steps=30, slack_steps=3) is None
        True
    """
    check_count("total_steps", total_steps, minimum=1)
    if abs(horizon.end_step - total_steps) <= check_count("slack_steps", slack_steps, minimum=0):
        return None
    end = horizon.end_step
    if end < total_steps:
        fraction = f"1/{total_steps // end}" if total_steps % end == 0 else f"{end / total_steps:.0%}"
        place = f"it ends at step {end} of {total_steps} ({fraction} of the run)"
    else:
        place = f"it would end at step {end}, and the run ends at step {total_steps}"
    return _warning(f"{_made_for(horizon)}: {place}{_warmup(horizon)}.", why, _remedy(horizon, total_steps))


def run_out(horizon: Horizon, *, ticks: int, span: str, why: str = "") -> Verdict | None:
    """Returns a `WrongHorizon` warning if a schedule has ended although another epoch begins.

    Args:
        horizon: The schedule.
        ticks: Ticks of the schedule until now, at least 0.
        span: The name of the epoch that begins.
        why: Why the schedule ticks this often.

    Raises:
        ValueError: If ticks is not an integer of at least 0.

    Example:
        >>> verdict = run_out(Horizon("OneCycleLR", ticks=30, ticks_per_step=2), ticks=30, span="train epoch 1")
        >>> verdict.sentence.partition(": ")[2]
        'it ended at step 15, and train epoch 1 begins with what is left of the learning rate.'
    """
    if check_count("ticks", ticks, minimum=0) < horizon.ticks:
        return None
    place = f"it ended at step {horizon.end_step}, and {span} begins with what is left of the learning rate"
    return _warning(f"{_made_for(horizon)}: {place}{_warmup(horizon)}.", why)


def _warning(sentence: str, why: str, remedy: str = "") -> Verdict:
    return Verdict("WrongHorizon", sentence, why=why, remedy=remedy, time=time.time())


def _remedy(horizon: Horizon, total_steps: int) -> str:
    """The number of ticks for which the schedule must be made, and those of its warm-up."""
    factor = horizon.ticks_per_step
    remedy = f"make {horizon.name} for {count_of(total_steps * factor, 'tick')}"
    if factor > 1:
        remedy += f": {count_of(total_steps, 'step')} of the run × {factor} ticks per step"
        if horizon.warmup_ticks:
            warmup = count_of(horizon.warmup_ticks * factor, "tick")
            remedy += f". A warm-up that is to last {count_of(horizon.warmup_ticks, 'step')} needs {warmup}"
    return f"{remedy}."


def _made_for(horizon: Horizon) -> str:
    pace = {1: "once", 2: "twice"}.get(horizon.ticks_per_step, f"{horizon.ticks_per_step} times")
    return f"{horizon.name} was made for {count_of(horizon.ticks, 'tick')} and ticks {pace} per optimizer step"


def _warmup(horizon: Horizon) -> str:
    if horizon.ticks_per_step == 1 or not horizon.warmup_ticks:
        return ""
    return f"; its warm-up of {count_of(horizon.warmup_ticks, 'tick')} ends at step {horizon.warmup_end_step}"

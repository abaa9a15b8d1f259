"""Does a learning-rate schedule end where the run does? `WrongHorizon`, with what it was probably made for.

A schedule counts *calls*, those of ``scheduler.step()``. There may be several per optimizer step, as where a framework
makes one per process, or one per epoch. Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from countoff.core.arithmetic.batches import check_count
from countoff.core.arithmetic.schedules import Ending
from countoff.core.messages import number_of
from countoff.core.verdict import Verdict, VerdictKind

__all__ = [
    "WRONG_HORIZON",
    "Horizon",
    "RunLength",
    "Stepping",
    "numbers_of",
    "run_out",
    "wrong_horizon",
]

WRONG_HORIZON = VerdictKind(
    "WrongHorizon",
    "a learning-rate schedule ends before or after the run; the report shows at which step",
    ends=False,
)
"""**Cause.** The schedule was made for one epoch, or for batches instead of optimizer steps; it is stepped once per
epoch, or once per process, as a prepared scheduler of Accelerate is; or a resume has not restored it.

**Fix.** Make the schedule for the number of steps that the message gives. If the run ends before its schedule on
purpose, ignore the warning.

[Learning rates](learning-rates.md) has the cases, and what is never reported.
"""
_EARLY, _LATE = Fraction(2, 100), Fraction(10, 100)
"""Parts of the run by which a schedule may end before it, and after it, without a word."""
_SMALL = 0.01
"""Part of the highest rate with which nobody goes on for long, after a smooth decay."""
_MADE_FOR = Fraction(2, 100)
"""Part by which a schedule's length may differ from the number for which it was made."""
_PERIODS = 4
"""Half waves after the first fall that make a rate one of cycles."""
_Certainty = Literal["any", "likely", "certain"]
_CERTAINTIES: tuple[_Certainty, ...] = ("any", "likely", "certain")
_ON_PURPOSE = "\nif the run ends before its schedule on purpose, ignore this."


@dataclass(frozen=True)
class RunLength:
    """How long a run is, as far as that is known.

    Attributes:
        steps: Optimizer steps of the whole run, at least 1; None if unknown.
        steps_per_epoch: Optimizer steps per epoch, at least 1; None if unknown.
        epochs: Epochs of the run, at least 1; None if unknown.
        gradient_accumulation_steps: Batches per optimizer step, at least 1.
        processes: Ranks that read data of their own, at least 1.
        limited: Whether a limit of steps or of batches ends the run or its epochs, as in a trial that is cut short.
        epoch_batches: Numbers of batches per epoch from which schedules are usually computed, at least 1: that of the
            loader before it was divided among processes, and that of its parts times the processes. Empty if unknown.

    Raises:
        ValueError: If a number is outside its domain.
    """

    steps: int | None = None
    steps_per_epoch: int | None = None
    epochs: int | None = None
    gradient_accumulation_steps: int = 1
    processes: int = 1
    limited: bool = False
    epoch_batches: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("steps", "steps_per_epoch", "epochs", "gradient_accumulation_steps", "processes"):
            if (value := getattr(self, name)) is not None:
                check_count(name, value, minimum=1)
        for batches in self.epoch_batches:
            check_count("epoch_batches", batches, minimum=1)

    @property
    def slack(self) -> int:
        """The largest difference in steps that rounding explains: a plan may round once per epoch."""
        return (self.epochs or 0) + 1


@dataclass(frozen=True)
class Stepping:
    """How a user lets a scheduler be stepped, as the beginning of a remedy; ``{}`` stands for its class.

    Attributes:
        per_step: Once per optimizer step; None where the user cannot change it.
        per_epoch: Once per epoch, likewise.
    """

    per_step: str | None = "step {} once per optimizer step"
    per_epoch: str | None = "step {} once per epoch"


@dataclass(frozen=True)
class Horizon:
    """Where a schedule ends, and how often it is stepped.

    Attributes:
        name: The scheduler's class, for the message.
        ending: Where it ends, in calls.
        pace: Calls per optimizer step, above 0; less than 1 where there is one per epoch, say.
        paced_by: Why it is stepped this often, in a few words for the message: ``once per process``.
        before: Optimizer steps and calls until now; a resumed run has some.

    Example:
        >>> ending = Ending("zero", at=300, rate=0.0, peak=0.1, warmup=20)
        >>> horizon = Horizon("LambdaLR", ending, pace=Fraction(4))
        >>> horizon.end_step, horizon.warmup_end_step
        (75, 5)
    """

    name: str
    ending: Ending
    pace: Fraction = Fraction(1)
    paced_by: str = ""
    before: tuple[int, int] = (0, 0)

    @property
    def end_step(self) -> int:
        """The optimizer step after which the schedule has ended."""
        return self._step_of(self.ending.reached)

    @property
    def warmup_end_step(self) -> int:
        """The optimizer step after which the warm-up has ended."""
        return self._step_of(self.ending.warmup)

    def _step_of(self, call: int) -> int:
        steps, calls = self.before
        return max(0, steps + math.ceil((call - calls) / self.pace))


def _usual_epochs(calls: int, run: RunLength, pace: Fraction) -> int | None:
    """The epochs for which a schedule of so many calls is right, as loops and examples compute it; None if for none.

    It is computed from a number of batches: one call for each of them, or one for each optimizer step, rounded in each
    epoch or once.
    """
    per_batch = run.gradient_accumulation_steps == pace != run.processes
    accumulation, found = 1 if per_batch else run.gradient_accumulation_steps, list[int]()
    for batches in run.epoch_batches:
        for per_epoch in {batches, batches // accumulation, math.ceil(batches / accumulation)} - {0}:
            found += [calls // per_epoch] if calls % per_epoch == 0 else []
        for most in (calls * accumulation // batches, ((calls + 1) * accumulation - 1) // batches):
            rounded = (most * batches // accumulation, math.ceil(most * batches / accumulation))
            found += [most] if most and calls in rounded else []
    return max(found, default=None)


def run_out(horizon: Horizon, run: RunLength, *, calls: int, span: str, why: str = "") -> Verdict | None:
    """Returns a `WrongHorizon` warning if the learning rate is 0 although another epoch begins.

    Args:
        horizon: The schedule.
        run: What is known of the run.
        calls: Calls of the schedule until now, at least 0.
        span: The name of the epoch that begins.
        why: Why the schedule is stepped this often, as a sentence.

    Example:
        >>> horizon = Horizon("LinearLR", Ending("zero", at=30, rate=0.0, peak=0.1), Fraction(2))
        >>> run_out(horizon, RunLength(), calls=30, span="train epoch 1").sentence.partition(": ")[0]
        'train epoch 1 begins with a learning rate of 0, which it has had since step 15'
        >>> run_out(horizon, RunLength(), calls=20, span="train epoch 1") is None
        True
    """
    ending = horizon.ending
    if ending.kind not in ("zero", "vanished") or ending.rises or calls < ending.reached:
        return None
    usual = _usual_epochs(ending.at, run, horizon.pace)
    if usual is not None and calls < usual * (run.steps_per_epoch or 0) * horizon.pace:
        return None  # each epoch has its own rounding: these are the last steps for which it was made
    value = "a learning rate of 0" if ending.kind == "zero" else "less than a millionth of the highest learning rate"
    place = f"{span} begins with {value}, which it has had since step {horizon.end_step:,}"
    times = f"{horizon.pace} times " if horizon.pace > 1 else ""
    remedy = f"make {horizon.name} for {times}the optimizer steps of the whole run."
    return WRONG_HORIZON.found(f"{place}: {_made_for(horizon, run)}.", why=why, remedy=remedy)


def wrong_horizon(
    horizon: Horizon, run: RunLength, *, why: str = "", stepping: Stepping = Stepping()
) -> Verdict | None:
    """Returns a `WrongHorizon` warning if a schedule does not end where the run ends.

    Nothing is said of what may be meant: a lowest rate above 0 that is reached early, cycles, or a run that a number of
    steps cuts short; unless the schedule's length is another number of the run, such as its epochs or its batches.

    Args:
        horizon: The schedule.
        run: How long the run is, with its number of steps.
        why: Why the schedule is stepped this often, as a sentence.
        stepping: How the framework's user has it stepped.

    Raises:
        ValueError: If the run's number of steps is not known.

    Example:
        >>> ending = Ending("zero", at=5000, rate=0.0, peak=0.1)
        >>> horizon = Horizon("LambdaLR", ending, Fraction(4), "once per process")
        >>> verdict = wrong_horizon(horizon, RunLength(5000))
        >>> verdict.sentence.partition(": ")[0]
        'the learning rate reaches 0 at step 1,250 of 5,000'
        >>> verdict.sentence.partition(": ")[2]
        'LambdaLR was made for 5,000 steps, and is stepped 4 times per optimizer step (once per process).'
        >>> verdict.remedy
        'make LambdaLR for 20,000 steps: 5,000 optimizer steps × 4.'
        >>> wrong_horizon(Horizon("LambdaLR", ending), RunLength(5000)) is None
        True
    """
    end, total, ending = horizon.end_step, check_count("steps", run.steps, minimum=1), horizon.ending
    early = ending.kind != "full" and end < total - max(run.slack, math.ceil(_EARLY * total))
    late = ending.kind != "vanished" and end > total + max(run.slack, math.ceil(_LATE * total))
    if not (early or late):
        return None
    if early:
        certain = _is_kept(ending) or _cycles(horizon, run)
        needed: _Certainty = "certain" if certain else "likely" if ending.rises else "any"
    else:
        needed = "likely" if run.limited else "any"
    causes = [
        cause
        for cause in _causes(horizon, run, total)
        if _CERTAINTIES.index(cause.certainty) >= _CERTAINTIES.index(needed)
    ]
    if needed != "any" and not causes:
        return None
    by_warmup = ending.kind == "full" or (late and not causes and horizon.warmup_end_step > total)
    place = _early(horizon, total) if early else _late(horizon, total, by_warmup)
    sentence = f"{place}: {_made_for(horizon, run, by_warmup)}."
    return WRONG_HORIZON.found(
        sentence,
        why=" ".join(part for part in (*(cause.text for cause in causes[:1]), why) if part),
        remedy=_remedy(horizon, run, total, stepping, by_warmup) + (_ON_PURPOSE if late and not causes else ""),
    )


def _is_kept(ending: Ending) -> bool:
    """Whether the run may go on with the lowest rate on purpose."""
    return ending.kind == "minimum" and (ending.stepwise or ending.rate > _SMALL * ending.peak)


def _cycles(horizon: Horizon, run: RunLength) -> bool:
    """Whether the rate falls and rises several times within the run."""
    ending = horizon.ending
    calls = _calls_of(run, horizon.pace, horizon.before)
    return ending.rises and calls > ending.at + _PERIODS * (ending.at - ending.warmup)


def _early(horizon: Horizon, total: int) -> str:
    ending, end = horizon.ending, horizon.end_step
    where = f"at step {end:,} of {total:,}"
    if ending.kind == "error":
        return f"{horizon.name} has no learning rate after step {end:,} of {total:,}, and raises an error there"
    if ending.kind == "vanished":
        return f"the learning rate falls below a millionth of its highest value {where}"
    value = "0" if ending.kind == "zero" else f"its lowest value, {number_of(ending.rate)},"
    return f"the learning rate reaches {value} {where}{' and then rises again' if ending.rises else ''}"


def _late(horizon: Horizon, total: int, by_warmup: bool) -> str:
    if by_warmup:
        end = horizon.warmup_end_step
        return f"the warm-up of the learning rate would end at step {end:,}, and the run ends at {total:,}"
    return f"the learning rate would reach its end at step {horizon.end_step:,}, and the run ends at {total:,}"


def _made_for(horizon: Horizon, run: RunLength, by_warmup: bool = False) -> str:
    ending, pace = horizon.ending, horizon.pace
    reason = f" ({horizon.paced_by})" if horizon.paced_by else ""
    stepped = f"is stepped {_pace(pace, run)}{reason}"
    if ending.kind == "vanished":  # a rate that falls for ever is made for no number of steps
        return f"{horizon.name} {stepped}"
    if by_warmup:
        text = f"that of {horizon.name} takes {_calls(ending.warmup, pace)}"
    else:
        text = f"{horizon.name} was made for {_calls(horizon.ending.at, pace)}"
    if pace != 1:
        text += f", and {stepped}"
    if pace > 1 and ending.warmup and not by_warmup:
        text += f"; its warm-up of {_steps(ending.warmup)} ends at step {horizon.warmup_end_step:,}"
    return text


def _pace(pace: Fraction, run: RunLength) -> str:
    if pace == 1:
        return "once per optimizer step"
    if pace < 1 and run.steps_per_epoch and (pace * run.steps_per_epoch).denominator == 1:
        times = int(pace * run.steps_per_epoch)
        return {1: "once", 2: "twice"}.get(times, f"{times:,} times") + " per epoch"
    if pace.numerator == 1:
        return f"once in {pace.denominator:,} optimizer steps"
    times = "twice" if pace.numerator == 2 else f"{pace.numerator:,} times"
    return (
        f"{times} per optimizer step" if pace.denominator == 1 else f"{times} in {pace.denominator:,} optimizer steps"
    )


def _remedy(horizon: Horizon, run: RunLength, total: int, stepping: Stepping, by_warmup: bool) -> str:
    """The number of calls for which the schedule must be made, and those of its warm-up."""
    name, pace, calls = horizon.name, horizon.pace, _calls_of(run, horizon.pace, horizon.before)
    made_for, warmup = horizon.ending.at, horizon.ending.warmup
    if horizon.ending.kind == "vanished" and (pace < 1 or stepping.per_epoch is None):
        return f"let the rate of {name} fall more slowly."
    if horizon.ending.kind == "vanished" and stepping.per_epoch is not None:
        return f"{stepping.per_epoch.format(name)}, if that is what it was made for.\nlet its rate fall more slowly."
    if _is_displaced(horizon, run, total):
        return (
            f"load the state of {name} from the checkpoint of the model, and step it for no step before that.\n"
            "make a new schedule for the steps that are left."
        )
    if by_warmup:
        return f"make the warm-up of {name} shorter than the {_steps(calls)} of the run."
    if pace < 1 and stepping.per_step is not None and _counts(made_for, total, run):
        return f"{stepping.per_step.format(name)}.\nmake it for {_calls(calls, pace)}."
    if pace >= 1 and stepping.per_epoch is not None and run.epochs and _counts(made_for, run.epochs, run):
        return f"{stepping.per_epoch.format(name)}.\nmake it for {_calls(calls, pace)}."
    if pace <= 1:
        return f"make {name} for {_calls(calls, pace)}."
    remedy = f"make {name} for {_steps(calls)}: {total:,} optimizer steps × {pace}."
    if warmup:
        remedy += (
            f" A warm-up that is to last {_steps(warmup)} of the optimizer needs {_steps(math.ceil(warmup * pace))}."
        )
    return remedy


@dataclass(frozen=True)
class _Cause:
    """What a schedule was probably made for.

    Attributes:
        text: A sentence.
        certainty: ``certain``: nobody makes a schedule for this on purpose; ``likely``: the number is no accident;
            ``any``: it says nothing of the schedule's length.
    """

    text: str
    certainty: _Certainty = "any"


def _causes(horizon: Horizon, run: RunLength, total: int) -> Iterator[_Cause]:
    """Yields the numbers of the run that are as large as the schedule."""
    made_for, pace = horizon.ending.at, horizon.pace
    if horizon.ending.kind == "vanished" or _cuts_warmup(horizon.ending):
        return
    calls = _calls_of(run, pace, horizon.before)
    if _is_displaced(horizon, run, total):
        steps, done = horizon.before
        yield _Cause(f"The schedule has made {_steps(done)} after {steps:,} optimizer steps of the run.")
    for number, what, certainty in numbers_of(run, total):
        for factor in (1,) if pace <= 1 else (1, pace):
            count = math.ceil(number * factor)
            if _near(made_for, count, run) and not _near(count, calls, run):
                times = "" if factor == 1 else f" × {pace}"
                # A plan and a schedule may round in other places.
                about = "" if made_for == count else f" {made_for:,} is about as many."
                yield _Cause(f"{number:,}{times} is the number of {what}.{about}", certainty)
    for number, what, wrong in ((run.epochs, "epochs", pace >= 1), (total, "optimizer steps", pace < 1)):
        if number and wrong and _counts(made_for, number, run) and max(number, calls) >= 10 * min(number, calls):
            yield _Cause(f"The run has {number:,} {what}: the schedule seems to count these.", "certain")


def _is_displaced(horizon: Horizon, run: RunLength, total: int) -> bool:
    """Whether the schedule is not where the run is, as after a resume that has not restored it, or did so twice."""
    steps, calls = horizon.before
    return steps > 0 and abs(calls - steps * horizon.pace) > max(run.slack, _EARLY * total) * max(1, horizon.pace)


def numbers_of(run: RunLength, steps: int) -> Iterator[tuple[int, str, _Certainty]]:
    """Yields the numbers for which a schedule is made by mistake in a run of so many optimizer steps."""
    accumulation, processes = run.gradient_accumulation_steps, run.processes
    yield steps, "optimizer steps of the run", "certain"
    if run.epochs:
        yield run.epochs, "epochs of the run", "certain"
    if accumulation > 1:
        what = f"batches of the run: optimizer steps × {accumulation}, the gradient accumulation"
        yield steps * accumulation, what, "likely"
    if processes > 1:
        what = f"optimizer steps that one process alone would need: those of the run × {processes}"
        yield steps * processes, what, "likely"
    if accumulation > 1 and processes > 1:
        what = f"batches that one process alone would need: optimizer steps × {accumulation} × {processes}"
        yield steps * accumulation * processes, what, "likely"
    if run.epochs and run.epochs > 1 and run.steps_per_epoch:
        yield run.steps_per_epoch, "optimizer steps of one epoch", "likely"
        if accumulation > 1:
            yield run.steps_per_epoch * accumulation, "batches of one epoch", "likely"


def _calls_of(run: RunLength, pace: Fraction, before: tuple[int, int]) -> int:
    """Calls of the whole run, or of one epoch where its length is not known."""
    steps, calls = before
    return max(1, calls + math.floor(((run.steps or run.steps_per_epoch or 1) - steps) * pace))


def _near(value: int, number: int, run: RunLength) -> bool:
    """Whether a schedule's length is a number of the run, but for rounding."""
    slack = min(run.slack, number // 10)
    return number > 0 and abs(value - number) <= max(slack, math.floor(_MADE_FOR * number))


def _cuts_warmup(ending: Ending) -> bool:
    """Whether the rate falls to 0 where the warm-up would be over, because the schedule was made for fewer steps."""
    return ending.kind == "zero" and ending.at <= ending.warmup


def _counts(made_for: int, number: int, run: RunLength) -> bool:
    """Whether a schedule seems to count what the run has a number of: its last change may be before the end."""
    return number / 2 <= made_for < number or _near(made_for, number, run)


def _calls(number: int, pace: Fraction) -> str:
    """Calls in words: a schedule that is stepped more slowly than the optimizer is not made for steps of it."""
    return _steps(number) if pace >= 1 else f"{number:,} {'call' if number == 1 else 'calls'} of its step()"


def _steps(number: int) -> str:
    return "1 step" if number == 1 else f"{number:,} steps"

"""Do ranks train the same parameters with the same learning rates? `LearningRateMismatch`.

Only ranks that are proven to hold the same parameters are compared; elsewhere rates may rightly differ. They compare
what their schedules will do at the roll call, and their rates at the first optimizer steps, at the sync points of a
train epoch, and at ticks. A difference names two ranks. Which of them is alone, the rates of all ranks at the same
point tell, in the table.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from countoff.core.checks.check import Check, FitStart, Others, RankState, TickPart
from countoff.core.checks.plan import each_on
from countoff.core.messages import count_of, names_of, number_of, ranks_by
from countoff.core.protocol.counters import SpanCounters, TickPlace
from countoff.core.protocol.fit_records import SchedulePlan
from countoff.core.protocol.rates import compared_rates, parse_rates, point_of, rates_differ
from countoff.core.protocol.records import Reason, Records, SyncKind, SyncPoint, record_text
from countoff.core.protocol.rule import Divergence
from countoff.core.verdict import Cause, Verdict, VerdictKind

__all__ = [
    "LEARNING_RATE_MISMATCH",
    "LearningRateCheck",
    "base_mismatch",
    "judge_rates",
    "judge_schedules",
    "outlier_rates",
    "with_rates",
]

SCHEDULE = "schedule"
"""Subject of a `LearningRateMismatch` that is found before the first batch."""
COMPARED_STEPS = 2
"""Optimizer steps of a fit after which the learning rates are compared at once.

Schedules of different lengths differ after the first call of `step()` at the latest, unless they begin alike.
"""
_WHY = "Each rank computes its learning rate by itself, and their schedules differ."
_OWN_RATE = "Each rank sets its learning rate by itself."
_BASE_WHY = f"{_OWN_RATE} The rates from which the schedules begin differ, and not their lengths."
_SAME_RATE = "give every rank the same lr, in the optimizer and in the schedule (max_lr)."
_OWN_CODE = "\nwhere code of your own computes the rate, compute it from the same numbers on every rank."
_WHEN = (
    "Rates are compared at the first two steps, where an epoch or an evaluation in it begins or ends, and every "
    "64 batches: these may have differed before."
)

LEARNING_RATE_MISMATCH = VerdictKind(
    "LearningRateMismatch",
    "ranks train with different learning rates",
    default="raises",
    level="raise",
    restart="useless",
    causes={
        "": Cause(
            f"{_WHY} {_WHEN}",
            "make the scheduler with the same length on every rank, and step it on every rank.\n"
            "where it goes by a metric, as ReduceLROnPlateau: reduce the metric over all ranks before "
            "scheduler.step(metric).",
        ),
        SCHEDULE: Cause(
            "Each rank makes its schedule by itself. A number that follows from the length of its own loader may be "
            "another one on each rank. The ranks' weights would drift apart.",
            "make the scheduler for one number of steps, and with one learning rate, on all ranks. If the number "
            "follows from len(loader): all-reduce it before you make the scheduler, and take the minimum.",
        ),
    },
)
"""**Cause.** The ranks' schedules have different lengths or first rates, one rank steps its scheduler more often, or a
`ReduceLROnPlateau` goes by each rank's own loss.

**Fix.** Make the schedule from numbers that all ranks have. Reduce a metric over all ranks before
`scheduler.step(metric)`; in Lightning, log it with `sync_dist=True`.

Only ranks are compared that are proven to hold the same parameters: see [Learning rates](learning-rates.md).
"""


class LearningRateCheck(Check):
    """Compares schedules at the roll call, and learning rates at the first steps and at ticks, as sync points do.

    Args:
        state: This rank's state.
        rates: Returns the learning rates in force; None where they are not known.
        base_rates: Returns those from which schedules compute them; empty where there is no schedule of torch's.
    """

    takes_the_rest = True

    def __init__(
        self,
        state: RankState,
        rates: Callable[[], Sequence[float]] | None,
        base_rates: Callable[[], Sequence[float]] = tuple,
    ) -> None:
        self.watches_steps = rates is not None
        self._state = state
        self._in_force = rates
        self._base_rates = base_rates
        self._others: Others | None = None
        self._holders: tuple[int, ...] = ()
        self._first_steps = list(range(1, COMPARED_STEPS + 1))
        self._left_steps: dict[int, list[int]] = {}

    def report(self, start: FitStart, room: int) -> Mapping[str, Any]:  # noqa: D102
        told: list[dict[str, Any]] = []
        for schedule in start.schedules:
            longer = [*told, schedule.to_json()]
            if len(record_text({"schedules": longer})) > room:
                break
            told = longer
        return {"schedules": told, "holders": _digest(start.holders)} if told and len(start.holders) > 1 else {}

    def compare_reports(self, reports: Records, *, complete: bool, refused: bool) -> Iterator[Verdict | None]:  # noqa: D102
        groups: dict[str, dict[int, Any]] = {}
        for rank, report in reports.items():
            if "holders" in report:
                groups.setdefault(str(report["holders"]), {})[rank] = report.get("schedules", ())
        yield from map(judge_schedules, groups.values())

    def fit_started(self, start: FitStart, others: Others | None) -> None:  # noqa: D102
        self._others, self._holders = others, start.holders

    def stepped(self, span: SpanCounters, steps: int) -> None:  # noqa: D102
        self.watches_steps = steps < COMPARED_STEPS
        state, others = self._state, self._others
        if others is None or len(self._holders) < 2 or steps > COMPARED_STEPS or not state.evidence.steps_by_batch:
            return
        if not (rates := self._rates_in_force()):
            return
        key, where = self._step_key(steps), f"at optimizer step {steps} (batch {span.started} of {span.name})"
        state.rates.keep(key, rates)
        base = compared_rates(self._base_rates())

        def judge(logged: Mapping[str, Any]) -> Verdict | None:
            ranks, theirs = (int(logged["rank"]), state.rank), parse_rates(logged)
            bases = parse_rates({"rates": logged.get("base")}), base  # another version may not write it
            found = base_mismatch(where, key, ranks, (theirs, rates), bases, first=steps == 1)
            return found or rate_mismatch(where, key, ranks, theirs, rates, why=_WHY)

        record = {"rank": state.rank, "rates": list(rates), **({"base": list(base)} if base else {})}
        others.compare(key, lambda: record, judge)

    def tick(self, span: SpanCounters) -> Callable[[TickPlace], TickPart]:  # noqa: D102
        return partial(self._part, self.rates())

    def span_closing(self, span: SpanCounters, reason: Reason, *, orderly: bool) -> None:  # noqa: D102
        # Another rank may be behind: it compares only the steps of this span before it closes it.
        if not span.evaluation and (done := [step for step in self._first_steps if step <= self._state.steps]):
            self._left_steps[span.opened] = done
            self._first_steps = [step for step in self._first_steps if step not in done]

    def left_keys(self, span: SpanCounters) -> Iterable[str]:  # noqa: D102
        return map(self._step_key, self._left_steps.pop(span.opened, ()))

    def _step_key(self, step: int) -> str:
        """The key of one of the first optimizer steps of a fit, among those who compare it."""
        return f"step/{step}" if self._with_all else f"step/{step}/{_digest(self._holders)}"

    @property
    def _with_all(self) -> bool:
        """Whether all ranks hold the same parameters. Sync points and ticks are those of all ranks."""
        return tuple(self._state.ranks) == self._holders

    def _part(self, rates: tuple[float, ...], at: TickPlace) -> TickPart:
        self._state.rates.keep(at.key, rates)  # before this rank's row of a verdict about this point

        def compare(logged: Mapping[str, Any], ranks: tuple[int, int]) -> Verdict | None:
            return rate_mismatch(f"at {at.in_words}", at.key, ranks, parse_rates(logged), rates)

        return TickPart({"rates": list(rates)}, compare)

    def rates(self) -> tuple[float, ...]:
        """The learning rates that all ranks compare; none before the first step of the fit."""
        return self._rates_in_force() if self._with_all else ()

    def _rates_in_force(self) -> tuple[float, ...]:
        """The learning rates in force; none before the first step of the fit.

        Nor are there any on another thread than that of the optimizer steps, as where a thread of its own reads the
        loader ahead: a scheduler may be in the middle of a step.
        """
        if self._in_force is None or not self._state.evidence.has_stepped(threading.get_ident()):
            return ()
        return compared_rates(self._in_force())

    def rates_at(self, kind: SyncKind, opens: SpanCounters | None) -> tuple[float, ...]:
        """The learning rates at a sync point, if it stands in a train epoch: elsewhere no optimizer uses them.

        Args:
            kind: What the sync point is.
            opens: The span that it opens, if it does.
        """
        if kind not in ("train_start", "train_end", "eval_start", "eval_end"):
            return ()
        train = opens if kind == "train_start" else self._state.train_span()
        return self.rates() if train is not None and train.compared else ()


def judge_schedules(records: Mapping[int, Sequence[Mapping[str, Any]]]) -> Verdict | None:
    """Returns a `LearningRateMismatch` if ranks will train with different learning rates.

    Ranks that know none of their schedules, or have another number of them, are compared with nobody.

    Args:
        records: What each rank has reported, by rank.

    >>> from countoff.core.arithmetic.schedules import Ending
    >>> first = SchedulePlan.of("LinearLR", Ending("zero", 8), begin=0, calls=8)
    >>> other = SchedulePlan.of("LinearLR", Ending("zero", 9), begin=0, calls=9)
    >>> judge_schedules({0: [first.to_json()], 1: [other.to_json()]}).sentence
    'before the first batch, LinearLR is made for 8 steps on rank 0, 9 steps on rank 1.'
    """
    known = {
        rank: sorted((SchedulePlan.from_json(each) for each in found), key=lambda plan: (plan.name, plan.made_for))
        for rank, found in sorted(records.items())
        if found
    }
    if len({len(found) for found in known.values()}) != 1:
        return None
    for number in range(len(next(iter(known.values())))):
        plans = {rank: found[number] for rank, found in known.items()}
        sides = ranks_by(
            {rank: str((plan.made_for, plan.warmup, plan.peak, plan.begins)) for rank, plan in plans.items()}
        )
        if len(sides) > 1 and _trains_apart(list(plans.values())):
            return _other_schedules(plans, [ranks for _, ranks in sides])
    return None


def _trains_apart(plans: Sequence[SchedulePlan]) -> bool:
    """Whether schedules that differ have other learning rates at a tick that the run is sure to reach.

    Until a rate falls, schedules with one warm-up and one highest rate are alike. Those that have ended may be, too;
    and schedules of different classes may have one curve.
    """
    if len({plan.name for plan in plans}) > 1 or min(plan.begins for plan in plans) >= max(
        plan.made_for for plan in plans
    ):
        return False
    alike = len({(plan.warmup, plan.peak) for plan in plans}) == 1
    first = min(plan.falls_after for plan in plans) if alike else 0
    return min(plan.reaches for plan in plans) > first


def _other_schedules(plans: Mapping[int, SchedulePlan], sides: Sequence[list[int]]) -> Verdict:
    first = [plans[ranks[0]] for ranks in sides]
    name = first[-1].name
    more: dict[str, Any] = {}

    def told(values: Sequence[str]) -> str:
        return each_on(list(zip(values, sides, strict=True)))

    if len({plan.made_for for plan in first}) > 1:
        sentence = f"{name} is made for {told([f'{plan.made_for:,} steps' for plan in first])}"
    elif len({plan.warmup for plan in first}) > 1:
        sentence = f"the warm-up of {name} takes {told([f'{plan.warmup:,} steps' for plan in first])}"
    elif len({plan.peak for plan in first}) > 1:
        peaks = [[plan.peak] for plan in first]
        words = rates_in_words(peaks) or [number_of(plan.peak) for plan in first]
        sentence = f"the highest learning rate of {name} is {told(words)}"
        if len(sides) == 2:
            sentence = _times(sides, peaks, "the highest is ") or sentence
        more = {"why": _BASE_WHY, "remedy": _SAME_RATE}
    else:
        sentence = f"{name} has made {told([f'{plan.begins:,} steps' for plan in first])}"
    alone = len(sides[-1]) > sum(map(len, sides[:-1]))
    named = sorted(rank for side in (sides[:-1] if alone else sides) for rank in side)
    more |= {"subject": SCHEDULE, "standing": "out of step" if alone else "differ"}
    return LEARNING_RATE_MISMATCH.found(f"before the first batch, {sentence}.", named, **more)


def _times(sides: Sequence[Sequence[int]], rates: Sequence[Sequence[float]], prefix: str = "") -> str:
    """How two sides' rates differ if they do so by one factor, the higher ones first; empty if that is not so.

    >>> _times([[0], [1, 2]], [[0.1], [0.2]])
    'ranks 1, 2 train with 2 times the learning rate of rank 0 (0.2, not 0.1)'
    """
    factor = _factor(*rates)
    words = rates_in_words(rates)
    if factor is None or words is None or number_of(factor, 4) == number_of(1 / factor, 4):
        return ""
    low, high = (0, 1) if factor > 1 else (1, 0)
    verb = "trains" if len(sides[high]) == 1 else "train"
    return (
        f"{names_of(sides[high])} {verb} with {number_of(max(factor, 1 / factor), 4)} times the learning rate of "
        f"{names_of(sides[low])} ({prefix}{words[high]}, not {words[low]})"
    )


def _factor(theirs: Sequence[float], mine: Sequence[float]) -> float | None:
    """The one number by which all of the first rates become the second ones; None if there is none."""
    if not theirs or len(theirs) != len(mine) or not all(0 < rate < math.inf for rate in (*theirs, *mine)):
        return None
    factor = mine[0] / theirs[0]
    alike = all(math.isclose(own, factor * other, rel_tol=1e-6) for other, own in zip(theirs, mine, strict=True))
    return factor if alike and 0 < factor < math.inf else None


def base_mismatch(
    where: str,
    point: str,
    ranks: tuple[int, int],
    rates: tuple[Sequence[float], Sequence[float]],
    bases: tuple[Sequence[float], Sequence[float]],
    *,
    first: bool,
) -> Verdict | None:
    """Returns the verdict of two ranks whose rates differ by one factor from the start; None if that is not known.

    Args:
        where: Where both were, as the beginning of a sentence.
        point: The name of that point.
        ranks: Both ranks, the one that wrote first before the other.
        rates: The rates of both.
        bases: Those from which their schedules compute them; empty where there is no schedule of torch's.
        first: Whether this is the first step: without such a schedule, nothing but code of the user's own sets them.
    """
    factor, of_bases = _factor(*rates), _factor(*bases)
    if not rates_differ(*rates) or factor is None or any(bases) != (of_bases is not None):
        return None
    if not first if of_bases is None else not math.isclose(factor, of_bases, rel_tol=1e-6):
        return None
    sentence = _times([[rank] for rank in ranks], rates)
    if not sentence:
        return None
    more = {"why": _BASE_WHY, "remedy": _SAME_RATE}
    if not any(bases):
        more = {"why": _OWN_RATE, "remedy": _SAME_RATE + _OWN_CODE}
    return LEARNING_RATE_MISMATCH.found(f"{where}, {sentence}.", ranks, point=point, standing="differ", **more)


def judge_rates(divergence: Divergence, rank: int) -> Verdict | None:
    """Returns a `LearningRateMismatch` that a sync point has shown.

    Args:
        divergence: What the rule proved.
        rank: The rank that proved it.
    """
    logged, own = divergence.logged, divergence.own
    if own is None:
        return None
    point = point_of(divergence.sync_index)
    return rate_mismatch(_place_of(own), point, (logged.rank, rank), logged.rates, own.rates)


def _place_of(sync_point: SyncPoint) -> str:
    if sync_point.kind == "train_end":
        return f"after {count_of(sync_point.at, 'batch')} of {sync_point.span}"
    if sync_point.kind == "train_start":
        return f"at the start of {sync_point.span}"
    return f"at the {'start' if sync_point.kind == 'eval_start' else 'end'} of {sync_point.span} within a train epoch"


def rate_mismatch(
    where: str,
    point: str,
    ranks: tuple[int, int],
    theirs: Sequence[float],
    mine: Sequence[float],
    *,
    why: str | None = None,
) -> Verdict | None:
    """Returns the verdict that two ranks train with different learning rates; None if they do not.

    Args:
        where: Where both were, as the beginning of a sentence.
        point: The name of that point, by which every rank finds its own rates there.
        ranks: Both ranks, the one that wrote first before the other.
        theirs: The rates of the first one.
        mine: Those of the second one.
        why: The cause; None: the general one, which says when rates are compared.

    >>> rate_mismatch("at batch 64 of train epoch 0", "tick/1/64", (0, 1), [0.1], [0.2]).sentence
    'at batch 64 of train epoch 0, rank 0 trains with learning rate 0.1 and rank 1 with 0.2.'
    """
    if not rates_differ(theirs, mine):
        return None
    first, second = ranks
    words = rates_in_words([theirs, mine])
    rate = "learning rate" if words is not None else "the learning rates"
    told = words or [", ".join(number_of(rate) for rate in each) for each in (theirs, mine)]
    sentence = f"{where}, rank {first} trains with {rate} {told[0]} and rank {second} with {told[1]}."
    return LEARNING_RATE_MISMATCH.found(sentence, ranks, why=why, point=point, standing="differ")


def rates_in_words(groups: Sequence[Sequence[float]]) -> list[str] | None:
    """The learning rates of some ranks, with as few digits as tell them apart, and equal ones of one rank once.

    Returns:
        One text for each rank; None if the rates differ only in their order.

    >>> rates_in_words([[0.1, 0.1], [0.1000004, 0.1000004]])
    ['0.1', '0.1000004']
    """
    different = len({str(list(rates)) for rates in groups})
    for digits in range(3, 18):
        words = [", ".join(dict.fromkeys(number_of(rate, digits) for rate in rates)) for rates in groups]
        if len(set(words)) == different:
            return words
    return None


def outlier_rates(rows: Mapping[int, Mapping[str, Any]]) -> tuple[int, ...]:
    """The ranks whose learning rates are not those of the majority; none where more than half do not agree.

    Args:
        rows: One row per rank that answered, by rank; its `rates` are None for a rank that has not been there.

    >>> outlier_rates({0: {"rates": [0.1]}, 1: {"rates": [0.2]}, 2: {"rates": [0.1]}})
    (1,)
    >>> outlier_rates({0: {"rates": [0.1]}, 1: {"rates": [0.2]}})
    ()
    """
    known = {rank: str(line["rates"]) for rank, line in rows.items() if line.get("rates")}
    sides = [ranks for _, ranks in ranks_by(known)]
    others = sorted(rank for side in sides[:-1] for rank in side)
    return tuple(others) if sides and 2 * len(sides[-1]) > len(rows) else ()


def with_rates(rows: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Returns rows of a verdict's table with the learning rates as text, as few digits as tell the ranks apart.

    Args:
        rows: One row per rank, by rank, with its `rates` where it knows them.
    """
    known = {rank: line["rates"] for rank, line in rows.items() if line.get("rates")}
    words = rates_in_words(list(known.values()))
    if words is None:
        words = [", ".join(number_of(rate) for rate in rates) for rates in known.values()]
    cells = dict(zip(known, words, strict=True))
    return {
        rank: {**{name: cell for name, cell in line.items() if name != "rates"}, "rate": cells.get(rank, "–")}
        for rank, line in rows.items()
    }


def _digest(ranks: Sequence[int]) -> str:
    return hashlib.blake2b(repr(ranks).encode(), digest_size=6).hexdigest()

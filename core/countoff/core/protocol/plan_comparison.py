"""Comparison of what ranks reported at a roll call: their plans, settings and versions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from countoff.core.settings import Settings
from countoff.core.verdict import Standing, Verdict, count_of, names_of

PROOF_FIELDS = (
    "batches_per_epoch",
    "proven_batches_per_epoch",
    "batches_between_evaluations",
    "batch_size",
    "gradient_accumulation_steps",
    "max_epochs",
    "max_steps",
    "position",
    "dp_degree",
)
"""Fields of a `FitPlan` in which ranks must not differ."""
_LIMITS = ("max_epochs", "max_steps")
"""Those of them in which None is a value: there is no such limit. In the others it is unknown, and proves nothing."""
_OWN_LENGTH = "own_batches_per_epoch"
_LENGTHS = ("batches_per_epoch", "proven_batches_per_epoch")

_UNEQUAL = (
    "The ranks' loaders differ in length, so the ranks would end their epochs, and reach every limit and schedule that "
    "depends on the length, at different batches."
)
_ENDS = "The rank that ends first would leave the others waiting in a collective."
_CAUSES = {
    "batches_per_epoch": _UNEQUAL,
    "proven_batches_per_epoch": _UNEQUAL,
    "batches_between_evaluations": (
        "The ranks would evaluate after different train batches. A collective of the evaluation would meet one of the "
        "training."
    ),
    "batch_size": "The averaged gradient would give the samples of some ranks more weight than those of others.",
    "gradient_accumulation_steps": "The ranks would take their optimizer steps after different batches.",
    "max_epochs": _ENDS,
    "max_steps": _ENDS,
    "position": (
        "The ranks have resumed from different checkpoints, or only some of them have resumed. The numbers of a "
        "position are the epoch, the batches of it that are done, and the steps, as far as the framework knows them."
    ),
    "dp_degree": "The ranks would divide the data into different numbers of shares.",
}
_EVEN_CAUSE = (
    "With these settings, ranks tell one another which batches they have. A rank with another setting does not do that "
    "in the same way, and the others would wait for it."
)
_EVEN_REMEDY = (
    "give every rank the same uneven_train, uneven_eval and lookahead, in the code or in the environment of all hosts."
)
_REMEDIES = {
    "uneven_train": _EVEN_REMEDY,
    "uneven_eval": _EVEN_REMEDY,
    "lookahead": _EVEN_REMEDY,
    "batch_size": "use the same batch_size on every rank.",
    "gradient_accumulation_steps": "give every rank the same number of batches per optimizer step.",
    "max_epochs": "give every rank the same number of epochs.",
    "max_steps": "give every rank the same number of steps.",
    "position": "resume every rank from the same checkpoint: look at the path that each rank loads.",
    "dp_degree": "build the same mesh on every rank.",
}
"""What to do by field, where it is the same in every framework. What follows from lengths, the adapter has."""


def group_ranks_by_value(records: Mapping[int, Mapping[str, Any]], field: str) -> list[tuple[Any, list[int]]]:
    """The values of one field with the ranks that hold each, the fewest ranks first.

    >>> group_ranks_by_value({0: {"lr": 1}, 1: {"lr": 2}, 2: {"lr": 1}}, "lr")
    [(2, [1]), (1, [0, 2])]
    """
    found: list[tuple[Any, list[int]]] = []
    for rank, record in sorted(records.items()):
        value = record.get(field)
        for known, ranks in found:
            if known == value:
                ranks.append(rank)
                break
        else:
            found.append((value, [rank]))
    return sorted(found, key=lambda group: len(group[1]))


def first_difference(
    records: Mapping[int, Mapping[str, Any]], fields: Sequence[str]
) -> tuple[str, tuple[int, ...]] | None:
    """The first of `fields` in which ranks differ, in words, with the ranks of the smallest group.

    >>> plan = {"batches_per_epoch": 5}
    >>> first_difference({0: plan, 1: {"batches_per_epoch": 4}, 2: plan}, ["batches_per_epoch"])
    ('batches_per_epoch is 4 on rank 1, 5 on ranks 0, 2', (1,))
    """
    for name in fields:
        found = group_ranks_by_value(records, name)
        if len(found) > 1:
            words = each_on([(_value(value), ranks) for value, ranks in found])
            smallest, largest = found[0][1], found[-1][1]
            return f"{name} is {words}", tuple(smallest if len(smallest) < len(largest) else sorted(records))
    return None


def each_on(found: Sequence[tuple[str, Sequence[int]]]) -> str:
    """The first four of values and their ranks, in words. A comma may stand between the ranks of a list too.

    >>> each_on([("4", [1]), ("5", [0, 2])]), each_on([("4", [1, 3]), ("5", [0, 2])])
    ('4 on rank 1, 5 on ranks 0, 2', '4 on ranks 1, 3; 5 on ranks 0, 2')
    """
    several = any(len(ranks) > 1 for _, ranks in found[:3][: len(found) - 1])
    return ("; " if several else ", ").join(f"{value} on {names_of(ranks)}" for value, ranks in found[:4])


def judge_plans(plans: Mapping[int, Mapping[str, Any]]) -> Verdict | None:
    """Returns a `PlanMismatch` if the ranks' plans differ in one of `PROOF_FIELDS`, as far as they are known.

    The verdict's subject is the field.

    >>> judge_plans({0: {"position": [0, 3, 0]}, 1: {"position": None}}) is None
    True
    >>> judge_plans({rank: {"batches_per_epoch": 8 - rank, "runs_to_end": False} for rank in (0, 1)}) is None
    True
    """
    unused = () if all(plan.get("runs_to_end", True) for plan in plans.values()) else _LENGTHS
    for name in [each for each in PROOF_FIELDS if each not in unused]:
        known = {rank: plan for rank, plan in plans.items() if name in _LIMITS or plan.get(name) is not None}
        difference = first_difference(known, [name])
        if difference is not None:
            sentence, ranks = difference
            standing = "differ" if len(ranks) == len(known) else "out of step"
            return _plan_mismatch(name, sentence, ranks, standing, why=_why_equal(plans) if name in _LENGTHS else "")
    lengths = group_ranks_by_value(_with_own_length(plans), _OWN_LENGTH)
    limits = {plan.get("max_steps") for plan in plans.values()}
    if len(lengths) > 1 and (limit := next(iter(limits))):
        fewest, short = min(lengths)
        if limit % fewest == 0:
            sentence = f"the run ends after {count_of(limit, 'batch')}, where the loaders of {names_of(short)} end"
            why = "Only those ranks would end that epoch too, with its evaluation and its checkpoint."
            return _plan_mismatch("batches_per_epoch", f"{sentence}, and the others' do not", tuple(short), why=why)
    return None


def judge_lengths(plans: Mapping[int, Mapping[str, Any]]) -> Verdict | None:
    """Returns a `Truncated` warning if the framework will end every epoch early on some ranks, as others have less.

    >>> print(judge_lengths({0: {"own_batches_per_epoch": 8}, 1: {"own_batches_per_epoch": 7}}).sentence)
    a train epoch has 8 batches on rank 0, 7 batches on rank 1: it ends after 7 on all ranks, and what the others have \
beyond is not trained on.
    """
    lengths = group_ranks_by_value(_with_own_length(plans), _OWN_LENGTH)
    if len(lengths) < 2:
        return None
    words = each_on([(count_of(batches, "batch"), ranks) for batches, ranks in lengths])
    fewest, short = min(lengths)
    effect = f"it ends after {fewest} on all ranks, and what the others have beyond is not trained on."
    why = "The ranks' loaders differ in length, and the framework stops all of them at the shortest without a message."
    sentence = f"a train epoch has {words}: {effect}"
    return Verdict("Truncated", sentence, tuple(short), why=why, time=time.time(), subject="plan")


def _with_own_length(plans: Mapping[int, Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    return {rank: plan for rank, plan in plans.items() if plan.get(_OWN_LENGTH)}


def _why_equal(plans: Mapping[int, Mapping[str, Any]]) -> str:
    return next((str(plan["why_equal_lengths"]) for plan in plans.values() if plan.get("why_equal_lengths")), "")


def _plan_mismatch(
    field: str, sentence: str, ranks: tuple[int, ...], standing: Standing = "differ", *, why: str
) -> Verdict:
    return Verdict(
        "PlanMismatch",
        f"before the first batch, {sentence}.",
        ranks,
        why=why or _CAUSES[field],
        remedy=_REMEDIES.get(field, ""),
        time=time.time(),
        subject=field,
        standing=standing,
    )


def even_record(settings: Settings, proven: int | None, now: int | None = None) -> dict[str, Any]:
    """Returns what a rank reports where ranks with different numbers of batches are to take the same number.

    Args:
        settings: The rank's settings.
        proven: Batches that are proven of every pass over its train loader; None if none are.
        now: What `len` of that loader gives now, where that is proven of a pass that begins now; None if it is not.
    """
    if not settings.keeps_even:
        return {}
    return {
        "uneven_train": settings.uneven_train,
        "uneven_eval": settings.uneven_eval,
        "lookahead": settings.lookahead,
        "length": proven,
        "now": now,
    }


def judge_even_settings(records: Mapping[int, Mapping[str, Any]]) -> Verdict | None:
    """Returns a `PlanMismatch` if ranks differ in what makes them take the same number of batches.

    A rank on which nothing does that reports nothing of `even_record`.

    >>> on = {"uneven_train": "stop", "uneven_eval": "warn", "lookahead": 4}
    >>> judge_even_settings({0: on, 1: {}}).sentence
    "before the first batch, uneven_train is 'stop' on rank 0, 'raise' on rank 1."
    """
    reported = {rank: record for rank, record in records.items() if "uneven_train" in record}
    train = {rank: {"uneven_train": repr(record.get("uneven_train", "raise"))} for rank, record in records.items()}
    evaluation = {rank: {"uneven_eval": repr(each["uneven_eval"])} for rank, each in reported.items()}
    if reported:
        evaluation |= {rank: {"uneven_eval": "not 'stop'"} for rank in records if rank not in reported}
    for name, compared in (("uneven_train", train), ("uneven_eval", evaluation), ("lookahead", reported)):
        difference = first_difference(compared, [name])
        if difference is not None:
            return _plan_mismatch(name, *difference, why=_EVEN_CAUSE)
    return None


def shortest_and_longest(lengths: Sequence[int | None]) -> list[int]:
    """Returns the fewest and the most batches of any rank; nothing if those of some rank are not proven.

    >>> shortest_and_longest([4, 5, 4]), shortest_and_longest([4, None])
    ([4, 5], [])
    """
    known = [length for length in lengths if length is not None]
    return [min(known), max(known)] if known and len(known) == len(lengths) else []


def judge_tick_batches(tick_batches: Mapping[int, Any]) -> Verdict | None:
    """Returns a `SettingsMismatch` if ranks look at steps and learning rates after different numbers of batches."""
    settings = {rank: {"tick_batches": batches} for rank, batches in tick_batches.items()}
    difference = first_difference(settings, ["tick_batches"])
    if difference is None:
        return None
    sentence, ranks = difference
    effect = "steps and learning rates are compared only after batches at which all of them look."
    return Verdict("SettingsMismatch", f"{sentence}: {effect}", ranks, time=time.time())


def judge_versions(versions: Mapping[int, Mapping[str, Any]]) -> Verdict | None:
    """Returns a `VersionMismatch` if ranks run different versions of a package."""
    names = sorted({name for version in versions.values() for name in version})
    difference = first_difference(versions, names)
    if difference is None:
        return None
    sentence, ranks = difference
    return Verdict("VersionMismatch", f"{sentence}.", ranks, time=time.time())


def agreed_fields(plans: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Names of the fields that have the same value in all plans."""
    names = sorted({name for plan in plans.values() for name in plan})
    return [name for name in names if len(group_ranks_by_value(plans, name)) == 1]


def _value(value: Any) -> str:
    return "unknown" if value is None else str(value)
